//! Whatever is given up, wherever it was, leaves nothing behind.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Claim, DistributedLock, Released};

use super::{Entry, cases, dropped};
use crate::case::Case;
use crate::link::FaultMode;
use crate::outcome::{Outcome, Stop, ensure};

pub(crate) const CASES: &[Entry] = cases![
    what_is_left_on_the_server_can_be_seen,
    dropped::try_acquire_dropped_at_every_poll_leaves_nothing,
    dropped::acquire_dropped_at_every_poll_of_a_wait_leaves_nothing,
    dropped::acquire_dropped_at_every_poll_of_a_grant_leaves_nothing,
    a_swallowed_reply_leaves_nothing_after_the_release,
    a_request_delivered_after_its_release_is_gone_after_a_ttl,
    a_dropped_guard_is_released,
];

/// Every case ends with a look at what is left: here that look must find something.
pub(crate) async fn what_is_left_on_the_server_can_be_seen(case: Arc<Case>) -> Outcome {
    let Some(before) = case.leftovers().await? else {
        return Err(Stop::not_applicable(
            "neither the harness nor the backend can list what is left",
        ));
    };
    ensure!(
        before.is_empty(),
        "the harness",
        "a fresh namespace is empty; it has {before:#?}"
    );
    let client = case.client().await?;
    let claims = [case.claim("a"), case.claim("b")];
    for (taken, claim) in claims.iter().enumerate() {
        case.take(&client, claim).await?;
        case.only_leftovers(taken + 1).await?;
    }
    for claim in &claims {
        client.release(claim, None).await?;
    }
    Ok(())
}

pub(crate) async fn a_swallowed_reply_leaves_nothing_after_the_release(case: Arc<Case>) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let claim = Claim::new(case.name("n"), case.ttl_of(Duration::from_secs(30)));
    client.set(FaultMode::RepliesLost);
    let lost = tokio::time::timeout(case.ttl() / 2, client.try_acquire(&claim)).await;
    ensure!(
        !matches!(lost, Ok(Ok(_))),
        "the suite",
        "the reply is swallowed; it came: {lost:?}"
    );
    client.set(FaultMode::None);
    let released = client.release(&claim, None).await?;
    ensure!(
        released == Released::Released,
        "the backend",
        "the request was done although its caller had gone; its release said {released:?}"
    );
    case.is_free(&other, claim.name()).await?;
    // The same at the level of users: the caller is told that it failed, and nothing is left.
    let party = case.party().await?;
    party.link.set(FaultMode::RepliesLost);
    let guard = tokio::time::timeout(case.ttl() / 2, party.locks.lock("m").into_future()).await;
    ensure!(
        !matches!(guard, Ok(Ok(_))),
        "the client",
        "no guard is made of a reply that never came; {guard:?}"
    );
    party.link.set(FaultMode::None);
    case.is_free_within(
        &other,
        &case.name("m"),
        case.steady_ttl() + case.hang_limit() + case.op_timeout(),
    )
    .await?;
    Ok(())
}

pub(crate) async fn a_request_delivered_after_its_release_is_gone_after_a_ttl(case: Arc<Case>) -> Outcome {
    case.needs(
        !case.capabilities().shares_leases,
        "whatever a client asks for joins the lease that it keeps alive: only a proxy can deliver late",
    )?;
    let (client, other) = (case.client().await?, case.client().await?);
    let claim = Claim::new(case.name("n"), case.ttl());
    // The order in which a held-back request reaches the server: the clean-up first.
    client.release(&claim, None).await?;
    client.try_acquire(&claim).await?;
    case.is_free_within(&other, claim.name(), case.ttl() + case.hang_limit())
        .await?;
    Ok(())
}

pub(crate) async fn a_dropped_guard_is_released(case: Arc<Case>) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    let ttl = case.kept_ttl();
    drop(party.locks.lock("n").ttl(ttl).await?);
    case.is_free_within(&other, &case.name("n"), case.hang_limit()).await?;
    let panicking = party.locks.lock("n").ttl(ttl).await?;
    let panicked = tokio::spawn(async move {
        let _guard = panicking;
        // Quietly: an ordinary panic would print itself among the results.
        std::panic::resume_unwind(Box::new("in the middle"));
    });
    ensure!(panicked.await.is_err(), "the suite", "the task panics");
    case.is_free_within(&other, &case.name("n"), case.hang_limit()).await?;
    Ok(())
}
