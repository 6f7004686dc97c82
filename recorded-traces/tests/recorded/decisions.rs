//! A backend that counts what it grants, and that can end as the process of a client does.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Lease, LockError, Released, Renewal, Wait, async_trait,
};
use tokio::sync::watch;

/// How many grants there were.
#[derive(Clone, Debug, Default)]
pub(crate) struct Decisions(Arc<AtomicUsize>);

impl Decisions {
    pub(crate) fn grants(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A backend whose grants are counted.
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
        if let Attempt::Granted(_) = attempt {
            self.decisions.0.fetch_add(1, Ordering::Relaxed);
        }
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
        self.alive(self.backend.release(claim, keep)).await
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        self.attempt(self.backend.acquire(claim, wait)).await
    }

    async fn close(&self) -> Result<(), LockError> {
        self.alive(self.backend.close()).await
    }
}
