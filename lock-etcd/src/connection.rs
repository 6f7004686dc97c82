//! One connection to one member.

use std::future::{Future, ready};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use etcd_client::{
    Channel, Client, ConnectOptions, Error, GetOptions, GetResponse, LeaseGrantOptions, LeaseGrantResponse,
    LeaseRevokeResponse, LeaseTimeToLiveResponse, ResponseHeader, Txn, TxnResponse,
};
use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use lock_core::{Clock, LockError, ServerInfo, Source, Stamp};
use lock_transport::{Endpoint, tcp};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};
use tokio_util::io::InspectReader;
use tokio_util::sync::CancellationToken;
use tonic::transport::Uri;

use crate::error::{self, Failure};
use crate::registry::Registry;
use crate::server_check::{self, Answers, Member};
use crate::settings::Settings;
use crate::tokens::Base;

/// A connection whose member has been looked at. It is one TCP connection, which is never made a second time: a request on it can reach no
/// other state of the server than the requests before it.
///
/// Dropping it closes the socket.
pub(crate) struct Connection {
    serial: u64,
    client: Client,
    /// Whether there is a user to log in as.
    has_login: bool,
    broken: CancellationToken,
    version: ServerInfo,
    clock: Clock,
    opened: Stamp,
    /// When the member was last heard, in nanoseconds since the opening.
    heard: AtomicU64,
    /// Held while the member is asked whether it is there.
    probing: Mutex<()>,
    settings: Arc<Settings>,
    registry: Arc<Registry>,
    runtime: Handle,
    answers: Answers,
    base: Mutex<Option<Base>>,
}

