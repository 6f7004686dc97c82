//! What an address means.

use std::borrow::Cow;
use std::time::Duration;

use lock_core::LockError;
#[cfg(feature = "tls")]
use lock_transport::Pin;
use lock_transport::Secret;
use percent_encoding::percent_decode_str;
use tokio_postgres::config::TargetSessionAttrs;

use crate::PostgresConfig;
use crate::config::Tls;
use crate::keys::Keys;
use crate::schema::Schema;
#[cfg(feature = "tls")]
use crate::tls::Roots;

const OURS: &str = "namespace, schema, op_timeout (such as 5s), pool_mode (session), allow_unsafe_configuration (true or \
                    false), ca, cert, key, pin, password_file";

/// Parameters of libpq that are read here.
const LIBPQ: &str = "application_name, channel_binding, client_encoding, connect_timeout, dbname, \
                     fallback_application_name, gssencmode, host, hostaddr, keepalives, keepalives_count, keepalives_idle, \
                     keepalives_interval, load_balance_hosts, options, password, port, ssl, sslcert, sslkey, sslmode, \
                     sslnegotiation, sslrootcert, target_session_attrs, tcp_user_timeout, user";

/// Those of them that the library underneath reads.
const THEIRS: [&str; 10] = [
    "channel_binding",
    "dbname",
    "host",
    "hostaddr",
    "load_balance_hosts",
    "options",
    "password",
    "port",
    "sslnegotiation",
    "user",
];

/// Parameters of libpq, and of other drivers, that are not supported. They may be named in an error; anything else may be a part
/// of a password with a `&` in it.
const UNSUPPORTED: [&str; 33] = [
    "connection_limit",
    "gssdelegation",
    "gsslib",
    "krbsrvname",
    "max_protocol_version",
    "min_protocol_version",
    "passfile",
    "pgbouncer",
    "pool_max_conns",
    "pool_timeout",
    "replication",
    "require_auth",
    "requirepeer",
    "requiressl",
    "scram_client_key",
    "scram_server_key",
    "service",
    "servicefile",
    "socket_timeout",
    "ssl_max_protocol_version",
    "ssl_min_protocol_version",
    "sslaccept",
    "sslcertmode",
    "sslcompression",
    "sslcrl",
    "sslcrldir",
    "sslidentity",
    "sslkeylogfile",
    "sslpassword",
    "sslsni",
    "statement_cache_size",
    "statement-cache-capacity",
    "timezone",
];

const SPECIAL: &str = "in a user or password, write # as %23, / as %2F, @ as %40";

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
    // What follows the first @ would be taken for the host, and be shown.
    let (authority, database) = base.split_once('/').unwrap_or((base, ""));
    if authority.matches('@').count() > 1 || database.contains('@') {
        return Err(wrong(format!("has an @ that separates nothing; {SPECIAL}")));
    }
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    let mut given = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        // Several hosts may be given one by one.
        if given.contains(&name) && !["host", "port", "hostaddr"].contains(&name) {
            // A password with a & in it would look like a name here.
            let name = if is_known(name) { name } else { "a parameter" };
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
    let mut server: tokio_postgres::Config = server.map_err(|_| {
        wrong(format!(
            "cannot be read; it looks like postgres://user:password@host:5432/database; {SPECIAL}"
        ))
    })?;
    if server.get_hosts().is_empty() && server.get_hostaddrs().is_empty() {
        return Err(wrong("names no host, as in postgres://localhost/shop"));
    }
    // Locks are on the primary.
    server.target_session_attrs(TargetSessionAttrs::ReadWrite);
    let mut config = PostgresConfig::new(server);
    if given.contains(&"ssl") && given.contains(&"sslmode") {
        return Err(wrong("gives ssl and sslmode; give sslmode alone"));
    }
    for (one, other) in [
        ("ca", "sslrootcert"),
        ("cert", "sslcert"),
        ("key", "sslkey"),
        ("password", "password_file"),
    ] {
        if given.contains(&one) && given.contains(&other) {
            return Err(wrong(format!(
                "gives {one} and {other}, which mean the same; give one of them"
            )));
        }
    }
    if given.contains(&"password_file") && config.server.get_password().is_some() {
        return Err(wrong("gives a password and password_file; give one of them"));
    }
    if (given.contains(&"ca") || given.contains(&"pin")) && !given.contains(&"sslmode") && !given.contains(&"ssl") {
        config = config.tls(tls("verify-full")?);
    }
    for (name, value) in &ours {
        config = read_one(config, name, value)?;
    }
    #[cfg(feature = "tls")]
    if config.certificates.roots == Roots::System && config.tls != Tls::VerifyFull {
        if given.contains(&"sslmode") || given.contains(&"ssl") {
            return Err(wrong(
                "has sslrootcert=system with a weaker sslmode; it needs sslmode=verify-full",
            ));
        }
        config = config.tls(Tls::VerifyFull);
    }
    Keys::new(&config.namespace)?;
    Schema::new(&config.schema)?;
    Ok(config)
}

