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

    /// The last arguments of a script for that owner: how many nodes there are, the process that the connection leads to, the proposal,
    /// and the longest ttl.
    pub(crate) fn arguments(&self, link: &Link, owner: &str) -> [String; 4] {
        let proposal = self.proposals.of(owner).to_string();
        [
            self.nodes.clone(),
            link.run_id().to_owned(),
            proposal,
            self.max_ttl.clone(),
        ]
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

/// The proposals of the operations under way, by owner: all nodes must get the same one, also if a request is sent again.
#[derive(Clone, Debug, Default)]
pub(crate) struct Proposals(Arc<Mutex<HashMap<String, Entry>>>);

#[derive(Debug)]
struct Entry {
    micros: u64,
    users: usize,
}

impl Proposals {
    /// Proposes that reading of the servers' clocks in each request for the owner, until the result is dropped. A later proposal
    /// for the same owner replaces it.
    pub(crate) fn propose(&self, owner: OwnerId, micros: u64) -> Arc<Proposal> {
        let owner = owner.to_string();
        let mut entries = self.lock();
        let entry = entries.entry(owner.clone()).or_insert(Entry { micros, users: 0 });
        entry.micros = micros;
        entry.users += 1;
        drop(entries);
        Arc::new(Proposal {
            proposals: self.clone(),
            owner,
        })
    }

    /// 0 if there is none.
    fn of(&self, owner: &str) -> u64 {
        self.lock().get(owner).map_or(0, |entry| entry.micros)
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
        assert_eq!(proposals.of(&owner.to_string()), 9);
        drop(first);
        assert_eq!(proposals.of(&owner.to_string()), 9);
        drop(second);
        assert_eq!(proposals.of(&owner.to_string()), 0);
    }
}
