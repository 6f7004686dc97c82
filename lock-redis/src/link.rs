//! One connection to the server, for commands and pushes alike.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lock_core::{BackendVersion, Clock, LockError, Stamp};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, Pipeline, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::failure::{self, Failure};
use crate::listeners::Listeners;
use crate::safety::Server;
use crate::server_time::ServerTime;
use crate::session::Settings;

/// A connection whose server has been looked at, and on which the client's channel is subscribed.
///
/// Requests are sent in the order in which they are made and may overlap. Dropping the link closes the socket.
pub(crate) struct Link {
    con: MultiplexedConnection,
    broken: CancellationToken,
    flags: bool,
    version: BackendVersion,
    clock: Clock,
    opened: Stamp,
    /// When the server was last heard, in nanoseconds since the opening.
    heard: Arc<AtomicU64>,
    time: Mutex<ServerTime>,
    probing: AtomicBool,
    patience: Duration,
    runtime: Handle,
}

/// Whoever gives up sooner than that had no time for an answer.
const IMPATIENCE: Duration = Duration::from_millis(20);

/// How long the server has at least to answer whether it is there.
const SHORTEST_PROBE: Duration = Duration::from_millis(100);

impl Link {
    /// Connects, subscribes `channel`, and looks at the server. Must be called on `runtime`, which works the connection.
    pub(crate) async fn open(
        settings: &Settings,
        channel: &str,
        listeners: Listeners,
        runtime: Handle,
    ) -> Result<Self, Failure> {
        let clock = Clock::system();
        let opened = clock.now();
        let broken = CancellationToken::new();
        // Should this future be dropped, so is the socket.
        let guard = broken.clone().drop_guard();
        let heard = Arc::new(AtomicU64::new(0));
        let stream = settings.place.connect(settings.op_timeout).await?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(Ear {
                listeners,
                broken: broken.clone(),
                heard: Arc::clone(&heard),
                clock: clock.clone(),
                opened,
            });
        let greeted = MultiplexedConnection::new_with_config(&settings.login(), stream, config).await;
        let (mut con, driver) = greeted.map_err(|error| unwelcome(settings, error))?;
        let ended = broken.clone();
        runtime.spawn(async move {
            tokio::select! {
                () = driver => {}
                () = ended.cancelled() => {}
            }
            ended.cancel();
        });
        let sent = clock.now();
        con.subscribe(channel).await?;
        let mut questions = Pipeline::new();
        questions.cmd("TIME");
        for section in ["server", "replication", "memory"] {
            questions.cmd("INFO").arg(section);
        }
        let (time, server, replication, memory): ((u64, u64), String, String, String) =
            questions.query_async(&mut con).await?;
        let time = time.0.saturating_mul(1_000_000).saturating_add(time.1);
        let server = Server::read(&[server, replication, memory].concat());
        server.check(settings.allow_unsafe)?;
        Ok(Self {
            con,
            broken: guard.disarm(),
            flags: server.knows_flags(),
            version: server.named(),
            time: Mutex::new(ServerTime::new(time, sent, clock.now())),
            clock,
            opened,
            heard,
            probing: AtomicBool::new(false),
            patience: settings.op_timeout,
            runtime,
        })
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

    /// The server that this leads to.
    pub(crate) fn version(&self) -> &BackendVersion {
        &self.version
    }

    /// Whether scripts can carry flags.
    pub(crate) fn knows_flags(&self) -> bool {
        self.flags
    }

    /// Sends a command and waits for its answer. Dropping the future means that the caller has no more patience.
    pub(crate) async fn ask(self: &Arc<Self>, command: &Cmd) -> Result<Value, RedisError> {
        let mut con = self.con.clone();
        let mut asked = Asked {
            link: self,
            sent: self.clock.now(),
            answered: false,
        };
        let answer = tokio::select! {
            biased;
            answer = con.send_packed_command(command) => answer,
            () = self.broken() => Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into()),
        };
        asked.answered = true;
        let answer = answer.and_then(|value| value.extract_error());
        match &answer {
            Ok(_) => self.heard_something(),
            Err(error) if error.is_unrecoverable_error() || failure::is_demotion(error) => self.close(),
            Err(_) => self.heard_something(),
        }
        answer
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

    fn heard_something(&self) {
        note(&self.heard, self.clock.now().since(self.opened));
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
                    tracing::debug!("the connection to Redis is silent; closing it");
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
            link.probe(waited.max(SHORTEST_PROBE));
        }
    }
}

/// Hears what the server says without being asked.
struct Ear {
    listeners: Listeners,
    broken: CancellationToken,
    heard: Arc<AtomicU64>,
    clock: Clock,
    opened: Stamp,
}

impl redis::aio::AsyncPushSender for Ear {
    fn send(&self, push: PushInfo) -> Result<(), redis::aio::SendError> {
        note(&self.heard, self.clock.now().since(self.opened));
        match push.kind {
            PushKind::Disconnection => self.broken.cancel(),
            PushKind::Message => {
                if let Some(Value::BulkString(message)) = push.data.last() {
                    self.listeners.hear(message);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn note(heard: &AtomicU64, since_opened: Duration) {
    let nanos = u64::try_from(since_opened.as_nanos()).unwrap_or(u64::MAX);
    heard.fetch_max(nanos, Ordering::AcqRel);
}

/// Why the server did not let us in.
fn unwelcome(settings: &Settings, error: RedisError) -> Failure {
    if !error.is_connection_dropped() {
        return error.into();
    }
    Failure::Known(LockError::Unavailable {
        operation: "connecting",
        message: format!(
            "Redis at {} closed the connection; if it wants TLS, use rediss:",
            settings.place
        ),
        source: Some(error.into()),
    })
}

/// The connection was not there in time.
pub(crate) fn no_connection(limit: Duration) -> LockError {
    LockError::no_answer("connecting", limit)
}