fn is_known(name: &str) -> bool {
    LIBPQ.split(", ").any(|known| known == name)
        || [
            "namespace",
            "schema",
            "op_timeout",
            "pool_mode",
            "allow_unsafe_configuration",
            "ca",
            "cert",
            "key",
            "password_file",
            "pin",
        ]
        .contains(&name)
}

fn read_one(mut config: PostgresConfig, name: &str, value: &str) -> Result<PostgresConfig, LockError> {
    let one_of = |known: &[&str]| match known.contains(&value) {
        true => Ok(()),
        false => Err(wrong(format!("has a wrong {name}; it is one of {}", known.join(", ")))),
    };
    match name {
        "namespace" => config = config.namespace(value),
        "password_file" => config = config.password(Secret::file(value)),
        "schema" => config = config.schema(value),
        "op_timeout" => match humantime::parse_duration(value) {
            Ok(limit) if !limit.is_zero() => config = config.op_timeout(limit),
            _ => {
                return Err(wrong(
                    "has a wrong op_timeout; give a time above zero, such as 5s or 500ms",
                ));
            }
        },
        "pool_mode" if value == "session" => config = config.session_pooler(true),
        "pool_mode" => {
            return Err(wrong(
                "has a wrong pool_mode; locks need a session for each client, so it is session if there is a pooler",
            ));
        }
        "allow_unsafe_configuration" => match value.parse() {
            Ok(allow) => config = config.allow_unsafe_configuration(allow),
            Err(_) => return Err(wrong(format!("has a wrong {name}; give true or false"))),
        },
        "ssl" => {
            // As JDBC has it, and libpq takes it.
            one_of(&["true"])?;
            config = config.tls(tls("require")?);
        }
        "sslmode" => config = config.tls(tls(value)?),
        #[cfg(feature = "tls")]
        "sslrootcert" if value == "system" => config.certificates.roots = Roots::System,
        #[cfg(feature = "tls")]
        "sslrootcert" | "ca" => config = config.trust(value),
        #[cfg(feature = "tls")]
        "sslcert" | "cert" => config.certificates.own = Some(value.into()),
        #[cfg(feature = "tls")]
        "sslkey" | "key" => config.certificates.key = Some(value.into()),
        #[cfg(feature = "tls")]
        "pin" => config = config.pin(Pin::parse(value).ok_or_else(|| wrong(Pin::WRONG))?),
        #[cfg(not(feature = "tls"))]
        "sslrootcert" | "sslcert" | "sslkey" | "ca" | "cert" | "key" | "pin" => return Err(without_tls()),
        // Sessions have names of their own, by which they are found.
        "application_name" | "fallback_application_name" => {}
        "client_encoding" => {
            if !["utf8", "utf-8", "unicode", "auto"].contains(&value.to_ascii_lowercase().as_str()) {
                return Err(wrong("has a client_encoding other than UTF8; leave it out"));
            }
        }
        "gssencmode" => match value {
            "disable" | "prefer" => {}
            _ => {
                return Err(wrong(
                    "has a gssencmode other than disable and prefer; GSSAPI is not supported",
                ));
            }
        },
        "connect_timeout" => config.tcp.connect_timeout = Duration::from_secs(number(name, value)?),
        "keepalives" => {
            one_of(&["0", "1"])?;
            config.tcp.keepalives = value == "1";
        }
        "keepalives_idle" => config.tcp.keepalives_idle = Duration::from_secs(number(name, value)?),
        "keepalives_interval" => config.tcp.keepalives_interval = Duration::from_secs(number(name, value)?),
        "keepalives_count" => config.tcp.keepalives_count = number(name, value)?.try_into().unwrap_or(u32::MAX),
        "tcp_user_timeout" => config.tcp.user_timeout = Some(Duration::from_millis(number(name, value)?)),
        "target_session_attrs" => match value {
            // Whichever of these it is, there is only one server that locks can be on.
            "any" | "read-write" | "primary" | "prefer-standby" => {}
            "read-only" | "standby" => {
                return Err(wrong(
                    "asks for a server that cannot be written to; locks need the primary: take target_session_attrs out",
                ));
            }
            _ => one_of(&["any", "read-write", "primary", "prefer-standby"])?,
        },
        name if UNSUPPORTED.contains(&name) => {
            return Err(wrong(format!(
                "has the parameter {name}, which is not supported; take it out"
            )));
        }
        // A password with a & in it would look like a name here.
        _ => {
            return Err(wrong(format!(
                "has an unknown parameter; known are {OURS}, and of libpq {LIBPQ}"
            )));
        }
    }
    Ok(config)
}

