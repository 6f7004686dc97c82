//! How a connection to one of the configured servers is made.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::time::Duration;

use lock_core::LockError;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_postgres::config::{Host, LoadBalanceHosts, SslMode, TargetSessionAttrs};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Config, NoTls};

use crate::commands::FREE_OF_DEFAULTS;
use crate::config::Tls;
use crate::failure::{self, Failure};
use crate::password;
use crate::sessions::Settings;
use crate::wire::Wire;

/// One address of one of the configured servers.
#[derive(Clone)]
pub(crate) struct Place {
    /// Names this address only.
    config: Config,
    shown: String,
}

/// Limits of a connection that the operating system keeps, as libpq has them. Zero is what the system does by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tcp {
    /// Limits the making of a connection to one address, if it is less than what is left of the time for the request.
    pub(crate) connect_timeout: Duration,
    pub(crate) keepalives: bool,
    pub(crate) keepalives_idle: Duration,
    pub(crate) keepalives_interval: Duration,
    pub(crate) keepalives_count: u32,
    /// `op_timeout` if not set.
    pub(crate) user_timeout: Option<Duration>,
}

impl Default for Tcp {
    /// What the network drops silently is noticed within 30 seconds.
    fn default() -> Self {
        Self {
            connect_timeout: Duration::ZERO,
            keepalives: true,
            keepalives_idle: Duration::from_secs(15),
            keepalives_interval: Duration::from_secs(5),
            keepalives_count: 3,
            user_timeout: None,
        }
    }
}

impl Wire {
    /// Connects to the first server that may be used. Must be called on `runtime`, which works the connection.
    ///
    /// Locks are kept by primaries alone. So of several hosts, and of several addresses of one host, standbys are passed over.
    pub(crate) async fn open(settings: &Settings, runtime: &Handle) -> Result<Self, Failure> {
        let mut server = settings.server.clone();
        if let Some(password) = &settings.password {
            server.password(password.get().await?);
        }
        let hosts = hosts(&server);
        let limit = share(settings.op_timeout, hosts.len());
        let mut failures = Vec::new();
        for host in &hosts {
            let opened = timeout(limit, open_host(settings, host, hosts.len() == 1, limit, runtime)).await;
            match opened {
                Ok(Ok(wire)) => return Ok(wire),
                Ok(Err(mut failed)) => failures.append(&mut failed),
                Err(_) => failures.push((host.shown.clone(), LockError::no_answer("connecting", limit).into())),
            }
        }
        if failures.len() == 1
            && let Some((_, failure)) = failures.pop()
        {
            return Err(failure.refused());
        }
        Err(Failure::Several(failures))
    }
}

/// Several answers share the time, and leave some of it for what is asked of the one that can be used.
fn share(limit: Duration, parts: usize) -> Duration {
    match u32::try_from(parts) {
        Ok(0 | 1) => limit,
        Ok(parts) => limit / (parts + 1),
        Err(_) => Duration::ZERO,
    }
}

/// Connects to the first address of the host that leads to a primary.
async fn open_host(
    settings: &Settings,
    host: &Place,
    alone: bool,
    limit: Duration,
    runtime: &Handle,
) -> Result<Wire, Vec<(String, Failure)>> {
    let places = match host.resolve(settings).await {
        Ok(places) => places,
        Err(failure) => return Err(vec![(host.shown.clone(), failure)]),
    };
    let limit = share(limit, places.len());
    // A single address is looked at later on, as every session is.
    let choosing = !alone || places.len() > 1;
    let mut failures = Vec::new();
    for place in places {
        let opening = timeout(limit, async {
            let wire = open_place(settings, &place, runtime).await?;
            let is_standby = format!("{FREE_OF_DEFAULTS}; SELECT pg_catalog.pg_is_in_recovery()");
            if choosing && wire.ask(&is_standby).await?.one()?.truth(0)? {
                return Err(Failure::Standby);
            }
            Ok(wire)
        });
        match opening.await {
            Ok(Ok(wire)) => return Ok(wire),
            Ok(Err(failure)) => {
                let is_last = is_about_user(&failure);
                failures.push((place.shown, failure));
                // As with libpq: the same server would say the same at its other addresses, and may count such attempts.
                if is_last {
                    break;
                }
            }
            Err(_) => failures.push((place.shown, LockError::no_answer("connecting", limit).into())),
        }
    }
    Err(failures)
}

/// Whether a server refused the user, the password or the database.
fn is_about_user(failure: &Failure) -> bool {
    match failure {
        Failure::Several(failures) => failures.iter().all(|(_, failure)| is_about_user(failure)),
        failure => matches!(
            failure.code(),
            Some(
                &SqlState::INVALID_PASSWORD
                    | &SqlState::INVALID_AUTHORIZATION_SPECIFICATION
                    | &SqlState::INVALID_CATALOG_NAME
            )
        ),
    }
}

