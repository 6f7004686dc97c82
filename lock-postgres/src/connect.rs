//! How a connection to one of the configured servers is made.
//!
//! `tokio_postgres` makes it. This module adds: each of several servers, and each of its addresses, has its share of the time and says why
//! it cannot be used; standbys are passed over; a password is looked for where libpq looks.

use std::net::IpAddr;
use std::time::Duration;

use lock_core::LockError;
use lock_transport::Endpoint;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_postgres::config::{Host, LoadBalanceHosts, SslMode};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Config, NoTls};

use crate::commands::FREE_OF_DEFAULTS;
use crate::config::Tls;
use crate::failure::{self, Failure};
use crate::password;
use crate::settings::Settings;
use crate::wire::Wire;

/// One of the configured hosts, or one of its addresses.
#[derive(Clone)]
struct Place {
    /// Names this host only.
    config: Config,
    endpoint: Endpoint,
    shown: String,
}

impl Wire {
    /// Connects to the first server that may be used. Must be called on `runtime`, which works the connection.
    ///
    /// Locks are kept by primaries alone. So of several hosts, and of several addresses of one host, standbys are passed over.
    pub(crate) async fn open(settings: &Settings, runtime: &Handle) -> Result<Self, Failure> {
        let hosts = hosts(settings).await?;
        let limit = share(settings.config.op_timeout, hosts.len());
        let mut failures = Vec::new();
        for host in &hosts {
            let opening = open_host(settings, host, hosts.len() == 1, limit, runtime, &mut failures);
            match timeout(limit, opening).await {
                Ok(Some(wire)) => return Ok(wire),
                Ok(None) => {}
                Err(_) => failures.push((host.shown.clone(), no_answer(limit))),
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

fn no_answer(limit: Duration) -> Failure {
    LockError::no_answer("connecting", limit).into()
}

/// Several answers share the time, and leave some of it for what is asked of the one that can be used.
fn share(limit: Duration, parts: usize) -> Duration {
    match u32::try_from(parts) {
        Ok(0 | 1) => limit,
        Ok(parts) => limit / (parts + 1),
        Err(_) => Duration::ZERO,
    }
}

/// Connects to the first address of the host that leads to a primary. What is wrong with the others is added to `failures`.
async fn open_host(
    settings: &Settings,
    host: &Place,
    alone: bool,
    limit: Duration,
    runtime: &Handle,
    failures: &mut Vec<(String, Failure)>,
) -> Option<Wire> {
    let places = match host.resolve(settings.config.server.get_load_balance_hosts()).await {
        Ok(places) => places,
        Err(error) => {
            failures.push((host.shown.clone(), error.into()));
            return None;
        }
    };
    let limit = share(limit, places.len());
    // A single address is looked at later on, as every session is.
    let choosing = !alone || places.len() > 1;
    for place in places {
        let opening = timeout(limit, async {
            let wire = open_place(settings, &place, runtime).await?;
            let is_standby = format!("{FREE_OF_DEFAULTS}; SELECT pg_catalog.pg_is_in_recovery()");
            if choosing && wire.ask(&is_standby).await?.one()?.truth(0)? {
                return Err(Failure::Standby);
            }
            Ok(wire)
        });
        let failure = match opening.await {
            Ok(Ok(wire)) => return Some(wire),
            Ok(Err(failure)) => failure,
            Err(_) => no_answer(limit),
        };
        let is_last = is_about_user(&failure);
        failures.push((place.shown, failure));
        // As with libpq: the same server would say the same at its other addresses, and may count such attempts.
        if is_last {
            break;
        }
    }
    None
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

async fn open_place(settings: &Settings, place: &Place, runtime: &Handle) -> Result<Wire, Failure> {
    let mut config = place.config.clone();
    let mode = match settings.config.tls {
        // As in libpq, a socket of this machine is never encrypted.
        _ if place.is_socket() => SslMode::Disable,
        Tls::Disable => SslMode::Disable,
        Tls::Prefer => SslMode::Prefer,
        Tls::Require | Tls::VerifyCa | Tls::VerifyFull => SslMode::Require,
    };
    #[cfg(feature = "tls")]
    if mode != SslMode::Disable {
        let (connector, handshake) = crate::tls::connector(settings.config.tls, &settings.config.tls_files).await?;
        let connected = config.ssl_mode(mode).connect(connector).await;
        let driven = connected.map(|(client, connection)| Wire::drive(client, connection, runtime));
        return driven.map_err(|error| match lock_transport::tls::is_cause_of(&error) {
            true => lock_transport::tls::explain(error, &handshake, &place.endpoint, &crate::tls::PEER).into(),
            false => failure::not_connected(&place.shown, error),
        });
    }
    if mode == SslMode::Require {
        return Err(LockError::configuration("TLS is wanted; turn on the feature \"tls\"").into());
    }
    let connected = config.ssl_mode(SslMode::Disable).connect(NoTls).await;
    let driven = connected.map(|(client, connection)| Wire::drive(client, connection, runtime));
    driven.map_err(|error| failure::not_connected(&place.shown, error))
}

/// The configured hosts, in the order in which they are tried.
async fn hosts(settings: &Settings) -> Result<Vec<Place>, Failure> {
    let all = &settings.config.server;
    let password = match &settings.config.password {
        Some(password) => Some(password.get().await?.into_bytes()),
        None => all.get_password().map(<[u8]>::to_vec),
    };
    let base = without_hosts(settings);
    let count = all.get_hosts().len().max(all.get_hostaddrs().len());
    let host = |number| {
        let mut place = Place::new(base.clone(), all, number);
        let config = &mut place.config;
        let user = config.get_user().unwrap_or_default();
        let database = config.get_dbname().unwrap_or(user);
        let found = || password::find(&place.endpoint, database, user).map(String::into_bytes);
        if let Some(password) = password.clone().or_else(found) {
            config.password(password);
        }
        place
    };
    let mut hosts: Vec<_> = (0..count).map(host).collect();
    if all.get_load_balance_hosts() == LoadBalanceHosts::Random {
        fastrand::shuffle(&mut hosts);
    }
    Ok(hosts)
}

/// What connections to all hosts have in common.
fn without_hosts(settings: &Settings) -> Config {
    let all = &settings.config.server;
    let mut base = Config::new();
    base.application_name(settings.application_name())
        .channel_binding(all.get_channel_binding())
        .ssl_negotiation(all.get_ssl_negotiation())
        // What the network drops silently is noticed within 30 seconds.
        .keepalives(true)
        .keepalives_idle(Duration::from_secs(15))
        .keepalives_interval(Duration::from_secs(5))
        .keepalives_retries(3);
    let user = all.get_user().map(str::to_owned);
    if let Some(user) = user.or_else(|| std::env::var("USER").ok()) {
        base.user(user);
    }
    if let Some(database) = all.get_dbname() {
        base.dbname(database);
    }
    if let Some(options) = all.get_options() {
        base.options(options);
    }
    let limit = settings.config.op_timeout;
    base.connect_timeout(all.get_connect_timeout().map_or(limit, |own| limit.min(*own)));
    base.tcp_user_timeout(all.get_tcp_user_timeout().map_or(limit, |own| *own));
    base
}

impl Place {
    /// The host of that number, whichever address it has.
    fn new(mut config: Config, all: &Config, number: usize) -> Self {
        let ports = all.get_ports();
        let port = ports.get(number).or(ports.first()).copied().unwrap_or(5432);
        config.port(port);
        let address = all.get_hostaddrs().get(number);
        if let Some(address) = address {
            config.hostaddr(*address);
        }
        let host = match all.get_hosts().get(number) {
            #[cfg(unix)]
            Some(Host::Unix(folder)) => {
                config.host_path(folder);
                return Self {
                    config,
                    endpoint: Endpoint::new("localhost", port),
                    shown: folder.join(format!(".s.PGSQL.{port}")).display().to_string(),
                };
            }
            Some(Host::Tcp(host)) => host.clone(),
            // For its certificate.
            None => address.map(IpAddr::to_string).unwrap_or_default(),
        };
        config.host(&host);
        let endpoint = Endpoint::new(host, port);
        Self {
            config,
            shown: endpoint.to_string(),
            endpoint,
        }
    }

    fn is_socket(&self) -> bool {
        !matches!(self.config.get_hosts(), [Host::Tcp(_)])
    }

    /// Every address of the host.
    async fn resolve(&self, order: LoadBalanceHosts) -> Result<Vec<Self>, LockError> {
        if self.is_socket() || !self.config.get_hostaddrs().is_empty() {
            return Ok(vec![self.clone()]);
        }
        let unreached = |why| {
            LockError::unavailable(
                "connecting",
                format!("Postgres cannot be reached at {}{why}", self.shown),
            )
        };
        let Endpoint { host, port } = &self.endpoint;
        let found = tokio::net::lookup_host((host.as_str(), *port)).await;
        let found = found.map_err(|error| unreached("").with_source(error))?;
        let mut addresses: Vec<_> = found.map(|address| address.ip()).collect();
        addresses.dedup();
        if order == LoadBalanceHosts::Random {
            fastrand::shuffle(&mut addresses);
        }
        let several = addresses.len() > 1;
        let at = |address: IpAddr| {
            let mut place = self.clone();
            place.config.hostaddr(address);
            if several {
                place.shown = format!("{} ({address})", place.shown);
            }
            place
        };
        let places: Vec<_> = addresses.into_iter().map(at).collect();
        match places.is_empty() {
            true => Err(unreached(": the name has no address")),
            false => Ok(places),
        }
    }
}
