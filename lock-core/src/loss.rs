//! How a holder learns that it holds no more.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use crate::alarm::Alarm;
use crate::process::Process;
use crate::sync::Notify;
use crate::sync::atomic::{AtomicU8, Ordering, fence};

/// Why a lock is no longer held. Terminal: a lost guard never comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
#[repr(u8)]
pub enum LossReason {
    /// The lease was not renewed in time; the server may have let go by now.
    #[error("the lease ran out before it could be renewed")]
    Expired = 1,
    /// The server said that this owner does not hold the lock: it was taken away, deleted, or forced free.
    #[error("it was released by force or deleted, or it expired where it is kept")]
    NotHeld = 2,
    /// What kept the lock alive ended early: a session was closed or a lease revoked.
    #[error("the server ended the session or lease that kept the lock")]
    Revoked = 3,
    /// The time set with `max_hold` is over.
    #[error("the longest permitted hold is over")]
    MaxHold = 4,
    /// The client was shut down while the lock was held.
    #[error("the lock client was shut down")]
    Shutdown = 5,
    /// The holder itself let go: the guard was released or dropped.
    #[error("the guard was released")]
    Released = 6,
    /// The runtime that the client was given ([`Options::runtime`](crate::Options::runtime)) has ended, and nothing renews the lock.
    #[error("the runtime of the lock client has ended")]
    RuntimeEnded = 7,
}

impl LossReason {
    fn from_code(code: u8) -> Option<Self> {
        [
            Self::Expired,
            Self::NotHeld,
            Self::Revoked,
            Self::MaxHold,
            Self::Shutdown,
            Self::Released,
            Self::RuntimeEnded,
        ]
        .into_iter()
        .find(|reason| *reason as u8 == code)
    }
}

/// Whether something has been revoked, and why. Only whoever holds the [`Revoker`] can fire it, once.
#[derive(Clone)]
pub struct Revocation(Arc<Cell>);

/// Fires a [`Revocation`]: the backend's way to say that the server let go early.
#[derive(Clone)]
pub struct Revoker(Arc<Cell>);

struct Cell {
    code: AtomicU8,
    notify: Notify,
    /// What to raise, and the lease and the guard or lease on it that it is about.
    alarm: OnceLock<(Arc<Alarm>, u64, usize)>,
}

impl Revocation {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Cell {
            code: AtomicU8::new(0),
            notify: Notify::new(),
            alarm: OnceLock::new(),
        }))
    }

    pub(crate) fn revoker(&self) -> Revoker {
        Revoker(Arc::clone(&self.0))
    }

    /// Tells it from all others that are alive.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Has `alarm` raised when it fires, or now if it has fired already: `about` is the [`id`](Self::id) of that lease's revocation, or of the
    /// grant's on it.
    pub(crate) fn alarm(&self, alarm: &Arc<Alarm>, lease: u64, about: usize) {
        let _ = self.0.alarm.set((Arc::clone(alarm), lease, about));
        fence(Ordering::SeqCst);
        if self.reason().is_some() {
            alarm.revoked(lease, about);
        }
    }

    /// Fires; the first reason stays. True if it was this call that fired.
    pub(crate) fn fire(&self, reason: LossReason) -> bool {
        let first = self.fire_quietly(reason);
        if first {
            raise(&self.0);
        }
        first
    }

    /// Fires without raising the alarm.
    pub(crate) fn fire_quietly(&self, reason: LossReason) -> bool {
        self.0.fire(reason)
    }

    /// Why it was revoked, or `None` if it was not.
    #[must_use]
    pub fn reason(&self) -> Option<LossReason> {
        LossReason::from_code(self.0.code.load(Ordering::Acquire))
    }

    /// Completes when it is revoked. Cancellation-safe.
    pub async fn revoked(&self) -> LossReason {
        loop {
            let notified = self.0.notify.notified();
            tokio::pin!(notified);
            // Registered before the look, so that a revocation between the two is not missed.
            notified.as_mut().enable();
            if let Some(reason) = self.reason() {
                return reason;
            }
            notified.await;
        }
    }
}

impl Revoker {
    /// Revokes for that reason. Later calls change nothing.
    pub fn revoke(&self, reason: LossReason) {
        if self.0.fire(reason) {
            raise(&self.0);
        }
    }
}

fn raise(cell: &Arc<Cell>) {
    // So that this look and the one in `alarm` do not both miss the other's write.
    fence(Ordering::SeqCst);
    if let Some((alarm, lease, about)) = cell.alarm.get() {
        alarm.revoked(*lease, *about);
    }
}

impl Cell {
    fn fire(&self, reason: LossReason) -> bool {
        let first = self
            .code
            .compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Acquire)
            .is_ok();
        if first {
            self.notify.notify_waiters();
        }
        first
    }
}

impl fmt::Debug for Revocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Revocation").field(&self.reason()).finish()
    }
}

impl fmt::Debug for Revoker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Revoker").finish_non_exhaustive()
    }
}

/// Tells when a guard stops holding its lock, however that happens. Awaiting it yields the [`LossReason`].
///
/// It borrows nothing and may be cloned into other tasks. It also ends, with [`LossReason::Released`], when the guard
/// is released, so that a task that watches it never outlives the lock.
#[derive(Clone, Debug)]
pub struct LossSignal {
    pub(crate) own: Revocation,
    pub(crate) grant: Revocation,
    pub(crate) lease: Revocation,
    pub(crate) process: Arc<Process>,
}

impl LossSignal {
    /// Waits for the loss. Cancellation-safe. In a forked child it is [`LossReason::Expired`] at once, as nothing renews the lease there.
    pub async fn wait(&self) -> LossReason {
        if !self.process.is_current() {
            return LossReason::Expired;
        }
        let reason = tokio::select! {
            biased;
            reason = self.own.revoked() => return reason,
            reason = self.grant.revoked() => reason,
            reason = self.lease.revoked() => reason,
        };
        // A release at the same time finds the guard lost, or has ended it before: all are told the same.
        self.own.fire(reason);
        self.own.reason().unwrap_or(reason)
    }

    /// Why the lock was lost before it was released, for a release that found it lost.
    pub(crate) fn before_release(&self) -> LossReason {
        let reason = self.own.reason().filter(|reason| *reason != LossReason::Released);
        reason.unwrap_or(LossReason::NotHeld)
    }
}

impl IntoFuture for LossSignal {
    type Output = LossReason;
    type IntoFuture = Pin<Box<dyn Future<Output = LossReason> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.wait().await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays() {
        let revocation = Revocation::new();
        assert_eq!(revocation.reason(), None);
        assert!(revocation.fire(LossReason::NotHeld));
        assert!(!revocation.fire(LossReason::Expired));
        assert_eq!(revocation.reason(), Some(LossReason::NotHeld));
    }

    #[tokio::test]
    async fn everyone_who_waits_is_told() {
        let revocation = Revocation::new();
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let revocation = revocation.clone();
                tokio::spawn(async move { revocation.revoked().await })
            })
            .collect();
        tokio::task::yield_now().await;
        revocation.revoker().revoke(LossReason::Revoked);
        for task in waiting {
            assert_eq!(task.await.unwrap(), LossReason::Revoked);
        }
    }
}
