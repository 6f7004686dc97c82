//! What an address means.

use std::borrow::Cow;

use lock_core::LockError;
use percent_encoding::percent_decode_str;
use tokio_postgres::config::TargetSessionAttrs;

use crate::PostgresConfig;
use crate::config::Tls;
use crate::keys::Keys;
use crate::schema::Schema;

const OURS: &str = "namespace, schema, op_timeout (such as 5s), allow_unsafe_configuration (true or false), sslmode, \
                    sslrootcert";

/// What the library underneath understands by itself. What sessions depend on is not among it.
const THEIRS: [&str; 10] = [
    "channel_binding",
    "dbname",
    "host",
    "hostaddr",
    "load_balance_hosts",
    "options",
    "password",
    "port",
    "target_session_attrs",
    "user",
];

/// Reads an address. No error shows any of it but the names of parameters.
pub(crate) fn read(url: &str) -> Result<PostgresConfig, LockError> {
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    if !["postgres", "postgresql"].contains(&scheme) {
        return Err(wrong(
            "must start with postgres:// or postgresql://, as in postgres://localhost/shop",
        ));
    }
    if rest.contains('#') {
        return Err(wrong("holds a #; write it as %23"));
    }
    let (base, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    let mut given = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        // Several hosts may be given one by one.
        if given.contains(&name) && !["host", "port", "hostaddr"].contains(&name) {
            return Err(wrong(format!("gives {name} twice; give it once")));
        }
        given.push(name);
        if THEIRS.contains(&name) {
            theirs.push(pair);
        } else {
            ours.push((name, decoded(value)?));
        }
    }
    // Its errors may show a part of the address.
    let server = format!("postgres://{base}?{}", theirs.join("&")).parse();
    let mut server: tokio_postgres::Config =
        server.map_err(|_| wrong("cannot be read; it looks like postgres://user:password@host:5432/database"))?;
    if server.get_hosts().is_empty() && server.get_hostaddrs().is_empty() {
        return Err(wrong("names no host, as in postgres://localhost/shop"));
    }
    if server.get_target_session_attrs() == TargetSessionAttrs::ReadOnly {
        return Err(wrong(
            "asks for a server that cannot be written to; locks need the one that can",
        ));
    }
    if !given.contains(&"target_session_attrs") {
        server.target_session_attrs(TargetSessionAttrs::ReadWrite);
    }
    let mut config = PostgresConfig::new(server);
    for (name, value) in ours {
        config = match name {
            "namespace" => config.namespace(value),
            "schema" => config.schema(value),
            "op_timeout" => match humantime::parse_duration(&value) {
                Ok(limit) if !limit.is_zero() => config.op_timeout(limit),
                _ => {
                    return Err(wrong(
                        "has a wrong op_timeout; give a time above zero, such as 5s or 500ms",
                    ));
                }
            },
            "allow_unsafe_configuration" => match value.parse() {
                Ok(allow) => config.allow_unsafe_configuration(allow),
                Err(_) => return Err(wrong(format!("has a wrong {name}; give true or false"))),
            },
            "sslmode" => config.tls(tls(&value)?),
            #[cfg(feature = "tls")]
            "sslrootcert" => config.trust(value.into_owned()),
            #[cfg(not(feature = "tls"))]
            "sslrootcert" => return Err(without_tls()),
            // A password with a & in it would look like a name here.
            _ => {
                return Err(wrong(format!(
                    "has an unknown parameter; known are {OURS}, {}",
                    THEIRS.join(", ")
                )));
            }
        };
    }
    Keys::new(&config.namespace)?;
    Schema::new(&config.schema)?;
    Ok(config)
}

fn tls(mode: &str) -> Result<Tls, LockError> {
    let tls = match mode {
        "disable" => Tls::Disable,
        "prefer" => Tls::Prefer,
        "require" => Tls::Require,
        "verify-ca" => Tls::VerifyCa,
        "verify-full" => Tls::VerifyFull,
        _ => {
            return Err(wrong(
                "has a wrong sslmode; it is one of disable, prefer, require, verify-ca, verify-full",
            ));
        }
    };
    #[cfg(not(feature = "tls"))]
    if ![Tls::Disable, Tls::Prefer].contains(&tls) {
        return Err(without_tls());
    }
    Ok(tls)
}

