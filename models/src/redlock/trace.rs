//! Replays what real nodes and coordinators did, and says whether the protocol allows it.
//!
//! The nodes' answers are compared with those of [`Node::handle`](super::node::Node::handle), the function that the model uses. Leases, places in queues and the
//! restart delay end by the clock of the node that each step has, so nothing has to be recorded of that. Tokens are compared exactly.

use serde::{Deserialize, Serialize};

use super::node::Answer;
use super::replay::Replay;
use crate::redis_queue::server::Push;

/// One event of one name. Times are readings of one clock, in microseconds, unless it says milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum Step {
    /// A node ran a script.
    Ran(Run),
    /// A node lost its data.
    Emptied {
        /// When.
        at: u64,
        /// The node, from 0.
        node: usize,
    },
    /// A node was restarted with its data, or an older copy of it.
    Restarted {
        /// When.
        at: u64,
        /// The node, from 0.
        node: usize,
    },
    /// A coordinator gave its caller a token.
    Given {
        /// When.
        at: u64,
        /// The acquisition.
        owner: String,
        /// The token.
        token: u64,
        /// The nodes that the coordinator counted as having granted, and what they granted.
        q1: Vec<(usize, u64)>,
    },
    /// An acquisition ended: it was released or given up, or its deadline has passed.
    Ended {
        /// When.
        at: u64,
        /// The acquisition.
        owner: String,
    },
}

/// One run of a script.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The node's clock when the script ran.
    pub at: u64,
    /// The node, from 0.
    pub node: usize,
    /// The token that the client proposed, or 0.
    pub proposal: u64,
    /// The place in the queue that the client proposed, or 0.
    pub place: u64,
    /// The script, and what it answered.
    #[serde(flatten)]
    pub script: Script,
    /// The grant that the script pushed to a waiter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub push: Option<Push<String>>,
    /// The waiters that the script removed because no client received their push.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unheard: Vec<String>,
    /// The waiters whose time was over and that the script came upon and removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub swept: Vec<String>,
}

/// What an acquisition does if it does not get the name. See the type of that name in lock-redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBusy {
    /// Nothing.
    Fail,
    /// It waits.
    Queue,
    /// It waits, also if it holds the node and others wait there.
    Yield,
}

/// A script, and what it answered. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "script", rename_all = "snake_case")]
pub enum Script {
    /// ACQUIRE.
    Acquire {
        /// The acquisition.
        owner: String,
        /// How long a lease lasts.
        ttl: u64,
        /// When the acquisition must have ended.
        stop: u64,
        /// The stamp of the request, which a push has again.
        sent: u64,
        /// What to do if another acquisition holds the node.
        on_busy: OnBusy,
        /// What the node answered.
        answer: Answer<u64>,
        /// For how long the node has granted the name, or keeps the place in the queue. 0 if it did neither.
        life: u64,
    },
    /// CONFIRM.
    Confirm {
        /// The acquisition.
        owner: String,
        /// What the client says that this node granted.
        presented: u64,
        /// The token to confirm.
        token: u64,
        /// Whether the node confirmed.
        confirmed: bool,
    },
    /// RENEW.
    Renew {
        /// The acquisition.
        owner: String,
        /// How long a lease lasts.
        ttl: u64,
        /// When the request is too late.
        stop: u64,
        /// What the node answered: renewed, late or lost.
        answer: Answer<u64>,
    },
    /// RELEASE.
    Release {
        /// The acquisition.
        owner: String,
        /// When the request is too late, if ever.
        stop: Option<u64>,
        /// Whether the node was freed.
        released: bool,
    },
    /// Asks since when the node has its data.
    Born {
        /// If the node has its data since then, it may grant at once.
        open: Option<u64>,
        /// Whether the node waits for the restart delay, unless that is over.
        is_new: bool,
        /// Since when the node has its data.
        since: u64,
    },
}

/// Why a trace is not one of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {at}: {reason}")]
pub struct Rejected {
    /// The number of the step, from 0.
    pub at: usize,
    /// What is wrong with it.
    pub reason: String,
}

/// Checks the trace of one name, the only one of its namespace, on `nodes` nodes that have no data at its beginning. The restart delay is `max_ttl`
/// (milliseconds). No counter may end within the trace.
///
/// # Errors
///
/// The first step that the protocol does not allow.
pub fn accepts(nodes: usize, max_ttl: u64, trace: &[Step]) -> Result<(), Rejected> {
    let mut replay = Replay::new(nodes, max_ttl);
    for (at, step) in trace.iter().enumerate() {
        replay.step(step).map_err(|reason| Rejected { at, reason })?;
    }
    Ok(())
}
