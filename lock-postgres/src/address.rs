//! What an address means.

use std::time::Duration;

use lock_core::LockError;
use lock_transport::url::Params;
use lock_transport::{Pin, Secret, TlsFiles};
use tokio_postgres::config::TargetSessionAttrs;

use crate::PostgresConfig;
use crate::config::Tls;
use crate::keys::Keys;
use crate::schema::Schema;

const PRODUCT: &str = "the Postgres server";

const OURS: &str = "namespace, schema, op_timeout (such as 5s), pool_mode (session), allow_unsafe_configuration (true or \
                    false), ca, cert, key, pin, password_file";

/// Parameters of libpq that are read.
const LIBPQ: &str = "application_name, channel_binding, client_encoding, connect_timeout, dbname, \
                     fallback_application_name, gssencmode, host, hostaddr, keepalives, keepalives_count, keepalives_idle, \
                     keepalives_interval, load_balance_hosts, options, password, port, ssl, sslcert, sslkey, sslmode, \
                     sslnegotiation, sslrootcert, target_session_attrs, tcp_user_timeout, user";

/// Those of them that `tokio_postgres` reads. The first three may be given once for each host.
const THEIRS: [&str; 10] = [
    "host",
    "hostaddr",
    "port",
    "channel_binding",
    "dbname",
    "load_balance_hosts",
    "options",
    "password",
    "sslnegotiation",
    "user",
];

/// Parameters of libpq, and of other drivers, that are not supported. They may be named in an error; anything else may be a part
/// of a password with a `&` in it.
const UNSUPPORTED: &str = "connection_limit, gssdelegation, gsslib, krbsrvname, max_protocol_version, min_protocol_version, \
                           passfile, pgbouncer, pool_max_conns, pool_timeout, replication, require_auth, requirepeer, \
                           requiressl, scram_client_key, scram_server_key, service, servicefile, socket_timeout, \
                           ssl_max_protocol_version, ssl_min_protocol_version, sslaccept, sslcertmode, sslcompression, \
                           sslcrl, sslcrldir, sslidentity, sslkeylogfile, sslpassword, sslsni, statement_cache_size, \
                           statement-cache-capacity, timezone";

const SPECIAL: &str = "in a user or password, write # as %23, / as %2F, @ as %40";

