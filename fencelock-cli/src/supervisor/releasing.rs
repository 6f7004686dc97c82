//! How the lock of a killed locker is released.
//!
//! **Invariant.** Only the acquisition that the locker has named is released, and only when nothing runs any more that the lock
//! protected. The owner is a new one for each acquisition, so a later holder is never harmed.

use std::time::Duration;

use fencelock::{LockError, Locks};
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};

use crate::channel::Claim;
use crate::exit::Failure;
use crate::place::Place;
use crate::say::say;
use crate::timing::Instant;

/// For how long it is tried if the end of the lease is not known.
pub(super) const SHORT: Duration = Duration::from_secs(5);

/// Between tries.
const PAUSE: Duration = Duration::from_millis(250);

/// Releases what `claim` names, and tries until `deadline`, when the lock is free by itself.
pub(super) fn release(name: &str, claim: Claim, deadline: Instant) {
    if let Err(failure) = try_to(name, claim, deadline) {
        say(format_args!(
            "fencelock was killed, and its lock {name} could not be released: {failure}; it frees itself when its ttl is over"
        ));
    }
}

fn try_to(name: &str, claim: Claim, deadline: Instant) -> Result<(), Failure> {
    let locks = Place::find(claim.url)?.client()?;
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::unavailable(format!("no runtime could be started: {e}")))?;
    let left = deadline.since(Instant::now());
    let released = runtime.block_on(async { timeout(left, until_answered(&locks, name, claim.owner)).await });
    match released {
        Ok(released) => Ok(released?),
        Err(_) => Err(Failure::unavailable("there was no answer in time")),
    }
}

async fn until_answered(locks: &Locks, name: &str, owner: fencelock::OwnerId) -> Result<(), LockError> {
    loop {
        match locks.release_owned(name, owner).await {
            Ok(_) => return Ok(()),
            Err(error) if error.is_retryable() => sleep(PAUSE).await,
            Err(error) => return Err(error),
        }
    }
}
