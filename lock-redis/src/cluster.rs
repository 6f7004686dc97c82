//! Which node of a Redis Cluster a request goes to.
//!
//! Each name is served by the primary of its slot, by the same scripts as on a server of its own. Requests follow the slot where it goes. While
//! it is moved, a script of several keys could be stopped in the middle; such scripts name one more key, which is never stored, so that the
//! nodes refuse them as a whole. A renewal needs the key of the lock alone, and is served by the node that has it.
//!
//! On each connection the client is subscribed to a channel of its own that ends with the run id of the node. The nodes pass messages on to
//! each other, so a waiter is told of its grant although its slot has moved; and the number of receivers counts only at the node of that run id.

mod slots;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::future::try_join_all;
use futures_util::stream::FuturesUnordered;
use lock_core::{LockError, LockName};
use lock_transport::{Endpoint, Reconnecting, within};
use redis::{ErrorKind, ServerErrorKind};
use tokio::time::{Instant, sleep, sleep_until};

use crate::config::joined;
use crate::connection::Connection;
use crate::error::Failure;
use crate::router::{Discovery, Next, Opening, Router};
use crate::settings::Settings;
use crate::transport::Place;
use slots::{Redirect, SLOTS, Slots, slot};

/// After how long without an answer one more node is asked which slots there are.
const STAGGER: Duration = Duration::from_millis(100);

/// How long other nodes may take to answer after one has refused the client.
const OTHERS: Duration = Duration::from_secs(1);

/// After how long without an answer a request looks whether another node serves the slot by now.
const SILENCE: Duration = Duration::from_secs(1);

/// The connections to the nodes, and which of those serves which slot.
pub(crate) struct Cluster {
    seeds: Vec<Place>,
    settings: Arc<Settings>,
    known: Mutex<Known>,
    /// How often the slots have been read; one task reads them at a time.
    refreshes: AtomicU64,
    refreshing: tokio::sync::Mutex<()>,
}

struct Known {
    slots: Slots,
    nodes: HashMap<Endpoint, Reconnecting<Opening>>,
    /// Why the slots could not be read the last time.
    trouble: Option<LockError>,
    is_closed: bool,
}

#[async_trait]
impl Router for Arc<Cluster> {
    async fn connection(&self, name: &LockName) -> Result<Connection, Failure> {
        let slot = self.slot(name);
        if self.owner(slot).is_none() {
            self.refresh().await?;
        }
        let owner = self.owner(slot);
        let owner = owner.ok_or_else(|| self.not_served("connecting", slot))?;
        let node = self.node(&owner)?;
        tokio::select! {
            biased;
            opened = node.get() => Ok(Connection::new(opened?)),
            () = self.left(slot, Some(&owner)) => Err(Failure::Broken),
        }
    }

    async fn all(&self) -> Result<Vec<Connection>, Failure> {
        self.refresh().await?;
        let primaries = self.lock().slots.primaries.clone();
        try_join_all(primaries.iter().map(|primary| self.connected(primary))).await
    }

