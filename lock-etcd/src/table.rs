//! What this client has on the server, as far as it knows.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{Claim, FencingToken, Grant, LockName, OwnerId, Revoker, Stamp};

use crate::leases::Kept;
use crate::requests::After;
use crate::reservations::{Holding, Reserved};
use crate::slots::{Slot, Slots};
use crate::tokens;
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
    slots: Slots,
}

impl State {
    /// Takes out the claim if it `fits`, and its slot with it.
    fn remove(&mut self, claim: &Claim, fits: impl FnOnce(&Entry) -> bool) {
        if !self.claims.get(&claim.owner()).is_some_and(fits) {
            return;
        }
        if let Some(entry) = self.claims.remove(&claim.owner()) {
            if entry.is_settled() {
                self.slots.give_back(claim.name(), entry.slot);
            } else {
                self.slots.give_up();
            }
        }
    }
}

struct Entry {
    claim: Claim,
    kept: Arc<Kept>,
    slot: Slot,
    /// The key of that slot.
    key: Arc<str>,
    /// The highest token that this client had seen when the claim was asked for first.
    floor: u64,
    /// How many requests were sent that can put it, and not answered.
    puts: u32,
    /// How many were sent that can delete it, whenever it was put, and not answered.
    deletes: u32,
    /// Whether it was put, or found on the server.
    there: bool,
    held: Option<Held>,
    /// Since when the claim is to go, and what is to become of its name.
    leaving: Option<(Stamp, After)>,
    reserved: Reserved,
}

struct Held {
    tokens: RangeInclusive<FencingToken>,
    /// The claim's own key, or the one that another client put for it.
    key: Arc<str>,
    created: i64,
    /// The link over which it was granted, unless it was asked for once more since.
    link: Option<u64>,
    revoker: Revoker,
    watch: Option<Watch>,
}

impl Entry {
    /// Whether every request that could change its own key, whenever it was put, was answered.
    fn is_settled(&self) -> bool {
        self.puts == 0 && self.deletes == 0
    }

    fn known(&self) -> Known {
        Known {
            kept: Arc::clone(&self.kept),
            key: Arc::clone(&self.key),
            unclear: self.puts > 0,
            granted: self.held.is_some(),
            adopted: self.held.as_ref().is_some_and(|held| held.key != self.key),
            link: self.held.as_ref().and_then(|held| held.link),
        }
    }
}

/// What is known of a claim.
pub(crate) struct Known {
    pub(crate) kept: Arc<Kept>,
    /// Its own key.
    pub(crate) key: Arc<str>,
    /// Whether it may be put later.
    pub(crate) unclear: bool,
    granted: bool,
    /// Whether the claim was granted for the key that another client put.
    adopted: bool,
    /// The link over which it was granted, and not asked for since.
    link: Option<u64>,
}

impl Known {
    /// Whether the claim was granted for its own key, and nothing else is to be heard of it.
    fn is_sure(&self) -> bool {
        self.granted && !self.unclear && !self.adopted
    }

    /// Whether the claim's key, if that link shows it at all, is the head of its queue.
    ///
    /// It was the head when it was granted. Younger keys come behind it, nothing was sent since that would put it anew, and under one
    /// link state does not go back.
    pub(crate) fn is_first_if_there(&self, link: u64) -> bool {
        !self.unclear && self.link == Some(link)
    }
}

