//! One connection to the server, for commands and pushes alike.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lock_core::{Clock, LockError, ServerInfo, Stamp};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, FromRedisValue, Pipeline, RedisError, Value};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::discovery::Discovery;
use crate::failure::{self, Failure};
use crate::feed::Feed;
use crate::keys::Keys;
use crate::push::{PushHandler, note};
use crate::safety::Server;
use crate::server_time::ServerTime;
use crate::session::Settings;
use crate::transport::Place;

/// A connection whose server has been looked at, and on which the client's channel is subscribed.
///
/// Requests are sent in the order in which they are made and may overlap. Dropping the link closes the socket.
pub(crate) struct Link {
    con: MultiplexedConnection,
    broken: CancellationToken,
    flags: bool,
    version: ServerInfo,
    run_id: String,
    /// For how long the server had run at the opening, in whole seconds.
    uptime: Duration,
    clock: Clock,
    opened: Stamp,
    /// When the server was last heard, in nanoseconds since the opening.
    heard: Arc<AtomicU64>,
    time: Mutex<ServerTime>,
    next_look: Due,
    /// Whether a warning has been logged about what was seen then.
    warned: AtomicBool,
    probing: AtomicBool,
    patience: Duration,
    shortest_probe: Duration,
    runtime: Handle,
}

/// Whoever gives up sooner than that had no time for an answer.
const IMPATIENCE: Duration = Duration::from_millis(20);

/// Between two looks at the settings of a server that are made beside renewals.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// How long the server has at least to answer whether it is there.
const SHORTEST_PROBE: Duration = Duration::from_millis(100);

impl Link {
    /// Connects, subscribes, and looks at the server. Must be called on `runtime`, which works the connection.
    ///
    /// `was_primary` says whether the client has found a primary before, and is set if it has one now.
    pub(crate) async fn open(
        settings: &Settings,
        feed: Feed,
        was_primary: &AtomicBool,
        runtime: Handle,
    ) -> Result<Self, Failure> {
        match &settings.server {
            Discovery::Fixed(place) => Self::open_at(place, settings, feed, was_primary, runtime).await,
            Discovery::Sentinels(sentinels) => {
                let mut search = sentinels.search();
                loop {
                    let mut found = search.next().await?;
                    let place = found.place.clone();
                    let opening = Self::open_at(&place, settings, feed.clone(), was_primary, runtime.clone());
                    match found.attempt(opening).await {
                        Ok(link) => {
                            runtime.spawn(found.watch(link.ending()));
                            return Ok(link);
                        }
                        Err(failure) => search.failed(found, failure).await?,
                    }
                }
            }
        }
    }

    async fn open_at(
        place: &Place,
        settings: &Settings,
        feed: Feed,
        was_primary: &AtomicBool,
        runtime: Handle,
    ) -> Result<Self, Failure> {
        let clock = Clock::system();
        let opened = clock.now();
        let broken = CancellationToken::new();
        // Should this future be dropped, so is the socket.
        let guard = broken.clone().drop_guard();
        let heard = Arc::new(AtomicU64::new(0));
        let channel = feed.channel().map(str::to_owned);
        let greeting = settings.login.greeting().await?;
        let stream = place.connect(settings.op_timeout).await?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(PushHandler {
                feed,
                broken: broken.clone(),
                heard: Arc::clone(&heard),
                clock: clock.clone(),
                opened,
            });
        let greeted = MultiplexedConnection::new_with_config(&greeting, stream, config).await;
        let (mut con, driver) = greeted.map_err(|error| unwelcome(place, error))?;
        let ended = broken.clone();
        // Also when the runtime ends, and drops this task.
        let closing = broken.clone().drop_guard();
        runtime.spawn(async move {
            let _closing = closing;
            tokio::select! {
                () = driver => {}
                () = ended.cancelled() => {}
            }
        });
        if let Some(channel) = channel {
            con.subscribe(channel).await?;
        }
        let sent = clock.now();
        let mut questions = Pipeline::new();
        questions.cmd("INFO").cmd("TIME");
        if settings.database != 0 {
            questions.cmd("SELECT").arg(settings.database);
        }
        let mut answers = con
            .send_packed_commands(&questions, 0, questions.len())
            .await?
            .into_iter();
        // What a Sentinel or a node of a cluster is asked after this, it does not understand.
        let server = Server::read(&read::<String>(&mut answers)?);
        settings.check(place, &server, was_primary.load(Ordering::Acquire))?;
        let time: (u64, u64) = read(&mut answers)?;
        if settings.database != 0 {
            read::<()>(&mut answers)?;
        }
        if server.is_primary() {
            was_primary.store(true, Ordering::Release);
        }
        let time = time.0.saturating_mul(1_000_000).saturating_add(time.1);
        Ok(Self {
            con,
            broken: guard.disarm(),
            flags: server.knows_flags(),
            version: server.named(),
            run_id: server.run_id().to_owned(),
            uptime: server.uptime(),
            time: Mutex::new(ServerTime::new(time, sent, clock.now())),
            clock,
            opened,
            heard,
            next_look: Due::default(),
            warned: AtomicBool::new(false),
            probing: AtomicBool::new(false),
            patience: settings.op_timeout,
            // Requests to a node that is slower than the majority are given up all the time.
            shortest_probe: match settings.node {
                Some(_) => settings.op_timeout / 4,
                None => SHORTEST_PROBE,
            },
            runtime,
        })
    }

