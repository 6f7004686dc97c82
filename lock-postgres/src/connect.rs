//! How a connection to one of the configured servers is made.
//!
//! `tokio_postgres` makes it. This module adds: each of several servers has its share of the time and says why it cannot be used; standbys
//! are passed over; a password is looked for where libpq looks.

use std::net::IpAddr;
use std::time::Duration;

use lock_core::LockError;
use lock_transport::Endpoint;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_postgres::config::{Host, LoadBalanceHosts, SslMode};
use tokio_postgres::{Config, NoTls};

use crate::commands::FREE_OF_DEFAULTS;
use crate::config::Tls;
use crate::failure::{self, Failure};
use crate::password;
use crate::settings::Settings;
use crate::wire::Wire;

/// One of the configured hosts.
struct Place {
    /// Names this host only.
    config: Config,
    endpoint: Endpoint,
    shown: String,
}

impl Wire {
    /// Connects to the first server that may be used. Must be called on `runtime`, which works the connection.
    ///
    /// Locks are kept by primaries alone. So of several hosts standbys are passed over.
    pub(crate) async fn open(settings: &Settings, runtime: &Handle) -> Result<Self, Failure> {
        let places = places(settings).await?;
        if let [place] = &*places {
            // It is looked at later on, as every session is.
            return open_place(settings, place, runtime).await.map_err(Failure::refused);
        }
        // Some of the time is left for what is asked of the one that can be used.
        let limit = share(settings, places.len());
        let is_standby = format!("{FREE_OF_DEFAULTS}; SELECT pg_catalog.pg_is_in_recovery()");
        let mut failures = Vec::new();
        for place in places {
            let opening = timeout(limit, async {
                let wire = open_place(settings, &place, runtime).await?;
                match wire.ask(&is_standby).await?.one()?.truth(0)? {
                    true => Err(Failure::Standby),
                    false => Ok(wire),
                }
            });
            match opening.await {
                Ok(Ok(wire)) => return Ok(wire),
                Ok(Err(failure)) => failures.push((place.shown, failure)),
                Err(_) => failures.push((place.shown, LockError::no_answer("connecting", limit).into())),
            }
        }
        Err(Failure::Several(failures))
    }
}

/// The time that each of so many hosts has.
fn share(settings: &Settings, hosts: usize) -> Duration {
    let parts = u32::try_from(hosts).unwrap_or(u32::MAX).saturating_add(1);
    settings.config.op_timeout / parts
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
async fn places(settings: &Settings) -> Result<Vec<Place>, Failure> {
    let all = &settings.config.server;
    let password = match &settings.config.password {
        Some(password) => Some(password.get().await?.into_bytes()),
        None => all.get_password().map(<[u8]>::to_vec),
    };
    let count = all.get_hosts().len().max(all.get_hostaddrs().len());
    let place = |number| {
        let mut place = Place::new(settings, number, share(settings, count));
        let config = &mut place.config;
        let user = config.get_user().unwrap_or_default();
        let database = config.get_dbname().unwrap_or(user);
        let found = || password::find(&place.endpoint, database, user).map(String::into_bytes);
        if let Some(password) = password.clone().or_else(found) {
            config.password(password);
        }
        place
    };
    let mut places: Vec<_> = (0..count).map(place).collect();
    if all.get_load_balance_hosts() == LoadBalanceHosts::Random {
        fastrand::shuffle(&mut places);
    }
    Ok(places)
}

impl Place {
    /// The host of that number, each of whose addresses has `limit` for a TCP connection.
    fn new(settings: &Settings, number: usize, limit: Duration) -> Self {
        let all = &settings.config.server;
        let mut config = Config::new();
        config
            .application_name(settings.application_name())
            .channel_binding(all.get_channel_binding())
            .ssl_negotiation(all.get_ssl_negotiation())
            .load_balance_hosts(all.get_load_balance_hosts())
            .connect_timeout(all.get_connect_timeout().map_or(limit, |own| limit.min(*own)))
            .tcp_user_timeout(*all.get_tcp_user_timeout().unwrap_or(&settings.config.op_timeout))
            // What the network drops silently is noticed within 30 seconds.
            .keepalives(true)
            .keepalives_idle(Duration::from_secs(15))
            .keepalives_interval(Duration::from_secs(5))
            .keepalives_retries(3);
        let user = all.get_user().map(str::to_owned);
        if let Some(user) = user.or_else(|| std::env::var("USER").ok()) {
            config.user(user);
        }
        if let Some(database) = all.get_dbname() {
            config.dbname(database);
        }
        if let Some(options) = all.get_options() {
            config.options(options);
        }
        let ports = all.get_ports();
        let port = ports.get(number).or(ports.first()).copied().unwrap_or(5432);
        config.port(port);
        let address = all.get_hostaddrs().get(number);
        if let Some(address) = address {
            config.hostaddr(*address);
        }
        let (host, socket) = match all.get_hosts().get(number) {
            #[cfg(unix)]
            Some(Host::Unix(folder)) => {
                config.host_path(folder);
                let socket = folder.join(format!(".s.PGSQL.{port}"));
                ("localhost".to_owned(), Some(socket.display().to_string()))
            }
            Some(Host::Tcp(host)) => (host.clone(), None),
            // For its certificate.
            None => (address.map(IpAddr::to_string).unwrap_or_default(), None),
        };
        if socket.is_none() {
            config.host(&host);
        }
        let endpoint = Endpoint::new(host, port);
        Self {
            config,
            shown: socket.unwrap_or_else(|| endpoint.to_string()),
            endpoint,
        }
    }

    fn is_socket(&self) -> bool {
        !matches!(self.config.get_hosts(), [Host::Tcp(_)])
    }
}
