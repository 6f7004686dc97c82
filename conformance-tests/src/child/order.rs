//! What the suite and its child processes say to each other, a line of JSON each.

use std::time::Duration;

use lock_core::FencingToken;
use serde::{Deserialize, Serialize};

use crate::writers::Written;

/// What a child is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Take a lock; answered twice.
    Lock {
        name: String,
        ttl: Duration,
        wait: Option<Duration>,
    },
    Reserve {
        name: String,
        ttl: Duration,
        length: Duration,
    },
    Release(String),
    /// Say whether a lock is believed to be held.
    Look(String),
    Count {
        name: String,
        ttl: Duration,
        times: usize,
    },
    Write {
        name: String,
        resource: String,
        writes: usize,
    },
    End {
        exits: bool,
    },
}

/// What it says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Ready,
    Asking,
    Granted(FencingToken),
    Busy,
    /// Whether the lock was held.
    Was(bool),
    Counted(Vec<FencingToken>),
    Written(Vec<Written>),
    Failed(String),
}
