//! A holder knows in time that it holds no more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lock_core::{DistributedLock, LockError, LockGuard, LossReason};

use super::{Entry, cases, told};
use crate::case::Case;
use crate::harness::Fault;
use crate::link::Weather;
use crate::outcome::{Outcome, ensure, fail};

pub(crate) const CASES: &[Entry] = cases![
    an_unreachable_server_is_noticed_before_it_frees,
    a_refusing_server_is_noticed_before_it_frees,
    a_server_whose_replies_are_lost_is_noticed_before_it_frees,
    late_replies_keep_the_lock_while_they_come_in_time,
    one_transient_renewal_error_loses_nothing,
    a_hung_renewal_beside_a_thousand_held_locks_loses_none_of_them,
    a_server_frozen_for_less_than_a_ttl_lets_nobody_else_in_while_the_holder_believes,
    told::a_lock_that_expires_early_is_told_within_one_renewal,
    told::a_stolen_lock_is_told_within_one_renewal,
    told::a_deleted_lock_is_told_within_one_renewal,
    told::a_lock_lost_in_a_restart_without_data_is_told_within_one_renewal,
    told::a_lock_lost_with_everything_else_is_told_within_one_renewal,
    told::a_restart_loses_no_lock_without_telling,
    the_loss_of_one_lock_leaves_others_held,
    run_cancels_its_work_on_loss,
    with_cancels_its_body_on_loss,
    a_loss_signal_outlives_its_guard,
];

pub(crate) async fn an_unreachable_server_is_noticed_before_it_frees(case: Arc<Case>) -> Outcome {
    noticed(&case, Weather::Silent).await
}

pub(crate) async fn a_refusing_server_is_noticed_before_it_frees(case: Arc<Case>) -> Outcome {
    noticed(&case, Weather::Refused).await
}

pub(crate) async fn a_server_whose_replies_are_lost_is_noticed_before_it_frees(case: Arc<Case>) -> Outcome {
    noticed(&case, Weather::Deaf).await
}

/// The holder is cut off at different points between two of its renewals.
async fn noticed(case: &Case, weather: Weather) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    for share in 0..3 {
        let guard = party
            .locks
            .lock("n")
            .ttl(case.ttl())
            .wait_for(case.hang_limit())
            .await?;
        tokio::time::sleep(case.ttl() * share / 8).await;
        party.link.set(weather.clone());
        let next = case.claim("n");
        // A renewal that is under way may still be heard: the last look before the end counts.
        let look = async {
            let mut believed = case.now();
            while guard.is_held() {
                believed = believed.max(case.now() + guard.remaining());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            believed
        };
        // The server may have been told once more at the very end, and then keeps it for another ttl.
        let limit = 2 * guard.ttl() + case.hang_limit();
        let (believed, taken) = tokio::join!(look, case.take_within(&other, &next, limit));
        let (_, at) = taken?;
        // Where requests arrive, it is the holder's own release that frees the lock, and no measure of its lease.
        if weather == Weather::Deaf {
            case.in_turn(believed, at)?;
        } else {
            case.margin(believed, at)?;
        }
        party.link.set(Weather::Fair);
        other.release(&next, None).await?;
    }
    Ok(())
}

pub(crate) async fn late_replies_keep_the_lock_while_they_come_in_time(case: Arc<Case>) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    let guard = party.locks.lock("n").ttl(case.steady_ttl()).await?;
    // A renewal has a quarter of the ttl.
    party.link.set(Weather::Slow(guard.ttl() / 8));
    let start = case.now();
    while case.now().since(start) < 2 * guard.ttl() {
        ensure!(
            guard.is_held(),
            "the client",
            "replies that take an eighth of the ttl lose nothing"
        );
        tokio::time::sleep(guard.ttl() / 20).await;
    }
    case.is_busy(&other, guard.name()).await?;
    party.link.set(Weather::Fair);
    guard.release().await?;
    Ok(())
}

pub(crate) async fn one_transient_renewal_error_loses_nothing(case: Arc<Case>) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    let guard = party.locks.lock("n").ttl(case.steady_ttl()).await?;
    party.link.fail_renewals(1);
    let start = case.now();
    while case.now().since(start) < 2 * guard.ttl() {
        ensure!(guard.is_held(), "the client", "one failed renewal loses nothing");
        tokio::time::sleep(guard.ttl() / 20).await;
    }
    ensure!(
        party.link.counts().renewals() >= 2,
        "the client",
        "a failed renewal is tried again"
    );
    case.is_busy(&other, guard.name()).await?;
    guard.release().await?;
    Ok(())
}