#[cfg(not(feature = "tls"))]
fn without_tls() -> LockError {
    wrong("asks for TLS; turn on the feature \"tls\" of lock-postgres")
}

fn decoded(text: &str) -> Result<Cow<'_, str>, LockError> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map_err(|_| wrong("holds bytes that are not UTF-8 after decoding"))
}

fn wrong(why: impl std::fmt::Display) -> LockError {
    LockError::configuration(format!("the address of the Postgres server {why}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio_postgres::config::Host;

    use super::*;

    fn good(url: &str) -> PostgresConfig {
        read(url).unwrap()
    }

    fn refusal(url: &str) -> String {
        let error = read(url).unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }));
        error.to_string()
    }

    #[test]
    fn an_address_names_servers_by_host_or_socket() {
        let config = good("postgresql://j%C3%B6e:p%40ss@one,two:5433/shop");
        let tcp = |host: &str| Host::Tcp(host.to_owned());
        assert_eq!(config.server.get_hosts(), [tcp("one"), tcp("two")]);
        assert_eq!(config.server.get_ports(), [5432, 5433]);
        assert_eq!(config.server.get_user(), Some("jöe"));
        assert_eq!(config.server.get_password(), Some(&b"p@ss"[..]));
        assert_eq!(config.server.get_dbname(), Some("shop"));
        let wanted = config.server.get_target_session_attrs();
        assert_eq!(wanted, TargetSessionAttrs::ReadWrite);
        #[cfg(unix)]
        for url in ["postgres://%2Frun%2Fpg/shop", "postgres:///shop?host=/run/pg"] {
            assert_eq!(good(url).server.get_hosts(), [Host::Unix("/run/pg".into())], "{url}");
        }
    }

    #[test]
    fn parameters_are_read() {
        let config = good(
            "postgres://h?namespace=shop&schema=my%20locks&op_timeout=500ms&sslmode=disable&allow_unsafe_configuration=true\
             &user=joe&target_session_attrs=any",
        );
        assert_eq!((&*config.namespace, &*config.schema), ("shop", "my locks"));
        assert_eq!(config.op_timeout, Duration::from_millis(500));
        assert_eq!(config.tls, Tls::Disable);
        assert_eq!(config.server.get_user(), Some("joe"));
        assert!(config.allow_unsafe);
        #[cfg(feature = "tls")]
        assert_eq!(
            good("postgres://h?sslmode=verify-full&sslrootcert=/ca.pem").root_certificate,
            Some("/ca.pem".into())
        );
    }

    #[test]
    fn a_wrong_address_is_refused_with_what_is_known() {
        assert!(refusal("redis://h").contains("postgres://localhost"));
        assert!(refusal("postgres:h").contains("postgres://localhost"));
        assert!(refusal("postgres:///shop").contains("no host"));
        assert!(refusal("postgres://h:port").contains("cannot be read"));
        assert!(refusal("postgres://h?timeout=1s").contains("known are namespace"));
        assert!(refusal("postgres://h?application_name=x").contains("known are namespace"));
        assert!(refusal("postgres://h?op_timeout=0s").contains("such as 5s"));
        assert!(refusal("postgres://h?op_timeout=1s&op_timeout=1s").contains("twice"));
        assert!(refusal("postgres://h?namespace=a:b").contains("namespace"));
        assert!(refusal("postgres://h?schema=").contains("schema"));
        assert!(refusal("postgres://h?sslmode=on").contains("verify-full"));
        assert!(refusal("postgres://h?target_session_attrs=read-only").contains("written"));
        assert!(refusal("postgres://h#x").contains("%23"));
    }

    #[test]
    fn nothing_secret_is_repeated() {
        for url in [
            "postgres://joe:hunter2@h:port",
            "postgres://joe:hunter2@",
            "postgres://joe:hunter2@h?x=hunter2",
            "postgres://joe:hunter2@h?hunter2",
            "postgres://joe:hunter2@h?op_timeout=hunter2",
            "postgres://h?password=a&hunter2",
            "hunter2://joe:hunter2@h",
        ] {
            let error = read(url).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
        let config = good("postgres://joe:hunter2@h");
        assert!(!format!("{config:?}").contains("hunter2"));
    }
}
