//! A waiter gets the lock in time, or is told in time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, Wait};
use tokio::task::{JoinHandle, JoinSet};

use super::{Entry, cases, leaving};
use crate::case::{Case, Party};
use crate::harness::Fault;
use crate::outcome::{Outcome, ensure};

pub(crate) const CASES: &[Entry] = cases![
    a_wait_of_the_backend_ends_at_its_deadline,
    a_wait_tells_at_once_that_the_name_is_busy,
    a_waiter_of_another_client_gets_the_lock_on_release,
    a_waiter_gets_an_expired_lock,
    waiters_of_different_clients_are_served_in_order,
    a_busy_client_does_not_starve_another,
    leaving::a_cancelled_waiter_holds_nobody_up,
    leaving::a_waiter_that_times_out_holds_nobody_up,
    a_killed_waiter_holds_nobody_up => |case| leaving::one_process_fails(&case, leaving::Harm::Kill),
    leaving::a_killed_waiter_before_another_and_a_killed_holder_hold_nobody_up,
    a_stopped_waiter_holds_nobody_up_for_long => |case| leaving::one_process_fails(&case, leaving::Harm::Stop),
    a_wait_goes_on_across_a_restart => |case| wait_goes_on_across(&case, Fault::Restart),
    a_wait_goes_on_across_a_restart_without_data => |case| wait_goes_on_across(&case, Fault::RestartWithoutData),
    a_wait_goes_on_when_everything_is_deleted => |case| wait_goes_on_across(&case, Fault::DeleteAll),
];

pub(crate) async fn a_wait_of_the_backend_ends_at_its_deadline(case: Arc<Case>) -> Outcome {
    let (holder, waiter) = (case.client().await?, case.client().await?);
    let claim = Claim::new(case.name("n"), case.kept_ttl());
    case.take(&holder, &claim).await?;
    // On a busy server an attempt takes its time, too: it is not to be taken for a wait.
    let mut attempt = Duration::ZERO;
    for wait in [Duration::ZERO, Duration::from_millis(300)] {
        let wait = wait.max(3 * attempt);
        let waiting = case.claim("n");
        let start = case.now();
        let limit = wait + case.hang_limit();
        let answer = case
            .within(
                limit,
                "acquire ends",
                waiter.acquire(&waiting, Wait::until(Some(start + wait))),
            )
            .await??;
        let took = case.now().since(start);
        ensure!(
            matches!(answer, Attempt::Busy(_)),
            "the backend",
            "a held name is busy; it said {answer:?}"
        );
        ensure!(
            took >= wait,
            "the backend",
            "it waits for the {wait:?} it was given; it gave up after {took:?}"
        );
        attempt = took;
        waiter.release(&waiting, None).await?;
    }
    case.only_leftovers(1).await?;
    holder.release(&claim, None).await?;
    Ok(())
}

pub(crate) async fn a_wait_tells_at_once_that_the_name_is_busy(case: Arc<Case>) -> Outcome {
    let (holder, waiter) = (case.party().await?.locks, case.party().await?);
    let guard = holder.lock("n").await?;
    let waiting = tokio::spawn(waiter.locks.lock("n").into_future());
    waits(&case, &waiter, 1).await?;
    // Whoever does not want to wait learns it from the wait of another task.
    let refused = waiter.locks.try_lock("n").await?;
    ensure!(
        refused.is_none(),
        "the client",
        "a held name is refused; it gave {refused:?}"
    );
    ensure!(
        !waiting.is_finished(),
        "the client",
        "a waiter waits while the lock is held"
    );
    guard.release().await?;
    waiting.await??.release().await?;
    Ok(())
}

/// At once: its own ttl is so long that it would not look by itself in time.
pub(crate) async fn a_waiter_of_another_client_gets_the_lock_on_release(case: Arc<Case>) -> Outcome {
    let (holder, waiter) = (case.party().await?, case.party().await?);
    for _ in 0..3 {
        let guard = holder.locks.lock("n").await?;
        let waiting = tokio::spawn(waiter.locks.lock("n").into_future());
        waits(&case, &waiter, 1).await?;
        ensure!(
            !waiting.is_finished(),
            "the client",
            "a waiter waits while the lock is held"
        );
        guard.release().await?;
        let next = case.soon("the waiter gets the lock on release", waiting).await???;
        next.release().await?;
    }
    Ok(())
}