/// Reads an address. No error shows any of it but the names of parameters.
pub(crate) fn read(url: &str) -> Result<PostgresConfig, LockError> {
    let schemes = ["postgres://", "postgresql://"];
    let Some(rest) = schemes.iter().find_map(|scheme| url.strip_prefix(scheme)) else {
        return Err(wrong(
            "must start with postgres:// or postgresql://, as in postgres://localhost/shop",
        ));
    };
    if rest.contains('#') {
        return Err(wrong("holds a #; write it as %23"));
    }
    let (base, query) = rest.split_once('?').unwrap_or((rest, ""));
    // What follows the first @ would be taken for the host, and be shown.
    let (authority, database) = base.split_once('/').unwrap_or((base, ""));
    if authority.matches('@').count() > 1 || database.contains('@') {
        return Err(wrong(format!("has an @ that separates nothing; {SPECIAL}")));
    }
    let name_of = |pair: &str| pair.split_once('=').map_or(pair, |(name, _)| name).to_owned();
    let (theirs, ours): (Vec<_>, Vec<_>) = query.split('&').partition(|pair| THEIRS.contains(&&*name_of(pair)));
    for name in &THEIRS[3..] {
        if theirs.iter().filter(|pair| name_of(pair) == *name).count() > 1 {
            return Err(wrong(format!("gives {name} twice; give it once")));
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
    let mut params = Params::parse(PRODUCT, &ours.join("&"))?;
    let mut config = PostgresConfig::new(server);
    read_ours(&mut config, &mut params)?;
    read_tls(&mut config, &mut params)?;
    read_limits(&mut config.server, &mut params)?;
    read_names(&mut params)?;
    for name in UNSUPPORTED.split(", ") {
        if params.text(name)?.is_some() {
            return Err(wrong(format!(
                "has the parameter {name}, which is not supported; take it out"
            )));
        }
    }
    params.finish(&format!("{OURS}, and of libpq {LIBPQ}"))?;
    Ok(config)
}

fn read_ours(config: &mut PostgresConfig, params: &mut Params) -> Result<(), LockError> {
    if let Some(namespace) = params.text("namespace")? {
        Keys::new(&namespace)?;
        config.namespace = namespace;
    }
    if let Some(schema) = params.text("schema")? {
        Schema::new(&schema)?;
        config.schema = schema;
    }
    if let Some(limit) = params.duration("op_timeout", "5s or 500ms")? {
        config.op_timeout = limit;
    }
    if let Some(allow) = params.flag("allow_unsafe_configuration")? {
        config.allow_unsafe = allow;
    }
    match (config.server.get_password(), params.text("password_file")?) {
        (Some(_), Some(_)) => return Err(wrong("gives a password and password_file; give one of them")),
        (_, file) => config.password = file.map(Secret::file),
    }
    match params.text("pool_mode")?.as_deref() {
        None => {}
        Some("session") => config.session_pooler = true,
        Some(_) => {
            return Err(wrong(
                "has a wrong pool_mode; locks need a session for each client, so it is session if there is a pooler",
            ));
        }
    }
    Ok(())
}

fn read_tls(config: &mut PostgresConfig, params: &mut Params) -> Result<(), LockError> {
    let mode = match (params.text("ssl")?.as_deref(), params.text("sslmode")?) {
        (Some(_), Some(_)) => return Err(wrong("gives ssl and sslmode; give sslmode alone")),
        // As JDBC has it, and libpq takes it.
        (Some("true"), None) => Some(tls("require")?),
        (Some(_), None) => return Err(wrong("has a wrong ssl; it is one of true")),
        (None, mode) => mode.as_deref().map(tls).transpose()?,
    };
    let (ca, root) = either(params, "ca", "sslrootcert")?;
    let system = root.as_deref() == Some("system");
    let pin = params.text("pin")?;
    let full = ca.is_some() || pin.is_some() || system;
    if system && mode.is_some_and(|mode| mode != Tls::VerifyFull) {
        return Err(wrong(
            "has sslrootcert=system with a weaker sslmode; it needs sslmode=verify-full",
        ));
    }
    let (cert, sslcert) = either(params, "cert", "sslcert")?;
    let (key, sslkey) = either(params, "key", "sslkey")?;
    let pin = pin.map(|pin| Pin::parse(&pin).ok_or_else(|| wrong(Pin::WRONG)));
    let files = TlsFiles {
        ca: ca.or(root.filter(|_| !system)).map(Into::into),
        cert: cert.or(sslcert).map(Into::into),
        key: key.or(sslkey).map(Into::into),
        pin: pin.transpose()?,
    };
    #[cfg(feature = "tls")]
    {
        config.tls_files = files;
        config.system_roots = system;
    }
    #[cfg(not(feature = "tls"))]
    if full || files != TlsFiles::default() {
        return Err(without_tls());
    }
    config.tls = match mode {
        Some(mode) => mode,
        None if full => Tls::VerifyFull,
        None => config.tls,
    };
    Ok(())
}

/// Limits of a connection that the operating system keeps. Zero is what the system does by itself.
fn read_limits(server: &mut tokio_postgres::Config, params: &mut Params) -> Result<(), LockError> {
    /// What Linux has.
    const SYSTEM: (u64, u64, u32) = (2 * 60 * 60, 75, 9);
    let seconds = |given: u64, system: u64| Duration::from_secs(if given == 0 { system } else { given });
    if let Some(limit @ 1..) = number(params, "connect_timeout")? {
        server.connect_timeout(Duration::from_secs(limit));
    }
    match params.text("keepalives")?.as_deref() {
        None => {}
        Some(on @ ("0" | "1")) => drop(server.keepalives(on == "1")),
        Some(_) => return Err(wrong("has a wrong keepalives; it is one of 0, 1")),
    }
    if let Some(idle) = number(params, "keepalives_idle")? {
        server.keepalives_idle(seconds(idle, SYSTEM.0));
    }
    if let Some(interval) = number(params, "keepalives_interval")? {
        server.keepalives_interval(seconds(interval, SYSTEM.1));
    }
    if let Some(count) = number(params, "keepalives_count")? {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        server.keepalives_retries(if count == 0 { SYSTEM.2 } else { count });
    }
    if let Some(limit) = number(params, "tcp_user_timeout")? {
        server.tcp_user_timeout(Duration::from_millis(limit));
    }
    Ok(())
}

/// What is known of libpq and changes nothing.
fn read_names(params: &mut Params) -> Result<(), LockError> {
    // Sessions have names of their own, by which they are found.
    params.text("application_name")?;
    params.text("fallback_application_name")?;
    let encoding = params.text("client_encoding")?.unwrap_or("auto".to_owned());
    if !["utf8", "utf-8", "unicode", "auto"].contains(&&*encoding.to_ascii_lowercase()) {
        return Err(wrong("has a client_encoding other than UTF8; leave it out"));
    }
    if !["disable", "prefer"].contains(&params.text("gssencmode")?.as_deref().unwrap_or("prefer")) {
        return Err(wrong(
            "has a gssencmode other than disable and prefer; GSSAPI is not supported",
        ));
    }
    match params.text("target_session_attrs")?.as_deref() {
        // Whichever of these it is, there is only one server that locks can be on.
        None | Some("any" | "read-write" | "primary" | "prefer-standby") => Ok(()),
        Some("read-only" | "standby") => Err(wrong(
            "asks for a server that cannot be written to; locks need the primary: take target_session_attrs out",
        )),
        Some(_) => Err(wrong(
            "has a wrong target_session_attrs; it is one of any, read-write, primary, prefer-standby",
        )),
    }
}

/// Two names of one parameter.
fn either(params: &mut Params, one: &str, other: &str) -> Result<(Option<String>, Option<String>), LockError> {
    match (params.text(one)?, params.text(other)?) {
        (Some(_), Some(_)) => Err(wrong(format!(
            "gives {one} and {other}, which mean the same; give one of them"
        ))),
        given => Ok(given),
    }
}

/// A number as libpq takes it: a negative one is none, as zero is.
fn number(params: &mut Params, name: &str) -> Result<Option<u64>, LockError> {
    let Some(value) = params.text(name)? else {
        return Ok(None);
    };
    match value.trim().parse::<i32>() {
        Ok(number) => Ok(Some(number.try_into().unwrap_or(0))),
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

fn wrong(why: impl std::fmt::Display) -> LockError {
    LockError::configuration(format!("the address of {PRODUCT} {why}"))
}

#[cfg(test)]
mod tests {
    use tokio_postgres::config::Host;

    use super::*;

    fn good(url: &str) -> PostgresConfig {
        read(url).unwrap()
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
    }

    #[cfg(feature = "tls")]
    #[test]
    fn certificates_have_the_names_of_libpq_and_those_of_all_backends() {
        for (query, ca, tls) in [
            ("sslrootcert=/ca&sslcert=/c%20d&sslkey=/key", Some("/ca"), Tls::Prefer),
            ("ca=/ca&cert=/c%20d&key=/key", Some("/ca"), Tls::VerifyFull),
            (
                "ca=/ca&sslcert=/c%20d&key=/key&sslmode=verify-ca",
                Some("/ca"),
                Tls::VerifyCa,
            ),
            ("sslrootcert=system&cert=/c%20d&sslkey=/key", None, Tls::VerifyFull),
            ("ssl=true&cert=/c%20d&key=/key", None, Tls::Require),
        ] {
            let config = good(&format!("postgres://h?password_file=/p&{query}"));
            let files = config.tls_files;
            assert_eq!((files.ca, config.tls), (ca.map(Into::into), tls), "{query}");
            assert_eq!(config.system_roots, query.contains("system"));
            assert_eq!((files.cert, files.key), (Some("/c d".into()), Some("/key".into())));
            assert_eq!(config.password, Some(Secret::file("/p")));
        }
    }

    #[test]
    fn what_libpq_takes_means_the_same() {
        for mode in ["disable", "allow", "prefer"] {
            good(&format!("postgres://h?sslmode={mode}"));
        }
        for attributes in ["any", "read-write", "primary", "prefer-standby"] {
            let config = good(&format!("postgres://h?target_session_attrs={attributes}"));
            assert_eq!(config.server.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
        }
        let limits = |query: &str| {
            let server = good(&format!("postgres://h?gssencmode=prefer&application_name=shop&{query}")).server;
            let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
            (
                seconds(server.get_connect_timeout().copied()),
                server.get_keepalives().then(|| server.get_keepalives_idle().as_secs()),
                seconds(server.get_keepalives_interval()),
                server.get_keepalives_retries(),
                seconds(server.get_tcp_user_timeout().copied()),
            )
        };
        assert_eq!(limits(""), (None, Some(15), Some(5.0), Some(3), None));
        let all = "connect_timeout=3&keepalives=1&keepalives_idle=60&keepalives_interval=10&keepalives_count=4&\
                   tcp_user_timeout=2500&load_balance_hosts=random&client_encoding=UTF8";
        assert_eq!(limits(all), (Some(3.0), Some(60), Some(10.0), Some(4), Some(2.5)));
        let none = "connect_timeout=-1&keepalives=0&keepalives_interval=0&keepalives_count=0&tcp_user_timeout=0";
        assert_eq!(limits(none), (None, None, Some(75.0), Some(9), Some(0.0)));
    }

    #[test]
    fn a_wrong_address_is_refused_with_what_to_do_and_nothing_secret_is_repeated() {
        let refusal = |url: &str| {
            let error = read(url).unwrap_err();
            assert!(matches!(error, LockError::Configuration { .. }));
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
            error.to_string()
        };
        for (url, says) in [
            ("redis://h", "postgres://localhost"),
            ("postgres:h", "postgres://localhost"),
            ("hunter2://joe:hunter2@h", "postgres://localhost"),
            ("postgres:///shop", "no host"),
            ("postgres://joe:hunter2@h:port", "cannot be read"),
            ("postgres://u:a@hunter2@h/d", "@ as %40"),
            ("postgres://u:1/hunter2@h/d", "@ as %40"),
            ("postgres://u:hunter2/b@h/d", "@ as %40"),
            ("postgres://h#x", "%23"),
            ("postgres://h?timeout=1s", "known are namespace"),
            ("postgres://joe:hunter2@h?hunter2", "known are namespace"),
            ("postgres://u:1?hunter2&hunter2@h&x", "known are namespace"),
            ("postgres://h?password=a&hunter2", "known are namespace"),
            ("postgres://h?hunter2&hunter2", "known are namespace"),
            ("postgres://h?user=hunter2&user=x", "gives user twice"),
            ("postgres://h?op_timeout=1s&op_timeout=1s", "gives op_timeout twice"),
            ("postgres://h?sslcrl=x", "sslcrl, which is not supported"),
            ("postgres://h?passfile=x", "passfile, which is not supported"),
            ("postgres://h?gssencmode=require", "GSSAPI"),
            ("postgres://h?connect_timeout=3s", "whole number"),
            ("postgres://h?keepalives=yes", "one of 0, 1"),
            ("postgres://h?client_encoding=latin1", "UTF8"),
            ("postgres://h?op_timeout=hunter2", "such as 5s"),
            ("postgres://h?op_timeout=0s", "such as 5s"),
            ("postgres://h?namespace=a:b", "namespace"),
            ("postgres://h?schema=", "schema"),
            ("postgres://h?sslmode=on", "verify-full"),
            ("postgres://h?ssl=on", "one of true"),
            ("postgres://h?ssl=true&sslmode=require", "sslmode alone"),
            ("postgres://h?pool_mode=transaction", "session"),
            ("postgres://h?target_session_attrs=read-only", "primary"),
            ("postgres://h?target_session_attrs=standby", "primary"),
            ("postgres://h?target_session_attrs=x", "prefer-standby"),
            ("postgres://h?ca=x&sslrootcert=x", "mean the same"),
            ("postgres://u:hunter2@h?password_file=x", "one of them"),
            ("postgres://h?password=hunter2&password_file=x", "one of them"),
        ] {
            let said = refusal(url);
            #[cfg(not(feature = "tls"))]
            if said.contains("asks for TLS") {
                continue;
            }
            assert!(said.contains(says), "{url}: {said}");
        }
        #[cfg(feature = "tls")]
        for weaker in ["sslmode=require", "sslmode=verify-ca", "ssl=true"] {
            let said = refusal(&format!("postgres://h?sslrootcert=system&{weaker}"));
            assert!(said.contains("needs sslmode=verify-full"), "{weaker}");
        }
        refusal("postgres://joe:hunter2@");
        let config = good("postgres://joe:hunter2@h");
        assert!(!format!("{config:?}").contains("hunter2"));
    }
}
