//! What an address means.

#[cfg(unix)]
use std::path::PathBuf;

use lock_core::LockError;
use lock_transport::url::{self, Address, Params, Spec};
use lock_transport::{Namespace, Secret};
use percent_encoding::percent_decode_str;

use crate::config::{RedisConfig, Target};
use crate::login::Login;
use crate::sentinel::Service;
use crate::transport::Place;

const PARAMETERS: &str = "namespace, op_timeout (such as 5s), counter_retention (such as 10m), allow_unsafe_configuration (true or false), \
                          password_file, ca, cert, key and pin (with rediss:), user, password and db (with redis+unix:), and sentinel_user, \
                          sentinel_password and sentinel_password_file (with redis+sentinel:)";

const PRODUCT: &str = "the Redis server";

const SERVER: Spec = Spec {
    product: PRODUCT,
    schemes: &[("redis", false), ("valkey", false), ("rediss", true), ("valkeys", true)],
    form: "redis://localhost:6379; others are redis+unix:, redis+sentinel://, redis+cluster:// and redlock://",
    port: 6379,
};

const SENTINELS: Spec = Spec {
    product: PRODUCT,
    schemes: &[
        ("redis+sentinel", false),
        ("valkey+sentinel", false),
        ("rediss+sentinel", true),
        ("valkeys+sentinel", true),
    ],
    form: "redis+sentinel://host1,host2,host3/SERVICE",
    port: 26379,
};

const CLUSTER: Spec = Spec {
    product: PRODUCT,
    schemes: &[
        ("redis+cluster", false),
        ("valkey+cluster", false),
        ("rediss+cluster", true),
        ("valkeys+cluster", true),
    ],
    form: "redis+cluster://host1,host2:7000",
    port: 6379,
};

impl RedisConfig {
    /// Reads an address:
    ///
    /// | address | server |
    /// |---|---|
    /// | `redis://host`, `redis://host:6379` | by TCP |
    /// | `rediss://host` | by TLS |
    /// | `redis://user:password@host`, `redis://:password@host` | with credentials; what is special in addresses is written as `%` and two digits |
    /// | `redis://host/2` | database number 2 |
    /// | `redis+unix:/run/redis.sock` | by a socket of this machine |
    /// | `redis+sentinel://host,host:26379/service`, `redis+sentinel://host,host/service/2` | the primary that these sentinels know under that name; credentials before the `@` are those of the servers |
    /// | `rediss+sentinel://host,host/service` | the same, by TLS to sentinels and servers |
    /// | `redis+cluster://host,host:7000` | the Redis Cluster that these nodes belong to; credentials before the `@` are those of all nodes |
    /// | `rediss+cluster://host,host` | the same, by TLS |
    ///
    /// `valkey` instead of `redis` means the same.
    ///
    /// | parameter | meaning | default |
    /// |---|---|---|
    /// | `namespace` | see [`namespace`](Self::namespace) | `fencelock` |
    /// | `op_timeout` | see [`op_timeout`](Self::op_timeout); `500ms`, `5s`, `1m` | `5s` |
    /// | `counter_retention` | see [`counter_retention`](Self::counter_retention); `1m`, `1h` | `10m` |
    /// | `allow_unsafe_configuration` | see [there](Self::allow_unsafe_configuration); `true` or `false` | `false` |
    /// | `password_file` | a file with the password, read at each connect | |
    /// | `ca` | with TLS, see [`trust`](Self::trust) | what the system trusts |
    /// | `cert`, `key` | with TLS, see [`client_certificate`](Self::client_certificate) | none |
    /// | `pin` | with TLS, see [`pin`](Self::pin); `sha256:` and what `openssl x509 -fingerprint -sha256` prints | none |
    /// | `sentinel_user`, `sentinel_password`, `sentinel_password_file` | see [`sentinel_credentials`](Self::sentinel_credentials) | none |
    /// | `user`, `password`, `db` | with `redis+unix:`, which has no other place for them | |
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if the address is not one of these, or a parameter is unknown, repeated or wrong. It
    /// never shows the address.
    pub fn from_url(url: &str) -> Result<Self, LockError> {
        read(url)
    }
}

