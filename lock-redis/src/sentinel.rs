//! A primary that sentinels know.
//!
//! Before each connection to a server, the sentinels in the address are asked for the primary, one after the other, until one names a server
//! that says of itself that it is a primary. The client stays subscribed to what that sentinel announces, so that a connection to a server
//! that has been replaced is closed at once although that server still answers.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::LockError;
use lock_transport::Endpoint;
use redis::aio::{AsyncPushSender, MultiplexedConnection, SendError};
use redis::{AsyncConnectionConfig, ErrorKind, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::connection::Socket;
use crate::error::{self, Failure};
use crate::login::Login;
use crate::transport::Place;

/// What sentinels announce when they name another primary. The one that leads a failover announces `+switch-master` only when the other
/// replicas follow the new primary, and `+promoted-slave` before that; and `+monitor` when they are told of another service by that name.
const EVENTS: [&str; 3] = ["+switch-master", "+promoted-slave", "+monitor"];

/// The longest that one sentinel may take to connect and answer, before the next one is asked.
const LIMIT: Duration = Duration::from_secs(2);

/// Before the sentinels are asked again after a primary could not be used.
const RETRY: Duration = Duration::from_millis(200);

/// How often a sentinel is asked that announces nothing.
const WATCH_EVERY: Duration = Duration::from_secs(5);

/// A service, and the sentinels that know its primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) name: String,
    /// All of them with TLS or none; so are the servers.
    pub(crate) sentinels: Vec<Place>,
    /// For the sentinels.
    pub(crate) login: Login,
}

impl Service {
    pub(crate) fn new(name: impl Into<String>, sentinels: Vec<Place>) -> Self {
        Self {
            name: name.into(),
            sentinels,
            login: Login::default(),
        }
    }

    /// The places of the sentinels, for display.
    fn hosts(&self) -> String {
        let places: Vec<_> = self.sentinels.iter().map(Place::to_string).collect();
        places.join(", ")
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of the sentinels {}", self.name, self.hosts())
    }
}

/// The sentinels of a service, as one client asks them.
pub(crate) struct Sentinels {
    service: Service,
    op_timeout: Duration,
    /// The one that is asked first: the last that named a primary, or one behind those that did not answer.
    first: AtomicUsize,
    /// Whether a primary has been found before.
    found: AtomicBool,
}

impl Sentinels {
    pub(crate) fn new(service: Service, op_timeout: Duration) -> Result<Self, LockError> {
        if service.sentinels.is_empty() || service.name.is_empty() {
            return Err(LockError::configuration(
                "there is no sentinel, or no name of a service; give at least one sentinel and the name that it knows the service by",
            ));
        }
        Ok(Self {
            service,
            op_timeout,
            first: AtomicUsize::new(0),
            found: AtomicBool::new(false),
        })
    }

    /// Connects to the primary by `open`, which refuses a server that is none.
    pub(crate) async fn connect<F>(self: Arc<Self>, open: impl Fn(Place) -> F) -> Result<Socket, LockError>
    where
        F: Future<Output = Result<Socket, LockError>>,
    {
        // Less than the caller waits, so that it gets the reason.
        let end = Instant::now() + self.op_timeout * 3 / 4;
        loop {
            let error = match Arc::clone(&self).attempt(&open, end).await {
                Ok(socket) => return Ok(socket),
                Err(error) => error,
            };
            if !error.is_retryable() || Instant::now() + RETRY > end {
                return Err(error);
            }
            tracing::debug!(target: "fencelock", "asking the sentinels again: {error:#}");
            sleep(RETRY).await;
        }
    }

    /// Asks each sentinel once, until one names a server that is a primary.
    async fn attempt<F>(self: Arc<Self>, open: impl Fn(Place) -> F, end: Instant) -> Result<Socket, LockError>
    where
        F: Future<Output = Result<Socket, LockError>>,
    {
        let (mut unnamed, mut unusable) = (Vec::new(), None);
        for number in self.in_turn() {
            let (sentinel, named) = match self.ask(number).await {
                Ok((sentinel, Answer::Primary(place))) => (sentinel, place),
                Ok((_, Answer::NoService { known })) => {
                    unnamed.push(self.no_service(&known));
                    continue;
                }
                Err(error) => {
                    // Each that is silent takes a part of the time that a connection may take.
                    let next = (number + 1) % self.service.sentinels.len();
                    let _ = self
                        .first
                        .compare_exchange(number, next, Ordering::AcqRel, Ordering::Acquire);
                    unnamed.push(error);
                    continue;
                }
            };
            self.found.store(true, Ordering::Release);
            // Also if other sentinels took most of the time.
            let end = end.max(Instant::now() + self.op_timeout / 5);
            let opened = match timeout_at(end, open(named.clone())).await {
                Ok(opened) => opened,
                Err(_) => Err(LockError::unavailable(
                    "connecting",
                    format!("the server at {named}, which the sentinels name as the primary, does not answer"),
                )),
            };
            match opened {
                Ok(socket) => {
                    self.first.store(number, Ordering::Release);
                    Handle::current().spawn(self.watch(sentinel, named, socket.ending()));
                    return Ok(socket);
                }
                // The next sentinel may know of another one.
                Err(error) => unusable = Some(self.explained(&named, error)),
            }
        }
        Err(unusable.unwrap_or_else(|| self.unknown(unnamed)))
    }