impl Connection {
    /// Connects to the endpoint at that place, logs in, and looks at the member. Must be called on `runtime`, which works the connection.
    pub(crate) async fn open(
        settings: Arc<Settings>,
        at: usize,
        registry: Arc<Registry>,
        runtime: Handle,
    ) -> Result<Self, Failure> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let clock = Clock::system();
        let opened = clock.now();
        let broken = CancellationToken::new();
        // Should this future be dropped, so is the socket.
        let guard = broken.clone().drop_guard();
        let login = match &settings.login {
            Some((user, password)) => Some((user.as_str(), password.get().await?)),
            None => None,
        };
        let host = &settings.hosts[at];
        let channel = channel(&settings, host, broken.clone(), runtime.clone()).await?;
        let answers = Answers::default();
        let greeted = async {
            let client = log_in(channel, login).await?;
            let member = match client.maintenance_client().status().await {
                Ok(status) => {
                    // The first answer has none before it.
                    let _ = status.header().map(|header| answers.check(header, 0));
                    Member::read(&status)
                }
                Err(error) if error::is_status_kept_from_users(&error) => Member::reticent(),
                Err(error) => return Err(error),
            };
            let members = match client.cluster_client().member_list().await {
                Ok(members) => Some(members),
                Err(error) if error::ends_connection(&error) => return Err(error),
                // Some versions tell it to root only.
                Err(_) => None,
            };
            Ok::<_, Error>((client, member, members))
        };
        let greeted = greeted.await;
        let (client, member, members) =
            greeted.map_err(|error| error::not_let_in(&host.to_string(), settings.tls.is_some(), error))?;
        member.check(settings.allow_unsafe)?;
        if let Some(members) = members {
            server_check::check_way(&members, settings.allow_unsafe)?;
        }
        Ok(Self {
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            client,
            has_login: settings.login.is_some(),
            broken: guard.disarm(),
            version: member.named(),
            clock,
            opened,
            heard: AtomicU64::new(0),
            probing: Mutex::new(()),
            settings,
            registry,
            runtime,
            answers,
            base: Mutex::new(None),
        })
    }

    /// Tells connections apart within this process.
    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// What the member is.
    pub(crate) fn version(&self) -> &ServerInfo {
        &self.version
    }

    /// The base of tokens, once it was raised on this connection.
    pub(crate) fn base(&self) -> &Mutex<Option<Base>> {
        &self.base
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// The highest revision that was seen on this connection; zero if none was.
    pub(crate) fn revision(&self) -> i64 {
        self.answers.revision()
    }

    /// Ends when the connection does.
    pub(crate) async fn broken(&self) {
        self.broken.cancelled().await;
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_cancelled()
    }

    /// Closes the connection; what has not been sent is not sent any more.
    pub(crate) fn close(&self) {
        self.broken.cancel();
    }

    /// Waits for the answer to a request, for as long as the member is there.
    pub(crate) async fn call<T>(&self, request: impl Future<Output = Result<T, Error>>) -> Result<T, Failure> {
        let answer = tokio::select! {
            biased;
            answer = request => answer,
            () = self.broken() => return Err(Failure::Broken),
            () = self.silence() => {
                tracing::debug!(target: "fencelock", "the connection to etcd is silent; closing it");
                self.close();
                return Err(Failure::Silent);
            }
        };
        let error = match answer {
            Ok(answer) => {
                self.heard_something();
                return Ok(answer);
            }
            Err(error) => error,
        };
        if self.has_login && error::wants_another_login(&error) {
            // Nothing was done, and the next connection logs in.
            self.close();
            return Err(Failure::Login);
        }
        match error::ends_connection(&error) {
            true => self.close(),
            false => self.heard_something(),
        }
        Err(error.into())
    }

    /// The same for a request whose answer tells of the state that it was carried out on.
    async fn ask<T>(
        &self,
        request: impl Future<Output = Result<T, Error>>,
        header: impl Fn(&T) -> Option<&ResponseHeader>,
    ) -> Result<T, Failure> {
        let before = self.answers.revision();
        let answer = self.call(request).await?;
        if let Some(header) = header(&answer) {
            self.answers.check(header, before).map_err(|why| {
                tracing::warn!(target: "fencelock", "{why}; connecting anew");
                self.close();
                Failure::OtherState(why)
            })?;
        }
        Ok(answer)
    }

    pub(crate) async fn txn(&self, txn: Txn) -> Result<TxnResponse, Failure> {
        let mut kv = self.client.kv_client();
        self.ask(kv.txn(txn), TxnResponse::header).await
    }

    pub(crate) async fn get(&self, key: impl Into<Vec<u8>>, options: GetOptions) -> Result<GetResponse, Failure> {
        let mut kv = self.client.kv_client();
        self.ask(kv.get(key, Some(options)), GetResponse::header).await
    }

    pub(crate) async fn grant_lease(&self, seconds: i64, id: Option<i64>) -> Result<LeaseGrantResponse, Failure> {
        let options = id.map(|id| LeaseGrantOptions::new().with_id(id));
        let mut leases = self.client.lease_client();
        self.ask(leases.grant(seconds, options), LeaseGrantResponse::header)
            .await
    }

    pub(crate) async fn revoke(&self, lease: i64) -> Result<LeaseRevokeResponse, Failure> {
        let mut leases = self.client.lease_client();
        self.call(leases.revoke(lease)).await
    }

    pub(crate) async fn time_to_live(&self, lease: i64) -> Result<LeaseTimeToLiveResponse, Failure> {
        let mut leases = self.client.lease_client();
        self.call(leases.time_to_live(lease, None)).await
    }

    fn heard_something(&self) {
        let nanos = self.clock.now().since(self.opened).as_nanos();
        self.heard
            .fetch_max(u64::try_from(nanos).unwrap_or(u64::MAX), Ordering::AcqRel);
    }

    /// When the member was heard last.
    fn heard(&self) -> Stamp {
        self.opened + Duration::from_nanos(self.heard.load(Ordering::Acquire))
    }

    /// Returns when a request that waits from now on is to be given up, and its connection with it:
    ///
    /// - if the member has let nothing be heard for a fifth of the shortest ttl of the leases that the client keeps: a renewal is due when a
    ///   third of the ttl is over, so almost half of it is left for the next member. When half of that time is over, the member is asked
    ///   whether it is there.
    /// - if half of the time is over that one operation may take. A follower passes requests on to the leader that it knows of. If that one
    ///   is dead, they are lost, and the follower fails them only after seven seconds with the usual `election-timeout`.
    async fn silence(&self) {
        let asked = self.clock.now();
        let longest = self.settings.op_timeout / 2;
        loop {
            let now = self.clock.now();
            let left = longest.saturating_sub(now.since(asked));
            let limit = self
                .registry
                .shortest_ttl(now)
                .map_or(longest, |ttl| longest.min(ttl / 5));
            let since = self.heard().max(asked);
            let due = since + limit / 2;
            if left.is_zero() {
                return;
            }
            if now < due {
                sleep(due.since(now).min(left)).await;
                continue;
            }
            let _probing = self.probing.lock().await;
            if self.heard() > since {
                continue;
            }
            if !matches!(timeout(limit / 2, self.is_there()).await, Ok(true)) {
                return;
            }
            self.heard_something();
        }
    }

    /// Whether the member answers. Also a refusal is an answer.
    async fn is_there(&self) -> bool {
        match self.client.maintenance_client().status().await {
            Ok(_) => true,
            Err(error) => !error::ends_connection(&error),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
    }
}

/// A client that is logged in. A server that knows no users, as one that was set up anew, is used without.
async fn log_in(channel: tonic::transport::Channel, login: Option<(&str, String)>) -> Result<Client, Error> {
    let options = ConnectOptions::new()
        .with_require_leader(true)
        .with_auto_token_refresh(true);
    if let Some((user, password)) = login {
        let named = options.clone().with_user(user, password);
        match Client::from_channel(Channel::Tonic(channel.clone()), Some(named)).await {
            Err(error) if error::knows_no_users(&error) => {}
            logged_in => return logged_in,
        }
    }
    Client::from_channel(Channel::Tonic(channel), Some(options)).await
}

/// Whatever carries the bytes.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

#[cfg(feature = "tls")]
const PEER: lock_transport::tls::Peer = lock_transport::tls::Peer {
    product: "etcd",
    plain: "use etcd: instead of etcds:, or its TLS port",
    client_auth: "",
};

/// How often a connection on which nothing happens is tried. Members do not suffer more than one trial every five seconds.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// A channel over one TCP connection. The end of that cancels `broken`, and cancelling `broken` ends it.
async fn channel(
    settings: &Settings,
    host: &Endpoint,
    broken: CancellationToken,
    runtime: Handle,
) -> Result<tonic::transport::Channel, Failure> {
    let unreachable = |error: Source| {
        LockError::unavailable("connecting", format!("etcd cannot be reached at {host}")).with_source(error)
    };
    let op_timeout = settings.op_timeout;
    let tcp = tcp::connect(host, op_timeout)
        .await
        .map_err(|e| unreachable(e.into()))?;
    let stream: Box<dyn Stream> = match &settings.tls {
        #[cfg(feature = "tls")]
        Some(files) => Box::new(lock_transport::tls::connect(tcp, host, files, &[b"h2"], &PEER, op_timeout).await?),
        _ => Box::new(tcp),
    };
    let unusable = |e: Source| LockError::configuration("a host in the address of etcd cannot be used").with_source(e);
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    // The stream is encrypted already; requests name the scheme that the server is reached by.
    let origin = Uri::try_from(format!("{scheme}://{host}")).map_err(|e| unusable(e.into()))?;
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{host}")).map_err(|e| unusable(e.into()))?;
    let endpoint = endpoint
        .origin(origin)
        .http2_keep_alive_interval(HEARTBEAT)
        .keep_alive_timeout(op_timeout)
        .keep_alive_while_idle(true);
    let driver = Driver {
        runtime,
        broken: broken.clone(),
    };
    // The closure is dropped with the stream: at the end of the connection, and also when the runtime ends.
    let ends = broken.drop_guard();
    let stream = InspectReader::new(stream, move |_: &[u8]| {
        let _held = &ends;
    });
    let stream = Arc::new(StdMutex::new(Some(TokioIo::new(stream))));
    let connector = tower::service_fn(move |_: Uri| {
        let stream = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        ready(stream.ok_or(io::Error::from(io::ErrorKind::BrokenPipe)))
    });
    let connected = endpoint.executor(driver).connect_with_connector(connector).await;
    connected.map_err(|error| unreachable(error.into()).into())
}

/// Runs what works the connection, for as long as it is to live. Dropping that closes the socket at once.
struct Driver {
    runtime: Handle,
    broken: CancellationToken,
}

impl Executor<Pin<Box<dyn Future<Output = ()> + Send>>> for Driver {
    fn execute(&self, work: Pin<Box<dyn Future<Output = ()> + Send>>) {
        let broken = self.broken.clone();
        self.runtime.spawn(async move {
            tokio::select! {
                biased;
                () = broken.cancelled() => {}
                () = work => {}
            }
        });
    }
}
