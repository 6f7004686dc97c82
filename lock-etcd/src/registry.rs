//! What this client has on the server, as far as it knows.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{Claim, FencingToken, Grant, LockName, OwnerId, Revoker, Stamp};

use crate::lease::EtcdLease;

/// How often claims and leases that are over are looked for.
const SWEEP: Duration = Duration::from_secs(1);

/// What becomes of the name of a claim that is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    Free,
    /// It stays taken until then.
    Reserved(Stamp),
}

/// The client's claims and leases.
pub(crate) struct Registry {
    /// Drawn at random: the beginning of this client's keys under each name.
    client: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The lease that new claims of a ttl in seconds share.
    shared: HashMap<u64, Arc<EtcdLease>>,
    /// All leases, those that no new claim uses included.
    leases: HashMap<i64, Arc<EtcdLease>>,
    claims: HashMap<LockName, Vec<Entry>>,
    /// When they were looked through last.
    swept: Option<Stamp>,
}

struct Entry {
    claim: Claim,
    lease: Arc<EtcdLease>,
    /// The number in the key: no other claim of this client on the name has it.
    number: u32,
    key: Arc<str>,
    /// How many requests were sent that can put the key, and not answered.
    puts: u32,
    /// Whether the key was put, or found on the server.
    is_there: bool,
    held: Option<Held>,
    /// Since when the claim is to go, and what is to become of its name.
    leaving: Option<(Stamp, After)>,
}

struct Held {
    tokens: RangeInclusive<FencingToken>,
    created: i64,
    base: u64,
    revoker: Revoker,
}

/// What is known of a claim that is to be released.
pub(crate) struct Known {
    pub(crate) lease: Arc<EtcdLease>,
    pub(crate) key: Arc<str>,
    /// Whether the key may be put later.
    pub(crate) is_unclear: bool,
    /// The base of its token, if it was granted.
    pub(crate) base: Option<u64>,
}

/// A claim that is held.
pub(crate) struct HeldKey {
    pub(crate) key: Arc<str>,
    pub(crate) created: i64,
    pub(crate) revoker: Revoker,
}

impl State {
    fn entry(&self, claim: &Claim) -> Option<&Entry> {
        let entries = self.claims.get(claim.name())?;
        entries.iter().find(|entry| entry.claim.owner() == claim.owner())
    }

    fn entry_mut(&mut self, claim: &Claim) -> Option<&mut Entry> {
        let entries = self.claims.get_mut(claim.name())?;
        entries.iter_mut().find(|entry| entry.claim.owner() == claim.owner())
    }

    fn remove(&mut self, claim: &Claim, fits: impl Fn(&Entry) -> bool) {
        if let Some(entries) = self.claims.get_mut(claim.name()) {
            entries.retain(|entry| entry.claim.owner() != claim.owner() || !fits(entry));
            if entries.is_empty() {
                self.claims.remove(claim.name());
            }
        }
    }
}

impl Default for Registry {
    fn default() -> Self {
        let [.., a, b, c, d, e, f, g, h] = *OwnerId::random().as_bytes();
        Self {
            client: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            state: Mutex::default(),
        }
    }
}

impl Registry {
    /// The lease that claims of that many seconds share, if it is alive at `now`.
    pub(crate) fn shared(&self, seconds: u64, now: Stamp) -> Option<Arc<EtcdLease>> {
        let state = self.lock();
        state.shared.get(&seconds).filter(|lease| lease.is_valid(now)).cloned()
    }

    /// Adds a lease, as the one that new claims share if it is for that many seconds.
    pub(crate) fn add(&self, lease: &Arc<EtcdLease>, shared_for: Option<u64>) {
        let mut state = self.lock();
        if let Some(seconds) = shared_for {
            state.shared.insert(seconds, Arc::clone(lease));
        }
        state.leases.insert(lease.id(), Arc::clone(lease));
    }

    /// Forgets the leases that are over, and the claims whose releases were never answered and that have ended with their leases. Does
    /// nothing if that was done a moment ago.
    pub(crate) fn sweep(&self, now: Stamp) {
        let mut state = self.lock();
        if state.swept.is_some_and(|swept| now < swept + SWEEP) {
            return;
        }
        state.swept = Some(now);
        state.shared.retain(|_, lease| lease.is_valid(now));
        state.leases.retain(|_, lease| lease.is_valid(now));
        state.claims.retain(|_, entries| {
            entries.retain(|entry| entry.leaving.is_none() || entry.lease.is_valid(now));
            !entries.is_empty()
        });
    }

    /// The shortest ttl of the leases that are alive at `now` and are renewed.
    pub(crate) fn shortest_ttl(&self, now: Stamp) -> Option<Duration> {
        let state = self.lock();
        let renewed = |lease: &&Arc<EtcdLease>| lease.is_valid(now) && lease.is_renewed();
        let valid = state.leases.values().filter(renewed);
        valid.map(|lease| lease.ttl()).min()
    }

