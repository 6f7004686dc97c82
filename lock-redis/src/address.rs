//! What an address means.

#[cfg(unix)]
use std::path::PathBuf;

use lock_core::LockError;
use lock_transport::url::{self, Address, Params, Spec};
use lock_transport::{Endpoint, Namespace};
use percent_encoding::percent_decode_str;

use crate::transport::Place;
use crate::{RedisConfig, sentinel};

const PARAMETERS: &str = "namespace, op_timeout (such as 5s), min_replicas, counter_retention (such as 10m), allow_unsafe_configuration (true or false), \
                          password_file, ca, cert, key and pin (with rediss:), user, password and db (with redis+unix:), and sentinel_user, \
                          sentinel_password and sentinel_password_file (with redis+sentinel:)";

const PRODUCT: &str = "the Redis server";

const SPEC: Spec = Spec {
    product: PRODUCT,
    schemes: &[("redis", false), ("valkey", false), ("rediss", true), ("valkeys", true)],
    form: "redis://localhost:6379; others are redis+unix:, redis+sentinel://, redis+cluster:// and redlock://",
    port: 6379,
};

/// Reads an address. No error shows any of it but the names of parameters.
pub(crate) fn read(url: &str) -> Result<RedisConfig, LockError> {
    if let Some((scheme, rest)) = url.split_once("+sentinel:") {
        return sentinel::read(scheme, rest);
    }
    #[cfg(unix)]
    if let Some(("redis+unix" | "valkey+unix", rest)) = url.split_once(':') {
        return at_socket(rest);
    }
    let Address {
        tls,
        user,
        password,
        mut hosts,
        path,
        mut params,
        ..
    } = url::parse(url, &SPEC)?;
    let (Some(Endpoint { host, port }), true) = (hosts.pop(), hosts.is_empty()) else {
        return Err(wrong(
            "names several hosts; begin it with redis+sentinel://, redis+cluster:// or redlock:// if they belong together",
        ));
    };
    let mut config = RedisConfig::at(match tls {
        false => Place::Tcp(host, port),
        #[cfg(feature = "tls")]
        true => Place::Tls(host, port, lock_transport::TlsFiles::from_params(&mut params)?),
        #[cfg(not(feature = "tls"))]
        true => return Err(wrong("asks for TLS; turn on the feature \"tls\"")),
    });
    config.login.password = params.password(password)?;
    if user.is_some() && config.login.password.is_none() {
        // A user without a password logs in, too: with an empty one.
        config = config.password("");
    }
    config.login.user = user;
    match path.trim_matches('/') {
        "" => {}
        number => config.database = database(number)?,
    }
    read_others(config, params)
}

#[cfg(unix)]
fn at_socket(rest: &str) -> Result<RedisConfig, LockError> {
    if rest.contains('#') {
        return Err(wrong("holds a #; write it as %23"));
    }
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut config = RedisConfig::at(Place::Unix(socket(path)?));
    let mut params = Params::parse(PRODUCT, query)?;
    config.login.user = params.text("user")?;
    let password = params.text("password")?.map(Into::into);
    config.login.password = params.password(password)?;
    if let Some(number) = params.text("db")? {
        config.database = database(&number)?;
    }
    read_others(config, params)
}

fn read_others(mut config: RedisConfig, mut params: Params) -> Result<RedisConfig, LockError> {
    if let Some(namespace) = params.text("namespace")? {
        config = config.namespace(Namespace::new(namespace)?.as_str());
    }
    if let Some(limit) = params.duration("op_timeout", "5s or 500ms")? {
        config = config.op_timeout(limit);
    }
    if let Some(time) = params.duration("counter_retention", "10m (1s to 365days)")? {
        config = config.counter_retention(time);
    }
    if let Some(replicas) = params.text("min_replicas")? {
        let replicas = replicas
            .parse()
            .map_err(|_| wrong("has a wrong min_replicas; give a number"))?;
        config = config.min_replicas(replicas);
    }
    if let Some(allow) = params.flag("allow_unsafe_configuration")? {
        config = config.allow_unsafe_configuration(allow);
    }
    params.finish(PARAMETERS)?;
    Ok(config)
}

#[cfg(unix)]
fn socket(path: &str) -> Result<PathBuf, LockError> {
    use std::os::unix::ffi::OsStringExt;
    // As URLs without a host may have it.
    let path: Vec<u8> = percent_decode_str(path.strip_prefix("//").unwrap_or(path)).collect();
    if !path.starts_with(b"/") || path.contains(&0) {
        return Err(wrong(
            "needs the socket's path from the root, as in redis+unix:/run/redis.sock",
        ));
    }
    Ok(std::ffi::OsString::from_vec(path).into())
}

fn database(number: &str) -> Result<u32, LockError> {
    let number = number.parse().ok().filter(|number| *number <= i32::MAX as u32);
    number.ok_or_else(|| wrong("has a database that is not a number, as in redis://localhost/0"))
}

pub(crate) fn decoded(text: &str) -> Result<std::borrow::Cow<'_, str>, LockError> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map_err(|_| wrong("holds bytes that are not UTF-8 after decoding"))
}