/// Reads an address. No error shows any of it but the names of parameters.
fn read(text: &str) -> Result<RedisConfig, LockError> {
    let scheme = text.split(':').next().unwrap_or_default();
    let spec = match scheme.split_once('+') {
        #[cfg(unix)]
        Some(("redis" | "valkey", "unix")) => return read_socket(&text[scheme.len() + 1..]),
        Some((_, "sentinel")) => &SENTINELS,
        Some((_, "cluster")) => &CLUSTER,
        _ => &SERVER,
    };
    let Address {
        tls,
        user,
        password,
        hosts,
        path,
        mut params,
        ..
    } = url::parse(text, spec)?;
    if has_comma_in_login(text) {
        return Err(wrong(
            "has a comma before an @; give the servers' user and password once, before the first host, and write , in them as %2C",
        ));
    }
    #[cfg(feature = "tls")]
    let files = match tls {
        true => Some(lock_transport::TlsFiles::from_params(&mut params)?),
        false => None,
    };
    #[cfg(not(feature = "tls"))]
    if tls {
        return Err(wrong("asks for TLS; turn on the feature \"tls\""));
    }
    let place = |endpoint| {
        #[cfg(feature = "tls")]
        if let Some(files) = &files {
            return Place::Tls(endpoint, files.clone());
        }
        Place::Tcp(endpoint)
    };
    let mut places: Vec<_> = hosts.into_iter().map(place).collect();
    let (target, number) = match spec.schemes[0].0 {
        "redis+sentinel" => {
            let (name, number) = path.split_once('/').unwrap_or((&path, ""));
            let name = percent_decode_str(name).decode_utf8();
            let name = name.map_err(|_| wrong("holds bytes that are not UTF-8 after decoding"))?;
            if name.is_empty() {
                return Err(wrong(
                    "names no service, as in redis+sentinel://host1,host2,host3/SERVICE",
                ));
            }
            let mut service = Service::new(name, places);
            service.login = read_sentinel_login(&mut params)?;
            (Target::Service(service), number)
        }
        "redis+cluster" => (Target::Cluster(places), &*path),
        _ => match (places.pop(), places.is_empty()) {
            (Some(place), true) => (Target::Server(place), &*path),
            _ => {
                return Err(wrong(
                    "names several hosts; begin it with redis+sentinel://, redis+cluster:// or redlock:// if they belong together",
                ));
            }
        },
    };
    let mut config = RedisConfig::at(target);
    config.login = Login::new(user, params.password(password)?);
    match number.trim_matches('/') {
        "" => {}
        number => config.database = read_database(number)?,
    }
    read_others(config, params)
}

/// Whether the credentials before the last `@` hold a comma as it is, so that hosts may be among them.
fn has_comma_in_login(text: &str) -> bool {
    let authority = text.split('/').nth(2).unwrap_or_default();
    authority.rsplit_once('@').is_some_and(|(login, _)| login.contains(','))
}

fn read_sentinel_login(params: &mut Params) -> Result<Login, LockError> {
    let user = params.text("sentinel_user")?;
    let password = match (
        params.text("sentinel_password")?,
        params.text("sentinel_password_file")?,
    ) {
        (Some(_), Some(_)) => {
            return Err(params.wrong("gives sentinel_password and sentinel_password_file; give one of them"));
        }
        (password, file) => password.map(Secret::new).or(file.map(Secret::file)),
    };
    Ok(Login::new(user, password))
}

