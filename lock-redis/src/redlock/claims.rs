//! What a client remembers of its claims, beside what the nodes store.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{FencingToken, OwnerId, Stamp};
use tokio::sync::watch;
use tokio::time::timeout;

/// The claims that hold a name, and those with requests that free a node and that the node has not confirmed.
///
/// Such a request can reach the node at any time until it expires. If the same claim is granted that node again, the request would end
/// that grant unnoticed, so the node does not count for the claim until then.
#[derive(Debug, Default)]
pub(super) struct Claims {
    known: Mutex<Known>,
    /// Changes when a node has confirmed a request.
    confirmed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Known {
    claims: HashMap<OwnerId, Memory>,
    /// At how many entries those that have expired are removed.
    limit: usize,
}

#[derive(Debug)]
struct Memory {
    token: Option<FencingToken>,
    /// A bit for each node with an unconfirmed request.
    unconfirmed: u8,
    /// When those requests have expired.
    until: Stamp,
}

/// The fewest entries among which expired ones are looked for.
const FEWEST: usize = 64;

impl Claims {
    /// The token of the claim, if it holds the name.
    pub(super) fn token(&self, owner: OwnerId) -> Option<FencingToken> {
        self.lock().claims.get(&owner)?.token
    }

    /// The claim holds the name.
    pub(super) fn hold(&self, owner: OwnerId, token: FencingToken, now: Stamp) {
        self.lock().of(owner, now).token = Some(token);
    }

    /// A request that frees these nodes is about to be sent. It expires at `until`.
    pub(super) fn free(&self, owner: OwnerId, nodes: impl IntoIterator<Item = usize>, now: Stamp, until: Stamp) {
        let mut known = self.lock();
        let memory = known.of(owner, now);
        memory.token = None;
        memory.until = memory.until.max(until);
        for node in nodes {
            memory.unconfirmed |= 1 << node;
        }
    }

    /// The claim does not hold the name any more.
    pub(super) fn forget(&self, owner: OwnerId) {
        let mut known = self.lock();
        if let Some(memory) = known.claims.get_mut(&owner) {
            memory.token = None;
            if memory.unconfirmed == 0 {
                known.claims.remove(&owner);
            }
        }
    }

    /// Whether there is a node that does not count for the claim.
    pub(super) fn any_unconfirmed(&self, owner: OwnerId, now: Stamp) -> bool {
        let known = self.lock();
        let memory = known.claims.get(&owner);
        memory.is_some_and(|memory| memory.unconfirmed != 0 && memory.until > now)
    }

    /// The node has carried out the request.
    pub(super) fn confirm(&self, owner: OwnerId, node: usize) {
        let mut known = self.lock();
        if let Some(memory) = known.claims.get_mut(&owner) {
            memory.unconfirmed &= !(1 << node);
            if memory.unconfirmed == 0 && memory.token.is_none() {
                known.claims.remove(&owner);
            }
        }
        drop(known);
        self.confirmed.send_replace(());
    }

    /// Waits until the node counts for the claim. False if it does not within `limit` from `now`.
    pub(super) async fn counts(&self, owner: OwnerId, node: usize, now: Stamp, limit: Duration) -> bool {
        let Some(until) = self.unconfirmed(owner, node, now) else {
            return true;
        };
        let left = until.since(now);
        let mut confirmed = self.confirmed.subscribe();
        let confirming = async {
            while self.unconfirmed(owner, node, now).is_some() {
                // The sender is here.
                let _ = confirmed.changed().await;
            }
        };
        timeout(limit.min(left), confirming).await.is_ok() || left <= limit
    }

    /// Until when the node does not count for the claim, if so.
    fn unconfirmed(&self, owner: OwnerId, node: usize, now: Stamp) -> Option<Stamp> {
        let known = self.lock();
        let memory = known.claims.get(&owner)?;
        (memory.unconfirmed & (1 << node) != 0 && memory.until > now).then_some(memory.until)
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Nothing here panics while holding the mutex.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn of(&mut self, owner: OwnerId, now: Stamp) -> &mut Memory {
        if self.claims.len() >= self.limit.max(FEWEST) {
            self.claims
                .retain(|_, memory| memory.token.is_some() || memory.until > now);
            self.limit = 2 * self.claims.len();
        }
        self.claims.entry(owner).or_insert(Memory {
            token: None,
            unconfirmed: 0,
            until: now,
        })
    }
}

#[cfg(test)]
mod tests {
    use lock_core::Clock;

    use super::*;

    #[test]
    fn a_node_does_not_count_until_it_has_confirmed_or_the_request_has_expired() {
        let (clock, hand) = Clock::manual();
        let (claims, owner) = (Claims::default(), OwnerId::random());
        let until = clock.now() + Duration::from_secs(10);
        claims.free(owner, [0, 2], clock.now(), until);
        let counts = |node| claims.unconfirmed(owner, node, clock.now()).is_none();
        assert_eq!([0, 1, 2].map(counts), [false, true, false]);
        claims.confirm(owner, 0);
        assert_eq!([0, 1, 2].map(counts), [true, true, false]);
        hand.advance(Duration::from_secs(10));
        assert_eq!([0, 1, 2].map(counts), [true, true, true]);
    }

    #[test]
    fn what_has_expired_is_forgotten_and_what_holds_is_not() {
        let (clock, hand) = Clock::manual();
        let (claims, held) = (Claims::default(), OwnerId::random());
        let token = FencingToken::new(7).unwrap();
        claims.hold(held, token, clock.now());
        for _ in 0..10 * FEWEST {
            let until = clock.now() + Duration::from_secs(1);
            claims.free(OwnerId::random(), [0], clock.now(), until);
            hand.advance(Duration::from_millis(100));
        }
        assert!(claims.lock().claims.len() <= FEWEST + 1);
        assert_eq!(claims.token(held), Some(token));
        claims.free(held, [1], clock.now(), clock.now() + Duration::from_secs(1));
        assert_eq!(claims.token(held), None);
        claims.confirm(held, 1);
        assert!(!claims.lock().claims.contains_key(&held));
    }
}
