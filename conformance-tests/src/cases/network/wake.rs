//! Wake-ups that do not arrive.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{DistributedLock, LockError};

use super::super::waiting::waits_after_busy;
use crate::case::Case;
use crate::faults::{Direction, Traffic};
use crate::outcome::{Outcome, ensure};

pub(super) async fn a_wake_up_missed_with_its_connection_is_repaired(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let (holder, waiter) = (case.party().await?.locks, case.party_through(&proxy).await?);
    for _ in 0..3 {
        // So long that no claim is granted because a lease or a place in the line ran out.
        let guard = holder.lock("n").await?;
        let before = waiter.link.counts().waits();
        let waiting = tokio::spawn(waiter.locks.lock("n").into_future());
        waits_after_busy(&case, &waiter, before).await?;
        proxy.refuse().await;
        proxy.cut();
        guard.release().await?;
        proxy.heal().await;
        let next = case
            .soon("the waiter that missed its wake-up gets the lock", waiting)
            .await???;
        next.release().await?;
    }
    Ok(())
}

pub(super) async fn a_wake_up_lost_in_silence_is_repaired(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let (holder, waiter) = (case.party().await?.locks, case.party_through(&proxy).await?);
    let ttl = case.steady_ttl();
    for direction in [Direction::Both, Direction::ToClient] {
        let guard = holder.lock("n").ttl(ttl).await?;
        let before = waiter.link.counts().waits();
        let waiting = tokio::spawn(waiter.locks.lock("n").ttl(ttl).into_future());
        waits_after_busy(&case, &waiter, before).await?;
        proxy.set(direction, Traffic::Lost);
        guard.release().await?;
        proxy.heal().await;
        // At the worst the lock goes to the silent waiter for one ttl, and the silence is found out by a refresh.
        let limit = 2 * ttl + waiter.link.capabilities().op_timeout + case.hang_limit();
        let next = case
            .within(limit, "the waiter whose wake-up was lost gets the lock", waiting)
            .await???;
        ensure!(next.is_held(), "the client", "what a waiter gets is held");
        next.release().await?;
    }
    Ok(())
}

pub(super) async fn a_wait_into_silence_is_over_in_time_and_holds_nobody_up(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let (holder, behind) = (case.party().await?.locks, case.party().await?);
    let silent = case.party_through(&proxy).await?;
    let ttl = case.steady_ttl();
    let guard = holder.lock("n").ttl(ttl).await?;
    let wait = Duration::from_millis(800);
    let start = case.now();
    let before = silent.link.counts().waits();
    let waiting = tokio::spawn(silent.locks.lock("n").ttl(ttl).wait_for(wait).into_future());
    waits_after_busy(&case, &silent, before).await?;
    proxy.set(Direction::Both, Traffic::Lost);
    let next = tokio::spawn(behind.locks.lock("n").ttl(ttl).into_future());
    let limit = wait + silent.link.capabilities().op_timeout + case.hang_limit();
    let answer = case.within(limit, "the wait ends", waiting).await??;
    ensure!(
        matches!(answer, Err(LockError::TimedOut { .. } | LockError::Unavailable { .. })),
        "the client",
        "a wait into silence is TimedOut or Unavailable; it said {answer:?}"
    );
    ensure!(
        case.now().since(start) >= wait || matches!(answer, Err(LockError::Unavailable { .. })),
        "the client",
        "a lock that stays busy is waited for until the end; it gave up early"
    );
    guard.release().await?;
    // At the worst the lock goes to the silent waiter for one ttl, after its place has run out.
    let limit = 2 * ttl + case.hang_limit();
    let next = case
        .within(limit, "the waiter behind it gets the lock", next)
        .await???;
    next.release().await?;
    proxy.heal().await;
    let again = case.lock_through(&silent.locks, "n", ttl).await?;
    again.release().await?;
    Ok(())
}
