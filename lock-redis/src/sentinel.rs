//! A primary that sentinels know.
//!
//! Before each connection to a server, all sentinels in the address are asked for the primary. The answer of the latest configuration counts: each
//! failover has a number, which sentinels that have missed it do not know. The client stays subscribed to what the sentinels announce, so that a
//! connection to a server that has been replaced is closed at once although that server still answers.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use lock_core::LockError;
use lock_transport::Endpoint;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, FromRedisValue, PushInfo, PushKind};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::config::{Service, joined};
use crate::connection::{Socket, read};
use crate::error::{self, Failure};
use crate::transport::Place;

/// What sentinels announce when they name another primary. The one that leads a failover announces `+switch-master` only when the other
/// replicas follow the new primary, and `+promoted-slave` before that; and `+monitor` when they are told of another service by that name.
const EVENTS: [&str; 3] = ["+switch-master", "+promoted-slave", "+monitor"];

/// The longest that one sentinel may take to connect and answer.
const LIMIT: Duration = Duration::from_secs(2);

/// How long the others may take once a majority has answered.
const STRAGGLERS: Duration = Duration::from_millis(100);

/// Before the sentinels are asked again after a primary could not be used, or a sentinel has closed its connection.
const RETRY: Duration = Duration::from_millis(200);

/// How often sentinels are asked that announce nothing.
const WATCH_EVERY: Duration = Duration::from_secs(5);

/// The sentinels of a service, as one client asks them.
pub(crate) struct Sentinels {
    service: Service,
    op_timeout: Duration,
    /// The latest configuration that was followed, plus 1; 0 before the first.
    followed: AtomicU64,
}

/// A connection to a sentinel that is subscribed to [`EVENTS`].
struct Sentinel {
    con: MultiplexedConnection,
    /// Has a message for each announcement, and when the connection ends.
    announcements: mpsc::UnboundedReceiver<()>,
    _closing: DropGuard,
}

/// The primary that a sentinel names.
struct Named {
    place: Place,
    /// The number of the configuration that it is from. Each failover makes a higher one.
    epoch: u64,
}

/// For each sentinel, by its number in the address, the connection to it, if there is one.
type Connections = Vec<Option<Sentinel>>;

impl Sentinels {
    pub(crate) fn new(service: Service, op_timeout: Duration) -> Self {
        Self {
            service,
            op_timeout,
            followed: AtomicU64::new(0),
        }
    }

    /// Connects by `open` to the primary that the latest configuration names. `open` refuses a server that is none.
    pub(crate) async fn connect<F>(self: Arc<Self>, open: impl Fn(Place) -> F) -> Result<Socket, LockError>
    where
        F: Future<Output = Result<Socket, LockError>>,
    {
        // Less than the caller waits, so that it gets the reason.
        let end = Instant::now() + self.op_timeout * 3 / 4;
        loop {
            let mut connections = Connections::default();
            let (named, failed) = self.ask(&mut connections).await;
            let mut unusable = None;
            // Mostly it is one.
            for place in self.latest(&named).unwrap_or_default() {
                // Also if the sentinels took most of the time.
                let end = end.max(Instant::now() + self.op_timeout / 5);
                let opened = timeout_at(end, open(place.clone())).await;
                let silent =
                    || format!("the server at {place}, which the sentinels name as the primary, does not answer");
                match opened.unwrap_or_else(|_| Err(LockError::unavailable("connecting", silent()))) {
                    Ok(socket) => {
                        let ending = socket.ending().clone();
                        Handle::current().spawn(self.watch(connections, place.clone(), ending));
                        return Ok(socket);
                    }
                    Err(error) => unusable = Some(self.explained(place, error)),
                }
            }
            let error = unusable.unwrap_or_else(|| self.unknown(&named, failed));
            if !error.is_retryable() || Instant::now() + RETRY > end {
                return Err(error);
            }
            tracing::debug!(target: "fencelock", "asking the sentinels again: {error:#}");
            sleep(RETRY).await;
        }
    }

    /// Asks all sentinels, at the same time, for the primary; connects to those to which there is no connection. As soon as a majority has
    /// answered, and not only with what is older than what was followed before, waits only a little for the others.
    async fn ask(&self, connections: &mut Connections) -> (Vec<Named>, Vec<LockError>) {
        let count = self.service.sentinels.len();
        connections.resize_with(count, || None);
        let pairs = connections.iter_mut().zip(&self.service.sentinels);
        let mut asking: FuturesUnordered<_> = pairs.map(|(at, place)| self.ask_one(at, place)).collect();
        let (mut named, mut failed) = (Vec::<Named>::new(), Vec::new());
        let mut end = None;
        loop {
            let next = match end {
                Some(end) => timeout_at(end, asking.next()).await.unwrap_or_default(),
                None => asking.next().await,
            };
            match next {
                Some(Ok(answer)) => named.push(answer),
                Some(Err(error)) => failed.push(error),
                None => break,
            }
            let is_known = |named: &Named| named.epoch + 1 >= self.followed.load(Ordering::Acquire);
            if named.len() > count / 2 && named.iter().any(is_known) {
                end.get_or_insert(Instant::now() + STRAGGLERS);
            }
        }
        drop(asking);
        (named, failed)
    }

