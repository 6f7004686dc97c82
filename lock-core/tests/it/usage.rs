//! The forms in which people use locks work, and misuse is told.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use lock_core::{Claim, LockError, LockName, Locks, LossReason, MemoryLock, Options, ReleaseOutcome};

use crate::{paused, until};

#[tokio::test]
async fn a_task_that_would_block_panics_and_a_thread_that_may_block_does_not() {
    let locks = Locks::new(MemoryLock::new());
    let request = locks.lock("a");
    catch_unwind(AssertUnwindSafe(|| request.acquire_blocking())).unwrap_err();
    let guard = locks.try_lock("a").await.unwrap().expect("nothing was taken");
    catch_unwind(AssertUnwindSafe(|| guard.release_blocking())).unwrap_err();
    locks.drain().await;
    let held = locks.try_lock("a").await.unwrap().expect("released in the background");

    let client = locks.clone();
    let waits = tokio::task::spawn_blocking(move || {
        let guard = client.lock("a").acquire_blocking()?;
        client.semaphore("api", 1).acquire_blocking()?.release_blocking()?;
        guard.release_blocking()
    });
    until(|| locks.stats().waiting > 0).await;
    held.release().await.unwrap();
    assert_eq!(waits.await.unwrap().unwrap(), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn every_error_about_a_lock_names_it_and_no_holder() {
    let memory = paused::memory();
    let locks = paused::client(memory.client()).scoped("shop");
    let name: LockName = "shop/a".parse().unwrap();
    memory.set_reachable(false);
    let mut errors = vec![locks.lock("a").no_wait().await.unwrap_err()];
    memory.set_reachable(true);
    errors.push(locks.lock("a").max_hold(Duration::ZERO).await.unwrap_err());
    errors.push(locks.lock("a").ttl(Duration::ZERO).await.unwrap_err());
    let guard = locks.lock("a").await.unwrap();
    let busy = locks.lock("a").no_wait().await.unwrap_err();
    assert!(busy.is_busy() && busy.holder().is_some());
    assert_eq!(busy.to_string(), "lock \"shop/a\" is already held");
    errors.push(busy);
    memory.steal(&name).unwrap();
    errors.push(guard.run(std::future::pending::<()>()).await.unwrap_err());
    locks.shutdown().await.unwrap();
    errors.push(locks.lock("a").await.unwrap_err());
    errors.push(locks.holder("a").await.unwrap_err());
    let process = format!(":{}", std::process::id());
    for error in errors {
        assert_eq!(error.name(), Some(&name), "{error}");
        assert!(error.to_string().starts_with("lock \"shop/a\""), "{error}");
        assert!(!format!("{error:#}").contains(&process), "{error:#}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_is_cancelled_by_a_loss_or_told_of_it_if_it_does_not_await() {
    let memory = paused::memory();
    let locks = paused::client(memory.client());
    assert_eq!(locks.lock("a").with(async |_| 7).await.unwrap(), 7);
    let cancelled = locks.lock("a").with(async |guard| {
        memory.steal(guard.name()).unwrap();
        std::future::pending::<()>().await;
    });
    let cancelled = cancelled.await;
    memory.expire(&"a".parse().unwrap());
    let told = locks.lock("a").with(async |guard| assert!(memory.expire(guard.name())));
    for (outcome, expected) in [(cancelled, LossReason::NotHeld), (told.await, LossReason::Expired)] {
        fails!(outcome, LockError::Lost { reason, .. } if *reason == expected);
    }
}

#[tokio::test(start_paused = true)]
async fn any_limit_for_requests_but_zero_will_do() {
    let with = |limit| Locks::with_options(paused::memory(), paused::options().op_timeout(limit));
    let locks = with(Duration::MAX);
    let guard = locks.lock("a").await.unwrap();
    assert!(locks.try_lock("a").await.unwrap().is_none());
    guard.renew_now().await.unwrap();
    guard.release().await.unwrap();
    locks.shutdown().await.unwrap();
    let locks = with(Duration::ZERO);
    for refused in [locks.lock("a").await.map(drop), locks.holder("a").await.map(drop)] {
        let error = fails!(refused, LockError::Configuration { .. });
        assert!(error.to_string().contains("op_timeout is zero"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_acquisition_is_released_by_its_owner_id_and_a_later_one_is_not() {
    let memory = paused::memory();
    let [holder, supervisor] = [(); 2].map(|()| paused::client(memory.client()));
    let guard = holder.lock("a").await.unwrap();
    let owner = guard.owner();
    assert_eq!(supervisor.holder("a").await.unwrap().unwrap().owner, Some(owner));
    assert!(!supervisor.release_owned("b", owner).await.unwrap());
    assert!(supervisor.release_owned("a", owner).await.unwrap());
    let next = supervisor.lock("a").no_wait().await.unwrap();
    assert!(!supervisor.release_owned("a", owner).await.unwrap());
    assert_eq!(holder.holder("a").await.unwrap().unwrap().owner, Some(next.owner()));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_read_only_looks_at_locks_and_takes_none() {
    let memory = paused::memory();
    let locks = paused::client(memory.client());
    let looker = Locks::with_options(memory, Options::new().read_only(true));
    let guard = locks.lock("held").await.unwrap();
    assert_eq!(looker.list("").await.unwrap().len(), 1);
    assert!(looker.holder("held").await.unwrap().is_some());
    for refused in [
        looker.lock("free").await.map(drop),
        looker.try_lock("free").await.map(drop),
        looker.force_release("held").await.map(drop),
        looker.release_owned("held", guard.owner()).await.map(drop),
    ] {
        let error = fails!(refused, LockError::Configuration { .. });
        assert!(error.to_string().contains("read-only"), "{error}");
    }
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_label_that_is_cut_is_that_of_its_own_claim() {
    let locks = paused::client(paused::memory());
    let long = "x".repeat(Claim::MAX_LABEL - 6);
    let guard = locks.lock("a").label(format!("\u{1b}[31m{long}é")).await.unwrap();
    let label = locks.holder("a").await.unwrap().unwrap().label;
    assert_eq!(label, Some(format!("\u{fffd}[31m{long}")));
    assert!(guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn scopes_are_prefixes() {
    let locks = paused::client(paused::memory());
    let tenant = locks.scoped("tenant").scoped("7");
    let guard = tenant.lock("a").await.unwrap();
    assert_eq!(guard.name().as_str(), "tenant/7/a");
    assert!(locks.try_lock("tenant/7/a").await.unwrap().is_none());
    let listed = tenant.list("").await.unwrap();
    assert_eq!(listed[0].name.as_ref().unwrap().as_str(), "a");
    let victims = tenant.force_release("a").await.unwrap();
    assert_eq!(victims[0].token, Some(guard.token()));
    assert!(!guard.is_held());
    for refused in [locks.scoped("").lock("a").await, tenant.lock("").await] {
        fails!(refused, LockError::InvalidName { .. });
    }
}