    /// The lease of that number.
    pub(crate) fn lease(&self, id: i64) -> Option<Arc<EtcdLease>> {
        self.lock().leases.get(&id).cloned()
    }

    pub(crate) fn forget_lease(&self, id: i64) {
        self.lock().leases.remove(&id);
    }

    /// Takes out all leases.
    pub(crate) fn take_leases(&self) -> Vec<Arc<EtcdLease>> {
        let mut state = self.lock();
        state.shared.clear();
        state.leases.drain().map(|(_, lease)| lease).collect()
    }

    /// A request is about to be sent that can put the key of the claim, which is returned: one of those in `queue`.
    pub(crate) fn putting(&self, claim: &Claim, queue: &str, lease: &Arc<EtcdLease>) -> Arc<str> {
        let mut state = self.lock();
        if state.entry(claim).is_none() {
            let entries = state.claims.entry(claim.name().clone()).or_default();
            let is_free = |number: &u32| entries.iter().all(|entry| entry.number != *number);
            let number = (0..).find(is_free).unwrap_or_default();
            let key = match claim.at_least() {
                // It can stay after the release.
                Some(_) => format!("{queue}{:016x}.{}", self.client, claim.owner()),
                None => format!("{queue}{:016x}.{number}", self.client),
            };
            entries.push(Entry {
                claim: claim.clone(),
                lease: Arc::clone(lease),
                number,
                key: key.into(),
                puts: 0,
                is_there: false,
                held: None,
                leaving: None,
            });
        }
        match state.entry_mut(claim) {
            Some(entry) => {
                entry.lease = Arc::clone(lease);
                entry.puts += 1;
                entry.leaving = None;
                Arc::clone(&entry.key)
            }
            None => Arc::from(queue),
        }
    }

    /// It was answered: whether the key was put.
    pub(crate) fn answered(&self, claim: &Claim, is_put: bool) {
        if let Some(entry) = self.lock().entry_mut(claim) {
            entry.puts = entry.puts.saturating_sub(1);
            entry.is_there |= is_put;
        }
    }

    /// The claim was granted, for its key that was created at that revision.
    pub(crate) fn granted(&self, grant: &Grant, base: u64, created: i64) {
        if let Some(entry) = self.lock().entry_mut(&grant.claim) {
            entry.is_there = true;
            entry.held = Some(Held {
                tokens: grant.first_token()..=grant.token,
                created,
                base,
                revoker: grant.revoker(),
            });
        }
    }

    /// The lease that the claim was asked for with last.
    pub(crate) fn lease_of(&self, claim: &Claim) -> Option<Arc<EtcdLease>> {
        let state = self.lock();
        state.entry(claim).map(|entry| Arc::clone(&entry.lease))
    }

    /// What is known of the claim; `None` if this client has not asked for it.
    pub(crate) fn known(&self, claim: &Claim) -> Option<Known> {
        let state = self.lock();
        state.entry(claim).map(|entry| Known {
            lease: Arc::clone(&entry.lease),
            key: Arc::clone(&entry.key),
            is_unclear: entry.puts > 0,
            base: entry.held.as_ref().map(|held| held.base),
        })
    }

    /// Whether the claim is not wanted any more.
    pub(crate) fn is_given_up(&self, claim: &Claim) -> bool {
        let state = self.lock();
        state.entry(claim).is_none_or(|entry| entry.leaving.is_some())
    }

    /// The key that makes a lock of that name and token this client's, and the revision at which it was created.
    pub(crate) fn holding(&self, name: &LockName, token: FencingToken) -> Option<(Arc<str>, i64)> {
        let state = self.lock();
        state.claims.get(name)?.iter().find_map(|entry| {
            let held = entry.held.as_ref()?;
            let is_it = held.tokens.contains(&token) && entry.leaving.is_none();
            is_it.then(|| (Arc::clone(&entry.key), held.created))
        })
    }

    /// The claim is to go.
    pub(crate) fn leave(&self, claim: &Claim, after: After, now: Stamp) {
        if let Some(entry) = self.lock().entry_mut(claim) {
            let since = entry.leaving.map_or(now, |(since, _)| since);
            entry.leaving = Some((since, after));
        }
    }

    /// The claim has gone from the server, and no request will bring it back.
    pub(crate) fn gone(&self, claim: &Claim) {
        self.lock().remove(claim, |_| true);
    }

    /// Forgets the claim if the server has nothing of it, and will have nothing. True if there is nothing to release.
    pub(crate) fn forget_what_is_nowhere(&self, claim: &Claim) -> bool {
        let mut state = self.lock();
        state.remove(claim, |entry| !entry.is_there && entry.puts == 0);
        state.entry(claim).is_none()
    }

