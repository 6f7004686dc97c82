//! What an address means.

#[cfg(unix)]
use std::path::PathBuf;

use lock_core::LockError;
use lock_transport::url::{self, Address, Params, Spec};
use lock_transport::{Namespace, Secret};
use percent_encoding::percent_decode_str;

use crate::config::{RedisConfig, Service, Target};
use crate::transport::{Login, Place};

const PARAMETERS: &str = "namespace, op_timeout (such as 5s), counter_retention (such as 10m), allow_unsafe_configuration (true or false), \
                          password_file, ca, cert, key and pin (with rediss:), user, password and db (with redis+unix:), sentinel_user, \
                          sentinel_password and sentinel_password_file (with redis+sentinel:), and max_ttl, node1.user, node1.password, \
                          node1.db and node1.ca (with redlock:, nodes are counted from 1)";

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

const REDLOCK: Spec = Spec {
    product: PRODUCT,
    schemes: &[("redlock", false), ("redlocks", true)],
    form: "redlock://host1,host2,host3",
    port: 6379,
};

impl RedisConfig {
    /// Reads an address:
    ///
    /// | address | server |
    /// |---|---|
    /// | `redis://host`, `redis://host:6379` | by TCP |
    /// | `redis://user:password@host`, `redis://:password@host` | with credentials; what is special in addresses is written as `%` and two digits |
    /// | `redis://host/2` | database number 2 |
    /// | `redis+unix:/run/redis.sock` | by a socket of this machine |
    /// | `redis+sentinel://host,host:26379/service`, `redis+sentinel://host,host/service/2` | the primary that these sentinels know under that name; credentials before the `@` are those of the servers |
    /// | `redis+cluster://host,host:7000` | the Redis Cluster that these nodes belong to; credentials before the `@` are those of all nodes |
    /// | `redlock://host,host:7000,host`, `redlock://host,host,host/2` | a majority of these servers. Each can have credentials of its own; those of the first one are for all without any |
    ///
    /// `rediss` instead of `redis`, and `redlocks` instead of `redlock`, mean TLS, to sentinels too. Each sentinel and node must have a
    /// certificate for the host under which it is known: those in the address for that one, servers for the one that the sentinels or the nodes
    /// tell, which is an IP address unless they are set up with `announce-hostnames`. `valkey` instead of `redis` means the same.
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
    /// | `max_ttl` | with `redlock:`, see [`max_ttl`](Self::max_ttl); `30s`, `5m` | `1m` |
    /// | `node2.user`, `node2.password`, `node2.db`, `node2.ca` | with `redlock:`, of the second host alone | what is for all |
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
        _ if scheme.starts_with("redlock") => return read_nodes(text),
        _ => &SERVER,
    };
    let mut address = url::parse(text, spec)?;
    if authority(text)
        .rsplit_once('@')
        .is_some_and(|(login, _)| login.contains(','))
    {
        return Err(wrong(
            "has a comma before an @; give the servers' user and password once, before the first host, and write , in them as %2C",
        ));
    }
    let mut places = places(&mut address, None)?;
    let several =
        "names several hosts; begin it with redis+sentinel://, redis+cluster:// or redlock:// if they belong together";
    let target = match spec.schemes[0].0 {
        "redis+sentinel" => Target::Sentinels(service(&mut address, places)?),
        "redis+cluster" => Target::Cluster(places),
        _ if places.len() > 1 => return Err(wrong(several)),
        _ => Target::Server(places.remove(0)),
    };
    config(target, address)
}

