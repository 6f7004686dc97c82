//! What an address means.

use lock_core::LockError;
use lock_transport::url::Params;
use lock_transport::{Secret, TlsFiles};
use tokio_postgres::config::TargetSessionAttrs;

use crate::PostgresConfig;
use crate::config::Tls;
use crate::keys::Keys;
use crate::schema::Schema;

const PRODUCT: &str = "the Postgres server";

const OURS: &str = "namespace, schema, op_timeout (such as 5s), pool_mode (session), allow_unsafe_configuration (true or \
                    false), ca, cert, key, pin, password_file";

/// Parameters of libpq that `tokio_postgres` reads. The first three may be given once for each host.
const THEIRS: [&str; 13] = [
    "host",
    "hostaddr",
    "port",
    "application_name",
    "channel_binding",
    "connect_timeout",
    "dbname",
    "load_balance_hosts",
    "options",
    "password",
    "sslnegotiation",
    "target_session_attrs",
    "user",
];

/// Those that have another name on other backends.
const RENAMED: [(&str, &str); 3] = [("sslrootcert", "ca"), ("sslcert", "cert"), ("sslkey", "key")];

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
    let (mut theirs, mut ours) = (Vec::new(), Vec::new());
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if !THEIRS.contains(&name) {
            let renamed = RENAMED.iter().find(|(old, _)| *old == name);
            ours.push(format!("{}={value}", renamed.map_or(name, |(_, new)| new)));
        } else if !THEIRS[..3].contains(&name) && theirs.iter().any(|(given, _)| *given == name) {
            return Err(wrong(format!("gives {name} twice; give it once")));
        } else {
            theirs.push((name, value));
        }
    }
    let theirs: Vec<_> = theirs.iter().map(|(name, value)| format!("{name}={value}")).collect();
    // Its errors may show a part of the address.
    let server = format!("postgres://{base}?{}", theirs.join("&")).parse();
    let server: tokio_postgres::Config = server.map_err(|_| {
        wrong(format!(
            "cannot be read; it looks like postgres://user:password@host:5432/database, with parameters as tokio-postgres takes them; \
             {SPECIAL}"
        ))
    })?;
    if server.get_hosts().is_empty() && server.get_hostaddrs().is_empty() {
        return Err(wrong("names no host, as in postgres://localhost/shop"));
    }
    if server.get_target_session_attrs() == TargetSessionAttrs::ReadOnly {
        return Err(wrong(
            "asks for a server that cannot be written to; locks need the primary: take target_session_attrs out",
        ));
    }
    let mut config = PostgresConfig::new(server);
    let mut params = Params::parse(PRODUCT, &ours.join("&"))?;
    read_ours(&mut config, &mut params)?;
    read_tls(&mut config, &mut params)?;
    let libpq = [&THEIRS[..], &["sslcert", "sslkey", "sslmode", "sslrootcert"]]
        .concat()
        .join(", ");
    params.finish(&format!("{OURS}, and of libpq {libpq}"))?;
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
    let file = params.text("password_file")?;
    if file.is_some() && config.server.get_password().is_some() {
        return Err(wrong("gives a password and password_file; give one of them"));
    }
    config.password = file.map(Secret::file);
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
    let mode = params.text("sslmode")?.as_deref().map(tls).transpose()?;
    let mut files = TlsFiles::from_params(params)?;
    let full = files.ca.is_some() || files.pin.is_some();
    // As libpq calls what the system trusts.
    files.ca = files.ca.filter(|ca| ca.as_os_str() != "system");
    if cfg!(not(feature = "tls")) && (full || files.cert.is_some()) {
        return Err(without_tls());
    }
    config.tls_files = files;
    config.tls = mode.unwrap_or(if full { Tls::VerifyFull } else { config.tls });
    Ok(())
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
    if cfg!(not(feature = "tls")) && ![Tls::Disable, Tls::Prefer].contains(&tls) {
        return Err(without_tls());
    }
    Ok(tls)
}

fn without_tls() -> LockError {
    wrong("asks for TLS; turn on the feature \"tls\"")
}

fn wrong(why: impl std::fmt::Display) -> LockError {
    LockError::configuration(format!("the address of {PRODUCT} {why}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
        assert_eq!(config.server.get_user(), Some("j\u{f6}e"));
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
             &user=joe&target_session_attrs=any&application_name=shop&connect_timeout=3&password_file=/p",
        );
        assert_eq!((&*config.namespace, &*config.schema), ("shop", "my locks"));
        assert_eq!(config.op_timeout, Duration::from_millis(500));
        assert_eq!(config.tls, Tls::Disable);
        assert_eq!(config.server.get_user(), Some("joe"));
        assert_eq!(config.server.get_connect_timeout(), Some(&Duration::from_secs(3)));
        assert_eq!(config.password, Some(Secret::file("/p")));
        assert!(config.allow_unsafe && !config.session_pooler);
        assert!(good("postgres://h?pool_mode=session").session_pooler);
    }

    #[cfg(feature = "tls")]
    #[test]
    fn certificates_have_the_names_of_libpq_and_those_of_all_backends() {
        for (query, ca, tls) in [
            (
                "sslrootcert=/ca&sslcert=/c%20d&sslkey=/key",
                Some("/ca"),
                Tls::VerifyFull,
            ),
            ("ca=/ca&cert=/c%20d&key=/key", Some("/ca"), Tls::VerifyFull),
            (
                "ca=/ca&sslcert=/c%20d&key=/key&sslmode=verify-ca",
                Some("/ca"),
                Tls::VerifyCa,
            ),
            ("sslrootcert=system&cert=/c%20d&sslkey=/key", None, Tls::VerifyFull),
            ("cert=/c%20d&key=/key", None, Tls::Prefer),
        ] {
            let config = good(&format!("postgres://h?{query}"));
            let files = config.tls_files;
            assert_eq!((files.ca, config.tls), (ca.map(Into::into), tls), "{query}");
            assert_eq!((files.cert, files.key), (Some("/c d".into()), Some("/key".into())));
        }
    }

    #[test]
    fn a_wrong_address_is_refused_with_what_to_do_and_nothing_secret_is_repeated() {
        for (url, says) in [
            ("redis://h", "postgres://localhost"),
            ("postgres:h", "postgres://localhost"),
            ("hunter2://joe:hunter2@h", "postgres://localhost"),
            ("postgres:///shop", "no host"),
            ("postgres://joe:hunter2@", ""),
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
            ("postgres://h?ca=x&sslrootcert=x", "gives ca twice"),
            ("postgres://h?connect_timeout=3s", "cannot be read"),
            ("postgres://h?op_timeout=hunter2", "such as 5s"),
            ("postgres://h?op_timeout=0s", "such as 5s"),
            ("postgres://h?namespace=a:b", "namespace"),
            ("postgres://h?schema=", "schema"),
            ("postgres://h?sslmode=allow", "verify-full"),
            ("postgres://h?cert=x", "only one of cert and key"),
            ("postgres://h?pool_mode=transaction", "session"),
            ("postgres://h?target_session_attrs=read-only", "primary"),
            ("postgres://u:hunter2@h?password_file=x", "one of them"),
            ("postgres://h?password=hunter2&password_file=x", "one of them"),
        ] {
            let error = read(url).unwrap_err();
            assert!(matches!(error, LockError::Configuration { .. }));
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
            assert!(error.to_string().contains(says), "{url}: {error}");
        }
        let config = good("postgres://joe:hunter2@h");
        assert!(!format!("{config:?}").contains("hunter2"));
    }
}
