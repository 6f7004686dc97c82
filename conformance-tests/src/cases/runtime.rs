//! Cases about runtimes that end while clients are in use.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_executor::block_on;
use lock_core::LockError;
use tokio::runtime::{Builder, Runtime};

use crate::case::Case;
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
            ensure!(
                next > token,
                "the backend",
                "the next token is higher; {next} came after {token}"
            );
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

pub(crate) async fn a_client_whose_own_runtime_ends_goes_on_without_it(case: Arc<Case>) -> Outcome {
    let other = case.party().await?.locks;
    let runtime = own_runtime()?;
    let locks = case.party_on_runtime(runtime.handle()).await?.locks;
    // This one is not used before its runtime has ended.
    let idle = case.party_on_runtime(runtime.handle()).await?.locks;
    let taken = other.lock("taken").await?;
    // Far from being renewed, so that what is told in time is not told by a renewal.
    let kept = locks.lock("kept").await?;
    let renewed = locks.lock("renewed").ttl(case.steady_ttl()).await?;
    let waiter = tokio::spawn(locks.lock("taken").wait_for(case.hang_limit()).into_future());
    while locks.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    case.in_line("taken", 1).await?;
    tokio::task::spawn_blocking(move || drop(runtime)).await?;

    if case.leases_are_connections() {
        let told = tokio::time::timeout(case.hang_limit(), kept.lost().wait()).await;
        ensure!(
            told.is_ok(),
            "the client",
            "a lock whose connection ended with its runtime is lost at once; after {:?} there was {kept:?}",
            case.hang_limit()
        );
    } else {
        tokio::time::sleep(case.steady_ttl() + case.steady_ttl() / 2).await;
        for guard in [&kept, &renewed] {
            ensure!(
                guard.is_held(),
                "the client",
                "{guard:?} is renewed without its runtime"
            );
        }
    }
    for (who, locks) in [("the client", &locks), ("a client that was idle", &idle)] {
        let refused = locks.try_lock("taken").await?;
        ensure!(
            refused.is_none(),
            "the backend",
            "{who} is refused what is taken; it got {refused:?}"
        );
        let guard = locks.lock("free").wait_for(case.hang_limit()).await?;
        ensure!(
            guard.is_held(),
            "the client",
            "{who} holds what it took; there was {guard:?}"
        );
        guard.release().await?;
    }
    let before = taken.token();
    taken.release().await?;
    match waiter.await? {
        Ok(guard) => ensure!(
            guard.token() > before,
            "the backend",
            "tokens rise from {before} when the runtime ends; there was {guard:?}"
        ),
        Err(error @ LockError::TimedOut { .. }) => {
            fail!("the client", "a wait goes on without its runtime; it said {error}")
        }
        Err(error) => return Err(error.into()),
    }
    for guard in [kept, renewed] {
        guard.release().await?;
    }
    Ok(())
}

/// A runtime that nothing but the client uses.
fn own_runtime() -> io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(1).enable_all().build()
}