    /// Ends when the connection does.
    pub(crate) async fn broken(&self) {
        self.broken.cancelled().await;
    }

    /// Cancelled when the connection ends. It does not keep it.
    pub(crate) fn ending(&self) -> CancellationToken {
        self.broken.clone()
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_cancelled()
    }

    /// Closes the connection; what has not been sent is not sent any more.
    pub(crate) fn close(&self) {
        self.broken.cancel();
    }

    /// What tells the server from all others, until it is restarted.
    pub(crate) fn run_id(&self) -> &str {
        &self.run_id
    }

    /// For how long the server has run, to a second.
    pub(crate) fn server_age(&self) -> Duration {
        self.uptime + self.clock.now().since(self.opened)
    }

    /// The server that this leads to.
    pub(crate) fn version(&self) -> &ServerInfo {
        &self.version
    }

    /// Whether scripts can carry flags.
    pub(crate) fn knows_flags(&self) -> bool {
        self.flags
    }

    /// Sends a command and waits for its answer. Dropping the future means that the caller has no more patience.
    pub(crate) async fn ask(self: &Arc<Self>, command: &Cmd) -> Result<Value, RedisError> {
        let mut con = self.con.clone();
        self.answered(async move { con.send_packed_command(command).await?.extract_error() })
            .await
    }

    /// The same for a slot that is being moved to this server.
    pub(crate) async fn ask_moving(self: &Arc<Self>, command: &Cmd) -> Result<Value, RedisError> {
        let mut con = self.con.clone();
        let mut both = Pipeline::new();
        both.cmd("ASKING").add_command(command.clone());
        self.answered(async move {
            let mut answers = con.send_packed_commands(&both, 0, both.len()).await?.into_iter();
            let (asking, answer) = (answers.next(), answers.next());
            asking.unwrap_or(Value::Nil).extract_error()?;
            answer.unwrap_or(Value::Nil).extract_error()
        })
        .await
    }

