//! Waits with a bug.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, LockError, Mode, Stamp, Wait};
use tokio::sync::oneshot;

use super::shared::{Abandoned, InLine, Place};
use super::{Broken, Bug};

impl Broken {
    /// As [`DistributedLock::acquire`].
    pub(super) async fn wait(&self, claim: &Claim, deadline: Option<Stamp>) -> Result<Attempt, LockError> {
        let now = || self.now();
        let in_line = || InLine::new(&self.shared, claim.name());
        // Whoever watches that one may act on it at once, so it must have its place by then.
        let _in_line = (!self.is(Bug::OnlyItsOwnPlaceIsChecked)).then(in_line);
        match self.bug {
            Bug::WaitReturnsAtOnce | Bug::RefusalMayPass => self.try_acquire(claim).await,
            Bug::WaitRunsPastItsDeadline => self.inner.acquire(claim, Wait::until(None)).await,
            Bug::WakeUpIsLost => match self.try_acquire(claim).await? {
                Attempt::Busy(busy) => {
                    match deadline {
                        Some(deadline) => tokio::time::sleep(deadline.since(now())).await,
                        None => std::future::pending().await,
                    }
                    Ok(busy.into())
                }
                granted => Ok(granted),
            },
            Bug::NoCheckAfterTheWait => {
                if let granted @ Attempt::Granted(_) = self.try_acquire(claim).await? {
                    return Ok(granted);
                }
                while self.shared.lock().holder(claim.name()).is_some() {
                    if deadline.is_some_and(|deadline| now() >= deadline) {
                        return Ok(Attempt::busy());
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                // All who waited wake up now.
                tokio::time::sleep(Duration::from_millis(5)).await;
                Ok(self.made_up(claim))
            }
            Bug::OnlyItsOwnPlaceIsChecked => {
                if let granted @ Attempt::Granted(_) = self.try_acquire(claim).await? {
                    return Ok(granted);
                }
                let place = Place::new(&self.shared, claim);
                let _in_line = in_line();
                while place.is_behind_somebody() {
                    if deadline.is_some_and(|deadline| now() >= deadline) {
                        return Ok(Attempt::busy());
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                // Whoever was before it is gone. That somebody before that one may still hold is not considered.
                if self.shared.lock().holder(claim.name()).is_some() {
                    return Ok(self.made_up(claim));
                }
                self.try_acquire(claim).await
            }
            Bug::QueueIsOutOfOrder => self.poll(claim, deadline).await,
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
