//! What an address means.

use std::borrow::Cow;

use lock_core::LockError;
use percent_encoding::percent_decode_str;
use url::Url;

use crate::EtcdConfig;
use crate::config::{Host, Secret};

const PARAMETERS: &str = "namespace, op_timeout (such as 5s), allow_unsafe_configuration (true or false), and ca, cert and key \
                          (with etcds:)";

const PORT: u16 = 2379;

/// Reads an address. No error shows any of it but the names of parameters.
pub(crate) fn read(url: &str) -> Result<EtcdConfig, LockError> {
    if url.contains('#') {
        return Err(wrong("holds a #; write it as %23"));
    }
    let (scheme, rest) = url.split_once("://").unwrap_or((url, ""));
    let tls = match scheme {
        "etcd" => false,
        #[cfg(feature = "tls")]
        "etcds" => true,
        #[cfg(not(feature = "tls"))]
        "etcds" => return Err(wrong("asks for TLS; turn on the feature \"tls\"")),
        _ => {
            return Err(wrong(
                "must start with etcd:// or etcds://, as in etcd://localhost:2379",
            ));
        }
    };
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = place.split_once('/').unwrap_or((place, ""));
    if !path.is_empty() {
        return Err(wrong("has a path, and etcd has none; see the parameter namespace"));
    }
    let (login, hosts) = match authority.rsplit_once('@') {
        Some((login, hosts)) => (Some(login), hosts),
        None => (None, authority),
    };
    let mut config = EtcdConfig::at(hosts.split(',').map(host).collect::<Result<_, _>>()?);
    if tls {
        config.tls = Some(crate::config::Tls::default());
    }
    if let Some(login) = login {
        let Some((user, password)) = login.split_once(':').filter(|(user, _)| !user.is_empty()) else {
            return Err(wrong("has a user without a password, or the other way round"));
        };
        config.login = Some((decoded(user)?.into_owned(), Secret(decoded(password)?.into_owned())));
    }
    let mut given = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = decoded(value)?;
        if given.contains(&name) {
            return Err(wrong(format!("gives {name} twice; give it once")));
        }
        match (name, &mut config.tls) {
            ("namespace", _) => config.namespace = value.into_owned(),
            ("op_timeout", _) => match humantime::parse_duration(&value) {
                Ok(limit) if !limit.is_zero() => config.op_timeout = limit,
                _ => {
                    return Err(wrong(
                        "has a wrong op_timeout; give a time above zero, such as 5s or 500ms",
                    ));
                }
            },
            ("allow_unsafe_configuration", _) => match value.parse() {
                Ok(allow) => config.allow_unsafe = allow,
                Err(_) => return Err(wrong(format!("has a wrong {name}; give true or false"))),
            },
            ("ca", Some(tls)) => tls.ca = Some(value.into_owned().into()),
            ("cert", Some(tls)) => tls.certificate = Some(value.into_owned().into()),
            ("key", Some(tls)) => tls.key = Some(value.into_owned().into()),
            // A password with a & in it would look like a name here.
            _ => return Err(wrong(format!("has an unknown parameter; known are {PARAMETERS}"))),
        }
        given.push(name);
    }
    if let Some(tls) = &config.tls
        && tls.certificate.is_some() != tls.key.is_some()
    {
        return Err(wrong(
            "gives only one of cert and key; a certificate needs its private key",
        ));
    }
    crate::keys::Keys::new(&config.namespace)?;
    Ok(config)
}

fn host(text: &str) -> Result<Host, LockError> {
    let unusable = || {
        wrong(
            "names a host that cannot be used; write hosts as in etcd://etcd-1:2379,etcd-2:2379; in a user or password, write # as %23, / as %2F, @ as %40",
        )
    };
    let url = Url::parse(&format!("etcd://{text}")).map_err(|_| unusable())?;
    // Whatever else the text has in it belongs to no host.
    if url.host_str().is_none_or(str::is_empty) || url.has_authority() && url.username() != "" {
        return Err(unusable());
    }
    let name = match url.host() {
        Some(url::Host::Domain(name)) => decoded(name)?.into_owned(),
        Some(url::Host::Ipv4(address)) => address.to_string(),
        Some(url::Host::Ipv6(address)) => address.to_string(),
        None => return Err(unusable()),
    };
    let port = url.port().unwrap_or(PORT);
    Ok(Host { name, port })
}

