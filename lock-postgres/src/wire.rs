//! One connection, before it has become a session.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lock_core::{Clock, Lease, LockError, LossReason};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres::{Client, Config, Connection, NoTls, Socket};
use tokio_util::sync::CancellationToken;

use crate::config::Tls;
use crate::failure::{self, Failure};
use crate::password;
use crate::rows::Rows;
use crate::sessions::Settings;

/// A connection that is worked in the background. Dropping it closes the socket.
pub(crate) struct Wire {
    /// Which of the configured servers it leads to.
    server: usize,
    client: Client,
    ended: CancellationToken,
    lease: KeptLease,
}

/// The lease that ends with the connection.
#[derive(Clone, Default)]
pub(crate) struct KeptLease(Arc<Mutex<Option<Lease>>>);

impl KeptLease {
    pub(crate) fn get(&self) -> Option<Lease> {
        self.lock().clone()
    }

    pub(crate) fn set(&self, lease: Option<Lease>) {
        *self.lock() = lease;
    }

    fn revoke(&self) {
        // Not under the mutex, as it tells others.
        let lease = self.lock().take();
        // If it had run out by then, that is why it is over: the server ends a silent session later than its lease.
        if let Some(lease) = lease
            && lease.is_valid(Clock::system().now())
        {
            lease.revoker().revoke(LossReason::Revoked);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Lease>> {
        // Nothing here panics while holding the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wire {
    /// Connects to the first server that may be used. Must be called on `runtime`, which works the connection.
    pub(crate) async fn open(settings: &Settings, runtime: &Handle) -> Result<Self, Failure> {
        let (hosts, addresses) = (settings.server.get_hosts(), settings.server.get_hostaddrs());
        let servers = hosts.len().max(addresses.len());
        if servers <= 1 {
            return Self::open_one(settings, 0, runtime).await;
        }
        let wanted = settings.server.get_target_session_attrs() != TargetSessionAttrs::Any;
        // One that does not answer leaves time for the others, and for what is asked of the one that does.
        let limit = settings.op_timeout / u32::try_from(servers + 1).unwrap_or(u32::MAX);
        let mut failures = Vec::new();
        for server in 0..servers {
            let opening = timeout(limit, async {
                let wire = Self::open_one(settings, server, runtime).await?;
                if wanted && wire.ask("SELECT pg_is_in_recovery()").await?.one()?.truth(0)? {
                    return Err(standby().into());
                }
                Ok(wire)
            });
            let opened = opening.await;
            match opened.unwrap_or_else(|_| Err(LockError::no_answer("connecting", limit).into())) {
                Ok(wire) => return Ok(wire),
                Err(failure) => failures.push((place(&one_of(&settings.server, server)), failure)),
            }
        }
        Err(Failure::Several(failures))
    }

    /// Connects once more to where this connection leads.
    pub(crate) async fn open_another(&self, settings: &Settings, runtime: &Handle) -> Result<Self, Failure> {
        Self::open_one(settings, self.server, runtime).await
    }

    async fn open_one(settings: &Settings, server: usize, runtime: &Handle) -> Result<Self, Failure> {
        let mut config = one_of(&settings.server, server);
        let database = config.get_dbname().or(config.get_user()).unwrap_or_default().to_owned();
        if config.get_password().is_none() {
            let host = match config.get_hosts().first() {
                Some(Host::Tcp(host)) => host.clone(),
                _ => "localhost".to_owned(),
            };
            let port = config.get_ports().first().copied().unwrap_or(5432);
            let user = config.get_user().unwrap_or_default().to_owned();
            if let Some(password) = password::find(&host, port, &database, &user) {
                config.password(password.0);
            }
        }
        // Whatever the network forgets is noticed within some of these.
        config
            .application_name(settings.application_name())
            .connect_timeout(settings.op_timeout)
            .tcp_user_timeout(settings.op_timeout)
            .keepalives(true)
            .keepalives_idle(Duration::from_secs(15))
            .keepalives_interval(Duration::from_secs(5))
            .keepalives_retries(3)
            .target_session_attrs(TargetSessionAttrs::Any);
        let place = place(&config);
        let unreached = |error| failure::not_connected(&place, error);
        match settings.tls {
            Tls::Disable => {
                config.ssl_mode(SslMode::Disable);
                let (client, connection) = config.connect(NoTls).await.map_err(unreached)?;
                Ok(Self::drive(server, client, connection, runtime))
            }
            #[cfg(feature = "tls")]
            tls => {
                config.ssl_mode(if tls == Tls::Prefer {
                    SslMode::Prefer
                } else {
                    SslMode::Require
                });
                let connector = crate::tls::connector(tls, settings.root_certificate.as_deref()).await?;
                let (client, connection) = config.connect(connector).await.map_err(unreached)?;
                Ok(Self::drive(server, client, connection, runtime))
            }
            #[cfg(not(feature = "tls"))]
            tls => {
                if tls != Tls::Prefer {
                    return Err(LockError::configuration(
                        "TLS is wanted; turn on the feature \"tls\" of lock-postgres",
                    )
                    .into());
                }
                config.ssl_mode(SslMode::Disable);
                let (client, connection) = config.connect(NoTls).await.map_err(unreached)?;
                Ok(Self::drive(server, client, connection, runtime))
            }
        }
    }

    fn drive<T>(server: usize, client: Client, connection: Connection<Socket, T>, runtime: &Handle) -> Self
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let ended = CancellationToken::new();
        let lease = KeptLease::default();
        let wire = Self {
            server,
            client,
            ended: ended.clone(),
            lease: lease.clone(),
        };
        runtime.spawn(async move {
            // Should the runtime end, so does the session, and its locks with it.
            let guard = ended.clone().drop_guard();
            tokio::select! {
                outcome = connection => {
                    if let Err(error) = outcome {
                        tracing::debug!(%error, "a session on Postgres ended");
                    }
                }
                () = ended.cancelled() => {}
            }
            drop(guard);
            lease.revoke();
        });
        wire
    }

    /// One message, and what it was answered with. Dropping the future does not take it back.
    pub(crate) async fn ask(&self, sql: &str) -> Result<Rows, Failure> {
        let answer = tokio::select! {
            biased;
            answer = self.client.simple_query(sql) => answer,
            () = self.ended.cancelled() => return Err(Failure::Ended),
        };
        answer.map(Rows::new).map_err(|error| self.failed(error))
    }

    /// The smallest sign of life: a Sync and nothing else.
    pub(crate) async fn beat(&self) -> Result<(), Failure> {
        let answer = tokio::select! {
            biased;
            answer = self.client.check_connection() => answer,
            () = self.ended.cancelled() => return Err(Failure::Ended),
        };
        answer.map_err(|error| self.failed(error))
    }

    fn failed(&self, error: tokio_postgres::Error) -> Failure {
        if failure::is_final(&error) {
            self.end();
        }
        error.into()
    }

    /// The lease that is revoked as soon as the connection ends; at once if it has.
    pub(crate) fn keep(&self, lease: Option<Lease>) {
        self.lease.set(lease);
        if self.is_ended() {
            self.lease.revoke();
        }
    }

    pub(crate) fn lease(&self) -> Option<Lease> {
        self.lease.get()
    }

    /// Closes the socket. The server ends the session as soon as it notices, and frees its locks.
    pub(crate) fn end(&self) {
        self.ended.cancel();
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.is_cancelled() || self.client.is_closed()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire")
            .field("ended", &self.is_ended())
            .finish_non_exhaustive()
    }
}

/// Where that server is, for people.
fn place(one: &Config) -> String {
    let port = one.get_ports().first().copied().unwrap_or(5432);
    match one.get_hosts().first() {
        Some(Host::Tcp(host)) if host.contains(':') => format!("[{host}]:{port}"),
        Some(Host::Tcp(host)) => format!("{host}:{port}"),
        #[cfg(unix)]
        Some(Host::Unix(folder)) => folder.join(format!(".s.PGSQL.{port}")).display().to_string(),
        None => one
            .get_hostaddrs()
            .first()
            .map_or_else(String::new, |address| format!("{address}:{port}")),
    }
}

/// The configuration for the server of that number alone.
fn one_of(all: &Config, server: usize) -> Config {
    let mut one = Config::new();
    let user = all.get_user().map(str::to_owned);
    if let Some(user) = user.or_else(|| std::env::var("USER").ok()) {
        one.user(user);
    }
    if let Some(password) = all.get_password() {
        one.password(password);
    }
    if let Some(database) = all.get_dbname() {
        one.dbname(database);
    }
    if let Some(options) = all.get_options() {
        one.options(options);
    }
    match all.get_hosts().get(server) {
        Some(Host::Tcp(host)) => {
            one.host(host);
        }
        #[cfg(unix)]
        Some(Host::Unix(path)) => {
            one.host_path(path);
        }
        None => {}
    }
    if let Some(address) = all.get_hostaddrs().get(server) {
        one.hostaddr(*address);
    }
    let ports = all.get_ports();
    one.port(ports.get(server).or(ports.first()).copied().unwrap_or(5432));
    one.channel_binding(all.get_channel_binding());
    one
}

/// Locks would seem to be free there that are held on the primary.
pub(crate) fn standby() -> LockError {
    LockError::UnsafeConfiguration {
        message:
            "this Postgres is a standby, or still recovering, and its locks are not those of the primary; connect to \
                  the primary"
                .into(),
    }
}
