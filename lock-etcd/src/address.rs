//! What an address means.

use lock_core::LockError;
use lock_transport::url::{self, Spec};
use lock_transport::{Namespace, TlsFiles};

use crate::config::EtcdConfig;

const PARAMETERS: &str = "namespace, op_timeout (such as 5s), allow_unsafe_configuration (true or false), password_file, and ca, cert, key and \
                          pin (with etcds:)";

const SPEC: Spec = Spec {
    product: "etcd",
    schemes: &[("etcd", false), ("etcds", true)],
    form: "etcd://localhost:2379 or etcd://etcd-1:2379,etcd-2:2379",
    port: 2379,
};

/// Reads an address. No error shows any of it but the names of parameters.
pub(crate) fn read(url: &str) -> Result<EtcdConfig, LockError> {
    let mut address = url::parse(url, &SPEC)?;
    let params = &mut address.params;
    if address.tls && !cfg!(feature = "tls") {
        return Err(params.wrong("asks for TLS; turn on the feature \"tls\""));
    }
    if !address.path.is_empty() {
        return Err(params.wrong("has a path, and etcd has none; see the parameter namespace"));
    }
    let mut config = EtcdConfig::at(address.hosts);
    if address.tls {
        config.tls = Some(TlsFiles::from_params(params)?);
    }
    config.login = match (address.user, params.password(address.password)?) {
        (Some(user), Some(password)) => Some((user, password)),
        (None, None) => None,
        _ => return Err(params.wrong("has a user without a password, or the other way round")),
    };
    if let Some(namespace) = params.text("namespace")? {
        config.namespace = Namespace::new(namespace)?.to_string();
    }
    if let Some(limit) = params.duration("op_timeout", "5s or 500ms")? {
        config.op_timeout = limit;
    }
    if let Some(allow) = params.flag("allow_unsafe_configuration")? {
        config.allow_unsafe = allow;
    }
    address.params.finish(PARAMETERS)?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lock_transport::Secret;

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
        good(url).hosts.into_iter().map(|host| (host.host, host.port)).collect()
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
        assert_eq!(config.login, Some(("jöe".into(), Secret::new("p@ss:/"))));
        assert_eq!(config.namespace, "shop");
        assert_eq!(config.op_timeout, Duration::from_millis(500));
        assert!(config.allow_unsafe && config.tls.is_none());
    }

    #[cfg(feature = "tls")]
    #[test]
    fn with_tls_an_address_names_certificates() {
        let tls = good("etcds://h?ca=/etc/my%20ca.pem&cert=c.pem&key=k.pem").tls.unwrap();
        assert_eq!(tls.ca, Some("/etc/my ca.pem".into()));
        assert_eq!((tls.cert, tls.key), (Some("c.pem".into()), Some("k.pem".into())));
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
