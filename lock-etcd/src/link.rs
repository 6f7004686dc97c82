//! One connection to one member.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{
    Channel, Client, ConnectOptions, Error, GetOptions, GetResponse, LeaseRevokeResponse, LeaseTimeToLiveResponse, Txn,
    TxnResponse,
};
use lock_core::{BackendVersion, Clock, Stamp};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::config::{Host, Secret};
use crate::failure::{self, Failure};
use crate::safety::Member;
use crate::session::Settings;
use crate::tokens::Base;
use crate::transport;
use crate::watches::Watches;

/// A connection whose member has been looked at.
///
/// Dropping the link closes the socket.
pub(crate) struct Link {
    serial: u64,
    client: Client,
    /// Whether there is a user to log in as.
    has_login: bool,
    /// Whether the server asked for no user although there is one to log in as.
    nameless: bool,
    /// When the last login began.
    logged_in: Mutex<Stamp>,
    broken: CancellationToken,
    version: BackendVersion,
    clock: Clock,
    opened: Stamp,
    /// When the member was last heard, in nanoseconds since the opening.
    heard: AtomicU64,
    probing: Arc<AtomicBool>,
    patience: Duration,
    runtime: Handle,
    base: Mutex<Option<Base>>,
    watches: Watches,
}

/// How many logins one request is worth: users are set up by several changes in a row.
const LOGINS: u32 = 3;

/// Whoever gives up sooner than that had no time for an answer.
const IMPATIENCE: Duration = Duration::from_millis(20);

/// How long the member has at least to answer whether it is there. One that is busy is no reason to leave it.
const SHORTEST_PROBE: Duration = Duration::from_millis(500);

/// How often a connection on which nothing happens is tried. Members do not suffer more than one trial every five seconds.
const HEARTBEAT: Duration = Duration::from_secs(10);

