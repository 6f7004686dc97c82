//! One sentinel: what it is asked, and what it says.

use std::collections::HashMap;
use std::time::Duration;

use lock_core::LockError;
use lock_transport::Endpoint;
use redis::aio::{AsyncPushSender, MultiplexedConnection, SendError};
use redis::{AsyncConnectionConfig, ErrorKind, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::error::{self, Failure};
use crate::login::Login;
use crate::transport::Place;

/// What sentinels announce when they name another primary. The one that leads a failover announces `+switch-master` only when the other
/// replicas follow the new primary, and `+promoted-slave` before that; and `+monitor` when they are told of another service by that name.
const EVENTS: [&str; 3] = ["+switch-master", "+promoted-slave", "+monitor"];

/// The primary that a sentinel names.
pub(super) struct Named {
    pub(super) place: Place,
    /// The number of the configuration that it is from. Each failover makes a higher one.
    pub(super) epoch: u64,
}

/// What a sentinel says of the service.
pub(super) enum Answer {
    Primary(Named),
    /// It does not know the service, but those.
    NoService {
        known: Vec<String>,
    },
}

/// A connection to a sentinel that is subscribed to [`EVENTS`].
pub(super) struct Sentinel {
    con: MultiplexedConnection,
    place: Place,
    /// Has a message for each announcement, and when the connection ends.
    pub(super) announcements: mpsc::UnboundedReceiver<()>,
    _closing: DropGuard,
}

impl Sentinel {
    /// `limit` is how long that may take; with TLS less, so that the reason is told.
    pub(super) async fn connect(place: &Place, login: &Login, limit: Duration) -> Result<Self, Failure> {
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
    pub(super) async fn primary(&self, service: &str) -> Result<Answer, Failure> {
        let mut con = self.con.clone();
        let masters = con.send_packed_command(redis::cmd("SENTINEL").arg("MASTERS")).await?;
        let mut masters: Vec<HashMap<String, String>> = read(masters)?;
        let name = |master: &HashMap<String, String>| master.get("name").is_some_and(|name| name == service);
        let Some(at) = masters.iter().position(name) else {
            let known = masters.into_iter().filter_map(|mut master| master.remove("name"));
            return Ok(Answer::NoService { known: known.collect() });
        };
        let mut number = |field| masters[at].remove(field).and_then(|text| text.parse::<u64>().ok());
        let (Some(epoch), Some(before)) = (number("config-epoch"), number("port")) else {
            return Err(Failure::Nonsense);
        };
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
        let named: Option<(String, u16)> = read(con.send_packed_command(&question).await?)?;
        let (host, port) = named.ok_or(Failure::Nonsense)?;
        // While it leads a failover, it names the new primary before it has the number of the new configuration.
        let is_switching = masters[at].get("ip") != Some(&host) || before != u64::from(port);
        Ok(Answer::Primary(Named {
            place: self.place.at(Endpoint::new(host, port)),
            epoch: epoch + u64::from(is_switching),
        }))
    }
}

pub(super) fn explain(place: &Place, failure: Failure) -> LockError {
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
