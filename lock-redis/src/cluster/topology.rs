//! What the client knows of the nodes, and how it finds out.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::{self, FuturesUnordered};
use lock_core::{Claim, Executor, LockError, Released, Stamp};
use tokio::time::{Instant, sleep, sleep_until};

use super::call::Try;
use super::slots::{Endpoint, SLOTS, Slots};
use crate::RedisConfig;
use crate::discovery::Target;
use crate::failure::Failure;
use crate::keys::Keys;
use crate::session::{Identity, Session};

/// After how long without an answer one more node is asked which slots there are.
const STAGGER: Duration = Duration::from_millis(100);

/// How long other nodes may take to answer after one has refused the client.
const OTHERS: Duration = Duration::from_secs(1);

/// How many releases are under way at a time when the client is closed.
const RELEASED: usize = 64;

/// The sessions with the nodes, and which of them serves which slot.
pub(super) struct Topology {
    seeds: Vec<Endpoint>,
    config: RedisConfig,
    keys: Keys,
    executor: Executor,
    identity: Identity,
    known: Mutex<Known>,
    /// How often the slots have been read; one task reads them at a time.
    refreshes: AtomicU64,
    refreshing: tokio::sync::Mutex<()>,
}

struct Known {
    slots: Slots,
    nodes: HashMap<Endpoint, Node>,
    is_closed: bool,
}

/// The session with a node, and the same session for slots that are being moved to it.
#[derive(Clone)]
struct Node {
    settled: Arc<Session>,
    moving: Arc<Session>,
}

impl Topology {
    pub(super) fn new(seeds: Vec<Endpoint>, config: RedisConfig, executor: Executor) -> Result<Self, LockError> {
        // Finds out now what cannot be used.
        let settings = config.clone().settings(executor.clone(), None)?;
        let known = Known {
            slots: Slots::empty(),
            nodes: HashMap::new(),
            is_closed: false,
        };
        Ok(Self {
            seeds,
            keys: settings.keys,
            config,
            executor,
            identity: Identity::new(),
            known: Mutex::new(known),
            refreshes: AtomicU64::new(0),
            refreshing: tokio::sync::Mutex::default(),
        })
    }

