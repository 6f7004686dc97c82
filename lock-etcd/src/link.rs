//! One connection to one member.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{
    Channel, Client, ConnectOptions, Error, GetOptions, GetResponse, LeaseGrantOptions, LeaseGrantResponse,
    LeaseRevokeResponse, LeaseTimeToLiveResponse, ResponseHeader, Txn, TxnResponse,
};
use lock_core::{Clock, ServerInfo, Stamp};
use lock_transport::Endpoint as Host;
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::failure::{self, Failure};
use crate::keys::Keys;
use crate::patience::Patience;
use crate::safety::{self, Member};
use crate::session::Settings;
use crate::state::State;
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
    version: ServerInfo,
    clock: Clock,
    opened: Stamp,
    /// When the member was last heard, in nanoseconds since the opening.
    heard: AtomicU64,
    /// Held by whoever asks the member whether it is there.
    probing: Mutex<()>,
    patience: Patience,
    op_timeout: Duration,
    runtime: Handle,
    keys: Keys,
    state: State,
    base: Mutex<Option<Base>>,
    watches: Watches,
}

/// How many logins one request is worth: users are set up by several changes in a row.
const LOGINS: u32 = 3;

/// How long a request waits at most before the member is asked whether it is there.
const FIRST_PROBE: Duration = Duration::from_secs(1);

/// How often the member is asked after that.
const PROBE: Duration = Duration::from_millis(250);

/// How long a request may still be answered once the leader has changed: what the new leader has of it is carried out at once.
const ELECTED: Duration = Duration::from_millis(500);

