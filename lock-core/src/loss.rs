//! How a holder learns that it holds no more.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Why a lock is no longer held. Terminal: a lost guard never comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease was not renewed in time; the server may have let go by now.
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
    /// The holder itself let go: the guard was released or dropped.
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

/// Fires a [`Revocation`]: the backend's way to say that the server let go early.
#[derive(Clone)]
pub struct Revoker(Revocation);

struct Cell {
    reason: OnceLock<LossReason>,
    /// That of the lease, for a grant; that of the grant, for a hold.
    parent: Option<Revocation>,
    listeners: Mutex<Listeners>,
}

/// What is told when it fires. Most locks are released before there is any but the alarm.
#[derive(Default)]
struct Listeners {
    token: Option<CancellationToken>,
    alarms: Alarms,
}

/// An alarm, and the identifier of what is said to have been revoked: a hold, or a lease with all holds that it keeps.
type Watching = (Arc<Alarm>, u64);

/// Those of the clients that have holds on it: mostly it is one.
#[derive(Clone, Default)]
pub(crate) struct Alarms {
    first: Option<Watching>,
    #[expect(clippy::box_collection, reason = "every hold has the room for it")]
    others: Option<Box<Vec<Watching>>>,
}

impl Alarms {
    fn add(&mut self, alarm: &Arc<Alarm>, revoked: u64) {
        let entry = (Arc::clone(alarm), revoked);
        match &mut self.first {
            Some((first, _)) if !Arc::ptr_eq(first, alarm) => {
                let others = self.others.get_or_insert_default();
                // Without those of clients that have ended.
                others.retain(|(other, _)| !Arc::ptr_eq(other, alarm) && Arc::strong_count(other) > 1);
                others.push(entry);
            }
            first => *first = Some(entry),
        }
    }

    fn raise(self) {
        for (alarm, revoked) in self
            .first
            .into_iter()
            .chain(self.others.into_iter().flat_map(|others| *others))
        {
            alarm.raise(revoked);
        }
    }
}

/// Wakes the watchdog because something was revoked.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    pub(crate) notify: Notify,
    revoked: Mutex<Vec<u64>>,
}

impl Alarm {
    fn raise(&self, revoked: u64) {
        self.lock().push(revoked);
        self.notify.notify_one();
    }

    /// What was revoked since the last call.
    pub(crate) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u64>> {
        // Nothing here panics while holding the mutex.
        self.revoked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Revocation {
    pub(crate) fn new() -> Self {
        Self::of(None)
    }

    /// One that also fires when this one does.
    pub(crate) fn child(&self) -> Self {
        Self::of(Some(self.clone()))
    }

    fn of(parent: Option<Self>) -> Self {
        Self(Arc::new(Cell {
            reason: OnceLock::new(),
            parent,
            listeners: Mutex::default(),
        }))
    }

    pub(crate) fn revoker(&self) -> Revoker {
        Revoker(self.clone())
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Has `alarm` raised when it fires by itself, or now if it has fired. Of one alarm the last call counts.
    pub(crate) fn watch(&self, alarm: &Arc<Alarm>, revoked: u64) {
        self.listeners().alarms.add(alarm, revoked);
        if self.0.reason.get().is_some() {
            alarm.raise(revoked);
        }
    }

    /// Fires; the first reason stays.
    pub(crate) fn fire(&self, reason: LossReason) {
        if let Some(alarms) = self.fire_quietly(reason) {
            alarms.raise();
        }
    }

    /// Fires without raising the alarms, which are returned by the call that fired.
    pub(crate) fn fire_quietly(&self, reason: LossReason) -> Option<Alarms> {
        self.0.reason.set(reason).ok()?;
        // A listener that comes later than this look finds the reason.
        let (token, alarms) = {
            let listeners = self.listeners();
            (listeners.token.clone(), listeners.alarms.clone())
        };
        if let Some(token) = token {
            token.cancel();
        }
        Some(alarms)
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
        let token = {
            let mut listeners = self.listeners();
            let new = || match &self.0.parent {
                Some(parent) => parent.token().child_token(),
                None => CancellationToken::new(),
            };
            listeners.token.get_or_insert_with(new).clone()
        };
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

    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        // Nothing here panics while holding the mutex.
        self.0.listeners.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn the_alarm_is_raised_for_what_fires_before_and_after() {
        let alarm = Arc::new(Alarm::default());
        let (before, after) = (Revocation::new(), Revocation::new());
        before.fire(LossReason::NotHeld);
        before.watch(&alarm, 1);
        after.watch(&alarm, 2);
        assert_eq!(alarm.take(), [1]);
        after.fire(LossReason::NotHeld);
        assert_eq!(alarm.take(), [2]);
        assert_eq!(alarm.take(), []);
    }

    #[test]
    fn the_alarms_of_all_clients_on_a_lease_are_raised() {
        let (alarms, lease) = ([(); 3].map(|()| Arc::new(Alarm::default())), Revocation::new());
        for alarm in alarms.iter().chain(&alarms) {
            lease.watch(alarm, 1);
        }
        lease.fire(LossReason::NotHeld);
        assert!(alarms.iter().all(|alarm| alarm.take() == [1]));
    }
}