pub(crate) async fn a_hung_renewal_beside_a_thousand_held_locks_loses_none_of_them(case: Arc<Case>) -> Outcome {
    const LOCKS: usize = 1000;
    case.needs(
        !case.capabilities().shares_leases,
        "one lease keeps all locks: their renewals cannot hang one by one",
    )?;
    let party = case.party().await?;
    // A thousand renewals per third of a ttl are a load of their own; it is not what this case is about.
    let ttl = case.ttl_of(Duration::from_secs(6));
    let stuck = party.locks.lock("stuck").ttl(case.ttl()).await?;
    let mut asking = tokio::task::JoinSet::new();
    for i in 0..LOCKS {
        asking.spawn(party.locks.lock(format!("n {i}")).ttl(ttl).into_future());
    }
    let mut guards: Vec<LockGuard> = Vec::new();
    while let Some(guard) = asking.join_next().await {
        guards.push(guard??);
    }
    party.link.set(Weather::OneNameSilent(stuck.name().clone()));
    case.within(
        case.ttl() + case.hang_limit(),
        "the lock whose renewals hang is lost",
        stuck.lost().wait(),
    )
    .await?;
    let renewals = party.link.counts().renewals();
    let limit = ttl + case.hang_limit();
    case.eventually("the client", "the others are renewed", limit, || {
        party.link.counts().renewals() >= renewals + LOCKS
    })
    .await?;
    let lost = guards.iter().filter(|guard| !guard.is_held()).count();
    ensure!(
        lost == 0,
        "the client",
        "a hung renewal of one lock loses no other; {lost} of {LOCKS} were lost"
    );
    party.link.set(Weather::Fair);
    drop(guards);
    party.locks.shutdown().await?;
    Ok(())
}

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
            "nobody else is let in while the holder believes"
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

pub(crate) async fn the_loss_of_one_lock_leaves_others_held(case: Arc<Case>) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    let kept = party.locks.lock("kept").ttl(case.steady_ttl()).await?;
    let lost = party
        .locks
        .lock("lost")
        .ttl(case.ttl())
        .renew(lock_core::Renew::Never)
        .await?;
    case.within(
        case.ttl() + case.hang_limit(),
        "an unrenewed lock is lost",
        lost.lost().wait(),
    )
    .await?;
    let start = case.now();
    while case.now().since(start) < kept.ttl() {
        ensure!(kept.is_held(), "the client", "the loss of one lock leaves others held");
        tokio::time::sleep(case.ttl() / 20).await;
    }
    case.is_busy(&other, kept.name()).await?;
    kept.release().await?;
    Ok(())
}

/// Says whether it was dropped.
struct Tell(Arc<AtomicBool>);

impl Drop for Tell {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

pub(crate) async fn run_cancels_its_work_on_loss(case: Arc<Case>) -> Outcome {
    let party = case.party().await?;
    let guard = party.locks.lock("n").ttl(case.ttl()).await?;
    let done = guard.run(async { 7 }).await;
    ensure!(
        matches!(done, Ok(7)),
        "the guard",
        "work under a held lock is done; it said {done:?}"
    );
    party.link.set(Weather::Silent);
    let cancelled = Arc::new(AtomicBool::new(false));
    let tell = Tell(Arc::clone(&cancelled));
    let work = async {
        let _tell = tell;
        std::future::pending::<()>().await;
    };
    let limit = guard.ttl() + case.hang_limit();
    let outcome = case.within(limit, "work is cancelled on loss", guard.run(work)).await?;
    match outcome {
        Err(LockError::Lost {
            reason: LossReason::Expired,
            ..
        }) => {}
        other => fail!("the guard", "it says why the work was cancelled; it said {other:?}"),
    }
    ensure!(
        cancelled.load(Ordering::SeqCst),
        "the guard",
        "the cancelled work is dropped"
    );
    let again = guard.run(async {}).await;
    ensure!(again.is_err(), "the guard", "no work is done under a lost lock");
    party.link.set(Weather::Fair);
    Ok(())
}

pub(crate) async fn with_cancels_its_body_on_loss(case: Arc<Case>) -> Outcome {
    let party = case.party().await?;
    let token = party.locks.lock("n").with(async |guard| guard.token()).await?;
    case.is_free(&party.link, &case.name("n")).await?;
    let cancelled = Arc::new(AtomicBool::new(false));
    let tell = Tell(Arc::clone(&cancelled));
    let link = &party.link;
    let body = party.locks.lock("n").ttl(case.ttl()).with(async |guard| {
        let _tell = tell;
        link.set(Weather::Silent);
        if guard.token() > token {
            std::future::pending::<()>().await;
        }
    });
    match case
        .within(
            case.ttl() + 2 * case.hang_limit(),
            "the body is cancelled on loss",
            body,
        )
        .await?
    {
        Err(LockError::Lost { .. }) => {}
        other => fail!("the client", "a body cut short by a loss is Lost; it said {other:?}"),
    }
    ensure!(
        cancelled.load(Ordering::SeqCst),
        "the client",
        "the cancelled body is dropped"
    );
    party.link.set(Weather::Fair);
    Ok(())
}

pub(crate) async fn a_loss_signal_outlives_its_guard(case: Arc<Case>) -> Outcome {
    let party = case.party().await?;
    let guard = party.locks.lock("n").await?;
    let signal = guard.lost();
    let watching = tokio::spawn(signal.into_future());
    drop(guard);
    let told = case
        .within(case.hang_limit(), "a dropped guard ends its signal", watching)
        .await??;
    ensure!(
        told == LossReason::Released,
        "the guard",
        "its signal says that it was released; it said {told:?}"
    );
    Ok(())
}