fn decoded(text: &str) -> Result<Cow<'_, str>, LockError> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map_err(|_| wrong("holds bytes that are not UTF-8 after decoding"))
}

fn wrong(why: impl std::fmt::Display) -> LockError {
    LockError::configuration(format!("the address of etcd {why}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn good(url: &str) -> EtcdConfig {
        read(url).unwrap()
    }

    fn refusal(url: &str) -> String {
        let error = read(url).unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }));
        error.to_string()
    }

    fn hosts(url: &str) -> Vec<(String, u16)> {
        good(url).hosts.into_iter().map(|host| (host.name, host.port)).collect()
    }

    #[test]
    fn an_address_names_one_member_or_more() {
        assert_eq!(hosts("etcd://a"), [("a".to_owned(), 2379)]);
        assert_eq!(hosts("etcd://10.0.0.1:1/"), [("10.0.0.1".to_owned(), 1)]);
        assert_eq!(
            hosts("etcd://u:p@a:1,b.example,[::1]:3?namespace=x"),
            [
                ("a".to_owned(), 1),
                ("b.example".to_owned(), 2379),
                ("::1".to_owned(), 3)
            ]
        );
        assert_eq!(good("etcd://[::1]:3").hosts[0].to_string(), "[::1]:3");
    }

    #[test]
    fn credentials_and_parameters_are_read() {
        let config =
            good("etcd://j%C3%B6e:p%40ss%3A%2F@h?namespace=shop&op_timeout=500ms&allow_unsafe_configuration=true");
        assert_eq!(config.login, Some(("jöe".into(), Secret("p@ss:/".into()))));
        assert_eq!(config.namespace, "shop");
        assert_eq!(config.op_timeout, Duration::from_millis(500));
        assert!(config.allow_unsafe && config.tls.is_none());
    }

    #[cfg(feature = "tls")]
    #[test]
    fn with_tls_an_address_names_certificates() {
        let tls = good("etcds://h?ca=/etc/my%20ca.pem&cert=c.pem&key=k.pem").tls.unwrap();
        assert_eq!(tls.ca, Some("/etc/my ca.pem".into()));
        assert_eq!((tls.certificate, tls.key), (Some("c.pem".into()), Some("k.pem".into())));
        assert!(refusal("etcds://h?cert=c.pem").contains("private key"));
    }

    #[test]
    fn a_wrong_address_is_refused_with_what_is_known() {
        assert!(refusal("http://h").contains("etcd://localhost"));
        assert!(refusal("etcd:h").contains("etcd://localhost"));
        assert!(refusal("etcd://").contains("host"));
        assert!(refusal("etcd://a,").contains("host"));
        assert!(refusal("etcd://a:b:1").contains("host"));
        assert!(refusal("etcd://h/x").contains("namespace"));
        assert!(refusal("etcd://joe@h").contains("without a password"));
        assert!(refusal("etcd://h?timeout=1s").contains("known are namespace"));
        assert!(refusal("etcd://h?ca=x").contains("with etcds:"));
        assert!(refusal("etcd://h?op_timeout=0s").contains("such as 5s"));
        assert!(refusal("etcd://h?op_timeout=1s&op_timeout=1s").contains("twice"));
        assert!(refusal("etcd://h?namespace=a:b").contains("namespace"));
        assert!(refusal("etcd://h#x").contains("%23"));
    }

    #[test]
    fn nothing_secret_is_repeated() {
        for url in [
            "etcd://joe:hunter2@h:port",
            "etcd://joe:hunter2@h/x",
            "etcd://joe:hunter2@h?x=hunter2",
            "etcd://joe:hunter2@h?hunter2",
            "etcd://joe:hunter2@h?op_timeout=hunter2",
            "etcd://hunter2@h",
            "hunter2://joe:hunter2@h",
        ] {
            let error = read(url).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
        let config = good("etcd://joe:hunter2@h");
        assert!(!format!("{config:?}").contains("hunter2"));
    }
}
