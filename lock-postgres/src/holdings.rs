//! What this client holds, by key. The server knows sessions only: whose a lock is within the client is known here.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use lock_core::{Claim, FencingToken, Grant, Holder, Lease, OwnerId, Stamp};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::carried::{Carried, Share};
use crate::record;
use crate::session::Session;

/// One lock that a session of this client carries.
pub(crate) struct Holding {
    pub(crate) claim: Claim,
    pub(crate) token: FencingToken,
    pub(crate) lease: Lease,
    pub(crate) since: SystemTime,
    /// What the core was given, and is told of its loss by.
    pub(crate) granted: Grant,
    /// Its share in the lease; none if it has the session to itself. Given up before the session is.
    pub(crate) share: Option<Share>,
    pub(crate) session: Carried,
}

impl Holding {
    pub(crate) fn grant(&self) -> Grant {
        self.granted.clone()
    }

    /// As others of this client see it.
    pub(crate) fn holder(&self) -> Holder {
        let mut holder = Holder::of(&self.claim);
        (holder.token, holder.acquired_at) = (Some(self.token), Some(self.since));
        holder
    }
}

type Slot = Arc<AsyncMutex<Option<Holding>>>;

/// All that this client holds. Work on one key takes turns, in the order in which it was asked for.
#[derive(Default)]
pub(crate) struct Holdings(Arc<Mutex<HashMap<i64, Slot>>>);

/// The turn to work on one key.
pub(crate) struct Turn {
    slots: Arc<Mutex<HashMap<i64, Slot>>>,
    key: i64,
    // None only while it is dropped.
    held: Option<OwnedMutexGuard<Option<Holding>>>,
}

impl Holdings {
    pub(crate) async fn turn(&self, key: i64) -> Turn {
        let slot = {
            let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry(key).or_default())
        };
        Turn {
            slots: Arc::clone(&self.0),
            key,
            held: Some(slot.lock_owned().await),
        }
    }

    /// The locks of that session that no request is under way for.
    pub(crate) fn of(&self, session: i32) -> Vec<String> {
        let slots: Vec<_> = {
            let slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            slots.iter().map(|(key, slot)| (*key, Arc::clone(slot))).collect()
        };
        let told = |(key, slot): (i64, Slot)| {
            let held = slot.try_lock().ok()?;
            let holding = held.as_ref().filter(|holding| holding.session.pid == session)?;
            Some(record::write(key, holding))
        };
        slots.into_iter().filter_map(told).collect()
    }

    /// Every key that something is known of.
    pub(crate) fn keys(&self) -> Vec<i64> {
        let slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slots.keys().copied().collect()
    }
}

impl Turn {
    /// What is held, if its session still carries it.
    pub(crate) fn held(&mut self) -> Option<&Holding> {
        let held = self.held.as_mut()?;
        if held.as_ref().is_some_and(|holding| holding.session.is_over()) {
            **held = None;
        }
        held.as_ref()
    }

    /// The same, if it is that session.
    pub(crate) fn held_by(&mut self, session: i32) -> Option<&Holding> {
        self.held().filter(|holding| holding.session.pid == session)
    }

    pub(crate) fn take(&mut self) -> Option<Holding> {
        self.held();
        self.held.as_mut()?.take()
    }

    pub(crate) fn put(&mut self, holding: Holding) {
        if let Some(held) = &mut self.held {
            **held = Some(holding);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let free = self.held().is_none();
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.held.take());
        // Whoever wants it now finds a new one; whoever waits for this one has a share in it.
        if free && slots.get(&self.key).is_some_and(|slot| Arc::strong_count(slot) == 1) {
            slots.remove(&self.key);
        }
    }
}

impl fmt::Debug for Holdings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holdings").field("keys", &self.keys().len()).finish()
    }
}

/// A backend of the server. Its pid alone may be that of a later one.
#[derive(Clone, Debug)]
pub(crate) struct Backend {
    pub(crate) pid: i32,
    pub(crate) started: i64,
}

/// The claims of this client that may have a reservation: how long that may be, and on which backend it was made. A claim is forgotten
/// with its release.
#[derive(Debug, Default)]
pub(crate) struct Reservations(Mutex<HashMap<OwnerId, (Stamp, Backend)>>);

impl Reservations {
    pub(crate) fn add(&self, owner: OwnerId, session: &Session, until: Stamp, now: Stamp) {
        let mut claims = self.lock();
        claims.retain(|_, (until, _)| *until > now);
        let backend = Backend {
            pid: session.pid,
            started: session.started,
        };
        claims.insert(owner, (until, backend));
    }

    pub(crate) fn remove(&self, owner: OwnerId) {
        self.lock().remove(&owner);
    }

    pub(crate) fn backend_of(&self, owner: OwnerId) -> Option<Backend> {
        self.lock().get(&owner).map(|(_, backend)| backend.clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<OwnerId, (Stamp, Backend)>> {
        // Nothing here panics while holding the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
