//! What all clones of a client share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use lock_core::{Clock, Executor, Grant, LockError, OwnerId, Stamp};
use redis::{ProtocolVersion, RedisConnectionInfo};
use tokio::time::timeout;

use crate::config::Secret;
use crate::failure::Failure;
use crate::keys::Keys;
use crate::line::Line;
use crate::link::Link;
use crate::listeners::Listeners;
use crate::redlock::Node;
use crate::transport::Place;

/// What the client was configured with.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) place: Place,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Secret>,
    pub(crate) database: u32,
    pub(crate) keys: Keys,
    pub(crate) op_timeout: Duration,
    pub(crate) min_replicas: u32,
    pub(crate) counter_retention: Duration,
    pub(crate) allow_unsafe: bool,
    pub(crate) executor: Executor,
    /// If the server is one of several.
    pub(crate) node: Option<Node>,
}

impl Settings {
    /// How the connection begins. The database is chosen later, once it is known that the server has any.
    pub(crate) fn login(&self) -> RedisConnectionInfo {
        let mut login = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_skip_set_lib_name();
        if let Some(user) = &self.user {
            login = login.set_username(user);
        }
        if let Some(Secret(password)) = &self.password {
            login = login.set_password(password);
        }
        login
    }
}

/// What all clones of a client share.
pub(crate) struct Session {
    settings: Arc<Settings>,
    clock: Clock,
    began: Stamp,
    /// Names this client on the server.
    client: String,
    /// How the channels of all clients of the namespace begin.
    channels: String,
    listeners: Listeners,
    line: Line,
    replicas: Option<Line>,
}

impl Session {
    /// Starts without a connection; the first request makes one.
    pub(crate) fn new(settings: Settings) -> Self {
        let clock = Clock::system();
        let client = OwnerId::random().to_string();
        let channels = settings.keys.channels();
        let channel = format!("{channels}{client}");
        let (settings, listeners) = (Arc::new(settings), Listeners::default());
        let waits = settings.min_replicas > 0;
        let was_primary = Arc::<AtomicBool>::default();
        // Nobody publishes there.
        let unheard = || {
            Line::new(
                Arc::clone(&settings),
                format!("{channel}:replicas"),
                Listeners::default(),
                Arc::clone(&was_primary),
            )
        };
        Self {
            began: clock.now(),
            clock,
            client,
            channels,
            replicas: waits.then(unheard),
            line: Line::new(
                Arc::clone(&settings),
                channel,
                listeners.clone(),
                Arc::clone(&was_primary),
            ),
            settings,
            listeners,
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What is known of the server as one of several.
    pub(crate) fn node(&self) -> Option<&Node> {
        self.settings.node.as_ref()
    }

    /// Whether the last acquire was refused because the server, one of several, is new or has lost its data.
    pub(crate) fn is_young(&self) -> bool {
        self.node().is_some_and(Node::is_young)
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    pub(crate) fn client(&self) -> &str {
        &self.client
    }

    pub(crate) fn channels(&self) -> &str {
        &self.channels
    }

    pub(crate) fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// Microseconds since the session began: what a stamp is called on the server.
    pub(crate) fn micros(&self, stamp: Stamp) -> u64 {
        u64::try_from(stamp.since(self.began).as_micros()).unwrap_or(u64::MAX)
    }

    /// The stamp that is called so on the server.
    pub(crate) fn stamp(&self, micros: u64) -> Stamp {
        self.began + Duration::from_micros(micros)
    }

    /// Does `work` within the time that one operation may take.
    pub(crate) async fn limited<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, LockError> {
        let limit = self.settings.op_timeout;
        match timeout(limit, work).await {
            Ok(done) => done.map_err(|failure| failure.explain(operation)),
            Err(_) => Err(LockError::no_answer(operation, limit)),
        }
    }

    /// The connection for all but what blocks it.
    pub(crate) async fn link(&self) -> Result<Arc<Link>, Failure> {
        self.line.link().await
    }

    /// The connection if there is one; none is made.
    pub(crate) fn current_link(&self) -> Option<Arc<Link>> {
        self.line.current()
    }

    /// The connection on which replicas are waited for, if they are.
    pub(crate) fn replicas(&self) -> Option<&Line> {
        self.replicas.as_ref()
    }

    /// Takes note of a grant that is about to be handed out.
    pub(crate) fn granted(&self, grant: &Grant) {
        self.listeners.hold(grant);
    }

    /// Ends the session: what it holds is let go of, if there is a connection for it.
    pub(crate) async fn close(&self) -> Result<(), LockError> {
        let mut outcome = Ok(());
        if let Some(link) = self.current_link() {
            let releasing = async {
                for (claim, reserved_until) in self.listeners.holding() {
                    match reserved_until.map(|until| until.since(self.clock.now())) {
                        Some(rest) if !rest.is_zero() => self.release_reserved_on(&link, &claim, rest).await?,
                        _ => self.release_on(&link, &claim).await?,
                    };
                }
                Ok(())
            };
            outcome = self.limited("close", releasing).await;
        }
        self.line.close();
        self.replicas.iter().for_each(Line::close);
        outcome
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.line.is_closed()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("settings", &self.settings)
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}
