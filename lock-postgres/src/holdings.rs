//! What this client holds, by key. The server knows sessions only: whose a lock is within the client is known here.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use lock_core::{Claim, FencingToken, Grant, Holder, Lease};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::session::{Carried, Share};

/// One lock that a session of this client carries.
pub(crate) struct Holding {
    pub(crate) claim: Claim,
    pub(crate) token: FencingToken,
    pub(crate) lease: Lease,
    pub(crate) since: SystemTime,
    pub(crate) session: Carried,
    /// Its share in the lease; none if it has the session to itself.
    pub(crate) share: Option<Share>,
}

impl Holding {
    pub(crate) fn grant(&self) -> Grant {
        Grant::new(self.claim.clone(), self.token, self.lease.clone())
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
