//! Waiters that go away, orderly or not, and what becomes of those behind them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{DistributedLock, LockError, LockGuard};
use tokio::task::{JoinHandle, JoinSet};

use crate::case::Case;
use crate::child::Child;
use crate::outcome::{Outcome, ensure, fail};

pub(crate) async fn a_cancelled_waiter_holds_nobody_up(case: Arc<Case>) -> Outcome {
    one_leaves(&case, async |leaver| {
        leaver.abort();
        Ok(())
    })
    .await
}

pub(crate) async fn a_waiter_that_times_out_holds_nobody_up(case: Arc<Case>) -> Outcome {
    one_leaves(&case, async |leaver| {
        // It waits for less long than the others.
        match leaver.await? {
            // Of a busy machine no answer may have come in the second that so short a wait gives it. It leaves all the same.
            Err(LockError::TimedOut { .. } | LockError::Unavailable { .. }) => Ok(()),
            other => fail!("the client", "a wait ends while the lock stays busy; it said {other:?}"),
        }
    })
    .await
}

/// Of four waiters, one leaves: the first, one in the middle, the last. The others get their turns, one by one.
async fn one_leaves(
    case: &Arc<Case>,
    leave: impl AsyncFn(JoinHandle<Result<LockGuard, LockError>>) -> Outcome,
) -> Outcome {
    let (holder, ttl) = (case.party().await?, case.kept_ttl());
    for place in [0, 1, 3] {
        case.note(format!("waiter {place} leaves"));
        let guard = holder.locks.lock("n").ttl(ttl).await?;
        let mut waiting = Vec::new();
        for waiter in 0..4 {
            let party = case.party().await?;
            // Connected, so that a wait is one for the lock alone.
            party.locks.lock("another").ttl(ttl).await?.release().await?;
            let wait = if waiter == place {
                Duration::from_millis(500)
            } else {
                case.hang_limit()
            };
            waiting.push(tokio::spawn(
                party.locks.lock("n").ttl(ttl).wait_for(wait).into_future(),
            ));
            // The one that is to leave may have gone by the time of this look, and did not count any more then.
            let is_over = |waiter| waiting.get(waiter).is_some_and(JoinHandle::is_finished);
            let asked = || party.locks.stats().waiting > 0 || is_over(waiter) || is_over(place);
            case.eventually("the client", "a waiter counts as waiting", asked)
                .await?;
            let left = async {
                while !is_over(place) {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            };
            tokio::select! {
                seen = case.in_line("n", waiter + 1) => drop(seen?),
                () = left => {}
            }
        }
        leave(waiting.remove(place)).await?;
        let served = async {
            while !waiting.iter().any(JoinHandle::is_finished) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::select! {
            seen = case.in_line("n", 3) => drop(seen?),
            () = served => {}
        }
        // The waiter behind it must not take its going for that of the holder.
        tokio::time::sleep(case.ttl() / 8).await;
        ensure!(
            !waiting.iter().any(JoinHandle::is_finished),
            "the backend",
            "no waiter is served while the lock is held; one was when another left"
        );
        guard.release().await?;
        one_after_the_other(case, waiting).await?;
    }
    Ok(())
}

/// Exactly one of the waiters gets the lock; then exactly one of the others; until none is left.
async fn one_after_the_other(case: &Case, mut waiting: Vec<JoinHandle<Result<LockGuard, LockError>>>) -> Outcome {
    while !waiting.is_empty() {
        let served = |waiting: &[JoinHandle<_>]| waiting.iter().filter(|task| task.is_finished()).count();
        case.eventually("the backend", "the next waiter is served", || served(&waiting) > 0)
            .await?;
        let together = served(&waiting);
        let Some(at) = waiting.iter().position(JoinHandle::is_finished) else {
            continue;
        };
        // Waits that have ended together without the lock say why.
        let guard = waiting.remove(at).await??;
        ensure!(
            together == 1,
            "the backend",
            "one waiter is served at a time; {together} were"
        );
        ensure!(guard.is_held(), "the client", "what a waiter gets is held");
        guard.release().await?;
    }
    Ok(())
}

/// No other process is left to tell the waiter, whose own ttl is so long that it would not look by itself in time.
pub(crate) async fn a_killed_waiter_before_another_and_a_killed_holder_hold_nobody_up(case: Arc<Case>) -> Outcome {
    case.needs_processes()?;
    let waiter = case.party().await?.locks;
    let (mut holder, mut first) = (case.child().await?, case.child().await?);
    holder.lock("n", case.ttl()).await?;
    first.ask("n", case.ttl(), None).await?;
    case.in_line("n", 1).await?;
    let waiting = tokio::spawn(waiter.lock("n").into_future());
    case.in_line("n", 2).await?;
    first.kill().await?;
    holder.kill().await?;
    let limit = 2 * case.ttl() + case.hang_limit();
    let next = case
        .within(limit, "the waiter behind the killed one gets the lock", waiting)
        .await???;
    next.release().await?;
    Ok(())
}

/// What is done to a process.
#[derive(Clone, Copy)]
pub(super) enum Harm {
    Kill,
    Stop,
}

/// Stops a process that waits; not in the middle of a step, which on a file is a transaction that all others wait for.
async fn stop_while_it_waits(case: &Case, child: &Child) -> Outcome {
    const TRIES: usize = 10;
    let client = case.client().await?;
    let claim = case.claim("something else");
    for _ in 0..TRIES {
        child.stop()?;
        match client.try_acquire(&claim).await {
            Ok(_) => {
                client.release(&claim, None).await?;
                return Ok(());
            }
            Err(LockError::Unavailable { .. }) => child.wake()?,
            Err(error) => return Err(error.into()),
        }
        client.release(&claim, None).await?;
    }
    fail!(
        "the backend",
        "a process that is stopped while it waits holds no other up; each time it did"
    );
}

/// Of three processes that wait, something is done to one: the first, the middle one, the last. The others get their
/// turns, one at a time.
pub(super) async fn one_process_fails(case: &Arc<Case>, harm: Harm) -> Outcome {
    case.needs_processes()?;
    let holder = case.party().await?.locks;
    let ttl = case.steady_ttl();
    for place in 0..3 {
        case.note(format!("waiter {place} fails"));
        let guard = holder.lock("n").wait_for(case.hang_limit()).await?;
        let mut children = Vec::new();
        for waiter in 0..3 {
            let mut child = case.child().await?;
            child.ask("n", ttl, None).await?;
            case.in_line("n", waiter + 1).await?;
            children.push(child);
        }
        let mut failed = children.remove(place);
        match harm {
            Harm::Kill => failed.kill().await?,
            Harm::Stop => stop_while_it_waits(case, &failed).await?,
        }
        guard.release().await?;
        let inside = Arc::new(AtomicUsize::new(0));
        let mut served = JoinSet::new();
        for mut child in children {
            let inside = Arc::clone(&inside);
            // At the worst the lock goes to the failed waiter for one ttl, after its place has run out.
            let limit = 2 * ttl + case.hang_limit();
            served.spawn(async move {
                let token = child.locked(limit).await?;
                ensure!(
                    token.is_some(),
                    "the backend",
                    "a waiter without a limit is never told busy"
                );
                let others = inside.fetch_add(1, Ordering::SeqCst);
                ensure!(others == 0, "the backend", "waiters are served one at a time");
                ensure!(child.is_held("n").await?, "the client", "what a waiter gets is held");
                inside.fetch_sub(1, Ordering::SeqCst);
                ensure!(
                    child.release("n").await?,
                    "the client",
                    "what a waiter gets is held to its release"
                );
                Outcome::Ok(())
            });
        }
        while let Some(ended) = served.join_next().await {
            ended??;
        }
        failed.kill().await?;
    }
    Ok(())
}