/// A number as libpq takes it: a negative one is none, as zero is.
fn number(name: &str, value: &str) -> Result<u64, LockError> {
    match value.trim().parse::<i32>() {
        Ok(number) => Ok(number.try_into().unwrap_or(0)),
        Err(_) => Err(wrong(format!("has a wrong {name}; give a whole number"))),
    }
}

fn tls(mode: &str) -> Result<Tls, LockError> {
    let tls = match mode {
        "disable" => Tls::Disable,
        "allow" => Tls::Allow,
        "prefer" => Tls::Prefer,
        "require" => Tls::Require,
        "verify-ca" => Tls::VerifyCa,
        "verify-full" => Tls::VerifyFull,
        _ => {
            return Err(wrong(
                "has a wrong sslmode; it is one of disable, allow, prefer, require, verify-ca, verify-full",
            ));
        }
    };
    #[cfg(not(feature = "tls"))]
    if ![Tls::Disable, Tls::Allow, Tls::Prefer].contains(&tls) {
        return Err(without_tls());
    }
    Ok(tls)
}

#[cfg(not(feature = "tls"))]
fn without_tls() -> LockError {
    wrong("asks for TLS; turn on the feature \"tls\"")
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
        assert!(config.allow_unsafe && !config.session_pooler);
        assert!(good("postgres://h?pool_mode=session").session_pooler);
        #[cfg(feature = "tls")]
        {
            let config = good("postgres://h?sslmode=verify-full&sslrootcert=/ca.pem&sslcert=/my%20cert&sslkey=/key");
            assert_eq!(config.certificates.roots, Roots::File("/ca.pem".into()));
            assert_eq!(config.certificates.own, Some("/my cert".into()));
            assert_eq!(config.certificates.key, Some("/key".into()));
            let config = good("postgres://h?ca=/ca.pem&cert=/cert&key=/key&password_file=/p");
            assert_eq!(config.certificates.roots, Roots::File("/ca.pem".into()));
            assert_eq!(
                (config.certificates.own, config.certificates.key),
                (Some("/cert".into()), Some("/key".into()))
            );
            assert_eq!(
                (config.tls, config.password),
                (Tls::VerifyFull, Some(Secret::file("/p")))
            );
            assert_eq!(good("postgres://h?ca=/ca.pem&sslmode=verify-ca").tls, Tls::VerifyCa);
            let config = good("postgres://h?sslrootcert=system");
            assert_eq!(
                (config.certificates.roots, config.tls),
                (Roots::System, Tls::VerifyFull)
            );
        }
    }

    #[test]
    fn what_libpq_takes_means_the_same() {
        for mode in ["disable", "allow", "prefer"] {
            good(&format!("postgres://h?sslmode={mode}"));
        }
        #[cfg(feature = "tls")]
        assert_eq!(good("postgres://h?ssl=true").tls, Tls::Require);
        for attributes in ["any", "read-write", "primary", "prefer-standby"] {
            let config = good(&format!("postgres://h?target_session_attrs={attributes}"));
            assert_eq!(config.server.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
        }
        let tcp = good(
            "postgres://h?connect_timeout=3&application_name=shop&gssencmode=prefer&keepalives=1&keepalives_idle=60&\
             keepalives_interval=10&keepalives_count=4&tcp_user_timeout=2500&load_balance_hosts=random&client_encoding=UTF8",
        )
        .tcp;
        let seconds = Duration::from_secs;
        assert_eq!((tcp.connect_timeout, tcp.keepalives), (seconds(3), true));
        assert_eq!(
            (tcp.keepalives_idle, tcp.keepalives_interval),
            (seconds(60), seconds(10))
        );
        assert_eq!(
            (tcp.keepalives_count, tcp.user_timeout),
            (4, Some(Duration::from_millis(2500)))
        );
        assert!(!good("postgres://h?keepalives=0&gssencmode=disable").tcp.keepalives);
        assert_eq!(
            good("postgres://h?connect_timeout=-1").tcp.connect_timeout,
            Duration::ZERO
        );
    }

    #[test]
    fn a_wrong_address_is_refused_with_what_is_known() {
        assert!(refusal("redis://h").contains("postgres://localhost"));
        assert!(refusal("postgres:h").contains("postgres://localhost"));
        assert!(refusal("postgres:///shop").contains("no host"));
        assert!(refusal("postgres://h:port").contains("cannot be read"));
        for url in ["postgres://u:a@b@h/d", "postgres://u:1/2@h/d", "postgres://u:a/b@h/d"] {
            assert!(refusal(url).contains("@ as %40"), "{url}");
        }
        assert_eq!(refusal("postgres://u:1?x&x@h&x&x"), refusal("postgres://u:1?y&y"));
        assert!(refusal("postgres://h?timeout=1s").contains("known are namespace"));
        assert!(refusal("postgres://h?sslcrl=x").contains("sslcrl, which is not supported"));
        assert!(refusal("postgres://h?passfile=x").contains("passfile, which is not supported"));
        assert!(refusal("postgres://h?gssencmode=require").contains("GSSAPI"));
        assert!(refusal("postgres://h?connect_timeout=3s").contains("whole number"));
        assert!(refusal("postgres://h?keepalives=yes").contains("one of 0, 1"));
        assert!(refusal("postgres://h?client_encoding=latin1").contains("UTF8"));
        assert!(refusal("postgres://h?op_timeout=0s").contains("such as 5s"));
        assert!(refusal("postgres://h?op_timeout=1s&op_timeout=1s").contains("twice"));
        assert!(refusal("postgres://h?namespace=a:b").contains("namespace"));
        assert!(refusal("postgres://h?schema=").contains("schema"));
        assert!(refusal("postgres://h?sslmode=on").contains("verify-full"));
        assert!(refusal("postgres://h?pool_mode=transaction").contains("session"));
        for attributes in ["read-only", "standby"] {
            assert!(refusal(&format!("postgres://h?target_session_attrs={attributes}")).contains("primary"));
        }
        assert!(refusal("postgres://h?target_session_attrs=x").contains("prefer-standby"));
        #[cfg(feature = "tls")]
        for weaker in ["sslmode=require", "sslmode=verify-ca", "ssl=true"] {
            let url = format!("postgres://h?sslrootcert=system&{weaker}");
            assert!(refusal(&url).contains("verify-full"), "{weaker}");
        }
        assert!(refusal("postgres://h?ca=x&sslrootcert=x").contains("mean the same"));
        assert!(refusal("postgres://u:p@h?password_file=x").contains("one of them"));
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
