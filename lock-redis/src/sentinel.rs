//! A primary that sentinels know.
//!
//! Before each connection to a server, all sentinels in the address are asked for the primary. The answer of the latest configuration counts: each
//! failover has a number, which sentinels that have missed it do not know. The client stays subscribed to what the sentinels announce, so that a
//! connection to a server that has been replaced is closed at once although that server still answers.

mod connection;

use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use lock_core::LockError;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::connection::Socket;
use crate::login::Login;
use crate::transport::Place;

use connection::{Answer, Named, Sentinel, explain};

/// The longest that one sentinel may take to connect and answer.
const LIMIT: Duration = Duration::from_secs(2);

/// How long the others may take once a majority has answered.
const STRAGGLERS: Duration = Duration::from_millis(100);

/// Before the sentinels are asked again after a primary could not be used, or a sentinel has closed its connection.
const RETRY: Duration = Duration::from_millis(200);

/// How often sentinels are asked that announce nothing.
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
    /// The latest configuration that was followed, plus 1; 0 before the first.
    followed: AtomicU64,
}

/// For each sentinel, by its number in the address, the connection to it, if there is one.
type Connections = Vec<Option<Sentinel>>;

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
            followed: AtomicU64::new(0),
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

    /// Asks all sentinels once, and connects to the primary that the latest configuration names.
    async fn attempt<F>(self: Arc<Self>, open: impl Fn(Place) -> F, end: Instant) -> Result<Socket, LockError>
    where
        F: Future<Output = Result<Socket, LockError>>,
    {
        let mut connections = Connections::default();
        let (named, failed) = self.ask(&mut connections).await;
        let mut unusable = None;
        // Mostly it is one.
        for place in self.latest(&named).unwrap_or_default() {
            // Also if the sentinels took most of the time.
            let end = end.max(Instant::now() + self.op_timeout / 5);
            let opened = match timeout_at(end, open(place.clone())).await {
                Ok(opened) => opened,
                Err(_) => Err(LockError::unavailable(
                    "connecting",
                    format!("the server at {place}, which the sentinels name as the primary, does not answer"),
                )),
            };
            match opened {
                Ok(socket) => {
                    let (place, ending) = (place.clone(), socket.ending());
                    Handle::current().spawn(self.watch(connections, place, ending));
                    return Ok(socket);
                }
                Err(error) => unusable = Some(self.explained(place, error)),
            }
        }
        Err(unusable.unwrap_or_else(|| self.unknown(&named, failed)))
    }

    /// Asks all sentinels, at the same time, for the primary; connects to those to which there is no connection. As soon as a majority has
    /// answered, and not only with what is older than what was followed before, waits only a little for the others.
    async fn ask(&self, connections: &mut Connections) -> (Vec<Named>, Vec<LockError>) {
        let count = self.service.sentinels.len();
        connections.resize_with(count, || None);
        let mut asking: FuturesUnordered<_> = connections
            .iter_mut()
            .zip(&self.service.sentinels)
            .map(|(connection, place)| self.ask_one(connection, place))
            .collect();
        let (mut named, mut failed) = (Vec::new(), Vec::new());
        let mut end = None;
        while named.len() + failed.len() < count {
            let next = async {
                match end {
                    Some(end) => timeout_at(end, asking.next()).await.unwrap_or_default(),
                    None => asking.next().await,
                }
            };
            match next.await {
                Some(Ok(answer)) => named.push(answer),
                Some(Err(error)) => failed.push(error),
                None => break,
            }
            let is_known = |named: &Named| named.epoch + 1 >= self.followed.load(Ordering::Acquire);
            if named.len() > count / 2 && named.iter().any(is_known) {
                end.get_or_insert(Instant::now() + STRAGGLERS);
            }
        }
        (named, failed)
    }

    /// The answer of one sentinel. A connection that fails is dropped.
    async fn ask_one(&self, connection: &mut Option<Sentinel>, place: &Place) -> Result<Named, LockError> {
        let limit = LIMIT.min(self.op_timeout / 2);
        let known = connection.take();
        let asking = async {
            let sentinel = match known {
                Some(mut sentinel) => {
                    // The answer comes after what was announced so far.
                    while sentinel.announcements.try_recv().is_ok() {}
                    sentinel
                }
                None => Sentinel::connect(place, &self.service.login, limit).await?,
            };
            let answer = sentinel.primary(&self.service.name).await?;
            *connection = Some(sentinel);
            Ok(answer)
        };
        match timeout(limit, asking).await {
            Ok(Ok(Answer::Primary(named))) => Ok(named),
            Ok(Ok(Answer::NoService { known })) => Err(self.no_service(&known)),
            Ok(Err(failure)) => Err(explain(place, failure)),
            Err(_) => {
                let what = format!("the sentinel at {place} does not answer");
                let cause = LockError::no_answer("asking a sentinel", limit);
                Err(LockError::unavailable("connecting", what).with_source(cause))
            }
        }
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
    fn unknown(&self, named: &[Named], failed: Vec<LockError>) -> LockError {
        if let Some(named) = named.first() {
            let message = format!(
                "a failover is not known to the sentinels of {:?} that can be reached, which name {}; see that the others run and can be \
                 reached",
                self.service.name, named.place
            );
            return LockError::unavailable("connecting", message);
        }
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
        match self.followed.load(Ordering::Acquire) > 0 {
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
            LockError::Configuration(info) => {
                let _ = write!(
                    info.message,
                    ". This is {which}; USER:PASSWORD@ in the address is for the servers, sentinel_user and sentinel_password are for the \
                     sentinels"
                );
            }
            LockError::UnsafeConfiguration(info) => {
                let _ = write!(info.message, ". This is {which}");
            }
            _ => {}
        }
        error
    }
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.service.fmt(f)
    }
}
