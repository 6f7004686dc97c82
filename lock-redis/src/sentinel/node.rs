//! One sentinel.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lock_core::LockError;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, Pipeline, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::service::Service;
use crate::failure::{self, Failure};
use crate::login::Login;
use crate::transport::Place;

/// What sentinels announce when they name another primary. The one that leads a failover announces `+switch-master` only when the other
/// replicas follow the new primary, and `+promoted-slave` before that; and `+monitor` when they are told of another service by that name.
const EVENTS: [&str; 3] = ["+switch-master", "+promoted-slave", "+monitor"];

/// The address of a primary, and the epoch of the failover that made it one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Primary {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) epoch: u64,
}

impl Primary {
    /// Whether this is another server, by a later failover.
    pub(super) fn replaces(&self, earlier: &Self) -> bool {
        self.epoch > earlier.epoch && !self.is_at(earlier)
    }

    /// Whether both are at the same address.
    pub(super) fn is_at(&self, other: &Self) -> bool {
        (&self.host, self.port) == (&other.host, other.port)
    }
}

/// What a sentinel says of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Primary(Primary),
    /// It does not know the service, but those.
    NoService {
        known: Vec<String>,
    },
}

/// A sentinel, and the connection to it.
pub(super) struct Sentinel {
    place: Place,
    service: String,
    login: Login,
    op_timeout: Duration,
    /// Locked while a connection is made, so that there is never more than one.
    connection: tokio::sync::Mutex<Option<Connection>>,
    /// The primary that it named last, over the connection that there is.
    last: Mutex<Option<Primary>>,
    announcements: watch::Sender<()>,
    closed: CancellationToken,
}

/// Subscribed to [`EVENTS`].
#[derive(Clone)]
struct Connection {
    con: MultiplexedConnection,
    broken: CancellationToken,
}

impl Sentinel {
    pub(super) fn new(place: Place, service: &Service, op_timeout: Duration, closed: CancellationToken) -> Self {
        Self {
            place,
            service: service.name.clone(),
            login: service.login.clone(),
            op_timeout,
            connection: tokio::sync::Mutex::default(),
            last: Mutex::default(),
            announcements: watch::Sender::new(()),
            closed,
        }
    }

    /// The primary that it named last, as long as it is connected.
    pub(super) fn last(&self) -> Option<Primary> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Completes with its next announcement, or the end of the connection.
    pub(super) fn announcement(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut announcements = self.announcements.subscribe();
        async move {
            let _ = announcements.changed().await;
        }
    }

    /// Completes when it names a primary that has replaced another one.
    pub(super) async fn until_replaced(
        &self,
        has_replaced: impl Fn(&Primary) -> bool,
        limit: Duration,
        retry: Duration,
    ) -> Primary {
        loop {
            // Before the question, so that nothing is missed.
            let announcement = self.announcement();
            match self.ask_within(limit).await {
                Ok(Answer::Primary(now)) if has_replaced(&now) => return now,
                Ok(_) => {
                    announcement.await;
                    // One that answers and then closes the connection is not asked without a pause.
                    if self.is_disconnected() {
                        sleep(retry / 10).await;
                    }
                }
                Err(error) => {
                    tracing::trace!(target: "fencelock", "a sentinel cannot be asked: {error:#}");
                    sleep(retry).await;
                }
            }
        }
    }

    fn is_disconnected(&self) -> bool {
        let connection = self.connection.try_lock();
        connection.is_ok_and(|connection| connection.as_ref().is_none_or(|open| open.broken.is_cancelled()))
    }

    /// Asks for the primary; connects if there is no connection. One that does not answer in time is closed.
    pub(super) async fn ask_within(&self, limit: Duration) -> Result<Answer, LockError> {
        let mut used = None;
        match timeout(limit, self.ask(&mut used)).await {
            Ok(Ok(answer)) => {
                *self.last.lock().unwrap_or_else(PoisonError::into_inner) = match &answer {
                    Answer::Primary(primary) => Some(primary.clone()),
                    Answer::NoService { .. } => None,
                };
                Ok(answer)
            }
            Ok(Err(failure)) => {
                self.disconnect(used).await;
                Err(self.explain(failure))
            }
            Err(_) => {
                self.disconnect(used).await;
                let error = LockError::no_answer("asking a sentinel", limit);
                Err(
                    LockError::unavailable("connecting", format!("the sentinel at {} does not answer", self.place))
                        .with_source(error),
                )
            }
        }
    }

