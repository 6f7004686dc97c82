//! What clients with a bug know of each other.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lock_core::{Claim, FencingToken, LockName, OwnerId};

/// What the clients of one namespace know of each other, for bugs that need it.
#[derive(Default)]
pub(super) struct Shared(Mutex<State>);

#[derive(Default)]
pub(super) struct State {
    /// The claim that was granted each name last, until it is released, and its token.
    pub(super) holders: HashMap<LockName, (Claim, FencingToken)>,
    pub(super) tokens: HashMap<OwnerId, FencingToken>,
    /// What is sent instead of a claim.
    pub(super) stand_ins: HashMap<OwnerId, Claim>,
    pub(super) owners: HashMap<(usize, LockName), Claim>,
    pub(super) counters: HashMap<LockName, u64>,
    /// The tokens of those whose locks were released by force.
    pub(super) forced: HashMap<LockName, FencingToken>,
    pub(super) released: HashSet<OwnerId>,
    pub(super) abandoned: HashSet<OwnerId>,
    /// How many wait for each name.
    pub(super) in_line: HashMap<LockName, usize>,
    /// Who waits for each name behind whom, in the order in which they came.
    line: HashMap<LockName, Vec<OwnerId>>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The claim that holds the name, as far as the clients know.
    pub(super) fn holder(&self, name: &LockName) -> Option<&Claim> {
        self.holders.get(name).map(|(claim, _)| claim)
    }

    pub(super) fn count(&mut self, name: &LockName) -> u64 {
        let counter = self.counters.entry(name.clone()).or_default();
        *counter += 1;
        *counter
    }
}

/// A waiter, in the order in which they came.
pub(super) struct Place<'a> {
    shared: &'a Shared,
    claim: Claim,
    behind: Option<OwnerId>,
}

impl<'a> Place<'a> {
    /// Behind the last one who waits, or else the holder.
    pub(super) fn new(shared: &'a Shared, claim: &Claim) -> Self {
        let mut state = shared.lock();
        *state.in_line.entry(claim.name().clone()).or_default() += 1;
        let holder = state.holder(claim.name()).map(Claim::owner);
        let line = state.line.entry(claim.name().clone()).or_default();
        let behind = line.last().copied().or(holder);
        line.push(claim.owner());
        drop(state);
        let claim = claim.clone();
        Self { shared, claim, behind }
    }

    /// Whether another one came after this waiter and still waits.
    pub(super) fn is_before_another(&self) -> bool {
        let state = self.shared.lock();
        let last = state.line.get(self.claim.name()).and_then(|line| line.last().copied());
        last != Some(self.claim.owner())
    }

    /// Whether the one that was before this waiter still waits or holds.
    pub(super) fn is_behind_another(&self) -> bool {
        let state = self.shared.lock();
        let waits = |line: &Vec<OwnerId>| line.iter().any(|owner| Some(*owner) == self.behind);
        let holder = state.holder(self.claim.name()).map(Claim::owner);
        self.behind.is_some() && (state.line.get(self.claim.name()).is_some_and(waits) || holder == self.behind)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if let Some(in_line) = state.in_line.get_mut(self.claim.name()) {
            *in_line -= 1;
        }
        if let Some(line) = state.line.get_mut(self.claim.name()) {
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
