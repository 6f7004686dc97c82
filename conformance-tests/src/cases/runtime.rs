//! Cases about runtimes that end while clients are in use.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_executor::block_on;
use lock_core::LockError;
use tokio::runtime::{Builder, Handle, Runtime};

use crate::case::{Case, rises};
use crate::outcome::{Outcome, checked, ensure, fail};

pub(crate) async fn a_client_used_from_two_runtimes_outlives_the_one_that_ends(case: Arc<Case>) -> Outcome {
    let locks = case.party().await?.locks;
    let ttl = case.steady_ttl();
    let there = locks.clone();
    let first = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // The runtime that took it, and on which the client was used first, ends here.
        Ok::<_, std::io::Error>(runtime.block_on(async { there.lock("first").ttl(ttl).await }))
    });
    let Ok(first) = tokio::task::spawn_blocking(move || first.join()).await? else {
        fail!("the client", "it works on a current_thread runtime");
    };
    let first = first??;
    let second = locks.lock("second").ttl(ttl).await?;
    tokio::time::sleep(ttl + ttl / 2).await;
    for guard in [&first, &second] {
        ensure!(
            guard.is_held(),
            "the client",
            "{guard:?} is still held after the other runtime ended"
        );
    }
    first.release().await?;
    second.release().await?;
    Ok(())
}

pub(crate) async fn a_client_is_made_and_used_outside_of_a_runtime(case: Arc<Case>) -> Outcome {
    case.needs_no_runtime()?;
    let outside = Arc::clone(&case);
    let used = std::thread::spawn(move || {
        block_on(async {
            let locks = outside.party().await?.locks;
            let guard = locks.lock("n").ttl(outside.ttl_of(Duration::from_secs(60))).await?;
            // Longer than a machine stands still: without an answer by then it would be Unavailable.
            let busy = locks.lock("n").wait_for(2 * outside.steady_ttl()).await;
            ensure!(
                matches!(busy, Err(LockError::TimedOut { .. })),
                "the client",
                "a lock that is held is TimedOut outside of a runtime, too; it said {busy:?}"
            );
            let token = guard.token();
            guard.release().await?;
            let next = locks.lock("n").with(async |guard| guard.token()).await?;
            rises(token, next)?;
            locks.shutdown().await?;
            Ok(())
        })
    });
    checked();
    match tokio::task::spawn_blocking(move || used.join()).await? {
        Ok(outcome) => outcome,
        Err(_) => fail!("the client", "it works outside of a tokio runtime; it panicked"),
    }
}

pub(crate) async fn a_client_whose_own_runtime_ends_ends_with_it(case: Arc<Case>) -> Outcome {
    let other = case.party().await?.locks;
    let (mut runtime, handle) = OwnRuntime::start()?;
    let locks = case.party_on_runtime(&handle).await?.locks;
    // This one is not used before its runtime has ended.
    let idle = case.party_on_runtime(&handle).await?.locks;
    let taken = other.lock("taken").await?;
    let held = locks.lock("held").ttl(case.steady_ttl()).await?;
    let token = held.token();
    let waiter = tokio::spawn(locks.lock("taken").ttl(case.steady_ttl()).into_future());
    while locks.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    case.in_line("taken", 1).await?;
    let ending = runtime.0.take();
    tokio::task::spawn_blocking(move || drop(ending)).await?;

    let limit = case.hang_limit();
    case.within(
        limit,
        "the holder is told that nothing renews its lock",
        held.lost().wait(),
    )
    .await?;
    let waited = case.within(limit, "a wait ends with its runtime", waiter).await??;
    let asked = case.within(limit, "a request ends", locks.try_lock("free")).await?;
    let first = case
        .within(limit, "the first request ends", idle.lock("free").into_future())
        .await?;
    for (who, answer) in [
        ("a waiter", waited.map(drop)),
        ("the client", asked.map(drop)),
        ("a client that was idle", first.map(drop)),
    ] {
        ensure!(
            answer
                .as_ref()
                .is_err_and(|error| error.to_string().contains("runtime")),
            "the client",
            "{who} is told that its runtime has ended; it got {answer:?}"
        );
    }
    // Nothing goes on in the background.
    let next = case
        .within(
            case.steady_ttl() + limit / 2,
            "the lock is free when its ttl is over",
            other.lock("held").into_future(),
        )
        .await??;
    rises(token, next.token())?;
    taken.release().await?;
    Ok(())
}

/// A runtime that nothing but the client uses. A task may drop it, as a case that fails does.
struct OwnRuntime(Option<Runtime>);

impl OwnRuntime {
    fn start() -> io::Result<(Self, Handle)> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let handle = runtime.handle().clone();
        Ok((Self(Some(runtime)), handle))
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