    /// Waits for the answer to a request, for as long as the connection lasts.
    async fn answered<T>(
        self: &Arc<Self>,
        request: impl Future<Output = Result<T, RedisError>>,
    ) -> Result<T, RedisError> {
        let mut asked = Asked {
            link: self,
            sent: self.clock.now(),
            answered: false,
        };
        let answer = tokio::select! {
            biased;
            answer = request => answer,
            () = self.broken() => Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into()),
        };
        asked.answered = true;
        match &answer {
            Ok(_) => self.heard_something(),
            Err(error) if error.is_unrecoverable_error() || failure::is_demotion(error) => self.close(),
            Err(_) => self.heard_something(),
        }
        answer
    }

    /// What the server says of itself now.
    pub(crate) async fn look(self: &Arc<Self>) -> Result<Server, Failure> {
        let answer = self.ask(&redis::cmd("INFO")).await?;
        let info: String = redis::from_redis_value(answer).map_err(|_| Failure::Nonsense)?;
        Ok(Server::read(&info))
    }

    /// Uses the commands that locks need only now and then, so that a user without the right to one of them is found out: what finds
    /// out whether the server is silent, the text of a script that it does not know, and what removes dead waiters of a long queue.
    pub(crate) async fn use_rare_commands(self: &Arc<Self>, keys: &Keys) -> Result<(), Failure> {
        self.ask(&redis::cmd("PING")).await?;
        let mut script = redis::cmd("EVAL");
        script.arg("return redis.call('HRANDFIELD', KEYS[1], 1)").arg(1);
        self.ask(script.arg(keys.unused())).await?;
        Ok(())
    }

    /// Looks at the server's settings once more, beside other requests: with the first renewal on this connection, and then
    /// at most once a minute. They can be changed while it runs. What is unsafe now is logged as a warning, once.
    pub(crate) fn look_again(self: &Arc<Self>) {
        if !self.next_look.take(self.clock.now().since(self.opened)) {
            return;
        }
        let link = Arc::clone(self);
        self.runtime.spawn(async move {
            // If it fails, the renewals tell what is wrong with the connection.
            if let Ok(Ok(server)) = timeout(link.patience, link.look()).await
                && let Some(message) = server.evicts()
                && !link.warned.swap(true, Ordering::AcqRel)
            {
                tracing::warn!(target: "fencelock", "locks may be lost: {message}");
            }
        });
    }

    /// Takes note of a reading of the server's clock, in microseconds, that was asked for at `sent`.
    pub(crate) fn learn(&self, micros: u64, sent: Stamp) {
        let reading = ServerTime::new(micros, sent, self.clock.now());
        let mut time = self.time.lock().unwrap_or_else(PoisonError::into_inner);
        *time = time.improved_by(reading);
    }

    /// Forgets what was known of the server's clock in favour of this reading.
    pub(crate) fn relearn(&self, micros: u64, sent: Stamp) {
        *self.time.lock().unwrap_or_else(PoisonError::into_inner) = ServerTime::new(micros, sent, self.clock.now());
    }

    /// The most that the server's clock can show at `stamp`, in milliseconds.
    pub(crate) fn server_millis(&self, stamp: Stamp) -> u64 {
        self.time.lock().unwrap_or_else(PoisonError::into_inner).latest(stamp) / 1000
    }

    /// The least that the server's clock can show at `stamp`, in microseconds.
    pub(crate) fn earliest_server_micros(&self, stamp: Stamp) -> u64 {
        self.time.lock().unwrap_or_else(PoisonError::into_inner).earliest(stamp)
    }

    fn heard_something(&self) {
        note(&self.heard, self.clock.now().since(self.opened));
    }

    /// Finds out whether the server is there at all if nothing was heard from it for `limit`, within that time again.
    pub(crate) fn probe_if_silent(self: &Arc<Self>, limit: Duration) {
        let heard = self.opened + Duration::from_nanos(self.heard.load(Ordering::Acquire));
        if self.clock.now().since(heard) >= limit {
            self.probe(limit);
        }
    }

    /// Finds out whether the server is there at all, by a question that it answers within `limit` or not.
    fn probe(self: &Arc<Self>, limit: Duration) {
        if self.is_broken() || self.probing.swap(true, Ordering::AcqRel) {
            return;
        }
        let link = Arc::clone(self);
        self.runtime.spawn(async move {
            let mut con = link.con.clone();
            let ping = redis::cmd("PING");
            match timeout(limit, con.send_packed_command(&ping)).await {
                Ok(Ok(_)) => link.heard_something(),
                _ => {
                    tracing::debug!(target: "fencelock", "the connection to Redis is silent; closing it");
                    link.close();
                }
            }
            link.probing.store(false, Ordering::Release);
        });
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

/// The next answer of a pipeline.
fn read<T: FromRedisValue>(answers: &mut impl Iterator<Item = Value>) -> Result<T, Failure> {
    let answer = answers.next().ok_or(Failure::Nonsense)?.extract_error()?;
    redis::from_redis_value(answer).map_err(|_| Failure::Nonsense)
}

/// When the server's settings are looked at next, in seconds since the opening: at once, and then every [`LOOK_EVERY`].
#[derive(Default)]
struct Due(AtomicU64);

impl Due {
    /// Whether it is time; if so, for the caller alone.
    fn take(&self, since_opened: Duration) -> bool {
        let now = since_opened.as_secs();
        let due = self.0.load(Ordering::Acquire);
        let next = now + LOOK_EVERY.as_secs();
        let taken = || self.0.compare_exchange(due, next, Ordering::AcqRel, Ordering::Acquire);
        now >= due && taken().is_ok()
    }
}

/// A question that is under way.
struct Asked<'a> {
    link: &'a Arc<Link>,
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
        // Given up without a word from the server since the sending.
        let waited = link.clock.now().since(self.sent);
        if waited >= link.patience {
            link.close();
        } else if waited >= IMPATIENCE {
            link.probe(waited.max(link.shortest_probe));
        }
    }
}

/// Why the server did not let us in.
fn unwelcome(place: &Place, error: RedisError) -> Failure {
    if !error.is_connection_dropped() {
        return error.into();
    }
    let told = format!(
        "what is at {place} closed the connection before it answered; {}",
        place.hung_up()
    );
    Failure::Known(LockError::unavailable("connecting", told).with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_looked_at_with_the_first_renewal_and_then_once_a_minute() {
        let due = Due::default();
        let looks: Vec<u64> = (3..200)
            .filter(|&second| due.take(Duration::from_secs(second)))
            .collect();
        assert_eq!(looks, [3, 63, 123, 183]);
    }
}