    /// Closes the connection that was used, of which announcements are still awaited perhaps.
    async fn disconnect(&self, used: Option<Connection>) {
        let Some(used) = used else { return };
        used.broken.cancel();
        self.connection.lock().await.take_if(|open| open.broken.is_cancelled());
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.announcements.send_replace(());
    }

    /// Asks over the connection that there is, or a new one, which is left in `used`.
    async fn ask(&self, used: &mut Option<Connection>) -> Result<Answer, Failure> {
        let mut con = used.insert(self.connected().await?).con.clone();
        let mut questions = Pipeline::new();
        let ask = |questions: &mut Pipeline, what: &str| {
            questions.cmd("SENTINEL").arg(what).arg(&self.service);
        };
        // In this order: an address with an earlier epoch is replaced by the next answer, and one with a later epoch never is.
        ask(&mut questions, "MASTER");
        ask(&mut questions, "GET-MASTER-ADDR-BY-NAME");
        let answers = con.send_packed_commands(&questions, 0, questions.len()).await?;
        let [state, address] = <[Value; 2]>::try_from(answers).map_err(|_| Failure::Nonsense)?;
        let Some((host, port)) = read::<Option<(String, u16)>>(address)? else {
            let masters = con.send_packed_command(redis::cmd("SENTINEL").arg("MASTERS")).await?;
            let masters: Vec<HashMap<String, String>> = read(masters)?;
            let known = masters.into_iter().filter_map(|mut master| master.remove("name"));
            return Ok(Answer::NoService { known: known.collect() });
        };
        let state: HashMap<String, String> = read(state)?;
        let epoch = state.get("config-epoch").and_then(|epoch| epoch.parse().ok());
        let epoch = epoch.ok_or(Failure::Nonsense)?;
        Ok(Answer::Primary(Primary { host, port, epoch }))
    }

    async fn connected(&self) -> Result<Connection, Failure> {
        let mut connection = self.connection.lock().await;
        match &*connection {
            Some(open) if !open.broken.is_cancelled() => Ok(open.clone()),
            _ => {
                let open = self.connect().await?;
                *connection = Some(open.clone());
                Ok(open)
            }
        }
    }

    async fn connect(&self) -> Result<Connection, Failure> {
        let broken = self.closed.child_token();
        // Should this future be dropped, so is the socket.
        let guard = broken.clone().drop_guard();
        let greeting = self.login.greeting().await?;
        let stream = self.place.connect(self.op_timeout).await?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(Announcements(self.announcements.clone()));
        let (mut con, driver) = MultiplexedConnection::new_with_config(&greeting, stream, config).await?;
        let ended = broken.clone();
        // Also when the runtime ends, and drops this task.
        let closing = broken.clone().drop_guard();
        Handle::current().spawn(async move {
            let _closing = closing;
            tokio::select! {
                () = driver => {}
                () = ended.cancelled() => {}
            }
        });
        con.subscribe(&EVENTS[..]).await?;
        Ok(Connection {
            con,
            broken: guard.disarm(),
        })
    }

    fn explain(&self, failure: Failure) -> LockError {
        let place = &self.place;
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
            _ if failure::is_denied(&error) => format!(
                "the user of the sentinel at {place} lacks a right; grant what docs/redis.md lists for sentinels"
            ),
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
}

/// The answer to one command.
fn read<T: redis::FromRedisValue>(answer: Value) -> Result<T, Failure> {
    redis::from_redis_value(answer.extract_error()?).map_err(|_| Failure::Nonsense)
}

fn is_unknown_command(error: &RedisError) -> bool {
    error.code() == Some("ERR") && error.detail().is_some_and(|words| words.starts_with("unknown command"))
}

/// Receives what a sentinel announces.
struct Announcements(watch::Sender<()>);

impl redis::aio::AsyncPushSender for Announcements {
    fn send(&self, push: PushInfo) -> Result<(), redis::aio::SendError> {
        if matches!(push.kind, PushKind::Message | PushKind::Disconnection) {
            self.0.send_replace(());
        }
        Ok(())
    }
}