/// Reads the address of independent nodes, each of which may have a login and parameters of its own.
fn read_nodes(text: &str) -> Result<RedisConfig, LockError> {
    let Address { path, mut params, .. } = url::parse(text, &REDLOCK)?;
    let (scheme, hosts) = (text.split(':').next().unwrap_or_default(), authority(text));
    let login = |host: &str| {
        host.rsplit_once('@')
            .map_or_else(String::new, |(login, _)| format!("{login}@"))
    };
    let shared = login(hosts.split(',').next().unwrap_or_default());
    let mut own = Vec::new();
    for (host, number) in hosts.split(',').zip(1..) {
        let mut of_node = |name| params.text(&format!("node{number}.{name}"));
        own.push((
            host,
            [of_node("user")?, of_node("password")?, of_node("db")?, of_node("ca")?],
        ));
    }
    let max_ttl = params.duration("max_ttl", "1m (1s to 1day)")?;
    let mut nodes = Vec::new();
    for (host, [user, password, database, ca]) in own {
        let login = if host.contains('@') { "" } else { &shared };
        let mut address = url::parse(&format!("{scheme}://{login}{host}"), &REDLOCK)?;
        address.user = user.or(address.user);
        address.password = password.map(Secret::new).or(address.password);
        address.path = database.unwrap_or_else(|| path.clone());
        address.params = params.clone();
        let place = places(&mut address, ca)?.remove(0);
        nodes.push(config(Target::Server(place), address)?);
    }
    let config = RedisConfig::redlock(nodes);
    Ok(match max_ttl {
        Some(time) => config.max_ttl(time),
        None => config,
    })
}

/// Logins, hosts and ports, as they are in the address.
fn authority(text: &str) -> &str {
    let rest = text.split_once("://").map_or("", |(_, rest)| rest);
    rest.split(['/', '?']).next().unwrap_or_default()
}

/// The places of the hosts; `ca` is a parameter of their own.
fn places(address: &mut Address, ca: Option<String>) -> Result<Vec<Place>, LockError> {
    let hosts = std::mem::take(&mut address.hosts).into_iter();
    if !address.tls {
        return match ca {
            Some(_) => Err(wrong(
                "names a certificate file of a node; begin it with redlocks: to use TLS",
            )),
            None => Ok(hosts.map(Place::Tcp).collect()),
        };
    }
    #[cfg(not(feature = "tls"))]
    return Err(wrong("asks for TLS; turn on the feature \"tls\""));
    #[cfg(feature = "tls")]
    {
        let mut files = lock_transport::TlsFiles::from_params(&mut address.params)?;
        files.ca = ca.map(Into::into).or(files.ca);
        Ok(hosts.map(|host| Place::Tls(host, files.clone())).collect())
    }
}

/// Takes the name of the service out of the path, and the login of the sentinels out of the parameters.
fn service(address: &mut Address, sentinels: Vec<Place>) -> Result<Service, LockError> {
    let path = std::mem::take(&mut address.path);
    let (name, number) = path.split_once('/').unwrap_or((&path, ""));
    address.path = number.to_owned();
    let name = percent_decode_str(name).decode_utf8();
    let name = name.map_err(|_| wrong("holds bytes that are not UTF-8 after decoding"))?;
    if name.is_empty() {
        return Err(wrong(
            "names no service, as in redis+sentinel://host1,host2,host3/SERVICE",
        ));
    }
    let params = &mut address.params;
    let (password, file) = (
        params.text("sentinel_password")?,
        params.text("sentinel_password_file")?,
    );
    if password.is_some() && file.is_some() {
        return Err(params.wrong("gives sentinel_password and sentinel_password_file; give one of them"));
    }
    let password = password.map(Secret::new).or(file.map(Secret::file));
    Ok(Service {
        name: name.into_owned(),
        sentinels,
        login: Login::new(params.text("sentinel_user")?, password),
    })
}

#[cfg(unix)]
fn read_socket(rest: &str) -> Result<RedisConfig, LockError> {
    use std::os::unix::ffi::OsStringExt;
    if rest.contains('#') {
        return Err(wrong("holds a #; write it as %23"));
    }
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    // As URLs without a host may have it.
    let path: Vec<u8> = percent_decode_str(path.strip_prefix("//").unwrap_or(path)).collect();
    if !path.starts_with(b"/") || path.contains(&0) {
        return Err(wrong(
            "needs the socket's path from the root, as in redis+unix:/run/redis.sock",
        ));
    }
    let path = PathBuf::from(std::ffi::OsString::from_vec(path));
    let mut params = Params::parse(PRODUCT, query)?;
    let address = Address {
        tls: false,
        user: params.text("user")?,
        password: params.text("password")?.map(Secret::new),
        hosts: Vec::new(),
        path: params.text("db")?.unwrap_or_default(),
        params,
    };
    config(Target::Server(Place::Unix(path)), address)
}

