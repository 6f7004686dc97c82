//! A holder knows in time that it holds no more: before the server lets go by itself, and as soon as it is known where the server lets go
//! early. The fence decides until then.

use std::sync::Arc;
use std::time::Duration;

use lock_core::fence::Fence;
use lock_core::{Attempt, DistributedLock};

use super::{Entry, cases};
use crate::case::{Case, rises};
use crate::harness::Fault;
use crate::outcome::{Outcome, ensure, fail};

pub(crate) const CASES: &[Entry] = cases![
    a_server_frozen_for_less_than_a_ttl_lets_nobody_else_in_while_the_holder_believes,
    a_lock_that_expires_early_is_told_within_one_renewal =>
        |case| told_within_one_renewal(&case, Fault::Expire(case.name("n")), true),
    a_stolen_lock_is_told_within_one_renewal =>
        |case| told_within_one_renewal(&case, Fault::Steal(case.name("n")), false),
    a_deleted_lock_is_told_within_one_renewal =>
        |case| told_within_one_renewal(&case, Fault::Delete(case.name("n")), true),
    a_lock_lost_in_a_restart_without_data_is_told_within_one_renewal =>
        |case| told_within_one_renewal(&case, Fault::RestartWithoutData, true),
    a_lock_lost_with_everything_else_is_told_within_one_renewal =>
        |case| told_within_one_renewal(&case, Fault::DeleteAll, true),
    a_restart_loses_no_lock_without_telling,
];

pub(crate) async fn a_server_frozen_for_less_than_a_ttl_lets_nobody_else_in_while_the_holder_believes(
    case: Arc<Case>,
) -> Outcome {
    let (party, other) = (case.party().await?, case.party().await?);
    let guard = party.locks.lock("n").ttl(case.steady_ttl()).await?;
    case.inject(Fault::Freeze(guard.ttl() * 3 / 4)).await?;
    let (waiter, ttl) = (Arc::clone(&case), guard.ttl());
    let waiting = tokio::spawn(async move { waiter.lock_through(&other.locks, "n", ttl).await });
    let start = case.now();
    while guard.is_held() && case.now().since(start) < 2 * guard.ttl() {
        ensure!(
            !waiting.is_finished(),
            "the backend",
            "no other is let in while the holder believes"
        );
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    case.remark(format!(
        "after a freeze of three quarters of a ttl the lock was {}",
        if guard.is_held() { "still held" } else { "lost" }
    ));
    drop(guard);
    waiting.await??.release().await?;
    Ok(())
}

pub(crate) async fn a_restart_loses_no_lock_without_telling(case: Arc<Case>) -> Outcome {
    let (party, other) = (case.party().await?, case.party().await?);
    let ttl = case.ttl_of(Duration::from_secs(6));
    let guard = party.locks.lock("n").ttl(ttl).await?;
    case.inject(Fault::Restart).await?;
    let told = tokio::time::timeout(ttl / 3 + Duration::from_secs(1), guard.lost().wait()).await;
    case.remark(format!(
        "a lock held across a restart was {}",
        told.map_or("kept".to_owned(), |reason| format!("lost: {reason}"))
    ));
    if guard.is_held() {
        let claim = case.claim("n");
        let start = case.now();
        loop {
            match other.link.try_acquire(&claim).await {
                Ok(Attempt::Busy(_)) => break,
                Err(error) if error.is_retryable() && case.now().since(start) < ttl / 3 => {}
                other => fail!("the backend", "what is believed in is busy; it said {other:?}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        guard.release().await?;
    }
    case.lock_through(&other.locks, "n", ttl).await?.release().await?;
    Ok(())
}

/// The server lets go early, and may tell the next holder before it can tell this one: then the fence decides.
async fn told_within_one_renewal(case: &Case, fault: Fault, frees: bool) -> Outcome {
    let (party, other) = (case.party().await?, case.party().await?);
    let words = fault.words();
    let resource = Fence::new("the resource", 0);
    // A holder that is not told would believe for much longer than one renewal.
    let ttl = case.ttl_of(Duration::from_secs(12));
    let taken = case.now();
    let guard = party.locks.lock("n").ttl(ttl).await?;
    let fenced = |token, allowed: bool| {
        let written = resource.write(token, |writes| *writes += 1);
        ensure!(
            written.is_ok() == allowed,
            "the resource",
            "it takes current and refuses stale tokens; {written:?}"
        );
        Outcome::Ok(())
    };
    fenced(guard.token(), true)?;
    let restarts = matches!(fault, Fault::RestartWithoutData);
    case.inject(fault).await?;
    let injected = case.now();
    let told = async {
        if restarts {
            // Renewals that find no server are repeated: their number says nothing then.
            let limit = case.hang_limit();
            return case.within(limit, "the loss is seen", guard.lost().wait()).await;
        }
        case.learns_by_a_renewal(&party, &guard, injected.since(taken), 1).await
    };
    if frees {
        let next = case.lock_through(&other.locks, "n", ttl).await?;
        if guard.is_held() {
            case.overlap(words);
        }
        rises(guard.token(), next.token())?;
        fenced(next.token(), true)?;
        fenced(guard.token(), false)?;
        told.await?;
        ensure!(
            !guard.is_held(),
            "the guard",
            "it is not held after it was told of its loss"
        );
        ensure!(
            next.is_held(),
            "the client",
            "the successor is spared by what the loser does then"
        );
        next.release().await?;
    } else {
        if guard.is_held() {
            case.overlap(words);
        }
        told.await?;
        ensure!(
            !guard.is_held(),
            "the guard",
            "it is not held after it was told of its loss"
        );
        let refused = other.locks.try_lock("n").await?;
        // The stranger's time may be over on a machine that stood still.
        ensure!(
            refused.is_none() || case.now().since(injected) >= ttl / 2,
            "the backend",
            "what was given to another client is busy; it gave {refused:?}"
        );
        drop(refused);
        // The stranger does not renew.
        let next = other.locks.lock("n").ttl(ttl).wait_for(ttl + case.hang_limit()).await?;
        fenced(next.token(), true)?;
        fenced(guard.token(), false)?;
        next.release().await?;
    }
    Ok(())
}