    /// The numbers of the sentinels in the order in which they are asked.
    fn in_turn(&self) -> impl Iterator<Item = usize> + use<> {
        let (first, count) = (self.first.load(Ordering::Acquire), self.service.sentinels.len());
        (0..count).map(move |at| (first + at) % count)
    }

    /// Connects to a sentinel and asks it for the primary.
    async fn ask(&self, number: usize) -> Result<(Sentinel, Answer), LockError> {
        let place = &self.service.sentinels[number];
        let limit = LIMIT.min(self.op_timeout / 2);
        let asking = async {
            let sentinel = Sentinel::connect(place, &self.service.login, limit).await?;
            let answer = sentinel.primary(&self.service).await?;
            Ok((sentinel, answer))
        };
        match timeout(limit, asking).await {
            Ok(asked) => asked.map_err(|failure| explain(place, failure)),
            Err(_) => {
                let what = format!("the sentinel at {place} does not answer");
                let cause = LockError::no_answer("asking a sentinel", limit);
                Err(LockError::unavailable("connecting", what).with_source(cause))
            }
        }
    }

    /// Cancels `ending`, which closes the connection to the server at `place`, as soon as a sentinel names another one. Completes when it
    /// is cancelled.
    async fn watch(self: Arc<Self>, sentinel: Sentinel, place: Place, ending: CancellationToken) {
        let mut watched = Some(sentinel);
        while !ending.is_cancelled() {
            let named = match &mut watched {
                Some(sentinel) => {
                    tokio::select! {
                        biased;
                        () = ending.cancelled() => return,
                        _ = timeout(WATCH_EVERY, sentinel.announcements.recv()) => {}
                    }
                    match timeout(LIMIT, sentinel.primary(&self.service)).await {
                        Ok(Ok(answer)) => Some(answer),
                        _ => None,
                    }
                }
                None => None,
            };
            let named = match named {
                Some(named) => named,
                // It has gone: another one is watched.
                None => match self.ask_any().await {
                    Some((sentinel, named)) => {
                        watched = Some(sentinel);
                        named
                    }
                    None => {
                        watched = None;
                        tokio::select! {
                            () = ending.cancelled() => return,
                            () = sleep(10 * RETRY) => continue,
                        }
                    }
                },
            };
            match named {
                Answer::Primary(now) if now != place => {
                    tracing::debug!(
                        target: "fencelock",
                        "closing the connection to {place}: the sentinels name {now} as the primary now"
                    );
                    ending.cancel();
                }
                _ => {}
            }
        }
    }

    async fn ask_any(&self) -> Option<(Sentinel, Answer)> {
        for number in self.in_turn() {
            if let Ok(asked) = self.ask(number).await {
                // One that closes each connection is not asked without a pause.
                sleep(RETRY).await;
                return Some(asked);
            }
        }
        None
    }

    /// The error if no sentinel names a primary.
    fn unknown(&self, failed: Vec<LockError>) -> LockError {
        // One that is set up in another way than the rest, or is just being set up, is no reason to give up.
        let wrong = failed.iter().filter(|error| !error.is_retryable());
        if wrong.clone().count() > failed.len() / 2
            && let Some(wrong) = wrong.into_iter().next()
        {
            return wrong.clone();
        }
        let message = format!(
            "none of the sentinels {} names a primary of {:?}; see that they run, and that the address is right",
            self.service.hosts(),
            self.service.name
        );
        let error = LockError::unavailable("connecting", message);
        match failed.into_iter().next() {
            Some(first) => error.with_source(first),
            None => error,
        }
    }