    async fn failed(
        &self,
        operation: &'static str,
        name: &LockName,
        at: Option<&Connection>,
        failure: Failure,
    ) -> Next {
        if self.lock().is_closed {
            return Next::Fail(LockError::closed());
        }
        let slot = self.slot(name);
        let asked = at
            .and_then(|at| at.place().endpoint().cloned())
            .or_else(|| self.owner(slot));
        let down = ErrorKind::Server(ServerErrorKind::ClusterDown);
        let is_down = matches!(&failure, Failure::Redis(error) if error.kind() == down);
        let redirect = Redirect::after(&failure, asked.as_ref());
        let mut error = failure.explain(operation);
        match redirect {
            Redirect::Moved(to) => {
                self.lock().slots.moved(slot, to);
                // Beside other requests. Without a runtime the next request fails.
                let cluster = Arc::clone(self);
                let refreshed = self
                    .settings
                    .executor
                    .spawn(async move { drop(cluster.refresh().await) });
                drop(refreshed);
                Next::Retry(error)
            }
            Redirect::Moving(to) => match self.connected(&to).await {
                Ok(connection) => Next::Ask(connection.asking()),
                Err(failure) => Next::Retry(failure.explain(operation)),
            },
            Redirect::Again => Next::Retry(error),
            Redirect::Refused => match self.refresh().await {
                Ok(()) if is_down || self.owner(slot).is_none() => Next::Retry(self.not_served(operation, slot)),
                Ok(()) => Next::Retry(error),
                Err(error) if error.is_retryable() => Next::Retry(error),
                Err(error) => Next::Fail(error),
            },
            Redirect::Fail => {
                // Which node it is that has to be mended.
                if let (Some(asked), LockError::Configuration(info)) = (&asked, &mut error) {
                    info.message += &format!(". This is node {asked}");
                }
                // It may have been set up wrong when another one had taken its place.
                match self.refresh().await.is_ok() && self.owner(slot) != asked {
                    true => Next::Retry(error),
                    false => Next::Fail(error),
                }
            }
        }
    }

    /// Looks for another node after a silence, because one that is cut off does not say so.
    async fn moved(&self, name: &LockName, at: &Connection) {
        self.left(self.slot(name), at.place().endpoint()).await;
    }

    fn trouble(&self) -> Option<LockError> {
        self.lock().trouble.clone()
    }

    fn unserved(&self) -> usize {
        self.lock().slots.unserved()
    }

    fn close(&self) {
        let mut known = self.lock();
        known.is_closed = true;
        let nodes = std::mem::take(&mut known.nodes);
        drop(known);
        nodes.values().for_each(Reconnecting::close);
    }

    fn is_closed(&self) -> bool {
        self.lock().is_closed
    }
}

impl Cluster {
    /// Starts without a connection. Each of the seeds is given by host and port.
    pub(crate) fn new(seeds: Vec<Place>, settings: Arc<Settings>) -> Arc<Self> {
        let known = Known {
            slots: Slots::empty(),
            nodes: HashMap::new(),
            trouble: None,
            is_closed: false,
        };
        Arc::new(Self {
            seeds,
            settings,
            known: Mutex::new(known),
            refreshes: AtomicU64::new(0),
            refreshing: tokio::sync::Mutex::default(),
        })
    }

    fn slot(&self, name: &LockName) -> u16 {
        slot(&self.settings.keys.lock(name))
    }

    /// The node that serves the slot, as far as known.
    fn owner(&self, slot: u16) -> Option<Endpoint> {
        self.lock().slots.owner(slot).cloned()
    }

    /// Completes when another node than `asked` serves the slot. It looks after each [`SILENCE`].
    async fn left(&self, slot: u16, asked: Option<&Endpoint>) {
        loop {
            sleep(SILENCE).await;
            // If it fails there is no other node to ask.
            let _ = self.refresh().await;
            if self.owner(slot).as_ref() != asked {
                return;
            }
        }
    }

    /// The connection to the node there.
    fn node(&self, endpoint: &Endpoint) -> Result<Reconnecting<Opening>, LockError> {
        let mut known = self.lock();
        if known.is_closed {
            return Err(LockError::closed());
        }
        let place = || self.seeds[0].at(endpoint.clone());
        let new = || Opening::reconnecting(Discovery::Fixed(place()), &self.settings);
        Ok(known.nodes.entry(endpoint.clone()).or_insert_with(new).clone())
    }

    async fn connected(&self, endpoint: &Endpoint) -> Result<Connection, Failure> {
        Ok(Connection::new(self.node(endpoint)?.get().await?))
    }

    /// Reads the slots from the first node that tells, unless another task does so meanwhile.
    ///
    /// Dropping the future stops it.
    async fn refresh(&self) -> Result<(), LockError> {
        let seen = self.refreshes.load(Ordering::Acquire);
        let _refreshing = self.refreshing.lock().await;
        if self.refreshes.load(Ordering::Acquire) != seen {
            return Ok(());
        }
        let read = self.read_slots().await;
        self.lock().trouble = read.as_ref().err().cloned();
        read
    }