impl Link {
    /// Connects, logs in, and looks at the member. Must be called on `runtime`, which works the connection.
    pub(crate) async fn open(
        settings: &Settings,
        host: &Host,
        patience: Patience,
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
        let channel = transport::connect(settings, host, broken.clone(), runtime.clone()).await?;
        let greeted = async {
            let (client, nameless) = log_in(channel, login).await?;
            let state = State::default();
            let member = match client.maintenance_client().status().await {
                Ok(status) => {
                    // The first answer goes on from none.
                    let _ = status.header().map(|header| state.goes_on(header, 0));
                    Member::read(&status)
                }
                Err(error) if failure::keeps_its_status_to_itself(&error) => Member::reticent(),
                Err(error) => return Err(error),
            };
            let members = match client.cluster_client().member_list().await {
                Ok(members) => Some(members),
                Err(error) if failure::ends_connection(&error) => return Err(error),
                // Some versions tell it to root only.
                Err(_) => None,
            };
            Ok::<_, Error>((client, nameless, member, members, state))
        };
        let greeted = greeted.await.map_err(|error| unwelcome(settings, host, error));
        let (client, nameless, member, members, state) = greeted?;
        member.check(settings.allow_unsafe)?;
        if let Some(members) = members {
            safety::check_way(&members, settings.allow_unsafe)?;
        }
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
            probing: Mutex::new(()),
            patience,
            op_timeout: settings.op_timeout,
            runtime,
            keys: settings.keys.clone(),
            state,
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
    pub(crate) fn version(&self) -> &ServerInfo {
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

    /// Waits for the answer to a request, for as long as the member is there.
    pub(crate) async fn ask<T>(&self, request: impl Future<Output = Result<T, Error>>) -> Result<T, Failure> {
        let answer = tokio::select! {
            biased;
            answer = request => answer,
            () = self.broken() => return Err(Failure::Broken),
            silence = self.silence() => return Err(silence),
        };
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
        let before = self.state.revision();
        let answer = self.ask_as_user(txn, |txn| {
            let mut kv = self.client.kv_client();
            async move { kv.txn(txn).await }
        });
        let answer = answer.await?;
        self.goes_on(answer.header(), before)?;
        Ok(answer)
    }

    pub(crate) async fn get(&self, key: impl Into<Vec<u8>>, options: GetOptions) -> Result<GetResponse, Failure> {
        let before = self.state.revision();
        let answer = self.ask_as_user((key.into(), options), |(key, options)| {
            let mut kv = self.client.kv_client();
            async move { kv.get(key, Some(options)).await }
        });
        let answer = answer.await?;
        self.goes_on(answer.header(), before)?;
        Ok(answer)
    }

    /// The highest revision that was seen on this link; zero if none was.
    pub(crate) fn revision(&self) -> i64 {
        self.state.revision()
    }

    pub(crate) async fn grant_lease(
        &self,
        seconds: i64,
        options: Option<LeaseGrantOptions>,
    ) -> Result<LeaseGrantResponse, Failure> {
        let before = self.state.revision();
        let mut leases = self.client.lease_client();
        let answer = self.ask(leases.grant(seconds, options)).await?;
        self.goes_on(answer.header(), before)?;
        Ok(answer)
    }

    /// Ends the connection if an answer is of another state than those before it.
    pub(crate) fn goes_on(&self, header: Option<&ResponseHeader>, before: i64) -> Result<(), Failure> {
        let Some(header) = header else { return Ok(()) };
        self.state.goes_on(header, before).map_err(|why| {
            tracing::warn!(target: "fencelock", "{why}; connecting anew");
            self.close();
            Failure::OtherState(why)
        })
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
            match timeout(self.op_timeout, self.ask(self.client.refresh_token())).await {
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

    /// When the member was heard last.
    fn heard(&self) -> Stamp {
        self.opened + Duration::from_nanos(self.heard.load(Ordering::Acquire))
    }

    /// Returns why when a request that waits from now on is not going to be answered, and closes the connection:
    ///
    /// - if the member has let nothing be heard for as long as there is [patience](Patience). One that has not answered for half of that,
    ///   or for a second, is asked whether it is there.
    /// - if the leader has changed. A follower passes requests on to the leader that it knows of. If that one is dead, they are lost, and
    ///   the follower tells so only after seven seconds with the usual `election-timeout`. What is not lost is answered soon after
    ///   the election.
    async fn silence(&self) -> Failure {
        let mut since = self.clock.now();
        let known = self.state.leader_changes();
        let (mut changed, mut longest) = (None, FIRST_PROBE);
        loop {
            let now = self.clock.now();
            let limit = self.patience.limit(now);
            let before = longest.min(limit / 2);
            sleep(before.saturating_sub(self.clock.now().since(since))).await;
            longest = PROBE;
            let probing = self.probing.lock().await;
            if self.heard() <= since {
                if !matches!(timeout(limit - before, self.is_there()).await, Ok(true)) {
                    tracing::debug!(target: "fencelock", "the connection to etcd is silent; closing it");
                    self.close();
                    return Failure::Silent;
                }
                self.heard_something();
            }
            drop(probing);
            since = self.heard();
            if self.state.leader_changes() == known {
                continue;
            }
            let now = self.clock.now();
            if now.since(*changed.get_or_insert(now)) >= ELECTED.min(limit) {
                tracing::debug!(target: "fencelock", "etcd has elected another leader, and a request was not answered; closing the connection"
                );
                self.close();
                return Failure::LeaderChanged;
            }
        }
    }

    /// Whether the member answers. It tells its term, too.
    async fn is_there(&self) -> bool {
        let error = match self.client.maintenance_client().status().await {
            Ok(status) => {
                self.state.saw_term(status.raft_term());
                return true;
            }
            Err(error) => error,
        };
        if failure::lacks_a_leader(&error) {
            self.state.saw_leader_change();
            return true;
        }
        if failure::keeps_its_status_to_itself(&error) {
            // A read that no other member takes part in has the term in its answer.
            let alone = GetOptions::new().with_serializable().with_keys_only();
            if let Ok(answer) = self.client.kv_client().get(self.keys.base(), Some(alone)).await
                && let Some(header) = answer.header()
            {
                self.state.saw_term(header.raft_term());
            }
        }
        // Also a refusal is an answer.
        !failure::ends_connection(&error)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

/// A client that is logged in, and whether it is not because the server knows no users, as one that was set up anew.
async fn log_in(channel: tonic::transport::Channel, login: Option<(&str, String)>) -> Result<(Client, bool), Error> {
    let options = ConnectOptions::new()
        .with_require_leader(true)
        .with_auto_token_refresh(true);
    let Some((user, password)) = login else {
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
    if failure::lacks_a_leader(&error) {
        return Failure::Member(failure::NO_LEADER.to_owned());
    }
    if !failure::ends_connection(&error) {
        return error.into();
    }
    failure::not_let_in(&host.to_string(), settings.tls.is_some(), &error)
}