    /// The claims on that lease that should have gone before `then`, and what is to become of their names.
    pub(crate) fn overdue(&self, lease: &EtcdLease, then: Stamp) -> Vec<(Claim, After)> {
        let overdue = |entry: &Entry| {
            let (_, after) = entry.leaving.filter(|(since, _)| *since < then)?;
            (entry.lease.id() == lease.id()).then(|| (entry.claim.clone(), after))
        };
        let state = self.lock();
        state.claims.values().flatten().filter_map(overdue).collect()
    }

    /// The claims on that lease that are held.
    pub(crate) fn held(&self, lease: &EtcdLease) -> Vec<HeldKey> {
        let held = |entry: &Entry| {
            let held = entry.held.as_ref().filter(|_| entry.leaving.is_none())?;
            (entry.lease.id() == lease.id()).then(|| HeldKey {
                key: Arc::clone(&entry.key),
                created: held.created,
                revoker: held.revoker.clone(),
            })
        };
        let state = self.lock();
        state.claims.values().flatten().filter_map(held).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn lease(id: i64, ttl: Duration, now: Stamp) -> Arc<EtcdLease> {
        EtcdLease::shared(id, ttl, now, format!("ns:lease/{id}"), 1)
    }

    #[test]
    fn claims_on_a_name_have_different_keys_which_are_used_again() {
        let (registry, lease) = (Registry::default(), lease(1, TTL, Clock::system().now()));
        let (first, second) = (claim(), claim());
        let key = registry.putting(&first, "n/", &lease);
        assert_eq!(registry.putting(&first, "n/", &lease), key);
        assert_ne!(registry.putting(&second, "n/", &lease), key);
        registry.gone(&first);
        assert_eq!(registry.putting(&claim(), "n/", &lease), key);
        let reserving = claim().with_at_least(TTL);
        let key = registry.putting(&reserving, "n/", &lease);
        assert!(key.ends_with(&reserving.owner().to_string()), "{key}");
    }

    #[test]
    fn only_a_claim_whose_requests_were_answered_can_be_forgotten_unreleased() {
        let (registry, lease) = (Registry::default(), lease(1, TTL, Clock::system().now()));
        let claims = [claim(), claim()];
        for claim in &claims {
            registry.putting(claim, "n/", &lease);
        }
        registry.answered(&claims[0], false);
        assert!(registry.forget_what_is_nowhere(&claims[0]));
        assert!(!registry.forget_what_is_nowhere(&claims[1]));
        assert!(registry.known(&claims[0]).is_none() && registry.known(&claims[1]).is_some());
    }

    #[test]
    fn a_lock_is_found_by_each_token_of_its_grant() {
        let (registry, claim, now) = (Registry::default(), claim(), Clock::system().now());
        let lease = lease(1, TTL, now);
        let [below, first, last] = [16, 17, 32].map(|token| FencingToken::new(token).unwrap());
        let key = registry.putting(&claim, "n/", &lease);
        let grant = Grant::new(claim.clone(), last, lease.lease(now, now)).with_first_token(first);
        registry.granted(&grant, 0, 2);
        for (token, found) in [
            (below, None),
            (first, Some((Arc::clone(&key), 2))),
            (last, Some((key, 2))),
        ] {
            assert_eq!(registry.holding(claim.name(), token), found);
        }
    }

    #[test]
    fn what_is_over_is_forgotten_and_the_shortest_ttl_counts_for_as_long_as_its_lease() {
        let (registry, now) = (Registry::default(), Clock::system().now());
        for (id, ttl) in [(1, 600), (2, 5)] {
            registry.add(&lease(id, Duration::from_secs(ttl), now), Some(ttl));
        }
        // One of a claim's own counts if the claim has it for its reservation.
        let of = |ttl| Claim::new("n".parse().unwrap(), Duration::from_secs(ttl));
        registry.add(
            &EtcdLease::for_claim(3, &of(3).with_own_lease().with_at_least(TTL), now),
            None,
        );
        registry.add(&EtcdLease::for_claim(4, &of(2).with_own_lease(), now), None);
        let shortest = |later| registry.shortest_ttl(now + Duration::from_secs(later));
        assert_eq!(shortest(0), Some(Duration::from_secs(3)));
        assert_eq!(shortest(4), Some(Duration::from_secs(5)));
        assert_eq!(shortest(601), None);
        let (left, held) = (claim(), claim());
        for claim in [&left, &held] {
            registry.putting(claim, "n/", &registry.lease(3).unwrap());
        }
        registry.leave(&left, After::Free, now);
        registry.sweep(now);
        assert!(registry.known(&left).is_some());
        registry.sweep(now + Duration::from_secs(4));
        assert!(registry.known(&left).is_none() && registry.known(&held).is_some());
        assert!(registry.lease(3).is_none() && registry.lease(2).is_some());
    }
}
