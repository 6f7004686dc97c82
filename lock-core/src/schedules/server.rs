//! A server that takes its time, and notes which claims of a client it may know.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use super::dawdle;
use crate::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, HandOver, Holder, Lease, LockError, LockName, Locks,
    MemoryLock, OwnerId, Released, Renewal, Wait,
};

/// How often other tasks may run before a request is worked on, and again before it is answered.
const TRIP: usize = 2;

/// The way of one client to the store.
#[derive(Debug)]
pub(super) struct Server {
    memory: MemoryLock,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The claims that are at the server: from when they are sent until it said that it knows them no longer.
    claims: HashMap<LockName, HashSet<OwnerId>>,
    too_many: Option<String>,
}

/// A client, and what its server sees of it.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) locks: Locks,
    pub(super) memory: Arc<MemoryLock>,
    seen: Arc<Mutex<Seen>>,
}

impl Client {
    pub(super) fn of(memory: &MemoryLock) -> Self {
        let own = Arc::new(memory.client());
        let seen = Arc::default();
        let server = Server {
            memory: memory.client(),
            seen: Arc::clone(&seen),
        };
        Self {
            locks: Locks::new(server),
            memory: own,
            seen,
        }
    }

    /// At no time was more than one claim for a name at the server, and none is left there. So it is if each release is answered: a
    /// claim whose release ran out of time stays behind until its ttl is over.
    pub(super) fn sent_one_claim_at_a_time(&self) {
        let seen = self.seen.lock().unwrap();
        assert_eq!(seen.too_many, None);
        assert!(seen.claims.is_empty(), "the server may know of {:?}", seen.claims);
    }

    /// Waits until nothing is under way.
    pub(super) async fn settle(&self) {
        while self.locks.stats().waiting > 0 {
            shuttle::future::yield_now().await;
        }
        self.locks.drain().await;
    }

    /// The client holds, asks for and remembers nothing.
    pub(super) fn is_idle(&self) {
        let core = &self.locks.core;
        let stats = self.locks.stats();
        assert_eq!((stats.waiting, stats.held, stats.releasing), (0, 0, 0));
        assert!(core.queue.is_idle(), "{:?}", core.queue);
        assert!(core.watchdog.is_idle(), "{:?}", core.watchdog);
    }

    /// Nothing is held or waited for at the server by any client.
    pub(super) async fn server_keeps_nothing(&self) {
        let held = self.memory.list("").await.unwrap();
        assert!(held.is_empty(), "{held:?}");
        assert_eq!(self.memory.waiters(), 0);
    }
}

impl Server {
    /// `claim` is on its way to the server, beside `other` at most.
    fn sends(&self, claim: &Claim, other: Option<&Claim>) {
        let mut seen = self.seen.lock().unwrap();
        let claims = seen.claims.entry(claim.name().clone()).or_default();
        claims.insert(claim.owner());
        let known = [Some(claim.owner()), other.map(Claim::owner)];
        let too_many = claims.iter().any(|owner| !known.contains(&Some(*owner)));
        // A panic would be an error of the backend for the client. The test looks at the end.
        if too_many {
            seen.too_many = Some(format!("{claim:?} was sent beside another one"));
        }
    }

    /// The server does not know the claim any more.
    fn forgets(&self, claim: &Claim) {
        let mut seen = self.seen.lock().unwrap();
        if let Some(claims) = seen.claims.get_mut(claim.name()) {
            claims.remove(&claim.owner());
            if claims.is_empty() {
                seen.claims.remove(claim.name());
            }
        }
    }

    fn answers(&self, claim: &Claim, answer: &Result<Attempt, LockError>) {
        if let Ok(Attempt::Busy(_)) = answer {
            self.forgets(claim);
        }
    }
}

#[async_trait]
impl DistributedLock for Server {
    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.sends(claim, None);
        dawdle(TRIP).await;
        let answer = self.memory.try_acquire(claim).await;
        dawdle(TRIP).await;
        self.answers(claim, &answer);
        answer
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        dawdle(TRIP).await;
        let answer = self.memory.renew(lease).await;
        dawdle(TRIP).await;
        answer
    }

    async fn release(&self, claim: &Claim) -> Result<Released, LockError> {
        dawdle(TRIP).await;
        let answer = self.memory.release(claim).await;
        dawdle(TRIP).await;
        self.forgets(claim);
        answer
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        self.sends(claim, None);
        dawdle(TRIP).await;
        let answer = self.memory.acquire(claim, wait).await;
        dawdle(TRIP).await;
        self.answers(claim, &answer);
        answer
    }

    async fn hand_over(&self, from: &Claim, to: &Claim) -> Result<HandOver, LockError> {
        self.sends(to, Some(from));
        dawdle(TRIP).await;
        let handed = self.memory.hand_over(from, to).await;
        dawdle(TRIP).await;
        if let Ok(handed) = &handed {
            self.forgets(from);
            if let Attempt::Busy(_) = handed.to {
                self.forgets(to);
            }
        }
        handed
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.memory.list(prefix).await
    }

    async fn close(&self) -> Result<(), LockError> {
        dawdle(TRIP).await;
        self.memory.close().await
    }

    fn clock(&self) -> Clock {
        self.memory.clock()
    }
}