/// The configuration, with what is left of the address: the login, the database and the parameters that all have.
fn config(target: Target, address: Address) -> Result<RedisConfig, LockError> {
    let mut params = address.params;
    let mut config = RedisConfig::at(target);
    config.login = Login::new(address.user, params.password(address.password)?);
    let number = address.path.trim_matches('/');
    if !number.is_empty() {
        let number = number.parse().ok().filter(|number| *number <= i32::MAX as u32);
        let not_a_number = || wrong("has a database that is not a number, as in redis://localhost/0");
        config.database = number.ok_or_else(not_a_number)?;
    }
    if let Some(namespace) = params.text("namespace")? {
        config.namespace = Namespace::new(namespace)?.as_str().to_owned();
    }
    if let Some(limit) = params.duration("op_timeout", "5s or 500ms")? {
        config.op_timeout = limit;
    }
    if let Some(time) = params.duration("counter_retention", "10m (1s to 365days)")? {
        config.counter_retention = time;
    }
    if let Some(allow) = params.flag("allow_unsafe_configuration")? {
        config.allow_unsafe = allow;
    }
    params.finish(PARAMETERS)?;
    Ok(config)
}

fn wrong(why: impl std::fmt::Display) -> LockError {
    LockError::configuration(format!("the address of {PRODUCT} {why}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn good(url: &str) -> RedisConfig {
        read(url).unwrap()
    }

    /// What the configuration says of the servers, and of how to log in.
    fn told(config: &RedisConfig) -> (String, Option<&str>, Option<&Secret>, u32) {
        let Login { user, password } = &config.login;
        (
            config.target.to_string(),
            user.as_deref(),
            password.as_ref(),
            config.database,
        )
    }

    #[test]
    fn an_address_names_servers_a_login_and_a_database() {
        for (url, target, user, password, database) in [
            ("redis://db.example", "db.example:6379", None, None, 0),
            ("redis://10.0.0.1:7000/", "10.0.0.1:7000", None, None, 0),
            ("valkey://[::1]:7000/3", "[::1]:7000", None, None, 3),
            ("redis://j%C3%B6e:p%40ss%3A@h", "h:6379", Some("jöe"), Some("p@ss:"), 0),
            ("redis://:secret@h", "h:6379", None, Some("secret"), 0),
            ("redis://joe@h", "h:6379", Some("joe"), Some(""), 0),
            ("redis+unix:/run/a%20b.sock", "/run/a b.sock", None, None, 0),
            ("redis+unix:///run/s?db=2", "/run/s", None, None, 2),
            (
                "valkey+unix:/s?user=joe&password=p%26",
                "/s",
                Some("joe"),
                Some("p&"),
                0,
            ),
            (
                "redis+sentinel://joe:p%40@a,[::1]:1,10.0.0.1/my%2Fmaster/3",
                "\"my/master\" of the sentinels a:26379, [::1]:1, 10.0.0.1:26379",
                Some("joe"),
                Some("p@"),
                3,
            ),
            (
                "redis+cluster://joe:p%40@a,b:7000,[::1]:7001/0",
                "a:6379, b:7000, [::1]:7001",
                Some("joe"),
                Some("p@"),
                0,
            ),
        ] {
            let (config, password) = (good(url), password.map(Secret::new));
            assert_eq!(
                told(&config),
                (target.to_owned(), user, password.as_ref(), database),
                "{url}"
            );
        }
        let file = Some(Secret::file("/p"));
        assert_eq!(good("redis://joe@h?password_file=/p").login.password, file);
    }

    #[test]
    fn parameters_are_read() {
        let config =
            good("redis://h?namespace=shop&op_timeout=500ms&counter_retention=1h&allow_unsafe_configuration=true");
        assert_eq!((&*config.namespace, config.allow_unsafe), ("shop", true));
        assert_eq!(config.op_timeout, Duration::from_millis(500));
        assert_eq!(config.counter_retention, Duration::from_secs(60 * 60));
        let config = good("redis+sentinel://a/s?sentinel_user=w%C3%A4chter&sentinel_password=s%26");
        let Target::Sentinels(service) = config.target else {
            panic!("sentinels")
        };
        assert_eq!(
            service.login,
            Login::new(Some("wächter".into()), Some(Secret::new("s&")))
        );
        assert_eq!(config.login, Login::default());
    }

    #[test]
    fn nodes_have_what_is_for_all_or_what_is_their_own() {
        let config = good(
            "redlock://joe:x@a,jim:y@b,c/1?max_ttl=5m&node3.user=ann&node2.db=7&node3.password=z%26&namespace=shop",
        );
        assert_eq!((config.max_ttl, &*config.namespace), (Duration::from_secs(300), "shop"));
        let [x, y, z] = ["x", "y", "z&"].map(Secret::new);
        let nodes = config.nodes.iter().flatten().map(told);
        let wanted = [("a", "joe", &x, 1), ("b", "jim", &y, 7), ("c", "ann", &z, 1)];
        for (told, (host, user, password, database)) in nodes.zip(wanted) {
            assert_eq!(told, (format!("{host}:6379"), Some(user), Some(password), database));
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn all_servers_are_reached_by_tls_alike_but_for_what_is_their_own() {
        let ca_of = |place: &Place| match place {
            Place::Tls(_, files) => files.ca.as_ref().map(|ca| ca.display().to_string()),
            other => panic!("{other}"),
        };
        for url in ["rediss://a", "valkeys+cluster://a", "rediss+sentinel://a/s"] {
            let config = good(&format!("{url}?ca=/my%20ca&cert=c&key=k"));
            let places = match &config.target {
                Target::Server(place) => vec![place],
                Target::Sentinels(service) => service.sentinels.iter().collect(),
                Target::Cluster(nodes) => nodes.iter().collect(),
            };
            assert_eq!(ca_of(places[0]).as_deref(), Some("/my ca"), "{url}");
        }
        let config = good("redlocks://a,b,c?ca=/x&node2.ca=/y");
        for (node, ca) in config.nodes.iter().flatten().zip(["/x", "/y", "/x"]) {
            assert!(matches!(&node.target, Target::Server(place) if ca_of(place).as_deref() == Some(ca)));
        }
    }

    // What all backends refuse alike is tested in lock-transport.
    #[test]
    fn a_wrong_address_is_refused_with_what_to_do_and_no_secret() {
        for (url, word) in [
            ("postgres://joe:hunter2@h", "redis://localhost"),
            ("redis://joe:hunter2@a,b", "several hosts"),
            ("redis://joe:hunter2@h/x", "not a number"),
            ("redis://joe:hunter2@h?hunter2=1s", "known are namespace"),
            ("redis://h?ca=hunter2", "with rediss:"),
            ("redis://h?counter_retention=hunter2", "such as 10m"),
            ("redis://h?namespace=a:hunter2", "namespace"),
            ("redis://a?sentinel_password=hunter2", "with redis+sentinel:"),
            ("redis+unix://host/s?password=hunter2", "from the root"),
            ("redis+unix:/s?password=a&hunter2", "unknown parameter"),
            ("redis+unix:/s?password=hunter2#x", "%23"),
            ("redis+sentinel://joe:hunter2@a,b/", "names no service"),
            ("redis+sentinel://a,joe:hunter2@b/s", "before the first host"),
            ("redis+sentinel://joe:hunter2@a/s/1/2", "not a number"),
            (
                "redis+sentinel://a/s?sentinel_password=hunter2&sentinel_password_file=/x",
                "one of them",
            ),
            ("redis+cluster:a", "redis+cluster://host1"),
            ("redis+cluster://joe:hunter2@a,jim:hunter2@b", "before the first host"),
            ("redlock://joe:hunter2@a,,c", "names no host"),
            ("redlock://joe:hunter2@a,b,c?node4.password=hunter2", "counted from 1"),
            ("redlock://a,b,c?node2.ca=hunter2", "redlocks:"),
            ("redlock://a,b,c?max_ttl=hunter2", "such as 1m"),
            ("redis://a?max_ttl=1m", "with redlock:"),
        ] {
            let error = read(url).unwrap_err();
            assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
            assert!(error.to_string().contains(word), "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
        for url in [
            "redis+sentinel://joe:hunter2@a/s?sentinel_password=hunter2",
            "redlock://joe:hunter2@a,b,c?node2.password=hunter2",
        ] {
            let lock = good(url).connect_lazy().unwrap();
            assert!(!format!("{:?} {lock:?}", good(url)).contains("hunter2"));
        }
    }
}
