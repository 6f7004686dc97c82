//! A backend that records what its coordinator decides, and that can end as the process of a client does.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, Lease, LockError, OwnerId, Released, Renewal, Stamp, Wait,
    async_trait,
};
use tokio::sync::watch;

/// What coordinators decided, in the order of their clock, which is that of the servers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Decisions(Arc<Mutex<Vec<Decision>>>);

#[derive(Clone, Debug)]
pub(crate) struct Decision {
    /// In microseconds.
    pub(crate) at: u64,
    pub(crate) owner: OwnerId,
    /// What was granted; none if the acquisition ended.
    pub(crate) granted: Option<(u64, Lease)>,
}

impl Decisions {
    fn note(&self, owner: OwnerId, granted: Option<(u64, Lease)>) {
        let at = micros();
        self.0.lock().unwrap().push(Decision { at, owner, granted });
    }

    fn attempted(&self, attempt: &Attempt) {
        if let Attempt::Granted(grant) = attempt {
            let granted = (grant.token.get(), grant.lease.clone());
            self.note(grant.claim.owner(), Some(granted));
        }
    }

    pub(crate) fn grants(&self) -> usize {
        let decisions = self.0.lock().unwrap();
        decisions.iter().filter(|decision| decision.granted.is_some()).count()
    }

    pub(crate) fn take(&self) -> Vec<Decision> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// The reading of the clock that the servers have too, in microseconds.
pub(crate) fn micros() -> u64 {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap();
    u64::try_from(now.as_micros()).unwrap()
}

/// That stamp by the same clock.
pub(crate) fn micros_at(stamp: Stamp) -> u64 {
    let (now, here) = (Clock::system().now(), micros());
    let between = |later: Stamp, earlier: Stamp| u64::try_from(later.since(earlier).as_micros()).unwrap();
    here + between(stamp, now) - between(now, stamp)
}

/// A backend whose decisions are recorded.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) backend: Box<dyn DistributedLock>,
    pub(crate) decisions: Decisions,
    /// True once the client has ended: nothing more reaches the servers.
    pub(crate) dead: watch::Receiver<bool>,
}

impl Recorded {
    async fn alive<T>(&self, work: impl Future<Output = Result<T, LockError>> + Send) -> Result<T, LockError> {
        let mut dead = self.dead.clone();
        tokio::select! {
            biased;
            _ = dead.wait_for(|dead| *dead) => Err(LockError::closed()),
            done = work => done,
        }
    }

    async fn attempt(
        &self,
        work: impl Future<Output = Result<Attempt, LockError>> + Send,
    ) -> Result<Attempt, LockError> {
        let attempt = self.alive(work).await?;
        self.decisions.attempted(&attempt);
        Ok(attempt)
    }
}

#[async_trait]
impl DistributedLock for Recorded {
    fn capabilities(&self) -> Capabilities {
        self.backend.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.attempt(self.backend.try_acquire(claim)).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.alive(self.backend.renew(lease)).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        if !*self.dead.borrow() {
            self.decisions.note(claim.owner(), None);
        }
        self.alive(self.backend.release(claim, keep)).await
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        self.attempt(self.backend.acquire(claim, wait)).await
    }

    async fn close(&self) -> Result<(), LockError> {
        self.alive(self.backend.close()).await
    }
}