impl Link {
    /// Connects, logs in, and looks at the member. Must be called on `runtime`, which works the connection.
    pub(crate) async fn open(settings: &Settings, host: &Host, runtime: Handle) -> Result<Self, Failure> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let clock = Clock::system();
        let opened = clock.now();
        let broken = CancellationToken::new();
        // Should this future be dropped, so is the socket.
        let guard = broken.clone().drop_guard();
        let endpoint = settings
            .endpoint(host)
            .await?
            .http2_keep_alive_interval(HEARTBEAT)
            .keep_alive_timeout(settings.op_timeout)
            .keep_alive_while_idle(true);
        let connecting = transport::connect(
            endpoint,
            host.name.clone(),
            host.port,
            settings.op_timeout,
            broken.clone(),
            runtime.clone(),
        );
        let channel = connecting
            .await
            .map_err(|error| failure::not_connected(&host.to_string(), settings.tls.is_some(), error))?;
        let greeted = async {
            let (client, nameless) = log_in(channel, settings.login.as_ref()).await?;
            let member = match client.maintenance_client().status().await {
                Ok(status) => Member::read(&status),
                Err(error) if failure::keeps_its_status_to_itself(&error) => Member::reticent(),
                Err(error) => return Err(error),
            };
            Ok::<_, Error>((client, nameless, member))
        };
        let (client, nameless, member) = greeted.await.map_err(|error| unwelcome(settings, host, error))?;
        member.check(settings.allow_unsafe)?;
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            serial,
            watches: Watches::start(serial, client.clone(), broken.clone()),
            client,
            has_login: settings.login.is_some(),
            nameless,
            logged_in: Mutex::new(opened),
            broken: guard.disarm(),
            version: member.named(),
            clock,
            opened,
            heard: AtomicU64::new(0),
            probing: Arc::default(),
            patience: settings.op_timeout,
            runtime,
            base: Mutex::new(None),
        })
    }

    /// Tells links apart within this process.
    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// What the member is.
    pub(crate) fn version(&self) -> &BackendVersion {
        &self.version
    }

    /// The base of tokens, once it was looked at on this link.
    pub(crate) fn base(&self) -> &Mutex<Option<Base>> {
        &self.base
    }

    pub(crate) fn watches(&self) -> &Watches {
        &self.watches
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
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

    /// Waits for the answer to a request. Dropping the future means that the caller has no more patience.
    pub(crate) async fn ask<T>(&self, request: impl Future<Output = Result<T, Error>>) -> Result<T, Failure> {
        let mut asked = Asked {
            link: self,
            sent: self.clock.now(),
            answered: false,
        };
        let answer = tokio::select! {
            biased;
            answer = request => answer,
            () = self.broken() => {
                asked.answered = true;
                return Err(Failure::Broken);
            }
        };
        asked.answered = true;
        match answer {
            Ok(answer) => {
                self.heard_something();
                Ok(answer)
            }
            Err(error) if self.nameless && failure::wants_user(&error) => {
                self.close();
                Err(Failure::Nameless)
            }
            Err(error) => {
                if failure::ends_connection(&error) {
                    self.close();
                } else {
                    self.heard_something();
                }
                Err(error.into())
            }
        }
    }

    /// The same for a request that etcd looks at the login of. If that is from before a change of users, the server does
    /// nothing, and is asked once more with a new one. What else is under way on the connection goes on.
    async fn ask_as_user<R, T, F>(&self, request: R, send: impl Fn(R) -> F) -> Result<T, Failure>
    where
        R: Clone,
        F: Future<Output = Result<T, Error>>,
    {
        for _ in 0..self.logins() {
            let sent = self.clock.now();
            match self.ask(send(request.clone())).await {
                Err(Failure::Etcd(error)) if failure::logged_in_before_a_change(&error) => {
                    self.log_in_again(sent).await?;
                }
                answer => return answer,
            }
        }
        self.ask(send(request)).await
    }

    pub(crate) async fn txn(&self, txn: Txn) -> Result<TxnResponse, Failure> {
        self.ask_as_user(txn, |txn| {
            let mut kv = self.client.kv_client();
            async move { kv.txn(txn).await }
        })
        .await
    }

    pub(crate) async fn get(&self, key: impl Into<Vec<u8>>, options: GetOptions) -> Result<GetResponse, Failure> {
        self.ask_as_user((key.into(), options), |(key, options)| {
            let mut kv = self.client.kv_client();
            async move { kv.get(key, Some(options)).await }
        })
        .await
    }

    pub(crate) async fn revoke(&self, lease: i64) -> Result<LeaseRevokeResponse, Failure> {
        self.ask_as_user(lease, |lease| {
            let mut leases = self.client.lease_client();
            async move { leases.revoke(lease).await }
        })
        .await
    }

    pub(crate) async fn time_to_live(&self, lease: i64) -> Result<LeaseTimeToLiveResponse, Failure> {
        self.ask_as_user(lease, |lease| {
            let mut leases = self.client.lease_client();
            async move { leases.time_to_live(lease, None).await }
        })
        .await
    }

    /// How many new logins a request is worth.
    pub(crate) fn logins(&self) -> u32 {
        if self.has_login { LOGINS } else { 0 }
    }

    /// Logs in, unless that was done after `sent`.
    pub(crate) async fn log_in_again(&self, sent: Stamp) -> Result<(), Failure> {
        let mut last = self.logged_in.lock().await;
        if *last <= sent {
            let now = self.clock.now();
            // Others wait for it.
            match timeout(self.patience, self.ask(self.client.refresh_token())).await {
                // It has come to ask for none.
                Ok(Err(Failure::Etcd(error))) if failure::knows_no_users(&error) => {}
                Ok(done) => done?,
                Err(_) => return Err(Failure::Broken),
            }
            *last = now;
        }
        Ok(())
    }

    fn heard_something(&self) {
        let nanos = self.clock.now().since(self.opened).as_nanos();
        self.heard
            .fetch_max(u64::try_from(nanos).unwrap_or(u64::MAX), Ordering::AcqRel);
    }

    /// Finds out whether the member is there at all, by a question that it answers within `limit` or not.
    fn probe(&self, limit: Duration) {
        if self.is_broken() || self.probing.swap(true, Ordering::AcqRel) {
            return;
        }
        let (client, broken, probing) = (self.client.clone(), self.broken.clone(), Arc::clone(&self.probing));
        self.runtime.spawn(async move {
            let mut member = client.maintenance_client();
            let asked = timeout(limit, member.status());
            tokio::select! {
                answer = asked => {
                    // Also a refusal is an answer.
                    let is_there = match answer {
                        Ok(Ok(_)) => true,
                        Ok(Err(error)) => !failure::ends_connection(&error),
                        Err(_) => false,
                    };
                    if !is_there {
                        tracing::debug!("the connection to etcd is silent; closing it");
                        broken.cancel();
                    }
                }
                () = broken.cancelled() => {}
            }
            probing.store(false, Ordering::Release);
        });
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

/// A question that is under way.
struct Asked<'a> {
    link: &'a Link,
    sent: Stamp,
    answered: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let link = self.link;
        let heard = link.opened + Duration::from_nanos(link.heard.load(Ordering::Acquire));
        if self.answered || heard > self.sent {
            return;
        }
        // Given up without a word from the member since the sending.
        let waited = link.clock.now().since(self.sent);
        // An operation may ask more than once, so its time can be over a little before that of one question.
        if waited >= link.patience / 4 * 3 {
            link.close();
        } else if waited >= IMPATIENCE {
            link.probe(waited.max(SHORTEST_PROBE));
        }
    }
}

/// A client that is logged in, and whether it is not because the server knows no users, as one that was set up anew.
async fn log_in(channel: tonic::transport::Channel, login: Option<&(String, Secret)>) -> Result<(Client, bool), Error> {
    let options = ConnectOptions::new()
        .with_require_leader(true)
        .with_auto_token_refresh(true);
    let Some((user, Secret(password))) = login else {
        let client = Client::from_channel(Channel::Tonic(channel), Some(options)).await?;
        return Ok((client, false));
    };
    let named = options.clone().with_user(user, password);
    match Client::from_channel(Channel::Tonic(channel.clone()), Some(named)).await {
        Err(error) if failure::knows_no_users(&error) => {
            let client = Client::from_channel(Channel::Tonic(channel), Some(options)).await?;
            Ok((client, true))
        }
        logged_in => logged_in.map(|client| (client, false)),
    }
}

/// Why the member did not let us in.
fn unwelcome(settings: &Settings, host: &Host, error: Error) -> Failure {
    if !failure::ends_connection(&error) {
        return error.into();
    }
    failure::not_let_in(&host.to_string(), settings.tls.is_some(), error)
}
