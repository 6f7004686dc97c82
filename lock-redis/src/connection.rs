//! One connection to a server, for commands and pushes alike.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lock_core::{Clock, LockError, ServerInfo, Stamp};
use redis::aio::{AsyncPushSender, MultiplexedConnection, SendError};
use redis::{AsyncConnectionConfig, Cmd, FromRedisValue, Pipeline, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::io::InspectReader;
use tokio_util::sync::CancellationToken;

use crate::error::{self, Failure};
use crate::server_check::Server;
use crate::server_time::ServerTime;
use crate::settings::Settings;
use crate::subscriptions::Subscriptions;
use crate::transport::Place;

/// A connection whose server has been looked at, and on which the client's channel is subscribed.
///
/// Requests are sent in the order in which they are made and may overlap. Clones share the socket; dropping the last one closes it.
#[derive(Clone)]
pub(crate) struct Connection {
    socket: Arc<Socket>,
    /// Whether requests are about names whose slot is only being moved to this node of a cluster.
    is_asking: bool,
}

/// What clones of a connection share.
pub(crate) struct Socket {
    con: MultiplexedConnection,
    broken: CancellationToken,
    place: Place,
    version: ServerInfo,
    run_id: String,
    /// For how long the server had run at the opening, in whole seconds.
    uptime: Duration,
    clock: Clock,
    opened: Stamp,
    /// When something last came from the server, in nanoseconds since the opening.
    heard: Arc<AtomicU64>,
    time: Mutex<ServerTime>,
    next_look: Due,
    /// Whether a warning has been logged about what was seen then.
    warned: AtomicBool,
    /// A request that was given up unanswered after that time closes the connection.
    silence: Duration,
    runtime: Handle,
}

/// A channel, and where its messages go.
#[derive(Clone)]
pub(crate) struct Feed {
    pub(crate) channel: String,
    pub(crate) subscriptions: Subscriptions,
}

/// Between two looks at the settings of a server that are made beside renewals.
const LOOK_EVERY: Duration = Duration::from_secs(60);

impl Socket {
    /// Connects, subscribes, and looks at the server. Must be called on the runtime that works the connection.
    ///
    /// `was_primary` says whether the client has found a primary before, and is set if it has one now.
    pub(crate) async fn open(
        place: &Place,
        settings: &Settings,
        feed: Feed,
        was_primary: &AtomicBool,
    ) -> Result<Self, Failure> {
        let runtime = Handle::current();
        let clock = Clock::system();
        let opened = clock.now();
        let broken = CancellationToken::new();
        // Should this future be dropped, so is the socket.
        let guard = broken.clone().drop_guard();
        let greeting = settings.login.greeting().await?;
        let stream = place.connect(settings.op_timeout).await?;
        let heard = Arc::new(AtomicU64::new(0));
        // Also while nobody looks at the answer.
        let stream = InspectReader::new(stream, {
            let (heard, clock) = (Arc::clone(&heard), clock.clone());
            move |_: &[u8]| heard.store(nanos(clock.now().since(opened)), Ordering::Release)
        });
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(PushHandler {
                subscriptions: feed.subscriptions,
                broken: broken.clone(),
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
        // In a cluster, no two nodes know the same channel: a message that no one received at its node is not delivered by another.
        con.subscribe(match settings.is_cluster() {
            true => format!("{}/{}", feed.channel, server.run_id()),
            false => feed.channel,
        })
        .await?;
        let time = time.0.saturating_mul(1_000_000).saturating_add(time.1);
        Ok(Self {
            con,
            broken: guard.disarm(),
            place: place.clone(),
            version: server.named(),
            run_id: server.run_id().to_owned(),
            uptime: server.uptime(),
            time: Mutex::new(ServerTime::new(time, sent, clock.now())),
            clock,
            opened,
            heard,
            next_look: Due::default(),
            warned: AtomicBool::new(false),
            // Less than callers have, so that one of them closes a connection to a silent server.
            silence: settings.op_timeout * 4 / 5,
            runtime,
        })
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_cancelled()
    }

    /// Closes the connection; what has not been sent is not sent any more.
    pub(crate) fn close(&self) {
        self.broken.cancel();
    }

    /// Cancelled when the connection ends. It does not keep it.
    pub(crate) fn ending(&self) -> CancellationToken {
        self.broken.clone()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.close();
    }
}

impl Connection {
    pub(crate) fn new(socket: Arc<Socket>) -> Self {
        Self {
            socket,
            is_asking: false,
        }
    }

    /// The same connection, for names whose slot is only being moved to its server.
    pub(crate) fn asking(self) -> Self {
        Self {
            is_asking: true,
            ..self
        }
    }

    /// Where the server is.
    pub(crate) fn place(&self) -> &Place {
        &self.socket.place
    }

    /// Cancelled when the connection ends. It does not keep it.
    pub(crate) fn ending(&self) -> CancellationToken {
        self.socket.ending()
    }

    /// What tells the server from all others, until it is restarted.
    pub(crate) fn run_id(&self) -> &str {
        &self.socket.run_id
    }

    /// For how long the server has run, to a second.
    pub(crate) fn server_age(&self) -> Duration {
        self.socket.uptime + self.socket.clock.now().since(self.socket.opened)
    }

    /// The server that this leads to.
    pub(crate) fn version(&self) -> &ServerInfo {
        &self.socket.version
    }

    /// Sends a command and waits for its answer.
    pub(crate) async fn request(&self, command: &Cmd) -> Result<Value, RedisError> {
        if self.is_asking {
            let mut answers = self.request_all(std::slice::from_ref(command)).await?;
            return answers.pop().unwrap_or(Value::Nil).extract_error();
        }
        let mut con = self.socket.con.clone();
        self.answered(async move { con.send_packed_command(command).await?.extract_error() })
            .await
    }

    /// Sends commands together and waits for all answers, some of which may be errors.
    pub(crate) async fn request_all(&self, commands: &[Cmd]) -> Result<Vec<Value>, RedisError> {
        let mut con = self.socket.con.clone();
        let mut all = Pipeline::with_capacity(2 * commands.len());
        for command in commands {
            if self.is_asking {
                all.cmd("ASKING");
            }
            all.add_command(command.clone());
        }
        let request = async move { con.send_packed_commands(&all, 0, all.len()).await };
        let answers = self.answered(request).await?;
        let skipped = usize::from(self.is_asking);
        Ok(answers.into_iter().skip(skipped).step_by(1 + skipped).collect())
    }

    /// Waits for the answer to a request, for as long as the connection lasts. If the future is dropped after most of the time that a
    /// request may take, and nothing has come from the server meanwhile, the connection is closed.
    async fn answered<T>(&self, request: impl Future<Output = Result<T, RedisError>>) -> Result<T, RedisError> {
        let socket = &*self.socket;
        let mut unanswered = Unanswered {
            socket,
            sent: socket.clock.now(),
            is_answered: false,
        };
        let answer = tokio::select! {
            biased;
            answer = request => answer,
            () = socket.broken.cancelled() => Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into()),
        };
        unanswered.is_answered = true;
        if let Err(error) = &answer
            && (error.is_unrecoverable_error() || error::is_demotion(error))
        {
            socket.close();
        }
        answer
    }

    /// What the server says of itself now.
    pub(crate) async fn look(&self) -> Result<Server, Failure> {
        let answer = self.request(&redis::cmd("INFO")).await?;
        let info: String = redis::from_redis_value(answer).map_err(|_| Failure::Nonsense)?;
        Ok(Server::read(&info))
    }

    /// Uses the commands that locks need only now and then, so that a user without the right to one of them is found out: what some
    /// tools check a connection with, the text of a script that the server does not know, and what removes dead waiters of a long queue.
    pub(crate) async fn use_rare_commands(&self, unused_key: &str) -> Result<(), Failure> {
        self.request(&redis::cmd("PING")).await?;
        let mut script = redis::cmd("EVAL");
        script.arg("return redis.call('HRANDFIELD', KEYS[1], 1)").arg(1);
        self.request(script.arg(unused_key)).await?;
        Ok(())
    }

    /// Looks at the server's settings once more, beside other requests: with the first renewal on this connection, and then
    /// at most once a minute. They can be changed while it runs. What is unsafe now is logged as a warning, once.
    pub(crate) fn look_again(&self) {
        let socket = &self.socket;
        if !socket.next_look.take(socket.clock.now().since(socket.opened)) {
            return;
        }
        let connection = self.clone();
        socket.runtime.spawn(async move {
            // If it fails, the renewals tell what is wrong with the connection.
            if let Ok(Ok(server)) = timeout(connection.socket.silence, connection.look()).await
                && let Some(message) = server.evicts()
                && !connection.socket.warned.swap(true, Ordering::AcqRel)
            {
                tracing::warn!(target: "fencelock", "locks may be lost: {message}");
            }
        });
    }

    /// Takes note of a reading of the server's clock, in microseconds, that was asked for at `sent`.
    pub(crate) fn learn(&self, micros: u64, sent: Stamp) {
        let reading = ServerTime::new(micros, sent, self.socket.clock.now());
        let mut time = self.time();
        *time = time.improved_by(reading);
    }

    /// Forgets what was known of the server's clock in favour of this reading.
    pub(crate) fn relearn(&self, micros: u64, sent: Stamp) {
        *self.time() = ServerTime::new(micros, sent, self.socket.clock.now());
    }

    /// The most that the server's clock can show at `stamp`, in milliseconds.
    pub(crate) fn server_millis(&self, stamp: Stamp) -> u64 {
        self.time().latest(stamp) / 1000
    }

    /// The least that the server's clock can show at `stamp`, in microseconds.
    pub(crate) fn earliest_server_micros(&self, stamp: Stamp) -> u64 {
        self.time().earliest(stamp)
    }

    fn time(&self) -> std::sync::MutexGuard<'_, ServerTime> {
        // Nothing here panics while holding the mutex.
        self.socket.time.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
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

/// A request that is under way.
struct Unanswered<'a> {
    socket: &'a Socket,
    sent: Stamp,
    is_answered: bool,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let socket = self.socket;
        let heard = socket.opened + Duration::from_nanos(socket.heard.load(Ordering::Acquire));
        if self.is_answered || heard > self.sent {
            return;
        }
        // Given up, and nothing has come since the sending.
        if socket.clock.now().since(self.sent) >= socket.silence {
            socket.close();
        }
    }
}

/// Receives the pushes of one connection.
struct PushHandler {
    subscriptions: Subscriptions,
    /// Cancelled when the connection ends.
    broken: CancellationToken,
}

impl AsyncPushSender for PushHandler {
    fn send(&self, push: PushInfo) -> Result<(), SendError> {
        match (push.kind, &*push.data) {
            (PushKind::Disconnection, _) => self.broken.cancel(),
            (PushKind::Message, [_, Value::BulkString(message)]) => self.subscriptions.hear(message),
            _ => {}
        }
        Ok(())
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