    pub(super) fn keys(&self) -> &Keys {
        &self.keys
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(super) fn executor(&self) -> &Executor {
        &self.executor
    }

    pub(super) fn op_timeout(&self) -> Duration {
        self.config.op_timeout
    }

    /// How often the slots have been read.
    pub(super) fn refreshes(&self) -> u64 {
        self.refreshes.load(Ordering::Acquire)
    }

    /// The node that serves the slot, as far as known.
    pub(super) fn owner(&self, slot: u16) -> Option<Endpoint> {
        self.lock().slots.owner(slot).cloned()
    }

    /// All primaries.
    pub(super) fn primaries(&self) -> Vec<Endpoint> {
        self.lock().slots.primaries().to_vec()
    }

    /// How many slots no node serves.
    pub(super) fn unserved(&self) -> usize {
        self.lock().slots.unserved()
    }

    /// Takes note of what a node said.
    pub(super) fn moved(&self, slot: u16, to: Endpoint) {
        self.lock().slots.moved(slot, to);
    }

    /// The session with the node there, for a slot that is only being moved to it if `moving`.
    pub(super) fn session(&self, endpoint: &Endpoint, moving: bool) -> Result<Arc<Session>, LockError> {
        let mut known = self.lock();
        if known.is_closed {
            return Err(LockError::closed());
        }
        let node = match known.nodes.get(endpoint) {
            Some(node) => node,
            None => {
                let node = self.connect(endpoint)?;
                known.nodes.entry(endpoint.clone()).or_insert(node)
            }
        };
        Ok(Arc::clone(if moving { &node.moving } else { &node.settled }))
    }

    fn connect(&self, endpoint: &Endpoint) -> Result<Node, LockError> {
        let mut config = self.config.clone();
        if let Target::Server(place) = &mut config.target {
            *place = place.at(&endpoint.host, endpoint.port);
        }
        let mut settings = config.settings(self.executor.clone(), None)?;
        settings.in_cluster = true;
        let session = Session::of(settings, self.identity.clone());
        Ok(Node {
            moving: Arc::new(session.asking()),
            settled: Arc::new(session),
        })
    }

    /// Reads the slots from the first node that tells, unless that has been done since `refreshes` was read as `seen`.
    ///
    /// Dropping the future stops it.
    pub(super) async fn refresh(&self, seen: u64) -> Result<(), LockError> {
        let _refreshing = self.refreshing.lock().await;
        if self.refreshes() != seen {
            return Ok(());
        }
        let mut candidates = self.candidates().into_iter();
        let (mut asked, mut errors) = (FuturesUnordered::new(), Vec::new());
        // From now on in vain, it seems, but one node that is set up wrong is not the cluster.
        let (mut end, mut other_cluster) = (None, None);
        loop {
            match candidates.next() {
                Some(endpoint) => asked.push(self.ask(endpoint)),
                None if asked.is_empty() => return self.settle(other_cluster, errors),
                None => {}
            }
            tokio::select! {
                biased;
                Some((endpoint, answer)) = asked.next() => match answer {
                    Ok(slots) if self.lock().slots.is_same_cluster(&slots) => {
                        self.learn(slots);
                        return Ok(());
                    }
                    Ok(slots) => {
                        end.get_or_insert(Instant::now() + OTHERS);
                        other_cluster.get_or_insert((endpoint, slots));
                    }
                    Err(error) => {
                        if !error.is_retryable() {
                            end.get_or_insert(Instant::now() + OTHERS);
                        }
                        errors.push((endpoint, error));
                    }
                },
                () = until(end) => return self.settle(other_cluster, errors),
                () = sleep(STAGGER) => {}
            }
        }
    }

    /// What to make of it if no node of the cluster answers. One at the place of a node that was in it may have been set up anew; one that
    /// only the address names belongs to a cluster that does not know of these locks.
    fn settle(
        &self,
        other_cluster: Option<(Endpoint, Slots)>,
        errors: Vec<(Endpoint, LockError)>,
    ) -> Result<(), LockError> {
        let Some((endpoint, slots)) = other_cluster else {
            return Err(none_answers(errors));
        };
        let was_in_it = {
            let known = &self.lock().slots;
            known.primaries().contains(&endpoint) || known.replicas().contains(&endpoint)
        };
        if was_in_it {
            self.learn(slots);
            return Ok(());
        }
        Err(LockError::unavailable(
            "connecting",
            format!(
                "no node of the cluster answers but {endpoint}, which belongs to another cluster: correct the address. If the cluster was \
                 replaced by that one, start this client anew"
            ),
        ))
    }

    /// Whom to ask: those that are known, each time in another order, and then the seeds.
    fn candidates(&self) -> Vec<Endpoint> {
        let known = self.lock();
        let mut all = known.slots.primaries().to_vec();
        if !all.is_empty() {
            let first = usize::try_from(self.refreshes()).unwrap_or_default() % all.len();
            all.rotate_left(first);
        }
        for other in known.slots.replicas().iter().chain(&self.seeds) {
            if !all.contains(other) {
                all.push(other.clone());
            }
        }
        all
    }

    async fn ask(&self, endpoint: Endpoint) -> (Endpoint, Result<Slots, LockError>) {
        let asking = async {
            let session = self.session(&endpoint, false)?;
            let asking = async {
                let mut question = redis::cmd("CLUSTER");
                let answer = session.link().await?.ask(question.arg("SLOTS")).await?;
                let slots = Slots::read(answer, &endpoint).ok_or(Failure::Nonsense)?;
                // It has been reset, or is not in the cluster yet.
                if slots.primaries().is_empty() {
                    return Err(LockError::unavailable("connecting", "it knows no node that serves any slot").into());
                }
                Ok(slots)
            };
            session.limited("asking for the nodes of the cluster", asking).await
        };
        let answer = asking.await;
        (endpoint, answer)
    }

    /// Replaces what is known of the slots, and ends the sessions with nodes that serve none any more.
    fn learn(&self, slots: Slots) {
        let mut known = self.lock();
        let old = std::mem::take(&mut known.nodes);
        let (stays, ends): (HashMap<_, _>, HashMap<_, _>) = old
            .into_iter()
            .partition(|(endpoint, _)| slots.primaries().contains(endpoint));
        known.nodes = stays;
        known.slots = slots;
        drop(known);
        for node in ends.into_values() {
            node.settled.end();
        }
        self.refreshes.fetch_add(1, Ordering::AcqRel);
    }

    /// Why a name of that slot is not served.
    pub(super) fn not_served(&self, operation: &'static str, slot: u16) -> LockError {
        let unserved = self.unserved();
        LockError::unavailable(
            operation,
            match unserved {
                0 => format!(
                    "the cluster is down for slot {slot}, in which this name is: look at CLUSTER INFO and CLUSTER SHARDS of its nodes"
                ),
                _ => format!(
                    "no node of the cluster serves slot {slot}, in which this name is, or others are not served and \
                     cluster-require-full-coverage is on: {unserved} of {SLOTS} slots have no node. Look at CLUSTER SHARDS, and assign \
                     them"
                ),
            },
        )
    }

    /// Releases what the client holds, and ends all sessions for good.
    pub(super) async fn release_all(self: &Arc<Self>) -> Result<(), LockError> {
        // Also if this is dropped.
        let _closing = Closing(self);
        // Those of each node apart, so that one that does not answer keeps no other from being asked.
        let mut of_nodes = HashMap::<_, Vec<_>>::new();
        for (claim, reserved_until) in self.identity.listeners.holding() {
            let owner = self.owner(self.slot(claim.name()));
            of_nodes.entry(owner).or_default().push((claim, reserved_until));
        }
        let releasing = of_nodes.into_values().map(|held| {
            let releases = held
                .into_iter()
                .map(|(claim, reserved_until)| self.release_held(claim, reserved_until));
            stream::iter(releases).buffer_unordered(RELEASED).collect::<Vec<_>>()
        });
        let released = join_all(releasing).await;
        released
            .into_iter()
            .flatten()
            .try_for_each(|released| released.map(drop))
    }

    async fn release_held(
        self: &Arc<Self>,
        claim: Claim,
        reserved_until: Option<Stamp>,
    ) -> Result<Released, LockError> {
        let now = self.identity.clock.now();
        let rest = reserved_until
            .map(|until| until.since(now))
            .filter(|rest| !rest.is_zero());
        let (claim, slot) = (&claim, self.slot(claim.name()));
        let releasing = |Try { session, .. }: Try| async move {
            let link = session.link().await?;
            session.release_on(&link, claim, rest).await
        };
        self.call("close", slot, true, releasing).await
    }

    /// Ends all sessions for good.
    pub(super) fn close(&self) {
        let mut known = self.lock();
        known.is_closed = true;
        let nodes = std::mem::take(&mut known.nodes);
        drop(known);
        for node in nodes.into_values() {
            node.settled.end();
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Nothing here panics while holding the mutex.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes the client when it is dropped.
struct Closing<'a>(&'a Topology);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl fmt::Debug for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Topology")
            .field("seeds", &self.seeds)
            .field("config", &self.config)
            .field("client", &self.identity.client)
            .finish_non_exhaustive()
    }
}

async fn until(end: Option<Instant>) {
    match end {
        Some(end) => sleep_until(end).await,
        None => std::future::pending().await,
    }
}

/// Why the slots are not known. What no retry mends comes first.
fn none_answers(mut errors: Vec<(Endpoint, LockError)>) -> LockError {
    if let Some(first) = errors.iter().position(|(_, error)| !error.is_retryable()) {
        return errors.swap_remove(first).1;
    }
    let asked: Vec<_> = errors.iter().map(|(endpoint, _)| endpoint.to_string()).collect();
    let message = format!("no node of the cluster answers; asked were {}", asked.join(", "));
    let error = LockError::unavailable("connecting", message);
    match errors.pop() {
        Some((_, cause)) => error.with_source(cause),
        None => error,
    }
}
