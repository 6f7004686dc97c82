//! How a holder learns that it holds no more.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::process::{Process, Serial};

/// Why a lock is no longer held. Terminal: a lost guard never comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease was not renewed in time; the server may have freed the lock by now.
    #[error("the lease ran out before it could be renewed")]
    Expired,
    /// The server said that this owner does not hold the lock: it was taken away, deleted, or forced free.
    #[error("it was released by force or deleted, or it expired where it is kept")]
    NotHeld,
    /// What kept the lock alive ended early: a session was closed or a lease revoked.
    #[error("the server ended the session or lease that kept the lock")]
    Revoked,
    /// The time set with `max_hold` is over.
    #[error("the longest permitted hold is over")]
    MaxHold,
    /// The client was shut down while the lock was held.
    #[error("the lock client was shut down")]
    Shutdown,
    /// The guard was released or dropped.
    #[error("the guard was released")]
    Released,
    /// The runtime that the client was given ([`Options::runtime`](crate::Options::runtime)) has ended, and nothing renews the lock.
    #[error("the runtime of the lock client has ended")]
    RuntimeEnded,
}

/// Whether something has been revoked, and why: a lease, a grant or one hold of it. What revokes a lease revokes its grants and their holds.
/// Only a [`Revoker`] can fire it, once.
#[derive(Clone)]
pub struct Revocation(Arc<Cell>);

/// Fires a [`Revocation`]: the backend's way to say that the server freed the lock early.
#[derive(Clone)]
pub struct Revoker(Revocation);

struct Cell {
    serial: Serial,
    reason: OnceLock<LossReason>,
    /// That of the lease, for a grant; that of the grant, for a hold.
    parent: Option<Revocation>,
    /// Most locks are released before there is one.
    token: Mutex<Option<CancellationToken>>,
}

fn new_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

impl Revocation {
    /// That of a lease.
    pub(crate) fn new() -> Self {
        Self::of((new_number(), 0), None)
    }

    /// One that also fires when this one does: that of a grant by the lease, or of a hold by the grant.
    pub(crate) fn child(&self) -> Self {
        let serial = match self.0.serial {
            (lease, 0) => (lease, new_number()),
            of_grant => of_grant,
        };
        Self::of(serial, Some(self.clone()))
    }

    fn of(serial: Serial, parent: Option<Self>) -> Self {
        Self(Arc::new(Cell {
            serial,
            reason: OnceLock::new(),
            parent,
            token: Mutex::new(None),
        }))
    }

    pub(crate) fn revoker(&self) -> Revoker {
        Revoker(self.clone())
    }

    /// Fires, and tells the clients; the first reason stays.
    pub(crate) fn fire(&self, reason: LossReason) {
        if self.fire_quietly(reason) {
            self.tell();
        }
    }

    /// Has the clients look at the holds that it concerns.
    pub(crate) fn tell(&self) {
        if let Some(process) = Process::existing() {
            // An error says that no client holds anything.
            let _ = process.revocations.send(self.0.serial);
        }
    }

    pub(crate) fn serial(&self) -> Serial {
        self.0.serial
    }

    /// Fires without telling the clients. False if it has fired before.
    pub(crate) fn fire_quietly(&self, reason: LossReason) -> bool {
        if self.0.reason.set(reason).is_err() {
            return false;
        }
        // A token that is made later than this look finds the reason.
        let token = self.own_token().clone();
        if let Some(token) = token {
            token.cancel();
        }
        true
    }

    /// Why it was revoked, or `None` if it was not.
    #[must_use]
    pub fn reason(&self) -> Option<LossReason> {
        let own = self.0.reason.get().copied();
        own.or_else(|| self.0.parent.as_ref()?.reason())
    }

    /// The same. A reason that it has from its lease stays, whatever fires it later: all that ask are told the same.
    pub(crate) fn settle(&self) -> Option<LossReason> {
        let reason = self.reason()?;
        Some(*self.0.reason.get_or_init(|| reason))
    }

    /// Cancelled when it fires.
    pub(crate) fn token(&self) -> CancellationToken {
        let new = || match &self.0.parent {
            Some(parent) => parent.token().child_token(),
            None => CancellationToken::new(),
        };
        let token = self.own_token().get_or_insert_with(new).clone();
        if self.0.reason.get().is_some() {
            token.cancel();
        }
        token
    }

    /// Completes when it is revoked. Cancellation-safe.
    pub async fn revoked(&self) -> LossReason {
        self.token().cancelled().await;
        self.settle().unwrap_or(LossReason::Revoked)
    }

    fn own_token(&self) -> MutexGuard<'_, Option<CancellationToken>> {
        // Nothing here panics while holding the mutex.
        self.0.token.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Revoker {
    /// Revokes for that reason. Later calls change nothing.
    pub fn revoke(&self, reason: LossReason) {
        self.0.fire(reason);
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
pub struct LossSignal(pub(crate) Revocation);

impl LossSignal {
    /// Waits for the loss. Cancellation-safe.
    pub async fn wait(&self) -> LossReason {
        self.0.revoked().await
    }

    /// Why the lock was lost before it was released, for a release that found it lost.
    pub(crate) fn before_release(&self) -> LossReason {
        let reason = self.0.settle().filter(|reason| *reason != LossReason::Released);
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
        let lease = Revocation::new();
        let (one, other) = (lease.child(), lease.child());
        one.fire(LossReason::NotHeld);
        assert_eq!(
            (one.reason(), other.reason(), lease.reason()),
            (Some(LossReason::NotHeld), None, None)
        );
        lease.fire(LossReason::Expired);
        lease.fire(LossReason::Revoked);
        assert_eq!(one.settle(), Some(LossReason::NotHeld));
        assert_eq!(other.settle(), Some(LossReason::Expired));
        other.fire(LossReason::Released);
        assert_eq!(other.reason(), Some(LossReason::Expired));
    }

    #[test]
    fn the_clients_are_told_what_fires_and_not_what_ends_by_itself() {
        let mut revoked = Process::current().revocations.subscribe();
        let (by_the_server, by_the_holder) = (Revocation::new(), Revocation::new());
        assert!(by_the_holder.fire_quietly(LossReason::Released));
        by_the_holder.revoker().revoke(LossReason::NotHeld);
        assert_eq!(by_the_holder.reason(), Some(LossReason::Released));
        by_the_server.revoker().revoke(LossReason::NotHeld);
        // Other tests revoke, too.
        let revoked: Vec<_> = std::iter::from_fn(|| revoked.try_recv().ok()).collect();
        assert!(revoked.contains(&by_the_server.serial()) && !revoked.contains(&by_the_holder.serial()));
    }
}