/// The party must be waiting for `n` before long, and that many claims must be in line at the server if it shows them.
pub(super) async fn waits(case: &Case, party: &Party, at_server: usize) -> Outcome {
    let waits = || party.locks.stats().waiting > 0;
    case.eventually("the client", "a waiter counts as waiting", waits)
        .await?;
    case.in_line("n", at_server).await.map(drop)
}

/// The same for its wait at the backend after the first `waits`. It was told by then that the name is busy, so that failures are
/// waited out: one before the first answer would be the caller's.
pub(super) async fn waits_after_busy(case: &Case, party: &Party, waits_before: usize) -> Outcome {
    waits(case, party, 1).await?;
    let asked = || party.link.counts().waits() > waits_before;
    case.eventually("the client", "the waiter was told that it is busy", asked)
        .await
}

pub(crate) async fn a_waiter_gets_an_expired_lock(case: Arc<Case>) -> Outcome {
    let (silent, waiter) = (case.client().await?, case.party().await?.locks);
    case.take(&silent, &case.brief_claim("n")).await?;
    let limit = case.ttl() + case.hang_limit();
    let next = case
        .within(limit, "the waiter gets what expired", waiter.lock("n").into_future())
        .await??;
    next.release().await?;
    Ok(())
}

pub(crate) async fn waiters_of_different_clients_are_served_in_order(case: Arc<Case>) -> Outcome {
    const WAITERS: usize = 6;
    case.needs(
        case.capabilities().fair,
        "the backend promises no order among processes",
    )?;
    let (holder, ttl) = (case.party().await?, case.kept_ttl());
    let guard = holder.locks.lock("n").ttl(ttl).await?;
    let turn = Arc::new(AtomicUsize::new(0));
    let mut waiting: Vec<JoinHandle<Outcome>> = Vec::new();
    for place in 0..WAITERS {
        let waiter = case.party().await?;
        let asking = waiter.locks.lock("n").ttl(ttl).into_future();
        let turn = Arc::clone(&turn);
        waiting.push(tokio::spawn(async move {
            let guard = asking.await?;
            let came = turn.fetch_add(1, Ordering::SeqCst);
            ensure!(
                came == place,
                "the backend",
                "first come, first served; place {place} was served as number {came}"
            );
            guard.release().await?;
            Ok(())
        }));
        // Only once one has come can the next be said to come after it.
        let seen = case.in_line("n", place + 1).await?;
        case.needs(
            seen,
            "the harness does not show who is in line, so nobody knows who came first",
        )?;
    }
    guard.release().await?;
    for task in waiting {
        case.soon("every waiter is served", task).await???;
    }
    Ok(())
}

pub(crate) async fn a_busy_client_does_not_starve_another(case: Arc<Case>) -> Outcome {
    let (busy, other) = (case.party().await?.locks, case.party().await?.locks);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let (locks, stop, ttl) = (busy.clone(), Arc::clone(&stop), case.kept_ttl());
        tasks.spawn(async move {
            let mut turns = 0;
            while !stop.load(Ordering::SeqCst) {
                locks.lock("n").ttl(ttl).await?.release().await?;
                turns += 1;
            }
            Outcome::Ok(turns)
        });
    }
    let mut served = 0;
    for _ in 0..5 {
        let guard = other.lock("n").wait_for(case.hang_limit()).await;
        if guard.is_err() {
            break;
        }
        served += 1;
    }
    stop.store(true, Ordering::SeqCst);
    let mut turns = 0;
    while let Some(ended) = tasks.join_next().await {
        turns += ended??;
    }
    ensure!(
        served == 5,
        "the client",
        "a busy client lets others in; {turns} turns left {served} of 5 to another"
    );
    Ok(())
}

async fn wait_goes_on_across(case: &Case, fault: Fault) -> Outcome {
    let (holder, waiter) = (case.party().await?.locks, case.party().await?);
    // What a waiter cannot be woken by, it finds out when it looks again, and so within its ttl.
    let ttl = case.steady_ttl();
    let guard = holder.lock("n").ttl(ttl).await?;
    let waiting = tokio::spawn(
        waiter
            .locks
            .lock("n")
            .ttl(ttl)
            .wait_for(case.hang_limit())
            .into_future(),
    );
    waits_after_busy(case, &waiter, 0).await?;
    case.inject(fault).await?;
    drop(guard);
    let next = case.soon("the wait goes on", waiting).await???;
    next.release().await?;
    Ok(())
}