    /// The answer of one sentinel. A connection that fails is dropped.
    async fn ask_one(&self, connection: &mut Option<Sentinel>, place: &Place) -> Result<Named, LockError> {
        let limit = LIMIT.min(self.op_timeout / 2);
        let known = connection.take();
        let asking = async {
            let mut sentinel = match known {
                Some(sentinel) => sentinel,
                None => Sentinel::connect(place, &self.service, limit).await?,
            };
            // The answer comes after what was announced so far.
            while sentinel.announcements.try_recv().is_ok() {}
            let answer = self.primary(&mut sentinel.con, place).await?;
            *connection = Some(sentinel);
            Ok(answer)
        };
        match timeout(limit, asking).await {
            Ok(answer) => answer.map_err(|failure| explain(place, failure)),
            Err(_) => {
                let what = format!("the sentinel at {place} does not answer");
                let cause = LockError::no_answer("asking a sentinel", limit);
                Err(LockError::unavailable("connecting", what).with_source(cause))
            }
        }
    }

    /// The primary that the sentinel at `place` names.
    async fn primary(&self, con: &mut MultiplexedConnection, place: &Place) -> Result<Named, Failure> {
        let service = &*self.service.name;
        let mut masters: Vec<HashMap<String, String>> = ask(con, redis::cmd("SENTINEL").arg("MASTERS")).await?;
        let name = |master: &HashMap<String, String>| master.get("name").is_some_and(|name| name == service);
        let Some(at) = masters.iter().position(name) else {
            let known = masters.into_iter().filter_map(|mut master| master.remove("name"));
            return Err(self.no_service(&joined(known)).into());
        };
        let master = masters.swap_remove(at);
        let number = |field| master.get(field).and_then(|text| text.parse::<u64>().ok());
        let (Some(epoch), Some(before)) = (number("config-epoch"), number("port")) else {
            return Err(Failure::Nonsense);
        };
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
        let named: Option<(String, u16)> = ask(con, &question).await?;
        let (host, port) = named.ok_or(Failure::Nonsense)?;
        // While it leads a failover, it names the new primary before it has the number of the new configuration.
        let is_switching = master.get("ip") != Some(&host) || before != u64::from(port);
        Ok(Named {
            place: place.at(Endpoint::new(host, port)),
            epoch: epoch + u64::from(is_switching),
        })
    }

