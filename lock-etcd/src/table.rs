//! What this client has on the server, as far as it knows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lock_core::{Claim, FencingToken, LockName, OwnerId, Revoker, Stamp};

use crate::leases::Kept;
use crate::watches::Watch;

/// The client's claims and leases.
#[derive(Default)]
pub(crate) struct Table(Mutex<State>);

#[derive(Default)]
struct State {
    /// The lease that new claims of a ttl in seconds share.
    shared: HashMap<u64, Arc<Kept>>,
    /// All leases, those that no new claim uses included.
    leases: HashMap<i64, Arc<Kept>>,
    claims: HashMap<OwnerId, Entry>,
}

struct Entry {
    claim: Claim,
    kept: Arc<Kept>,
    /// How many requests were sent to take the name, and not answered.
    unanswered: u32,
    held: Option<Held>,
    /// Since when the claim is to go.
    leaving: Option<Stamp>,
}

struct Held {
    token: FencingToken,
    created: i64,
    revoker: Revoker,
    watch: Option<Watch>,
}

/// What is known of a claim.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) kept: Arc<Kept>,
    /// Whether a request of it may be carried out later.
    pub(crate) unclear: bool,
    /// The revision at which its key was created, once it was granted.
    pub(crate) created: Option<i64>,
}

/// A claim that is held and not watched.
pub(crate) struct Unwatched {
    pub(crate) claim: Claim,
    pub(crate) created: i64,
    pub(crate) revoker: Revoker,
}

impl Table {
    /// The lease that claims of that many seconds share, if it is alive at `now`.
    pub(crate) fn shared(&self, seconds: u64, now: Stamp) -> Option<Arc<Kept>> {
        let state = self.lock();
        state.shared.get(&seconds).filter(|kept| kept.is_valid(now)).cloned()
    }

    /// Adds a lease, as the one that new claims share if it is for that many seconds, and forgets those that are over.
    pub(crate) fn add(&self, kept: &Arc<Kept>, shared_for: Option<u64>, now: Stamp) {
        let mut state = self.lock();
        let State {
            shared, leases, claims, ..
        } = &mut *state;
        leases.retain(|_, kept| kept.is_valid(now));
        claims.retain(|_, entry| entry.leaving.is_none() || entry.kept.is_valid(now));
        if let Some(seconds) = shared_for {
            shared.insert(seconds, Arc::clone(kept));
        }
        leases.insert(kept.id(), Arc::clone(kept));
    }

    pub(crate) fn lease(&self, id: i64) -> Option<Arc<Kept>> {
        self.lock().leases.get(&id).cloned()
    }

    pub(crate) fn forget_lease(&self, id: i64) {
        self.lock().leases.remove(&id);
    }

    /// Takes out all leases.
    pub(crate) fn take_leases(&self) -> Vec<Arc<Kept>> {
        let mut state = self.lock();
        state.shared.clear();
        state.leases.drain().map(|(_, kept)| kept).collect()
    }

    /// A request to take the name is about to be sent.
    pub(crate) fn asked(&self, claim: &Claim, kept: &Arc<Kept>) {
        let mut state = self.lock();
        let entry = state.claims.entry(claim.owner()).or_insert_with(|| Entry {
            claim: claim.clone(),
            kept: Arc::clone(kept),
            unanswered: 0,
            held: None,
            leaving: None,
        });
        if entry.kept.id() != kept.id() {
            entry.kept = Arc::clone(kept);
        }
        entry.unanswered += 1;
        entry.leaving = None;
    }

    /// It was answered.
    pub(crate) fn answered(&self, claim: &Claim) {
        if let Some(entry) = self.lock().claims.get_mut(&claim.owner()) {
            entry.unanswered = entry.unanswered.saturating_sub(1);
        }
    }

    /// The claim was granted.
    pub(crate) fn granted(&self, claim: &Claim, token: FencingToken, created: i64, revoker: Revoker) {
        if let Some(entry) = self.lock().claims.get_mut(&claim.owner()) {
            entry.held = Some(Held {
                token,
                created,
                revoker,
                watch: None,
            });
        }
    }

    pub(crate) fn claim(&self, claim: &Claim) -> Option<Known> {
        self.lock().claims.get(&claim.owner()).map(|entry| Known {
            kept: Arc::clone(&entry.kept),
            unclear: entry.unanswered > 0,
            created: entry.held.as_ref().map(|held| held.created),
        })
    }

    /// Whether the claim is not wanted any more.
    pub(crate) fn is_given_up(&self, claim: &Claim) -> bool {
        let state = self.lock();
        state
            .claims
            .get(&claim.owner())
            .is_none_or(|entry| entry.leaving.is_some())
    }

    /// The key that makes a lock of that name and token this client's, and the revision at which it was created.
    pub(crate) fn holding(&self, name: &LockName, token: FencingToken) -> Option<(Claim, i64)> {
        let state = self.lock();
        let mut claims = state.claims.values();
        claims.find_map(|entry| {
            let held = entry.held.as_ref()?;
            let it = entry.claim.name() == name && held.token == token && entry.leaving.is_none();
            it.then(|| (entry.claim.clone(), held.created))
        })
    }

    /// The claim is to go: nothing is to be heard of it any more.
    pub(crate) fn leave(&self, claim: &Claim, now: Stamp) {
        if let Some(entry) = self.lock().claims.get_mut(&claim.owner()) {
            entry.leaving.get_or_insert(now);
            if let Some(held) = &mut entry.held {
                held.watch = None;
            }
        }
    }

    /// The claim has gone.
    pub(crate) fn gone(&self, claim: &Claim) {
        self.lock().claims.remove(&claim.owner());
    }

    /// The claims on that lease that should have gone before `then`.
    pub(crate) fn overdue(&self, kept: &Kept, then: Stamp) -> Vec<Claim> {
        let overdue = |entry: &&Entry| entry.kept.id() == kept.id() && entry.leaving.is_some_and(|since| since < then);
        let state = self.lock();
        state.claims.values().filter(overdue).map(|e| e.claim.clone()).collect()
    }

    /// The claims on that lease that are held and not watched over that link.
    pub(crate) fn unwatched(&self, kept: &Kept, link: u64) -> Vec<Unwatched> {
        let state = self.lock();
        let mine = |entry: &&Entry| entry.kept.id() == kept.id() && entry.leaving.is_none();
        let unwatched = |entry: &Entry| {
            let held = entry.held.as_ref()?;
            let watched = held.watch.as_ref().is_some_and(|watch| watch.watches_on(link));
            (!watched).then(|| Unwatched {
                claim: entry.claim.clone(),
                created: held.created,
                revoker: held.revoker.clone(),
            })
        };
        state.claims.values().filter(mine).filter_map(unwatched).collect()
    }

    /// A held claim is watched now.
    pub(crate) fn watched(&self, claim: &Claim, watch: Watch) {
        let mut state = self.lock();
        let entry = state.claims.get_mut(&claim.owner());
        // One that went meanwhile drops its watch.
        if let Some(entry) = entry.filter(|entry| entry.leaving.is_none())
            && let Some(held) = &mut entry.held
        {
            held.watch = Some(watch);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