    async fn read_slots(&self) -> Result<(), LockError> {
        let mut candidates = self.candidates().into_iter();
        let (mut asked, mut errors) = (FuturesUnordered::new(), Vec::new());
        // From now on in vain, it seems, but one node that is set up wrong is not the cluster.
        let (mut end, mut other_cluster) = (None, None);
        loop {
            match candidates.next() {
                Some(endpoint) => asked.push(self.ask(endpoint)),
                None if asked.is_empty() => break,
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
                () = sleep_until(end.unwrap_or_else(Instant::now)), if end.is_some() => break,
                () = sleep(STAGGER) => {}
            }
        }
        let Some((endpoint, slots)) = other_cluster else {
            return Err(none_answers(errors));
        };
        // A node at the place of one that was in the cluster may have been set up anew. One that only the address names belongs to a cluster
        // that does not know of these locks.
        let known = self.lock().slots.clone();
        if known.primaries.contains(&endpoint) || known.replicas.contains(&endpoint) {
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

    /// The nodes to ask: those that are known, each time in another order, and then the seeds.
    fn candidates(&self) -> Vec<Endpoint> {
        let known = self.lock();
        let mut all = known.slots.primaries.clone();
        let first = usize::try_from(self.refreshes.load(Ordering::Acquire)).unwrap_or_default() % all.len().max(1);
        all.rotate_left(first);
        all.extend(known.slots.replicas.iter().cloned());
        all.extend(self.seeds.iter().filter_map(Place::endpoint).cloned());
        let mut seen = HashSet::new();
        all.retain(|endpoint| seen.insert(endpoint.clone()));
        all
    }

    async fn ask(&self, endpoint: Endpoint) -> (Endpoint, Result<Slots, LockError>) {
        const OPERATION: &str = "asking for the nodes of the cluster";
        let asking = async {
            let connection = self.connected(&endpoint).await?;
            let answer = connection.request(redis::cmd("CLUSTER").arg("SLOTS")).await?;
            let slots = Slots::read(answer, &endpoint).ok_or(Failure::Nonsense)?;
            // It has been reset, or is not in the cluster yet.
            if slots.primaries.is_empty() {
                return Err(LockError::unavailable("connecting", "it knows no node that serves any slot").into());
            }
            Ok::<_, Failure>(slots)
        };
        let answer = within(self.settings.config.op_timeout, OPERATION, asking).await;
        (endpoint, answer.map_err(|failure| failure.explain(OPERATION)))
    }

    /// Replaces what is known of the slots, and closes the connections to nodes that serve none any more.
    fn learn(&self, slots: Slots) {
        let mut known = self.lock();
        let old = std::mem::take(&mut known.nodes);
        let serves = |(endpoint, _): &(Endpoint, _)| slots.primaries.contains(endpoint);
        let (stays, ends): (HashMap<_, _>, HashMap<_, _>) = old.into_iter().partition(serves);
        known.nodes = stays;
        known.slots = slots;
        drop(known);
        ends.values().for_each(Reconnecting::close);
        self.refreshes.fetch_add(1, Ordering::AcqRel);
    }

    /// Why a name of that slot is not served.
    fn not_served(&self, operation: &'static str, slot: u16) -> LockError {
        let unserved = self.lock().slots.unserved();
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

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Nothing here panics while holding the mutex.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why the slots are not known. What no retry mends comes first.
fn none_answers(mut errors: Vec<(Endpoint, LockError)>) -> LockError {
    if let Some(first) = errors.iter().position(|(_, error)| !error.is_retryable()) {
        return errors.swap_remove(first).1;
    }
    let asked = joined(errors.iter().map(|(endpoint, _)| endpoint));
    let error = LockError::unavailable(
        "connecting",
        format!("no node of the cluster answers; asked were {asked}"),
    );
    match errors.pop() {
        Some((_, cause)) => error.with_source(cause),
        None => error,
    }
}
