//! Writers that go on after their time, as processes do that were stopped, and what the resource may answer them.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Clock, FencingToken, LockError, Locks};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use crate::harness::Resource;

/// One guarded write, as whoever made it saw it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) token: FencingToken,
    /// When it was asked for and answered, in nanoseconds of a clock that all processes of the machine share.
    pub(crate) asked: u64,
    pub(crate) answered: u64,
    pub(crate) accepted: bool,
}

/// Takes the lock again and again, writes with its token, lets go of it, and writes on.
pub(crate) async fn write_on(
    locks: &Locks,
    resource: &Arc<dyn Resource>,
    name: &str,
    writes: usize,
) -> Result<Vec<Written>, LockError> {
    let mut written = Vec::with_capacity(writes);
    while written.len() < writes {
        let guard = locks.lock(name).await?;
        let token = guard.token();
        write_some(resource, token, &mut written).await?;
        guard.release().await?;
        write_some(resource, token, &mut written).await?;
    }
    Ok(written)
}

/// Writes in handfuls that are on their way at the same time, with pauses between some of them.
async fn write_some(
    resource: &Arc<dyn Resource>,
    token: FencingToken,
    written: &mut Vec<Written>,
) -> Result<(), LockError> {
    let end = written.len() + fastrand::usize(50..250);
    while written.len() < end {
        let mut handful = JoinSet::new();
        for _ in 0..fastrand::usize(1..32) {
            let resource = Arc::clone(resource);
            handful.spawn(async move {
                let asked = now();
                let accepted = resource.write(token, token.as_i64()).await?;
                Ok::<_, LockError>(Written {
                    token,
                    asked,
                    answered: now(),
                    accepted,
                })
            });
        }
        while let Some(done) = handful.join_next().await {
            written.push(done.map_err(|panic| LockError::failed("writing", panic))??);
        }
        if fastrand::u8(..4) == 0 {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(..2_000))).await;
        }
    }
    Ok(())
}

/// What the resource should not have done. Writes that overlap in time may have come in either order.
pub(crate) fn violations(written: &[Written]) -> Vec<String> {
    let mut found = Vec::new();
    let mut accepted: Vec<_> = written.iter().filter(|write| write.accepted).collect();
    // The highest token that surely had been seen at a time, and the highest that may have been.
    accepted.sort_unstable_by_key(|write| write.answered);
    let seen = rising(accepted.iter().map(|write| (write.answered, write.token)));
    accepted.sort_unstable_by_key(|write| write.asked);
    let maybe_seen = rising(accepted.iter().map(|write| (write.asked, write.token)));
    for write in written {
        let mark = highest_before(&seen, write.asked);
        if write.accepted && mark > Some(write.token) {
            found.push(format!("{write:?} was accepted, although {mark:?} had been"));
        }
        let mark = highest_before(&maybe_seen, write.answered);
        if !write.accepted && mark <= Some(write.token) {
            found.push(format!(
                "{write:?} was refused, although nothing above {mark:?} had been accepted"
            ));
        }
    }
    found
}

/// For each time the highest value up to then.
fn rising(values: impl Iterator<Item = (u64, FencingToken)>) -> Vec<(u64, FencingToken)> {
    values
        .scan(None, |highest, (time, token)| {
            *highest = (*highest).max(Some(token));
            highest.map(|highest| (time, highest))
        })
        .collect()
}

fn highest_before(rising: &[(u64, FencingToken)], time: u64) -> Option<FencingToken> {
    let before = rising.partition_point(|(then, _)| *then < time);
    before.checked_sub(1).map(|last| rising[last].1)
}

/// The clock has an origin, to which a subtraction of any length comes down.
fn now() -> u64 {
    let now = Clock::system().now();
    u64::try_from(now.since(now - Duration::MAX).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(token: u64, asked: u64, answered: u64, accepted: bool) -> Written {
        let token = FencingToken::new(token).unwrap();
        Written {
            token,
            asked,
            answered,
            accepted,
        }
    }

    #[test]
    fn a_lower_token_that_is_accepted_after_a_higher_one_is_a_violation() {
        let history = [write(5, 1, 2, true), write(6, 3, 4, true), write(5, 5, 6, true)];
        assert_eq!(violations(&history).len(), 1);
    }

    #[test]
    fn the_highest_token_that_is_refused_is_a_violation() {
        let history = [write(5, 1, 2, true), write(5, 3, 4, false), write(6, 5, 6, false)];
        assert_eq!(violations(&history).len(), 2);
    }

    #[test]
    fn writes_at_the_same_time_may_have_come_in_either_order() {
        for accepted in [true, false] {
            let history = [write(6, 1, 5, true), write(5, 2, 4, accepted)];
            assert_eq!(violations(&history), Vec::<String>::new());
        }
    }
}
