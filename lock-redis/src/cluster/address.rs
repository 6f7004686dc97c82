//! What an address of a cluster means.

use lock_core::LockError;

use super::ClusterConfig;
use crate::RedisConfig;
use crate::transport::Place;

const FORM: &str =
    "must start with redis+cluster:// or rediss+cluster:// (TLS), as in redis+cluster://host1,host2:7000";

/// Reads an address. No error shows any of it but the names of parameters.
pub(super) fn read(url: &str) -> Result<ClusterConfig, LockError> {
    let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong(FORM))?;
    let scheme = match scheme {
        "redis+cluster" | "valkey+cluster" => "redis",
        "rediss+cluster" | "valkeys+cluster" => "rediss",
        _ => return Err(wrong(FORM)),
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, further) = rest.split_at(end);
    let (login, hosts) = match authority.rsplit_once('@') {
        Some((login, hosts)) => (format!("{login}@"), hosts),
        None => (String::new(), authority),
    };
    if login.contains(',') {
        return Err(wrong(
            "has credentials behind a comma, or a comma in them; give those of the cluster once, before all hosts, and write , as %2C",
        ));
    }
    let seed = |host: &str| match host.is_empty() {
        true => Err(wrong("names no host, or none between two commas; give HOST,HOST")),
        false => RedisConfig::from_url(&format!("{scheme}://{login}{host}{further}")),
    };
    let seeds: Vec<_> = hosts.split(',').map(seed).collect::<Result<_, _>>()?;
    Ok(ClusterConfig::new(seeds))
}

fn wrong(why: &str) -> LockError {
    LockError::configuration(format!("the address of the Redis Cluster {why}"))
}

/// A client of a single server has found a node of a cluster there.
pub(crate) fn needs_cluster_address(place: &Place) -> LockError {
    let address = place.url("+cluster");
    LockError::configuration(format!(
        "this is a node of a Redis Cluster, which serves only a part of the names; use the address {address} instead, with the same \
         credentials and parameters"
    ))
}

/// A client of a cluster has found a single server there.
pub(crate) fn not_a_cluster(place: &Place) -> LockError {
    let scheme = match place {
        #[cfg(feature = "tls")]
        Place::Tls(..) => "rediss:",
        _ => "redis:",
    };
    LockError::configuration(format!(
        "the Redis at {place} is no node of a cluster; start the address with {scheme} if it is a server of its own, or give the nodes of \
         the cluster"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(feature = "tls")]
    use crate::discovery::Target;

    fn refusal(url: &str) -> String {
        let error = read(url).unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }));
        error.to_string()
    }

    #[test]
    fn an_address_names_seeds_that_share_everything_else() {
        let config = read("redis+cluster://joe:p%40@a,b:7000,[::1]:7001/0?namespace=shop&op_timeout=2s").unwrap();
        let targets: Vec<_> = config.seeds.iter().map(|seed| seed.target.to_string()).collect();
        assert_eq!(targets, ["a:6379", "b:7000", "[::1]:7001"]);
        assert!(
            config
                .seeds
                .iter()
                .all(|seed| seed.login.user.as_deref() == Some("joe") && seed.namespace == "shop")
        );
        #[cfg(feature = "tls")]
        assert!(matches!(
            read("valkeys+cluster://a?ca=/x").unwrap().seeds[0].target,
            Target::Server(Place::Tls(_, 6379, lock_transport::TlsFiles { ca: Some(_), .. }))
        ));
    }

    #[test]
    fn a_wrong_address_is_refused_and_not_shown() {
        assert!(refusal("redis://a").contains("redis+cluster://host1"));
        assert!(refusal("redis+cluster:a").contains("redis+cluster://host1"));
        assert!(refusal("redis+cluster://").contains("no host"));
        assert!(refusal("redis+cluster://a,,b").contains("no host"));
        assert!(refusal("redis+cluster://a?max_ttl=1s").contains("known are namespace"));
        for url in [
            "redis+cluster://joe:hunter2@a,jim:hunter2@b",
            "redis+cluster://joe:hunter2@a/x",
            "redis+cluster://joe:hunter2@a?password=hunter2",
            "redis+cluster://joe:hunter2@a:port",
            "hunter2+cluster://a",
        ] {
            let error = read(url).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn the_other_kind_of_address_is_named() {
        let place = Place::Tcp("a".into(), 7000);
        assert!(
            needs_cluster_address(&place)
                .to_string()
                .contains("redis+cluster://a:7000")
        );
        assert!(not_a_cluster(&place).to_string().contains("redis:"));
    }
}
