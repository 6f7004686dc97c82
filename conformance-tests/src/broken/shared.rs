//! What clients with a bug know of each other.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lock_core::{Claim, FencingToken, Holder, Lease, LockName, OwnerId};

/// What the clients of one namespace know of each other, for bugs that need it.
#[derive(Default)]
pub(super) struct Shared(Mutex<State>);

#[derive(Default)]
pub(super) struct State {
    pub(super) holders: HashMap<LockName, Held>,
    /// What was answered when it was first asked who holds a name.
    pub(super) remembered: HashMap<LockName, Vec<Holder>>,
    pub(super) tokens: HashMap<OwnerId, FencingToken>,
    /// What is sent instead of a claim.
    pub(super) stand_ins: HashMap<OwnerId, Claim>,
    pub(super) owners: HashMap<(usize, LockName), Claim>,
    pub(super) counters: HashMap<LockName, u64>,
    /// Whether the counter of the backend was set back.
    pub(super) set_back: bool,
    /// The tokens of those whose locks were released by force.
    pub(super) forced: HashMap<LockName, FencingToken>,
    pub(super) released: HashSet<OwnerId>,
    pub(super) abandoned: HashSet<OwnerId>,
    /// The claims that have reserved their names, and the client of each.
    pub(super) reserved: Vec<(usize, Claim)>,
    /// The claims in the mode `Shared` that were granted.
    pub(super) readers: Vec<Claim>,
    /// How many wait for each name.
    pub(super) in_line: HashMap<LockName, usize>,
    /// Who waits for each name behind whom, in the order in which they came.
    line: HashMap<LockName, Vec<OwnerId>>,
}

pub(super) struct Held {
    pub(super) claim: Claim,
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

/// Somebody who waits behind somebody.
pub(super) struct Place<'a> {
    shared: &'a Shared,
    claim: Claim,
    behind: Option<OwnerId>,
}

impl<'a> Place<'a> {
    /// Behind the last one who waits, or else the holder.
    pub(super) fn new(shared: &'a Shared, claim: &Claim) -> Self {
        let mut state = shared.lock();
        let holder = state.holder(claim.name()).map(|held| held.claim.owner());
        let line = state.line.entry(claim.name().clone()).or_default();
        let behind = line.last().copied().or(holder);
        line.push(claim.owner());
        drop(state);
        Self {
            shared,
            claim: claim.clone(),
            behind,
        }
    }

    pub(super) fn is_behind_somebody(&self) -> bool {
        let state = self.shared.lock();
        let waits = |line: &Vec<OwnerId>| line.iter().any(|owner| Some(*owner) == self.behind);
        let holds = |held: &Held| Some(held.claim.owner()) == self.behind;
        state.line.get(self.claim.name()).is_some_and(waits) || state.holder(self.claim.name()).is_some_and(holds)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(line) = self.shared.lock().line.get_mut(self.claim.name()) {
            line.retain(|owner| *owner != self.claim.owner());
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