    /// The primaries that the latest configuration of the answers names, if it is to be followed: one that is older than what was followed before
    /// only if a majority of the sentinels has it, as after `SENTINEL MONITOR`.
    fn latest<'a>(&self, answers: &'a [Named]) -> Option<Vec<&'a Place>> {
        let epoch = answers.iter().map(|named| named.epoch).max()?;
        if self.followed.fetch_max(epoch + 1, Ordering::AcqRel) > epoch + 1 {
            if answers.len() <= self.service.sentinels.len() / 2 {
                return None;
            }
            self.followed.store(epoch + 1, Ordering::Release);
        }
        let latest = answers.iter().filter(|named| named.epoch == epoch);
        let mut places: Vec<_> = latest.map(|named| &named.place).collect();
        places.dedup();
        Some(places)
    }

    /// Cancels `ending`, which closes the connection to the server at `place`, as soon as the sentinels name another one. Completes when it is
    /// cancelled.
    async fn watch(self: Arc<Self>, mut connections: Connections, place: Place, ending: CancellationToken) {
        let mut every = WATCH_EVERY;
        while !ending.is_cancelled() {
            let open = connections.iter_mut().flatten();
            let mut announced: FuturesUnordered<_> = open.map(|sentinel| sentinel.announcements.recv()).collect();
            tokio::select! {
                biased;
                () = ending.cancelled() => return,
                Some(_) = announced.next() => {}
                () = sleep(every) => {}
            }
            drop(announced);
            let before = connections.iter().flatten().count();
            let (named, _) = self.ask(&mut connections).await;
            let lost = before > connections.iter().flatten().count();
            if let Some(latest) = self.latest(&named)
                && !latest.contains(&&place)
            {
                tracing::debug!(
                    target: "fencelock",
                    "closing the connection to {place}: the sentinels name {} as the primary now", latest[0]
                );
                ending.cancel();
            }
            // One that closes each connection is not asked without a pause.
            every = if lost { RETRY } else { WATCH_EVERY };
        }
    }

    /// The error if no sentinel names a primary that is to be followed.
    fn unknown(&self, named: &[Named], mut failed: Vec<LockError>) -> LockError {
        let service = &self.service;
        if let Some(named) = named.first() {
            let message = format!(
                "a failover is not known to the sentinels of {:?} that can be reached, which name {}; see that the others run and can be \
                 reached",
                service.name, named.place
            );
            return LockError::unavailable("connecting", message);
        }
        // One that is set up in another way than the rest, or is just being set up, is no reason to give up.
        let is_wrong = |error: &&LockError| !error.is_retryable();
        if failed.iter().filter(is_wrong).count() > failed.len() / 2 {
            let wrong = failed.iter().position(|error| is_wrong(&error));
            return failed.swap_remove(wrong.unwrap_or_default());
        }
        let message = format!(
            "none of the sentinels {} names a primary of {:?}; see that they run, and that the address is right",
            joined(&service.sentinels),
            service.name
        );
        let error = LockError::unavailable("connecting", message);
        match failed.into_iter().next() {
            Some(first) => error.with_source(first),
            None => error,
        }
    }

    fn no_service(&self, known: &str) -> LockError {
        let known = if known.is_empty() { "none" } else { known };
        let message = format!(
            "the sentinels know no service {:?}; they watch {known}. Correct the name behind the hosts in the address",
            self.service.name
        );
        // Sentinels that knew it are being set up anew.
        match self.followed.load(Ordering::Acquire) > 0 {
            true => LockError::unavailable("connecting", message),
            false => LockError::configuration(message),
        }
    }

    /// Adds to an error which server it is about, and why that one.
    fn explained(&self, place: &Place, mut error: LockError) -> LockError {
        let name = &self.service.name;
        let which = format!("the server at {place}, which the sentinels name as the primary of {name:?}");
        if let LockError::Configuration(info) | LockError::UnsafeConfiguration(info) = &mut error {
            // Writing to a string cannot fail.
            let _ = write!(info.message, ". This is {which}");
        }
        if let LockError::Configuration(info) = &mut error {
            info.message += "; USER:PASSWORD@ in the address is for the servers, sentinel_user and sentinel_password are for the sentinels";
        }
        error
    }
}

impl Sentinel {
    /// `limit` is how long that may take; with TLS less, so that the reason is told.
    async fn connect(place: &Place, service: &Service, limit: Duration) -> Result<Self, Failure> {
        let broken = CancellationToken::new();
        // Should this future be dropped, so is the socket.
        let closing = broken.clone().drop_guard();
        let stream = place.connect(limit).await?;
        let (tell, announcements) = mpsc::unbounded_channel();
        let pushes = move |push: PushInfo| match push.kind {
            // Without a receiver nothing is watched any more.
            PushKind::Message | PushKind::Disconnection => tell.send(()),
            _ => Ok(()),
        };
        let mut con = service.login.greet(stream, pushes, &broken).await?;
        con.subscribe(&EVENTS[..]).await?;
        Ok(Self {
            con,
            announcements,
            _closing: closing,
        })
    }
}

async fn ask<T: FromRedisValue>(con: &mut MultiplexedConnection, question: &Cmd) -> Result<T, Failure> {
    read(Some(con.send_packed_command(question).await?))
}

/// Why a sentinel could not be asked.
fn explain(place: &Place, failure: Failure) -> LockError {
    let Failure::Redis(error) = failure else {
        return failure.explain("asking a sentinel");
    };
    let (code, words) = (error.code().unwrap_or_default(), error.detail().unwrap_or_default());
    let message = match code {
        "NOAUTH" => format!("the sentinel at {place} wants a password; give it as sentinel_password in the address"),
        _ if error.kind() == ErrorKind::AuthenticationFailed || code == "WRONGPASS" => format!(
            "the sentinel at {place} refused the user name or the password; correct sentinel_user and sentinel_password in the address"
        ),
        "ERR" if words.starts_with("unknown command") => format!(
            "what answers at {place} is a Redis server and no sentinel; use {} for it, or give the addresses of its sentinels",
            place.url("")
        ),
        _ if error::is_denied(&error) => {
            format!("the user of the sentinel at {place} lacks a right; grant what docs/redis.md lists for sentinels")
        }
        _ => {
            let hint = match error.is_connection_dropped() {
                true => format!("; {}", place.hung_up()),
                false => String::new(),
            };
            let what = format!("the sentinel at {place} cannot be asked{hint}");
            return LockError::unavailable("connecting", what).with_source(error);
        }
    };
    LockError::configuration(message).with_source(error)
}
