//! What a client knows of one node of several.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{LockError, OwnerId};

use crate::link::Link;
use crate::requests::millis;

/// A node's part of the client's settings.
#[derive(Debug)]
pub(crate) struct Node {
    place: Place,
    proposals: Proposals,
    nodes: String,
    max_ttl: String,
    young: AtomicBool,
}

impl Node {
    /// One of that many nodes.
    pub(super) fn new(place: Place, proposals: Proposals, nodes: usize, max_ttl: Duration) -> Self {
        Self {
            place,
            proposals,
            nodes: nodes.to_string(),
            max_ttl: millis(max_ttl).to_string(),
            young: AtomicBool::new(false),
        }
    }

    /// Takes note of the server that was found as this node, and refuses one that was found as another node: its failure would count twice.
    pub(crate) fn found(&self, run_id: &str) -> Result<(), LockError> {
        let Place { number, found } = &self.place;
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        let other = found.iter().find(|(other, id)| *other != number && *id == run_id);
        if let Some((other, _)) = other {
            return Err(same(*other, *number));
        }
        found.insert(*number, run_id.to_owned());
        Ok(())
    }

    /// The last arguments of a script for that owner: how many nodes there are, the process that the connection leads to, the proposal
    /// for the token, the place in the queue, and the longest ttl.
    pub(crate) fn arguments(&self, link: &Link, owner: &str) -> [String; 5] {
        let [token, place] = self.proposals.of(owner).map(|micros| micros.to_string());
        let process = link.run_id().to_owned();
        [self.nodes.clone(), process, token, place, self.max_ttl.clone()]
    }

    /// Takes note of the number that the claim of that owner has in this node's queue.
    pub(crate) fn queued(&self, owner: OwnerId, number: u64) {
        self.proposals.queued(owner, number);
    }

    /// Takes note of whether the last acquire was refused because the node is new or has lost its data.
    pub(crate) fn answered(&self, young: bool) {
        self.young.store(young, Ordering::Release);
    }

    /// Whether the last acquire was refused for that reason.
    pub(crate) fn is_young(&self) -> bool {
        self.young.load(Ordering::Acquire)
    }
}

/// Which of the nodes it is, and the run ids of the servers that were found as each of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    pub(super) number: usize,
    found: Arc<Mutex<HashMap<usize, String>>>,
}

impl Place {
    /// The place of another node of the same client.
    pub(super) fn of(&self, number: usize) -> Self {
        Self { number, ..self.clone() }
    }
}

/// Two nodes, by their numbers from 0, are one server.
pub(super) fn same(one: usize, other: usize) -> LockError {
    let (one, other) = (one.min(other) + 1, one.max(other) + 1);
    LockError::configuration(format!(
        "nodes {one} and {other} are the same server, whose failure would count twice; give independent servers"
    ))
}

/// The proposals of the operations under way, by owner: all nodes must get the same token proposed, also if a request is sent again.
///
/// The place in the queues begins as the same reading of the clock. A node puts a newcomer behind all who wait there already, and may give
/// it a higher number for that. Who yields goes back with the highest number that a node has given it, as a Lamport clock rises, so
/// that contenders come to have the same order on all nodes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Proposals(Arc<Mutex<HashMap<String, Entry>>>);

#[derive(Debug, Default)]
struct Entry {
    token: u64,
    place: u64,
    users: usize,
}

impl Proposals {
    /// Proposes that reading of the servers' clocks in each request for the owner, until the result is dropped. A later proposal
    /// for the same owner replaces it.
    pub(crate) fn propose(&self, owner: OwnerId, micros: u64) -> Arc<Proposal> {
        let owner = owner.to_string();
        let mut entries = self.lock();
        let entry = entries.entry(owner.clone()).or_default();
        entry.token = micros;
        entry.place = entry.place.max(micros);
        entry.users += 1;
        drop(entries);
        Arc::new(Proposal {
            proposals: self.clone(),
            owner,
        })
    }

    fn queued(&self, owner: OwnerId, number: u64) {
        if let Some(entry) = self.lock().get_mut(&owner.to_string()) {
            entry.place = entry.place.max(number);
        }
    }

    /// For the token and for the place; 0 if there is none.
    fn of(&self, owner: &str) -> [u64; 2] {
        self.lock()
            .get(owner)
            .map_or([0, 0], |entry| [entry.token, entry.place])
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        // Nothing here panics while holding the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A proposal in use.
#[derive(Debug)]
pub(crate) struct Proposal {
    proposals: Proposals,
    owner: String,
}

impl Drop for Proposal {
    fn drop(&mut self) {
        let mut entries = self.proposals.lock();
        if let Some(entry) = entries.get_mut(&self.owner) {
            entry.users -= 1;
            if entry.users == 0 {
                entries.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proposal_lasts_until_its_last_user_is_dropped() {
        let proposals = Proposals::default();
        let owner = OwnerId::random();
        let first = proposals.propose(owner, 7);
        let second = proposals.propose(owner, 9);
        assert_eq!(proposals.of(&owner.to_string()), [9, 9]);
        drop(first);
        assert_eq!(proposals.of(&owner.to_string()), [9, 9]);
        drop(second);
        assert_eq!(proposals.of(&owner.to_string()), [0, 0]);
    }

    #[test]
    fn a_place_only_rises_and_the_token_stays() {
        let proposals = Proposals::default();
        let owner = OwnerId::random();
        let _proposal = proposals.propose(owner, 7);
        for (number, place) in [(0, 7), (9, 9), (8, 9)] {
            proposals.queued(owner, number);
            assert_eq!(proposals.of(&owner.to_string()), [7, place]);
        }
    }
}