/// A claim that is held and not watched.
pub(crate) struct Unwatched {
    pub(crate) claim: Claim,
    pub(crate) key: Arc<str>,
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
            shared,
            leases,
            claims,
            slots,
        } = &mut *state;
        leases.retain(|_, kept| kept.is_valid(now));
        let before = claims.len();
        claims.retain(|_, entry| entry.leaving.is_none() || entry.kept.is_valid(now));
        if claims.len() < before {
            // Their releases were never answered.
            slots.give_up();
        }
        if let Some(seconds) = shared_for {
            shared.insert(seconds, Arc::clone(kept));
        }
        leases.insert(kept.id(), Arc::clone(kept));
    }

    /// The shortest ttl of the shared leases that are alive at `now`; the others are forgotten.
    pub(crate) fn shortest(&self, now: Stamp) -> Option<Duration> {
        let mut state = self.lock();
        state.shared.retain(|_, kept| kept.is_valid(now));
        state.shared.values().map(|kept| kept.ttl()).min()
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

    /// A request to take the name is about to be sent, which can put the key that is returned: one of those in `queue`.
    ///
    /// `floor` is the highest token that this client has seen.
    pub(crate) fn putting(&self, claim: &Claim, queue: &str, kept: &Arc<Kept>, floor: u64) -> Arc<str> {
        let mut state = self.lock();
        let State { claims, slots, .. } = &mut *state;
        let entry = claims.entry(claim.owner()).or_insert_with(|| {
            let slot = slots.take(claim.name());
            Entry {
                claim: claim.clone(),
                kept: Arc::clone(kept),
                slot,
                key: format!("{queue}{slot}").into(),
                floor,
                puts: 0,
                deletes: 0,
                there: false,
                held: None,
                leaving: None,
                reserved: Reserved::default(),
            }
        });
        if entry.kept.id() != kept.id() {
            entry.kept = Arc::clone(kept);
        }
        if let Some(held) = &mut entry.held {
            held.link = None;
        }
        entry.puts += 1;
        entry.leaving = None;
        Arc::clone(&entry.key)
    }

    /// It was answered: whether the key was put.
    pub(crate) fn answered(&self, claim: &Claim, key: &str, put: bool) {
        self.change(claim, key, |entry| {
            entry.puts -= 1;
            entry.there |= put;
        });
    }

    /// A request is about to be sent that deletes the claim's own key, whenever that was put. None, and nothing is to be sent, if the claim
    /// was granted for the key that another client put, or is not known.
    pub(crate) fn deleting(&self, claim: &Claim) -> Option<Known> {
        let mut state = self.lock();
        let entry = state.claims.get_mut(&claim.owner())?;
        let known = entry.known();
        (!known.adopted).then(|| {
            entry.deletes += 1;
            known
        })
    }

    /// It was answered.
    pub(crate) fn deleted(&self, claim: &Claim, key: &str) {
        self.change(claim, key, |entry| entry.deletes -= 1);
    }

    /// A claim that went under its request, and came again, has another key.
    fn change(&self, claim: &Claim, key: &str, change: impl FnOnce(&mut Entry)) {
        let mut state = self.lock();
        let entry = state.claims.get_mut(&claim.owner());
        if let Some(entry) = entry.filter(|entry| *entry.key == *key) {
            change(entry);
        }
    }

    /// The claim was found on the server, under whatever key.
    pub(crate) fn found(&self, claim: &Claim) {
        if let Some(entry) = self.lock().claims.get_mut(&claim.owner()) {
            entry.there = true;
        }
    }

    /// How many tokens the claim wants with that key, whenever it is granted. One if another client put the key: that client may have
    /// been granted it, and the claim may have used its last token.
    pub(crate) fn tokens_wanted(&self, claim: &Claim, key: &str) -> NonZeroU32 {
        let state = self.lock();
        let entry = state.claims.get(&claim.owner()).filter(|entry| *entry.key == *key);
        entry.map_or(NonZeroU32::MIN, |entry| entry.claim.tokens_wanted())
    }

    /// The claim was granted, for a key that was created at that revision.
    pub(crate) fn granted(&self, grant: &Grant, (key, created): (&str, i64), link: u64) {
        if let Some(entry) = self.lock().claims.get_mut(&grant.claim.owner()) {
            let own = Some(&entry.key).filter(|own| ***own == *key);
            entry.held = Some(Held {
                tokens: grant.first_token()..=grant.token,
                key: own.map_or_else(|| key.into(), Arc::clone),
                created,
                link: Some(link),
                revoker: grant.revoker(),
                watch: None,
            });
        }
    }

    /// The highest token that this client had seen when the claim was asked for first: the claim's own is above that.
    pub(crate) fn floor(&self, claim: &Claim) -> u64 {
        let state = self.lock();
        state.claims.get(&claim.owner()).map_or(0, |entry| entry.floor)
    }

    /// The shared lease of a claim whose key, if that link shows it at all, is the head of its queue.
    pub(crate) fn held_over(&self, claim: &Claim, link: u64) -> Option<Arc<Kept>> {
        let state = self.lock();
        let known = state.claims.get(&claim.owner())?.known();
        let held = known.is_sure() && known.is_first_if_there(link) && known.kept.mark().is_some();
        held.then_some(known.kept)
    }

    /// The lease that the claim was asked for with last.
    pub(crate) fn lease_of(&self, claim: &Claim) -> Option<Arc<Kept>> {
        let state = self.lock();
        let entry = state.claims.get(&claim.owner())?;
        Some(Arc::clone(&entry.kept))
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
    pub(crate) fn holding(&self, name: &LockName, token: FencingToken) -> Option<(Arc<str>, i64)> {
        let state = self.lock();
        let mut claims = state.claims.values();
        claims.find_map(|entry| {
            let held = entry.held.as_ref()?;
            let it = entry.claim.name() == name && held.tokens.contains(&token) && entry.leaving.is_none();
            it.then(|| (Arc::clone(&held.key), held.created))
        })
    }

    /// The claim is to go: nothing is to be heard of it any more.
    pub(crate) fn leave(&self, claim: &Claim, after: After, now: Stamp) {
        if let Some(entry) = self.lock().claims.get_mut(&claim.owner()) {
            let since = entry.leaving.map_or(now, |(since, _)| since);
            entry.leaving = Some((since, after));
            if let Some(held) = &mut entry.held {
                held.watch = None;
            }
        }
    }

    /// The claim that has this key of its own has gone. One that came again has another key.
    pub(crate) fn gone(&self, claim: &Claim, own: &str) {
        self.lock().remove(claim, |entry| *entry.key == *own);
    }

    /// Forgets the claim if the server has nothing of it, and will have nothing. True if there is nothing to release.
    pub(crate) fn forget_what_is_nowhere(&self, claim: &Claim) -> bool {
        let mut state = self.lock();
        state.remove(claim, |entry| !entry.there && entry.is_settled());
        !state.claims.contains_key(&claim.owner())
    }

    /// The key of this client that the claim has.
    pub(crate) fn key_of(&self, claim: &Claim) -> Option<Arc<str>> {
        let state = self.lock();
        let entry = state.claims.get(&claim.owner())?;
        Some(Arc::clone(&entry.key))
    }

    /// The claims on that lease that should have gone before `then`, and what is to become of their names.
    pub(crate) fn overdue(&self, kept: &Kept, then: Stamp) -> Vec<(Claim, After)> {
        let overdue = |entry: &Entry| {
            let (_, after) = entry.leaving.filter(|(since, _)| *since < then)?;
            (entry.kept.id() == kept.id()).then(|| (entry.claim.clone(), after))
        };
        let state = self.lock();
        state.claims.values().filter_map(overdue).collect()
    }

    /// Looks at the reservation of a claim, or changes it; `None` if nothing is known of the claim.
    pub(crate) fn reservation<T>(&self, claim: &Claim, look: impl FnOnce(&mut Reserved) -> T) -> Option<T> {
        let mut state = self.lock();
        let entry = state.claims.get_mut(&claim.owner())?;
        Some(look(&mut entry.reserved))
    }

    /// The key by which the claim was granted.
    pub(crate) fn holding_of(&self, claim: &Claim) -> Option<Holding> {
        let state = self.lock();
        let held = state.claims.get(&claim.owner())?.held.as_ref()?;
        Some(Holding {
            key: Arc::clone(&held.key),
            created: held.created,
            base: tokens::base_of(*held.tokens.end(), held.created),
        })
    }

    /// Whether the claim was granted for its own key, and nothing else is to be heard of it.
    pub(crate) fn is_sure(&self, claim: &Claim) -> bool {
        let state = self.lock();
        let entry = state.claims.get(&claim.owner());
        entry.is_some_and(|entry| entry.known().is_sure())
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
                key: Arc::clone(&held.key),
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

#[cfg(test)]
mod tests {
    use lock_core::Clock;

    use super::*;

    const TTL: Duration = Duration::from_secs(2);

    fn claim() -> Claim {
        Claim::new("n".parse().unwrap(), TTL)
    }

    fn kept() -> Arc<Kept> {
        Kept::new(1, TTL, Clock::system().now(), Err("ns:lease/1".to_owned()), 1)
    }

    #[test]
    fn a_key_is_given_out_again_once_all_is_answered() {
        let (table, kept, claims) = (Table::default(), kept(), [claim(), claim()]);
        let key = table.putting(&claims[0], "n/", &kept, 0);
        table.answered(&claims[0], &key, true);
        table.deleting(&claims[0]).unwrap();
        table.deleted(&claims[0], &key);
        table.gone(&claims[0], &key);
        assert_eq!(table.putting(&claims[1], "n/", &kept, 0), key);
    }

    #[test]
    fn an_old_answer_does_not_end_a_claim_that_came_again() {
        let (table, kept, claim) = (Table::default(), kept(), claim());
        let old = table.putting(&claim, "n/", &kept, 0);
        table.answered(&claim, &old, true);
        for _ in 0..2 {
            table.deleting(&claim).unwrap();
        }
        table.deleted(&claim, &old);
        table.gone(&claim, &old);
        let new = table.putting(&claim, "n/", &kept, 0);
        assert_ne!(new, old);
        table.deleted(&claim, &old);
        table.gone(&claim, &old);
        assert_eq!(table.key_of(&claim), Some(new));
    }

    #[test]
    fn a_lock_is_found_by_each_token_of_its_grant() {
        let (table, kept, claim, now) = (Table::default(), kept(), claim(), Clock::system().now());
        let [below, first, last] = [16, 17, 32].map(|token| FencingToken::new(token).unwrap());
        let grant = Grant::new(claim.clone(), last, kept.lease(now, now)).with_first_token(first);
        let key = table.putting(&claim, "n/", &kept, 0);
        table.granted(&grant, (&key, 2), 1);
        for token in [first, last] {
            assert!(table.holding(claim.name(), token).is_some());
        }
        assert!(table.holding(claim.name(), below).is_none());
        assert_eq!(table.holding_of(&claim).unwrap().base, Some(0));
    }

    #[test]
    fn of_a_refused_claim_nothing_is_kept_unless_it_may_still_be_put() {
        let (table, kept, claims) = (Table::default(), kept(), [claim(), claim()]);
        let keys = claims.each_ref().map(|claim| table.putting(claim, "n/", &kept, 0));
        table.answered(&claims[0], &keys[0], false);
        assert!(table.forget_what_is_nowhere(&claims[0]));
        assert!(!table.forget_what_is_nowhere(&claims[1]));
        assert_eq!(table.key_of(&claims[0]), None);
        assert!(table.key_of(&claims[1]).is_some());
    }
}
