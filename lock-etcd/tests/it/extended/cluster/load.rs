//! Clients that take turns, and a look at what they believe.
//!
//! A leader that was stopped for long revokes, when it goes on, leases that its successor keeps: etcd knows (its issue 15247), and does
//! so still. No client can prevent that. Its holders are told, and until then two may believe:
//! that much is granted when such a leader goes on, and nothing at any other time.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lock_core::{FencingToken, LockGuard, Locks, LossReason};
use lock_etcd::EtcdConfig;
use tokio::task::JoinSet;

use crate::server::HANG_LIMIT;

/// Long enough for an election and a new connection.
pub(crate) const TTL: Duration = Duration::from_secs(8);
const CLIENTS: usize = 8;
const NAMES: usize = 4;

/// What is known of a name.
#[derive(Default)]
struct Name {
    /// Who believes in it.
    holder: Option<Arc<LockGuard>>,
    last: Option<FencingToken>,
}

/// Clients that lock and release.
pub(crate) struct Load {
    shared: Arc<Shared>,
    clients: JoinSet<()>,
}

#[derive(Default)]
struct Shared {
    names: [Mutex<Name>; NAMES],
    grants: [AtomicUsize; NAMES],
    lost: AtomicUsize,
    revoked: AtomicUsize,
    failed: AtomicUsize,
    over: AtomicBool,
    /// Whether a leader goes on that may revoke what its successor keeps.
    stale_leader: AtomicBool,
}

impl Load {
    pub(crate) async fn start(config: impl Fn(usize) -> EtcdConfig) -> Self {
        let shared = Arc::new(Shared::default());
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let lock = config(number)
                .op_timeout(Duration::from_secs(4))
                .connect()
                .await
                .unwrap();
            clients.spawn(take_turns(Locks::new(lock), Arc::clone(&shared)));
        }
        Self { shared, clients }
    }

    /// Waits until each name was granted some times more.
    pub(crate) async fn goes_on(&mut self, after: &str) {
        const MORE: usize = 5;
        let counts = || self.shared.grants.each_ref().map(|count| count.load(Ordering::SeqCst));
        let (before, began) = (counts(), std::time::Instant::now());
        while counts().iter().zip(before).any(|(now, before)| *now < before + MORE) {
            // A client only ends by a panic here: what it found is to be seen at once.
            if let Some(ended) = self.clients.try_join_next() {
                ended.unwrap();
            }
            assert!(
                began.elapsed() < HANG_LIMIT,
                "all names are granted again after {after}: {before:?}, {:?}",
                counts()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        println!(
            "after {after}: {MORE} grants of every name within {:?}",
            began.elapsed()
        );
    }

    /// From now on a leader that was stopped goes on, or none does any more.
    pub(crate) fn stale_leader(&self, goes_on: bool) {
        self.shared.stale_leader.store(goes_on, Ordering::SeqCst);
    }

    pub(crate) async fn end(mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        while let Some(ended) = self.clients.join_next().await {
            ended.unwrap();
        }
        let count = |count: &AtomicUsize| count.load(Ordering::SeqCst);
        let granted: usize = self.shared.grants.iter().map(count).sum();
        let [lost, revoked, failed] = [&self.shared.lost, &self.shared.revoked, &self.shared.failed].map(count);
        println!(
            "{granted} grants, {lost} lost, {failed} failed; {revoked} held a moment longer than a lease that the server revoked, \
             no other overlap; tokens only rose"
        );
    }
}

async fn take_turns(locks: Locks, shared: Arc<Shared>) {
    while !shared.over.load(Ordering::SeqCst) {
        let at = fastrand::usize(..NAMES);
        let asked = locks
            .lock(format!("name/{at}"))
            .ttl(TTL)
            .wait_for(Duration::from_secs(10));
        let Ok(guard) = asked.await else {
            shared.failed.fetch_add(1, Ordering::SeqCst);
            continue;
        };
        let guard = Arc::new(guard);
        if let Some(other) = shared.begins(at, &guard) {
            let may_be = shared.stale_leader.load(Ordering::SeqCst);
            assert!(may_be, "{other:?} and {guard:?} both believe in {at}");
            let told = tokio::time::timeout(HANG_LIMIT, other.lost()).await;
            assert_eq!(
                told,
                Ok(LossReason::Revoked),
                "{other:?} and {guard:?} both believe in {at}"
            );
            shared.revoked.fetch_add(1, Ordering::SeqCst);
        }
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..10))).await;
        shared.ends(at, &guard);
        drop(guard);
    }
    locks.shutdown().await.unwrap();
}

impl Shared {
    /// Returns who believes in the name as well. As it is kept here it is not released, so what ends it can be heard.
    fn begins(&self, at: usize, guard: &Arc<LockGuard>) -> Option<Arc<LockGuard>> {
        let mut name = self.names[at].lock().unwrap_or_else(PoisonError::into_inner);
        // One that has lost it meanwhile was told in time if it knows now.
        if !guard.is_held() {
            return None;
        }
        if let Some(last) = name.last {
            assert!(guard.token() > last, "{} was granted after {last}", guard.token());
        }
        name.last = Some(guard.token());
        self.grants[at].fetch_add(1, Ordering::SeqCst);
        name.holder.replace(Arc::clone(guard)).filter(|other| other.is_held())
    }

    fn ends(&self, at: usize, guard: &Arc<LockGuard>) {
        if !guard.is_held() {
            self.lost.fetch_add(1, Ordering::SeqCst);
        }
        let mut name = self.names[at].lock().unwrap_or_else(PoisonError::into_inner);
        if name.holder.as_ref().is_some_and(|holder| Arc::ptr_eq(holder, guard)) {
            name.holder = None;
        }
    }
}
