//! Waits with a bug.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, LockError, Mode, Stamp, Wait};
use tokio::sync::oneshot;

use super::shared::{Abandoned, Place};
use super::{Broken, Bug};

impl Broken {
    /// As [`DistributedLock::acquire`], after an attempt that found the name busy.
    pub(super) async fn wait(&self, claim: &Claim, deadline: Option<Stamp>) -> Result<Attempt, LockError> {
        let is_over = || deadline.is_some_and(|deadline| self.now() >= deadline);
        // Whoever watches the line may act on it at once, so this one must have its place by then.
        let place = Place::new(&self.shared, claim);
        match self.bug {
            Bug::WakeUpIsLost => match self.try_acquire(claim).await? {
                Attempt::Busy(busy) => {
                    match deadline {
                        Some(deadline) => tokio::time::sleep(deadline.since(self.now())).await,
                        None => std::future::pending().await,
                    }
                    Ok(busy.into())
                }
                granted => Ok(granted),
            },
            Bug::NoCheckAfterTheWait => {
                while self.shared.lock().holder(claim.name()).is_some() {
                    if is_over() {
                        return Ok(Attempt::busy());
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                // All who waited wake up now.
                tokio::time::sleep(Duration::from_millis(5)).await;
                Ok(self.made_up(claim))
            }
            Bug::OnlyItsOwnPlaceIsChecked => {
                while place.is_behind_another() {
                    if is_over() {
                        return Ok(Attempt::busy());
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                // The one before it is gone. That another one before that may still hold is not considered.
                if self.shared.lock().holder(claim.name()).is_some() {
                    return Ok(self.made_up(claim));
                }
                self.try_acquire(claim).await
            }
            Bug::QueueIsOutOfOrder => {
                while place.is_before_another() {
                    if is_over() {
                        return Ok(Attempt::busy());
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                self.poll(claim, deadline).await
            }
            // It is in no queue, where later readers would come after it.
            Bug::ReadersPassAWriter if claim.mode() == Mode::Exclusive => self.poll(claim, deadline).await,
            Bug::CancelLeavesItsEntry => {
                let (inner, entry) = (Arc::clone(&self.inner), claim.clone());
                let (tell, told) = oneshot::channel();
                tokio::spawn(async move {
                    // Whether anyone still waits is not asked.
                    let _ = tell.send(inner.acquire(&entry, Wait::until(deadline)).await);
                });
                let mut abandoned = Abandoned {
                    shared: &self.shared,
                    owner: Some(claim.owner()),
                };
                let answer = told.await.unwrap_or_else(|_| Ok(Attempt::busy()));
                abandoned.owner = None;
                self.answered(claim, answer?)
            }
            _ => {
                let attempt = self.inner.acquire(&self.sent(claim), Wait::until(deadline)).await?;
                self.answered(claim, attempt)
            }
        }
    }

    async fn poll(&self, claim: &Claim, deadline: Option<Stamp>) -> Result<Attempt, LockError> {
        loop {
            let attempt = self.try_acquire(claim).await?;
            if matches!(attempt, Attempt::Granted(_)) || deadline.is_some_and(|deadline| self.now() >= deadline) {
                return Ok(attempt);
            }
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..60))).await;
        }
    }
}