#[cfg(unix)]
fn read_socket(rest: &str) -> Result<RedisConfig, LockError> {
    if rest.contains('#') {
        return Err(wrong("holds a #; write it as %23"));
    }
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut config = RedisConfig::at(Target::Server(Place::Unix(socket(path)?)));
    let mut params = Params::parse(PRODUCT, query)?;
    let (user, password) = (params.text("user")?, params.text("password")?.map(Secret::new));
    config.login = Login::new(user, params.password(password)?);
    if let Some(number) = params.text("db")? {
        config.database = read_database(&number)?;
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

fn read_database(number: &str) -> Result<u32, LockError> {
    let number = number.parse().ok().filter(|number| *number <= i32::MAX as u32);
    number.ok_or_else(|| wrong("has a database that is not a number, as in redis://localhost/0"))
}

fn wrong(why: impl std::fmt::Display) -> LockError {
    LockError::configuration(format!("the address of {PRODUCT} {why}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lock_transport::{Endpoint, Secret};

    use super::*;

    fn good(url: &str) -> RedisConfig {
        read(url).unwrap()
    }

    #[test]
    fn an_address_names_a_server_in_one_of_three_ways() {
        let tcp = |host: &str, port| Target::Server(Place::tcp(host, port));
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
                Target::Server(Place::Tls(Endpoint::new("db.example", 6379), files))
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
            "redis://j%C3%B6e:p%40ss%3A@h/3?namespace=shop&op_timeout=500ms&counter_retention=1h&allow_unsafe_configuration=true",
        );
        assert_eq!(config.login.user.as_deref(), Some("jöe"));
        assert_eq!(config.login.password, Some(Secret::new("p@ss:")));
        assert_eq!(good("redis://joe@h").login.password, Some(Secret::new("")));
        assert_eq!(config.database, 3);
        assert_eq!(config.namespace, "shop");
        assert_eq!(config.op_timeout, Duration::from_millis(500));
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

    // What all backends refuse alike is tested in lock-transport.
    #[test]
    fn a_wrong_address_is_refused_with_what_to_do_and_no_secret() {
        for (url, word) in [
            ("postgres://joe:hunter2@h", "redis://localhost"),
            ("redis://joe:hunter2@a,b", "several hosts"),
            ("redis://joe:hunter2@h/x", "not a number"),
            ("redis://joe:hunter2@h/-1", "not a number"),
            ("redis://joe:hunter2@h?hunter2=1s", "known are namespace"),
            ("redis://h?ca=hunter2", "with rediss:"),
            ("redis://h?counter_retention=hunter2", "such as 10m"),
            ("redis://h?namespace=a:hunter2", "namespace"),
            ("redis://a?sentinel_password=hunter2", "with redis+sentinel:"),
            ("redis+unix://host/s?password=hunter2", "from the root"),
            ("redis+unix:s", "from the root"),
            ("redis+unix:/s?password=a&hunter2", "unknown parameter"),
            ("redis+unix:/s?password=hunter2#x", "%23"),
            ("redis+sentinel://joe:hunter2@a,b", "names no service"),
            ("redis+sentinel://joe:hunter2@a,b/", "names no service"),
            ("redis+sentinel:hunter2", "must start with redis+sentinel://"),
            ("redis+sentinel://a,joe:hunter2@b/s", "before the first host"),
            ("redis+sentinel://joe:hunter2@a/s/hunter2", "not a number"),
            ("redis+sentinel://joe:hunter2@a/s/1/2", "not a number"),
            (
                "redis+sentinel://a/s?sentinel_password=hunter2&sentinel_password_file=/x",
                "one of them",
            ),
            ("hunter2+sentinel://a/s", "must start with"),
            ("redis+cluster:a", "redis+cluster://host1"),
            ("redis+cluster://joe:hunter2@a,jim:hunter2@b", "before the first host"),
            ("redis+cluster://joe:hunter2@a/x", "not a number"),
        ] {
            let error = read(url).unwrap_err();
            assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
            assert!(error.to_string().contains(word), "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
        let config = good("redis+sentinel://joe:hunter2@a/s?sentinel_password=hunter2");
        let lock = config.clone().connect_lazy().unwrap();
        assert!(!format!("{config:?} {lock:?}").contains("hunter2"));
    }

    fn service(config: &RedisConfig) -> &Service {
        match &config.target {
            Target::Service(service) => service,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn an_address_names_sentinels_a_service_and_two_logins() {
        let config = RedisConfig::from_url(
            "redis+sentinel://joe:p%40ss@a.example,[::1]:7000,10.0.0.1/my%2Fmaster/3?sentinel_user=w%C3%A4chter&sentinel_password=s%26&namespace=shop",
        )
        .unwrap();
        let tcp = |host: &str, port| Place::tcp(host, port);
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
        let tls = |host: &str, port| Place::Tls(Endpoint::new(host, port), files.clone());
        assert_eq!(service(&config).sentinels, [tls("a", 26379), tls("b", 1)]);
        assert_eq!(service(&config).sentinels[0].at(Endpoint::new("c", 2)), tls("c", 2));
    }

    #[test]
    fn an_address_of_a_cluster_names_nodes_that_share_everything_else() {
        let config = good("redis+cluster://joe:p%40@a,b:7000,[::1]:7001/0?namespace=shop&op_timeout=2s");
        assert_eq!(config.target.to_string(), "a:6379, b:7000, [::1]:7001");
        assert_eq!(
            (config.login.user.as_deref(), &*config.namespace),
            (Some("joe"), "shop")
        );
        #[cfg(feature = "tls")]
        assert!(matches!(
            good("valkeys+cluster://a?ca=/x").target,
            Target::Cluster(nodes) if matches!(&*nodes, [Place::Tls(_, files)] if files.ca.is_some())
        ));
    }
}
