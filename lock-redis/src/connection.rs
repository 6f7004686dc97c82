//! One connection to a server, for commands and pushes alike.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{Clock, LockError, Stamp};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, FromRedisValue, Pipeline, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::io::InspectReader;
use tokio_util::sync::CancellationToken;

use crate::error::{self, Failure};
use crate::server_check::Server;
use crate::server_time::ServerTime;
use crate::settings::Settings;
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
    /// As it was at the opening.
    server: Server,
    clock: Clock,
    opened: Stamp,
    /// When something last came from the server, in nanoseconds since the opening.
    heard: Arc<AtomicU64>,
    time: Mutex<ServerTime>,
    /// The minute since the opening, counted from 1, in which the server was last looked at.
    looked: AtomicU64,
    /// Whether a warning has been logged about what was seen then.
    warned: AtomicBool,
    /// A request that was given up unanswered after that time closes the connection.
    silence: Duration,
    runtime: Handle,
}

impl Socket {
    /// Connects, subscribes, and looks at the server. Must be called on the runtime that works the connection.
    ///
    /// `was_primary` says whether the client has found a primary before, and is set if it has one now.
    pub(crate) async fn open(place: &Place, settings: &Settings, was_primary: &AtomicBool) -> Result<Self, Failure> {
        let (clock, config) = (settings.clock.clone(), &settings.config);
        let opened = clock.now();
        let broken = CancellationToken::new();
        // Should this future be dropped, so is the socket.
        let guard = broken.clone().drop_guard();
        let heard = Arc::new(AtomicU64::new(0));
        // Also while no caller looks at the answer.
        let stream = InspectReader::new(place.connect(config.op_timeout).await?, {
            let (heard, clock) = (Arc::clone(&heard), clock.clone());
            move |_: &[u8]| {
                let nanos = u64::try_from(clock.now().since(opened).as_nanos());
                heard.store(nanos.unwrap_or(u64::MAX), Ordering::Release);
            }
        });
        let pushes = {
            let (subscriptions, broken) = (settings.subscriptions.clone(), broken.clone());
            move |push: PushInfo| {
                match (push.kind, &*push.data) {
                    (PushKind::Disconnection, _) => broken.cancel(),
                    (PushKind::Message, [_, Value::BulkString(message)]) => subscriptions.hear(message),
                    _ => {}
                }
                Ok::<_, ()>(())
            }
        };
        let greeted = config.login.greet(stream, pushes, &broken).await;
        let mut con = greeted.map_err(|failure| unwelcome(place, failure))?;
        let sent = clock.now();
        let mut questions = Pipeline::new();
        questions.cmd("INFO").cmd("TIME");
        if config.database != 0 {
            questions.cmd("SELECT").arg(config.database);
        }
        let answers = con.send_packed_commands(&questions, 0, questions.len()).await?;
        let received = clock.now();
        let mut answers = answers.into_iter();
        // What a Sentinel or a node of a cluster is asked after this, it does not understand.
        let server = Server::read(&read::<String>(answers.next())?);
        server.check(place, settings, was_primary.load(Ordering::Acquire))?;
        let time: (u64, u64) = read(answers.next())?;
        answers.next().map(Value::extract_error).transpose()?;
        if server.is_primary() {
            was_primary.store(true, Ordering::Release);
        }
        let client = settings.client_at(server.run_id());
        con.subscribe(settings.keys.channels() + &client).await?;
        let time = time.0.saturating_mul(1_000_000).saturating_add(time.1);
        Ok(Self {
            con,
            broken: guard.disarm(),
            place: place.clone(),
            server,
            time: Mutex::new(ServerTime::new(time, sent, received)),
            clock,
            opened,
            heard,
            looked: AtomicU64::new(0),
            warned: AtomicBool::new(false),
            // Less than callers have, so that one of them closes a connection to a silent server.
            silence: config.op_timeout * 4 / 5,
            runtime: Handle::current(),
        })
    }

    /// Closes the connection; what has not been sent is not sent any more.
    pub(crate) fn close(&self) {
        self.broken.cancel();
    }

    /// Cancelled when the connection ends. It does not keep it.
    pub(crate) fn ending(&self) -> &CancellationToken {
        &self.broken
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
        self.socket.broken.clone()
    }

    /// The server, as it was when the connection was opened.
    pub(crate) fn server(&self) -> &Server {
        &self.socket.server
    }

    /// For how long the server has run, to a second.
    pub(crate) fn server_age(&self) -> Duration {
        self.socket.server.uptime() + self.socket.clock.now().since(self.socket.opened)
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
        Ok(Server::read(&read::<String>(Some(answer))?))
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

    /// Looks at the server's settings once more, beside other requests, with the first renewal of each minute of this connection: they can be
    /// changed while it runs. What is unsafe now is logged as a warning, once.
    pub(crate) fn look_again(&self) {
        let socket = &self.socket;
        let minute = 1 + socket.clock.now().since(socket.opened).as_secs() / 60;
        if socket.looked.swap(minute, Ordering::AcqRel) == minute {
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

    /// Takes note of a reading of the server's clock, in microseconds, that was asked for at `sent`. `is_set`: what was known before is wrong.
    pub(crate) fn learn(&self, micros: u64, sent: Stamp, is_set: bool) {
        let reading = ServerTime::new(micros, sent, self.socket.clock.now());
        let mut time = self.time();
        *time = match is_set {
            true => reading,
            false => time.improved_by(reading),
        };
    }

    /// What is known of the server's clock.
    pub(crate) fn time(&self) -> MutexGuard<'_, ServerTime> {
        // Nothing here panics while holding the mutex.
        self.socket.time.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The answer to one of several commands.
pub(crate) fn read<T: FromRedisValue>(answer: Option<Value>) -> Result<T, Failure> {
    let answer = answer.ok_or(Failure::Nonsense)?.extract_error()?;
    redis::from_redis_value(answer).map_err(|_| Failure::Nonsense)
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
        let is_silent = !self.is_answered && heard <= self.sent;
        if is_silent && socket.clock.now().since(self.sent) >= socket.silence {
            socket.close();
        }
    }
}

/// Adds to a greeting that the server did not answer what may be wrong.
fn unwelcome(place: &Place, failure: Failure) -> Failure {
    match failure {
        Failure::Redis(error) if error.is_connection_dropped() => {
            let hint = place.hung_up();
            let message = format!("what is at {place} closed the connection before it answered; {hint}");
            LockError::unavailable("connecting", message).with_source(error).into()
        }
        failure => failure,
    }
}