    fn no_service(&self, known: &[String]) -> LockError {
        let known = match known {
            [] => "they watch none".to_owned(),
            known => format!("they watch {}", known.join(", ")),
        };
        let message = format!(
            "the sentinels know no service {:?}; {known}. Correct the name behind the hosts in the address",
            self.service.name
        );
        // Sentinels that knew it are being set up anew.
        match self.found.load(Ordering::Acquire) {
            true => LockError::unavailable("connecting", message),
            false => LockError::configuration(message),
        }
    }

    /// Adds to an error which server it is about, and why that one.
    fn explained(&self, place: &Place, mut error: LockError) -> LockError {
        let which = format!(
            "the server at {place}, which the sentinels name as the primary of {:?}",
            self.service.name
        );
        match &mut error {
            LockError::Configuration { message, .. } => {
                let _ = write!(
                    message,
                    ". This is {which}; USER:PASSWORD@ in the address is for the servers, sentinel_user and sentinel_password are for the \
                     sentinels"
                );
            }
            LockError::UnsafeConfiguration { message, .. } => {
                let _ = write!(message, ". This is {which}");
            }
            _ => {}
        }
        error
    }
}

/// What a sentinel says of the service.
enum Answer {
    Primary(Place),
    /// It does not know the service, but those.
    NoService {
        known: Vec<String>,
    },
}

/// A connection to a sentinel that is subscribed to [`EVENTS`].
struct Sentinel {
    con: MultiplexedConnection,
    place: Place,
    /// Has a message for each announcement, and when the connection ends.
    announcements: mpsc::UnboundedReceiver<()>,
    _closing: DropGuard,
}

impl Sentinel {
    /// `limit` is how long that may take; with TLS less, so that the reason is told.
    async fn connect(place: &Place, login: &Login, limit: Duration) -> Result<Self, Failure> {
        let broken = CancellationToken::new();
        // Should this future be dropped, so is the socket.
        let closing = broken.clone().drop_guard();
        let greeting = login.greeting().await?;
        let stream = place.connect(limit).await?;
        let (tell, announcements) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(Announcements(tell));
        let (mut con, driver) = MultiplexedConnection::new_with_config(&greeting, stream, config).await?;
        Handle::current().spawn(async move {
            tokio::select! {
                () = driver => {}
                () = broken.cancelled() => {}
            }
        });
        con.subscribe(&EVENTS[..]).await?;
        Ok(Self {
            con,
            place: place.clone(),
            announcements,
            _closing: closing,
        })
    }

    /// Asks for the primary of the service.
    async fn primary(&self, service: &Service) -> Result<Answer, Failure> {
        let mut con = self.con.clone();
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(&service.name);
        if let Some((host, port)) = read::<Option<(String, u16)>>(con.send_packed_command(&question).await?)? {
            return Ok(Answer::Primary(self.place.at(Endpoint::new(host, port))));
        }
        let masters = con.send_packed_command(redis::cmd("SENTINEL").arg("MASTERS")).await?;
        let masters: Vec<HashMap<String, String>> = read(masters)?;
        let known = masters.into_iter().filter_map(|mut master| master.remove("name"));
        Ok(Answer::NoService { known: known.collect() })
    }
}

fn explain(place: &Place, failure: Failure) -> LockError {
    let Failure::Redis(error) = failure else {
        return failure.explain("asking a sentinel");
    };
    let message = match error.code().unwrap_or_default() {
        "NOAUTH" => {
            format!("the sentinel at {place} wants a password; give it as sentinel_password in the address")
        }
        _ if error.kind() == ErrorKind::AuthenticationFailed || error.code() == Some("WRONGPASS") => format!(
            "the sentinel at {place} refused the user name or the password; correct sentinel_user and sentinel_password in the address"
        ),
        _ if is_unknown_command(&error) => format!(
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

/// The answer to one command.
fn read<T: redis::FromRedisValue>(answer: Value) -> Result<T, Failure> {
    redis::from_redis_value(answer.extract_error()?).map_err(|_| Failure::Nonsense)
}

fn is_unknown_command(error: &RedisError) -> bool {
    error.code() == Some("ERR") && error.detail().is_some_and(|words| words.starts_with("unknown command"))
}

/// Receives what a sentinel announces.
struct Announcements(mpsc::UnboundedSender<()>);

impl AsyncPushSender for Announcements {
    fn send(&self, push: PushInfo) -> Result<(), SendError> {
        if matches!(push.kind, PushKind::Message | PushKind::Disconnection) {
            // Without a receiver nothing is watched any more.
            let _ = self.0.send(());
        }
        Ok(())
    }
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.service.fmt(f)
    }
}
