//! What an address of sentinels means.

use lock_transport::{Endpoint, Secret};

use super::service::Service;
use crate::RedisConfig;
use crate::address::{decoded, wrong};
use crate::discovery::Target;
use crate::transport::Place;

const FORM: &str = "names no service, as in redis+sentinel://host1,host2,host3/SERVICE";

/// Reads what stands before and behind the `+sentinel:` of an address. No error shows any of it but the names of parameters.
pub(crate) fn read(scheme: &str, rest: &str) -> Result<RedisConfig, lock_core::LockError> {
    let scheme = match scheme {
        "redis" | "valkey" => "redis",
        "rediss" | "valkeys" => "rediss",
        _ => return Err(wrong("must start with redis+sentinel:// or rediss+sentinel:// (TLS)")),
    };
    let rest = rest.strip_prefix("//").ok_or_else(|| wrong(FORM))?;
    if rest.contains('#') {
        return Err(wrong("holds a #; write it as %23"));
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (hosts, path) = rest.split_once('/').ok_or_else(|| wrong(FORM))?;
    let (login, hosts) = match hosts.rsplit_once('@') {
        Some((login, hosts)) => (format!("{login}@"), hosts),
        None => (String::new(), hosts),
    };
    if login.contains(',') {
        return Err(wrong(
            "has a comma before an @; give the servers' user and password once, before the first host, and write , in them as %2C",
        ));
    }
    let (service, database) = path.split_once('/').unwrap_or((path, ""));
    let service = decoded(service)?;
    if service.is_empty() {
        return Err(wrong(FORM));
    }
    let (mut user, mut password, mut file) = (None, None, None);
    let mut others = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let given = match name {
            "sentinel_user" => &mut user,
            "sentinel_password" => &mut password,
            "sentinel_password_file" => &mut file,
            _ => {
                others.push(pair);
                continue;
            }
        };
        if given.replace(decoded(value)?.into_owned()).is_some() {
            return Err(wrong(format!("gives {name} twice; give it once")));
        }
    }
    // What remains is the address of one server, but for its host.
    let mut config = RedisConfig::from_url(&format!("{scheme}://{login}server/{database}?{}", others.join("&")))?;
    let Target::Server(server) = &config.target else {
        return Err(wrong(FORM));
    };
    let mut sentinels = Vec::new();
    for sentinel in hosts.split(',') {
        sentinels.push(place(sentinel, server)?);
    }
    let mut service = Service::new(service, sentinels);
    if password.is_some() && file.is_some() {
        return Err(wrong(
            "gives sentinel_password and sentinel_password_file; give one of them",
        ));
    }
    if user.is_some() && password.is_none() && file.is_none() {
        // A user without a password logs in, too: with an empty one.
        password = Some(String::new());
    }
    (service.login.user, service.login.password) = (user, password.map(Secret::new).or(file.map(Secret::file)));
    config.target = Target::Service(service);
    Ok(config)
}

/// The sentinel at `HOST:PORT`, which is talked to as the servers are.
fn place(sentinel: &str, server: &Place) -> Result<Place, lock_core::LockError> {
    let unusable = || match sentinel {
        "" => wrong("names no host, or none beside a comma"),
        _ => wrong("has a host that cannot be read"),
    };
    let Endpoint { host, port } = Endpoint::parse(sentinel, 26379).ok_or_else(unusable)?;
    Ok(server.at(&host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(config: &RedisConfig) -> &Service {
        match &config.target {
            Target::Service(service) => service,
            Target::Server(place) => panic!("{place}"),
        }
    }

    #[test]
    fn an_address_names_sentinels_a_service_and_two_logins() {
        let config = RedisConfig::from_url(
            "redis+sentinel://joe:p%40ss@a.example,[::1]:7000,10.0.0.1/my%2Fmaster/3?sentinel_user=w%C3%A4chter&sentinel_password=s%26&namespace=shop",
        )
        .unwrap();
        let tcp = |host: &str, port| Place::Tcp(host.to_owned(), port);
        let sentinels = [tcp("a.example", 26379), tcp("::1", 7000), tcp("10.0.0.1", 26379)];
        assert_eq!(service(&config).sentinels, sentinels);
        assert_eq!(service(&config).name, "my/master");
        assert_eq!(service(&config).login.user.as_deref(), Some("wächter"));
        assert_eq!(service(&config).login.password, Some(Secret::new("s&")));
        assert_eq!(config.login.user.as_deref(), Some("joe"));
        assert_eq!(config.login.password, Some(Secret::new("p@ss")));
        assert_eq!((config.database, config.namespace.as_str()), (3, "shop"));
        let config = RedisConfig::from_url("valkey+sentinel://a/s?sentinel_password=x").unwrap();
        assert_eq!(service(&config).login.user, None);
        assert_eq!(config.login.password, None);
    }

    #[cfg(feature = "tls")]
    #[test]
    fn sentinels_and_servers_are_talked_to_by_tls_alike() {
        let config = RedisConfig::from_url("rediss+sentinel://a,b:1/s?ca=/etc/ca.pem").unwrap();
        let files = lock_transport::TlsFiles {
            ca: Some("/etc/ca.pem".into()),
            ..Default::default()
        };
        let tls = |host: &str, port| Place::Tls(host.to_owned(), port, files.clone());
        assert_eq!(service(&config).sentinels, [tls("a", 26379), tls("b", 1)]);
        assert_eq!(service(&config).sentinels[0].at("c", 2), tls("c", 2));
    }

    #[test]
    fn a_wrong_address_is_refused_and_nothing_secret_is_repeated() {
        for (url, word) in [
            ("redis+sentinel://joe:hunter2@a,b", "names no service"),
            ("redis+sentinel://joe:hunter2@a,b/", "names no service"),
            ("redis+sentinel:hunter2", "names no service"),
            ("redis+sentinel://joe:hunter2@/s", "names no host"),
            ("redis+sentinel://joe:hunter2@a,,b/s", "names no host"),
            ("redis+sentinel://joe:hunter2@a:hunter2/s", "host that cannot be read"),
            ("redis+sentinel://a,joe:hunter2@b/s", "before the first host"),
            ("redis+sentinel://joe:hunter2@a/s/hunter2", "not a number"),
            ("redis+sentinel://joe:hunter2@a/s/1/2", "not a number"),
            ("redis+sentinel://joe:hunter2@a/s#hunter2", "%23"),
            (
                "redis+sentinel://a/s?sentinel_password=hunter2&sentinel_password=hunter2",
                "twice",
            ),
            ("redis+sentinel://a/s?hunter2=hunter2", "unknown parameter"),
            ("redis+sentinel://a/s?ca=x", "with rediss:"),
            ("redis://a?sentinel_password=hunter2", "with redis+sentinel:"),
            ("hunter2+sentinel://a/s", "must start with"),
        ] {
            let error = RedisConfig::from_url(url).unwrap_err();
            assert!(matches!(error, lock_core::LockError::Configuration { .. }), "{error:?}");
            assert!(error.to_string().contains(word), "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
        let config = RedisConfig::from_url("redis+sentinel://joe:hunter2@a/s?sentinel_password=hunter2").unwrap();
        assert!(!format!("{config:?}").contains("hunter2"));
        let lock = config.connect_lazy().unwrap();
        assert!(!format!("{lock:?}").contains("hunter2"));
    }
}