/// Connects as `sslmode` has it. Where it leaves a choice, the second way is tried if the first one is refused.
async fn open_place(settings: &Settings, place: &Place, runtime: &Handle) -> Result<Wire, Failure> {
    let (first, second) = match settings.tls {
        // A socket of this machine is never encrypted, whatever is asked for. So it is with libpq.
        _ if place.is_socket() => (SslMode::Disable, None),
        Tls::Disable => (SslMode::Disable, None),
        Tls::Allow => (SslMode::Disable, Some((SslMode::Require, "without TLS", "with TLS"))),
        Tls::Prefer => (SslMode::Prefer, Some((SslMode::Disable, "with TLS", "without TLS"))),
        Tls::Require | Tls::VerifyCa | Tls::VerifyFull => (SslMode::Require, None),
    };
    let (mut encrypted, opened) = open_as(settings, place, first, runtime).await;
    // Without TLS there is nothing to choose from.
    encrypted |= first == SslMode::Disable && cfg!(feature = "tls");
    match (opened, second) {
        (Err(failure), Some((mode, one, other))) if encrypted && is_about_encryption(&failure) => {
            let (_, opened) = open_as(settings, place, mode, runtime).await;
            opened.map_err(|second| {
                let failed = [(one, failure), (other, second)];
                Failure::Several(
                    failed
                        .map(|(way, failure)| (format!("{} {way}", place.shown), failure))
                        .into(),
                )
            })
        }
        (opened, _) => opened,
    }
}

/// Whether the other choice, with or without TLS, may be let in: the handshake failed, or no line of `pg_hba.conf` fits.
fn is_about_encryption(failure: &Failure) -> bool {
    match failure {
        #[cfg(feature = "tls")]
        Failure::Tls(_) => true,
        Failure::Postgres(error) => {
            error.code() == Some(&SqlState::INVALID_AUTHORIZATION_SPECIFICATION) || failure::is_about_tls(error)
        }
        _ => false,
    }
}

/// The connection, and whether it, or the attempt, was encrypted.
async fn open_as(settings: &Settings, place: &Place, mode: SslMode, runtime: &Handle) -> (bool, Result<Wire, Failure>) {
    let mut config = place.config.clone();
    config
        .application_name(settings.application_name())
        .ssl_mode(mode)
        .target_session_attrs(TargetSessionAttrs::Any);
    set_limits(&mut config, settings);
    let unreached = |error| failure::not_connected(&place.shown, error);
    #[cfg(feature = "tls")]
    if mode != SslMode::Disable {
        let connector = match crate::tls::connector(settings.tls, &settings.certificates).await {
            Ok(connector) => connector,
            Err(failure) => return (true, Err(failure)),
        };
        let handshake = connector.handshake;
        let connected = config.connect(connector.connector).await;
        let encrypted = handshake.was_shown() || connected.as_ref().is_err_and(failure::is_about_tls);
        let driven = connected.map(|(client, connection)| Wire::drive(client, connection, runtime));
        let failed = |error| match lock_transport::tls::is_cause_of(&error) {
            true => Failure::Tls(lock_transport::tls::explain(
                error,
                &handshake,
                &place.endpoint(),
                &crate::tls::PEER,
            )),
            false => unreached(error),
        };
        return (encrypted, driven.map_err(failed));
    }
    #[cfg(not(feature = "tls"))]
    if mode == SslMode::Require {
        return (
            true,
            Err(LockError::configuration("TLS is wanted; turn on the feature \"tls\"").into()),
        );
    }
    config.ssl_mode(SslMode::Disable);
    let connected = config.connect(NoTls).await;
    let driven = connected.map(|(client, connection)| Wire::drive(client, connection, runtime));
    (false, driven.map_err(unreached))
}

fn set_limits(config: &mut Config, settings: &Settings) {
    let tcp = &settings.tcp;
    let limit = match tcp.connect_timeout {
        Duration::ZERO => settings.op_timeout,
        limit => limit.min(settings.op_timeout),
    };
    config.connect_timeout(limit).keepalives(tcp.keepalives);
    match tcp.user_timeout.unwrap_or(settings.op_timeout) {
        Duration::ZERO => {}
        limit => drop(config.tcp_user_timeout(limit)),
    }
    if !tcp.keepalives_idle.is_zero() {
        config.keepalives_idle(tcp.keepalives_idle);
    }
    if !tcp.keepalives_interval.is_zero() {
        config.keepalives_interval(tcp.keepalives_interval);
    }
    if tcp.keepalives_count > 0 {
        config.keepalives_retries(tcp.keepalives_count);
    }
}

