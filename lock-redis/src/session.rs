//! What all clones of a client share.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use lock_core::{Clock, Executor, Grant, LockError, LockName, OwnerId, Stamp};
use tokio::time::timeout;

use crate::cluster::{self, Member};
use crate::discovery::Discovery;
use crate::failure::{self, Failure};
use crate::feed::Feed;
use crate::keys::Keys;
use crate::line::Line;
use crate::link::Link;
use crate::listeners::Listeners;
use crate::login::Login;
use crate::redlock::Membership;
use crate::safety::Server;
use crate::scripts::Setting;
use crate::transport::Place;

/// What the client was configured with.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) server: Discovery,
    pub(crate) login: Login,
    pub(crate) database: u32,
    pub(crate) keys: Keys,
    pub(crate) op_timeout: Duration,
    pub(crate) min_replicas: u32,
    pub(crate) counter_retention: Duration,
    pub(crate) allow_unsafe: bool,
    pub(crate) executor: Executor,
    /// If the server is one of several independent ones.
    pub(crate) node: Option<Membership>,
    /// Whether the server is a node of a cluster.
    pub(crate) in_cluster: bool,
}

impl Settings {
    /// Refuses a server, found at `place`, that the client cannot use, or that locks are not safe on. `was_primary` as for
    /// [`Server::check`].
    pub(crate) fn check(&self, place: &Place, server: &Server, was_primary: bool) -> Result<(), LockError> {
        if let Some(node) = &self.node {
            server.check_is_alone()?;
            node.found(server.run_id())?;
        }
        match (self.in_cluster, server.is_in_cluster()) {
            (true, true) => return server.check_in_cluster(self.allow_unsafe),
            (true, false) if !server.is_sentinel() => return Err(cluster::not_a_cluster(place)),
            (false, true) => return Err(cluster::needs_cluster_address(place)),
            _ => {}
        }
        let named = matches!(self.server, Discovery::Sentinels(_));
        server.check(place, self.allow_unsafe, named || was_primary)?;
        // Also if replicas are allowed: sentinels name what should be a primary.
        if named && !server.is_primary() {
            return Err(LockError::unavailable("connecting", failure::DEMOTED.to_owned()));
        }
        Ok(())
    }
}

/// What the sessions of one client have in common.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) clock: Clock,
    pub(crate) began: Stamp,
    /// Names this client on the server.
    pub(crate) client: String,
    pub(crate) listeners: Listeners,
}

impl Identity {
    /// A new client.
    pub(crate) fn new() -> Self {
        let clock = Clock::system();
        Self {
            began: clock.now(),
            clock,
            client: OwnerId::random().to_string(),
            listeners: Listeners::default(),
        }
    }
}

/// What all clones of a client share.
#[derive(Clone)]
pub(crate) struct Session {
    settings: Arc<Settings>,
    identity: Identity,
    /// How the channels of all clients of the namespace begin.
    channels: String,
    line: Line,
    replicas: Option<Line>,
    /// If the server is a node of a cluster.
    member: Option<Member>,
}

impl Session {
    /// Starts without a connection; the first request makes one.
    pub(crate) fn new(settings: Settings) -> Self {
        Self::of(settings, Identity::new())
    }

    /// The same, for one of several servers that the client uses.
    pub(crate) fn of(settings: Settings, identity: Identity) -> Self {
        let settings = Arc::new(settings);
        let was_primary = Arc::<AtomicBool>::default();
        let line = |feed| Line::new(Arc::clone(&settings), feed, Arc::clone(&was_primary));
        let channels = settings.keys.channels();
        let member = settings.in_cluster.then(|| Member::new(&identity, line));
        let feed = match member {
            Some(_) => Feed::None,
            None => Feed::Client {
                channel: format!("{channels}{}", identity.client),
                listeners: identity.listeners.clone(),
            },
        };
        Self {
            line: line(feed),
            replicas: (settings.min_replicas > 0).then(|| line(Feed::None)),
            settings,
            identity,
            channels,
            member,
        }
    }

    /// The same session, for names whose slot is only being moved to its server.
    pub(crate) fn asking(&self) -> Self {
        Self {
            member: self.member.as_ref().map(Member::asking),
            ..self.clone()
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.identity.clock
    }

    /// What this client is called at the server that `link` leads to, in requests for that name: the end of the channel that it is
    /// subscribed to.
    pub(crate) fn client_at(&self, link: &Link, name: &LockName) -> Cow<'_, str> {
        let client = &self.identity.client;
        match &self.member {
            Some(member) => member.client_at(client, link, &self.channels(name)).into(),
            None => client.into(),
        }
    }

    /// How the channels of clients begin that wait for that name.
    pub(crate) fn channels(&self, name: &LockName) -> Cow<'_, str> {
        match self.member {
            Some(_) => self.settings.keys.channels_of(name).into(),
            None => (&*self.channels).into(),
        }
    }

    pub(crate) fn listeners(&self) -> &Listeners {
        &self.identity.listeners
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// What is known of the server as a node of a cluster.
    pub(crate) fn member(&self) -> Option<&Member> {
        self.member.as_ref()
    }

    /// The kind of server that scripts run on.
    pub(crate) fn setting(&self) -> Setting {
        match &self.member {
            Some(member) => Setting::Cluster {
                asking: member.is_asking(),
            },
            None => Setting::Alone,
        }
    }

    /// Microseconds since the session began: what a stamp is called on the server.
    pub(crate) fn micros(&self, stamp: Stamp) -> u64 {
        u64::try_from(stamp.since(self.identity.began).as_micros()).unwrap_or(u64::MAX)
    }

    /// The stamp that is called so on the server.
    pub(crate) fn stamp(&self, micros: u64) -> Stamp {
        self.identity.began + Duration::from_micros(micros)
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
        self.listeners().hold(grant);
    }

    /// Ends the session: what it holds is let go of, if there is a connection for it.
    pub(crate) async fn close(&self) -> Result<(), LockError> {
        let mut outcome = Ok(());
        if let Some(link) = self.current_link() {
            let releasing = async {
                for (claim, reserved_until) in self.listeners().holding() {
                    let rest = reserved_until.map(|until| until.since(self.clock().now()));
                    let keep = rest.filter(|rest| !rest.is_zero());
                    self.release_on(&link, &claim, keep).await?;
                }
                Ok(())
            };
            outcome = self.limited("close", releasing).await;
        }
        self.end();
        outcome
    }

    /// Whether both are sessions with the same node of a cluster, as which it serves the slot.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.settings, &other.settings)
    }

    /// Ends the session, and leaves what it holds to expire.
    pub(crate) fn end(&self) {
        self.line.close();
        self.replicas.iter().for_each(Line::close);
        self.settings.server.close();
        self.member.iter().for_each(Member::close);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.line.is_closed()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("settings", &self.settings)
            .field("client", &self.identity.client)
            .finish_non_exhaustive()
    }
}
