//! What the client of one of several nodes knows of the others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lock_core::LockError;

/// Which of the nodes a client is connected to.
#[derive(Debug)]
pub(crate) struct Membership {
    /// Which of the nodes it is.
    number: usize,
    found: Found,
    /// How many nodes there are, and the longest ttl in ms, as scripts are told.
    pub(super) nodes: String,
    pub(super) max_ttl: String,
}

/// The run ids of the servers that were found as each of the nodes.
pub(super) type Found = Arc<Mutex<HashMap<usize, String>>>;

impl Membership {
    pub(super) fn new(number: usize, found: &Found, nodes: usize, max_ttl: Duration) -> Self {
        Self {
            number,
            found: Arc::clone(found),
            nodes: nodes.to_string(),
            max_ttl: max_ttl.as_millis().to_string(),
        }
    }

    /// Takes note of the server that was found as this node, and refuses one that was found as another node: its failure would count twice.
    pub(crate) fn found(&self, run_id: &str) -> Result<(), LockError> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let other = found.iter().find(|(other, id)| **other != self.number && *id == run_id);
        if let Some((other, _)) = other {
            return Err(same(*other, self.number));
        }
        found.insert(self.number, run_id.to_owned());
        Ok(())
    }
}

/// Two nodes, by their numbers from 0, are one server.
pub(super) fn same(one: usize, other: usize) -> LockError {
    let (one, other) = (one.min(other) + 1, one.max(other) + 1);
    LockError::configuration(format!(
        "nodes {one} and {other} are the same server, whose failure would count twice; give independent servers"
    ))
}
