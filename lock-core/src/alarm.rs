//! What wakes the watchdog out of turn.

use std::sync::PoisonError;

use crate::sync::{Mutex, MutexGuard, Notify};

/// Wakes the watchdog.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    pub(crate) notify: Notify,
    /// What was revoked since the last look: the lease, and the revocation, which is the lease's own or that of a guard on it.
    revoked: Mutex<Vec<(u64, usize)>>,
}

impl Alarm {
    pub(crate) fn revoked(&self, lease: u64, revocation: usize) {
        self.lock().push((lease, revocation));
        self.notify.notify_one();
    }

    pub(crate) fn take_revoked(&self) -> Vec<(u64, usize)> {
        std::mem::take(&mut self.lock())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<(u64, usize)>> {
        // Nothing here panics while holding the mutex.
        self.revoked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