pub(crate) fn wrong(why: impl std::fmt::Display) -> LockError {
    LockError::configuration(format!("the address of the Redis server {why}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lock_transport::Secret;

    use super::*;
    use crate::discovery::Target;

    fn good(url: &str) -> RedisConfig {
        read(url).unwrap()
    }

    fn refusal(url: &str) -> String {
        let error = read(url).unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }));
        error.to_string()
    }

    #[test]
    fn an_address_names_a_server_in_one_of_three_ways() {
        let tcp = |host: &str, port| Target::Server(Place::Tcp(host.to_owned(), port));
        assert_eq!(good("redis://db.example").target, tcp("db.example", 6379));
        assert_eq!(good("redis://10.0.0.1:7000/").target, tcp("10.0.0.1", 7000));
        assert_eq!(good("valkey://[::1]:7000").target, tcp("::1", 7000));
        #[cfg(feature = "tls")]
        {
            let files = lock_transport::TlsFiles {
                ca: Some("/etc/my ca.pem".into()),
                cert: Some("c".into()),
                key: Some("k".into()),
                pin: None,
            };
            assert_eq!(
                good("rediss://db.example?ca=/etc/my%20ca.pem&cert=c&key=k").target,
                Target::Server(Place::Tls("db.example".into(), 6379, files))
            );
        }
        for url in [
            "redis+unix:/run/a%20b.sock",
            "redis+unix:///run/a%20b.sock",
            "valkey+unix:/run/a%20b.sock?db=0",
        ] {
            assert_eq!(
                good(url).target,
                Target::Server(Place::Unix("/run/a b.sock".into())),
                "{url}"
            );
        }
    }

    #[test]
    fn credentials_database_and_parameters_are_read() {
        let config = good(
            "redis://j%C3%B6e:p%40ss%3A@h/3?namespace=shop&op_timeout=500ms&min_replicas=2&counter_retention=1h&allow_unsafe_configuration=true",
        );
        assert_eq!(config.login.user.as_deref(), Some("jöe"));
        assert_eq!(config.login.password, Some(Secret::new("p@ss:")));
        assert_eq!(good("redis://joe@h").login.password, Some(Secret::new("")));
        assert_eq!(config.database, 3);
        assert_eq!(config.namespace, "shop");
        assert_eq!(config.op_timeout, Duration::from_millis(500));
        assert_eq!(config.min_replicas, 2);
        assert_eq!(config.counter_retention, Duration::from_secs(60 * 60));
        assert!(config.allow_unsafe);
        let config = good("redis://:secret@h");
        assert_eq!(
            (config.login.user, config.login.password),
            (None, Some(Secret::new("secret")))
        );
        assert_eq!(
            good("redis://joe@h?password_file=/p").login.password,
            Some(Secret::file("/p"))
        );
        let config = good("redis+unix:/s?user=joe&password=p%26&db=2");
        assert_eq!(config.login.user.as_deref(), Some("joe"));
        assert_eq!(config.login.password, Some(Secret::new("p&")));
        assert_eq!(config.database, 2);
    }

    #[test]
    fn a_wrong_address_is_refused_with_what_is_known() {
        assert!(refusal("postgres://h").contains("redis://localhost"));
        assert!(refusal("redis:").contains("host"));
        assert!(refusal("redis://a,b").contains("several hosts"));
        assert!(refusal("redis://").contains("host"));
        assert!(refusal("redis://joe:a#b@h").contains("# as %23"));
        assert!(refusal("redis://joe:a/b@h").contains("/ as %2F"));
        assert!(refusal("redis://h/x").contains("number"));
        assert!(refusal("redis://h/-1").contains("number"));
        assert!(refusal("redis://h?timeout=1s").contains("known are namespace"));
        assert!(refusal("redis://h?ca=x").contains("with rediss:"));
        assert!(refusal("redis://h?op_timeout=0s").contains("such as 5s"));
        assert!(refusal("redis://h?counter_retention=long").contains("such as 10m"));
        assert!(refusal("redis://h?op_timeout=1s&op_timeout=1s").contains("twice"));
        assert!(refusal("redis://h?namespace=a:b").contains("namespace"));
        assert!(refusal("redis://h#x").contains("%23"));
        assert!(refusal("redis+unix://host/s").contains("from the root"));
        assert!(refusal("redis+unix:s").contains("from the root"));
    }

    #[test]
    fn nothing_secret_is_repeated() {
        for url in [
            "redis://joe:hunter2@h:port",
            "redis://joe:hunter2@h/x",
            "redis://joe:hunter2@h?x=hunter2",
            "redis://joe:hunter2@h?hunter2",
            "redis://joe:hunter2@h?op_timeout=hunter2",
            "redis+unix:/s?password=a&hunter2",
            "hunter2://joe:hunter2@h",
        ] {
            let error = read(url).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
        let config = good("redis://joe:hunter2@h");
        assert!(!format!("{config:?}").contains("hunter2"));
    }
}
