//! What clients with a bug know of each other.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lock_core::{Claim, FencingToken, Lease, LockName, OwnerId};

/// What the clients of one namespace know of each other, for bugs that need it.
#[derive(Default)]
pub(super) struct Shared(Mutex<State>);

#[derive(Default)]
pub(super) struct State {
    pub(super) holders: HashMap<LockName, Held>,
    pub(super) tokens: HashMap<OwnerId, FencingToken>,
    /// What is sent instead of a claim.
    pub(super) stand_ins: HashMap<OwnerId, Claim>,
    pub(super) owners: HashMap<(usize, LockName), Claim>,
    pub(super) counters: HashMap<LockName, u64>,
    pub(super) released: HashSet<OwnerId>,
    pub(super) abandoned: HashSet<OwnerId>,
    /// How many wait for each name.
    pub(super) in_line: HashMap<LockName, usize>,
}

pub(super) struct Held {
    pub(super) claim: Claim,
    pub(super) client: usize,
    pub(super) token: FencingToken,
    pub(super) lease: Lease,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    pub(super) fn holder(&self, name: &LockName) -> Option<&Held> {
        self.holders.get(name)
    }

    pub(super) fn count(&mut self, name: &LockName) -> u64 {
        let counter = self.counters.entry(name.clone()).or_default();
        *counter += 1;
        *counter
    }
}

/// Somebody who waits for that name.
pub(super) struct InLine<'a> {
    shared: &'a Shared,
    name: LockName,
}

impl<'a> InLine<'a> {
    pub(super) fn new(shared: &'a Shared, name: &LockName) -> Self {
        *shared.lock().in_line.entry(name.clone()).or_default() += 1;
        let name = name.clone();
        Self { shared, name }
    }
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        if let Some(in_line) = self.shared.lock().in_line.get_mut(&self.name) {
            *in_line -= 1;
        }
    }
}

/// Remembers a wait that was given up.
pub(super) struct Abandoned<'a> {
    pub(super) shared: &'a Shared,
    pub(super) owner: Option<OwnerId>,
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        self.shared.lock().abandoned.extend(self.owner);
    }
}
