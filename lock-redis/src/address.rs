//! What an address means.

use std::borrow::Cow;
use std::path::PathBuf;

use lock_core::LockError;
use percent_encoding::percent_decode_str;
use url::{Host, Url};

use crate::transport::Place;
use crate::{RedisConfig, sentinel};

const PARAMETERS: &str = "namespace, op_timeout (such as 5s), min_replicas, counter_retention (such as 10m), allow_unsafe_configuration (true or false), ca (with rediss:), \
                          user, password and db (with redis+unix:), and sentinel_user and sentinel_password (with redis+sentinel:)";

const SPECIAL: &str = "in a user or password, write # as %23, / as %2F, @ as %40";

/// Reads an address. No error shows any of it but the names of parameters.
pub(crate) fn read(url: &str) -> Result<RedisConfig, LockError> {
    if let Some((scheme, rest)) = url.split_once("+sentinel:") {
        return sentinel::read(scheme, rest);
    }
    let url = Url::parse(url).map_err(|e| wrong(format!("cannot be read: {e}; {SPECIAL}")))?;
    if url.fragment().is_some() {
        return Err(wrong("holds a #; write it as %23"));
    }
    let mut config = match url.scheme() {
        "redis" | "valkey" => {
            let (host, port) = host(&url, 6379)?;
            RedisConfig::at(Place::Tcp(host, port))
        }
        #[cfg(feature = "tls")]
        "rediss" | "valkeys" => {
            let (host, port) = host(&url, 6379)?;
            RedisConfig::at(Place::Tls(host, port, None))
        }
        #[cfg(not(feature = "tls"))]
        "rediss" | "valkeys" => return Err(wrong("asks for TLS; turn on the feature \"tls\"")),
        #[cfg(unix)]
        "redis+unix" | "valkey+unix" => RedisConfig::at(Place::Unix(socket(&url)?)),
        _ => {
            return Err(wrong(
                "must start with redis:, rediss:, redis+unix:, redis+sentinel: or rediss+sentinel:, as in redis://localhost:6379",
            ));
        }
    };
    let by_socket = url.scheme().ends_with("+unix");
    if !by_socket {
        if !url.username().is_empty() {
            config.login.user = Some(decoded(url.username())?.into_owned());
            // A user without a password logs in, too: with an empty one.
            config = config.password("");
        }
        if let Some(password) = url.password() {
            config = config.password(decoded(password)?);
        }
        match url.path().trim_matches('/') {
            "" => {}
            number => config.database = database(number)?,
        }
    }
    let mut given = Vec::new();
    for pair in url
        .query()
        .unwrap_or_default()
        .split('&')
        .filter(|pair| !pair.is_empty())
    {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = decoded(value)?;
        if given.contains(&name) {
            return Err(wrong(format!("gives {name} twice; give it once")));
        }
        given.push(name);
        config = match name {
            "namespace" => config.namespace(value),
            "op_timeout" => match humantime::parse_duration(&value) {
                Ok(limit) if !limit.is_zero() => config.op_timeout(limit),
                _ => {
                    return Err(wrong(
                        "has a wrong op_timeout; give a time above zero, such as 5s or 500ms",
                    ));
                }
            },
            "min_replicas" => match value.parse() {
                Ok(replicas) => config.min_replicas(replicas),
                Err(_) => return Err(wrong("has a wrong min_replicas; give a number")),
            },
            "counter_retention" => match humantime::parse_duration(&value) {
                Ok(time) => config.counter_retention(time),
                Err(_) => {
                    return Err(wrong(
                        "has a wrong counter_retention; give a time of 1s to 365days, such as 10m",
                    ));
                }
            },
            "allow_unsafe_configuration" => match value.parse() {
                Ok(allow) => config.allow_unsafe_configuration(allow),
                Err(_) => return Err(wrong(format!("has a wrong {name}; give true or false"))),
            },
            #[cfg(feature = "tls")]
            "ca" if matches!(config.target, crate::discovery::Target::Server(Place::Tls(..))) => {
                config.trust(value.into_owned())
            }
            "user" if by_socket => {
                config.login.user = Some(value.into_owned());
                config
            }
            "password" if by_socket => config.password(value),
            "db" if by_socket => config.database(database(&value)?),
            // A password with a & in it would look like a name here.
            _ => return Err(wrong(format!("has an unknown parameter; known are {PARAMETERS}"))),
        };
    }
    crate::keys::Keys::new(&config.namespace)?;
    Ok(config)
}

/// The host and the port that the URL names.
pub(crate) fn host(url: &Url, default_port: u16) -> Result<(String, u16), LockError> {
    let host = match url.host() {
        Some(Host::Domain(host)) if !host.is_empty() => decoded(host)?.into_owned(),
        Some(Host::Ipv4(address)) => address.to_string(),
        Some(Host::Ipv6(address)) => address.to_string(),
        _ => return Err(wrong("names no host, as in redis://localhost:6379")),
    };
    Ok((host, url.port().unwrap_or(default_port)))
}

#[cfg(unix)]
fn socket(url: &Url) -> Result<PathBuf, LockError> {
    use std::os::unix::ffi::OsStringExt;
    let path: Vec<u8> = percent_decode_str(url.path()).collect();
    if url.host_str().is_some_and(|host| !host.is_empty()) || !path.starts_with(b"/") || path.contains(&0) {
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

pub(crate) fn decoded(text: &str) -> Result<Cow<'_, str>, LockError> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map_err(|_| wrong("holds bytes that are not UTF-8 after decoding"))
}

pub(crate) fn wrong(why: impl std::fmt::Display) -> LockError {
    LockError::configuration(format!("the address of the Redis server {why}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::discovery::Target;
    use crate::login::Secret;

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
        assert_eq!(
            good("rediss://db.example?ca=/etc/my%20ca.pem").target,
            Target::Server(Place::Tls("db.example".into(), 6379, Some("/etc/my ca.pem".into())))
        );
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
        assert_eq!(config.login.password, Some(Secret("p@ss:".into())));
        assert_eq!(good("redis://joe@h").login.password, Some(Secret(String::new())));
        assert_eq!(config.database, 3);
        assert_eq!(config.namespace, "shop");
        assert_eq!(config.op_timeout, Duration::from_millis(500));
        assert_eq!(config.min_replicas, 2);
        assert_eq!(config.counter_retention, Duration::from_secs(60 * 60));
        assert!(config.allow_unsafe);
        let config = good("redis://:secret@h");
        assert_eq!(
            (config.login.user, config.login.password),
            (None, Some(Secret("secret".into())))
        );
        let config = good("redis+unix:/s?user=joe&password=p%26&db=2");
        assert_eq!(config.login.user.as_deref(), Some("joe"));
        assert_eq!(config.login.password, Some(Secret("p&".into())));
        assert_eq!(config.database, 2);
    }

    #[test]
    fn a_wrong_address_is_refused_with_what_is_known() {
        assert!(refusal("postgres://h").contains("redis://localhost"));
        assert!(refusal("redis:").contains("host"));
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