/// The configured hosts, in the order in which they are tried.
fn hosts(all: &Config) -> Vec<Place> {
    let count = all.get_hosts().len().max(all.get_hostaddrs().len());
    let mut hosts: Vec<_> = (0..count).map(|number| Place::of_host(all, number)).collect();
    if all.get_load_balance_hosts() == LoadBalanceHosts::Random {
        shuffle(&mut hosts);
    }
    hosts
}

fn shuffle<T>(items: &mut [T]) {
    // Each of these has random keys.
    items.sort_by_cached_key(|_| RandomState::new().hash_one(()));
}

impl Place {
    /// The host of that number, whichever address it has.
    fn of_host(all: &Config, number: usize) -> Self {
        let mut one = Config::new();
        let user = all.get_user().map(str::to_owned);
        if let Some(user) = user.or_else(|| std::env::var("USER").ok()) {
            one.user(user);
        }
        if let Some(database) = all.get_dbname() {
            one.dbname(database);
        }
        if let Some(options) = all.get_options() {
            one.options(options);
        }
        let address = all.get_hostaddrs().get(number);
        match all.get_hosts().get(number) {
            Some(Host::Tcp(host)) => {
                one.host(host);
            }
            #[cfg(unix)]
            Some(Host::Unix(path)) => {
                one.host_path(path);
            }
            // For its certificate.
            None => {
                one.host(address.map(IpAddr::to_string).unwrap_or_default());
            }
        }
        if let Some(address) = address {
            one.hostaddr(*address);
        }
        let ports = all.get_ports();
        one.port(ports.get(number).or(ports.first()).copied().unwrap_or(5432));
        one.channel_binding(all.get_channel_binding());
        one.ssl_negotiation(all.get_ssl_negotiation());
        let shown = shown(&one);
        let mut place = Self { config: one, shown };
        if let Some(password) = all.get_password() {
            place.config.password(password);
        } else if let Some(password) = place.find_password() {
            place.config.password(password);
        }
        place
    }

    fn find_password(&self) -> Option<String> {
        let config = &self.config;
        let host = match config.get_hosts().first() {
            Some(Host::Tcp(host)) => host.as_str(),
            _ => "localhost",
        };
        let port = config.get_ports().first().copied().unwrap_or(5432);
        let database = config.get_dbname().or(config.get_user()).unwrap_or_default();
        password::find(host, port, database, config.get_user().unwrap_or_default())
    }

    #[cfg(feature = "tls")]
    fn endpoint(&self) -> lock_transport::Endpoint {
        let host = match self.config.get_hosts() {
            [Host::Tcp(host)] => host.as_str(),
            _ => "localhost",
        };
        lock_transport::Endpoint::new(host, self.config.get_ports().first().copied().unwrap_or(5432))
    }

    fn is_socket(&self) -> bool {
        #[cfg(unix)]
        return matches!(self.config.get_hosts(), [Host::Unix(_)]);
        #[cfg(not(unix))]
        false
    }

    /// Every address of the host.
    async fn resolve(&self, settings: &Settings) -> Result<Vec<Self>, Failure> {
        let port = self.config.get_ports().first().copied().unwrap_or(5432);
        let [Host::Tcp(host)] = self.config.get_hosts() else {
            return Ok(vec![self.clone()]);
        };
        if !self.config.get_hostaddrs().is_empty() || host.parse::<IpAddr>().is_ok() {
            return Ok(vec![self.clone()]);
        }
        let found = tokio::net::lookup_host((host.as_str(), port)).await;
        let found = found.map_err(|error| {
            LockError::unavailable("connecting", format!("Postgres cannot be reached at {}", self.shown))
                .with_source(error)
        })?;
        let mut addresses: Vec<IpAddr> = Vec::new();
        for address in found {
            if !addresses.contains(&address.ip()) {
                addresses.push(address.ip());
            }
        }
        if settings.server.get_load_balance_hosts() == LoadBalanceHosts::Random {
            shuffle(&mut addresses);
        }
        let several = addresses.len() > 1;
        let places = addresses.into_iter().map(|address| {
            let mut place = self.clone();
            place.config.hostaddr(address);
            if several {
                place.shown = format!("{} ({address})", place.shown);
            }
            place
        });
        let places: Vec<_> = places.collect();
        if places.is_empty() {
            return Err(LockError::unavailable(
                "connecting",
                format!("Postgres cannot be reached at {}: the name has no address", self.shown),
            )
            .into());
        }
        Ok(places)
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

/// Where the server is, for people.
fn shown(one: &Config) -> String {
    let port = one.get_ports().first().copied().unwrap_or(5432);
    match one.get_hosts().first() {
        Some(Host::Tcp(host)) if host.contains(':') => format!("[{host}]:{port}"),
        Some(Host::Tcp(host)) => format!("{host}:{port}"),
        #[cfg(unix)]
        Some(Host::Unix(folder)) => folder.join(format!(".s.PGSQL.{port}")).display().to_string(),
        None => String::new(),
    }
}
