//! Only the owner of a grant can renew or release it.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, LossReason, ReleaseOutcome, Released, Renewal};

use super::{Entry, cases};
use crate::case::{Case, renews, rises};
use crate::link::Link;
use crate::outcome::{Outcome, ensure, fail};

pub(crate) const CASES: &[Entry] = cases![
    release_by_another_owner_harms_nothing,
    release_twice_is_not_held_the_second_time,
    a_late_release_spares_the_successor,
    a_late_renewal_does_not_lengthen_the_successors_lease,
    renewal_never_brings_back_an_expired_lock,
    renewal_after_release_brings_nothing_back,
    a_forced_release_tells_the_victim_within_one_renewal,
    a_forced_release_of_a_free_name_finds_nobody,
];

pub(crate) async fn release_by_another_owner_harms_nothing(case: Arc<Case>) -> Outcome {
    let (holder, other) = (case.client().await?, case.client().await?);
    let claim = case.claim("n");
    case.take(&holder, &claim).await?;
    for client in [&other, &holder] {
        not_held(client, &case.claim("n")).await?;
        case.is_busy(&other, claim.name()).await?;
    }
    held(&holder, &claim).await
}

pub(crate) async fn release_twice_is_not_held_the_second_time(case: Arc<Case>) -> Outcome {
    let client = case.client().await?;
    let claim = case.claim("n");
    case.take(&client, &claim).await?;
    held(&client, &claim).await?;
    not_held(&client, &claim).await?;
    case.is_free(&client, claim.name()).await
}

pub(crate) async fn a_late_release_spares_the_successor(case: Arc<Case>) -> Outcome {
    let (first, second) = (case.client().await?, case.client().await?);
    // The successor of the second round belongs to the same client as the late one.
    for successor_of in [&second, &first] {
        let (late, next) = (case.brief_claim("n"), case.claim("n"));
        case.take(&first, &late).await?;
        case.take_within(successor_of, &next, case.ttl() + case.hang_limit())
            .await?;
        not_held(&first, &late).await?;
        case.is_busy(&second, next.name()).await?;
        held(successor_of, &next).await?;
    }
    Ok(())
}

pub(crate) async fn a_late_renewal_does_not_lengthen_the_successors_lease(case: Arc<Case>) -> Outcome {
    let (first, second, judge) = (case.client().await?, case.client().await?, case.client().await?);
    // The successor of the second round belongs to the same client as the late one.
    for successor_of in [&second, &first] {
        let (late, next) = (case.brief_claim("n"), case.brief_claim("n"));
        let stale = case.take(&first, &late).await?;
        let (_, granted) = case
            .take_within(successor_of, &next, case.ttl() + case.hang_limit())
            .await?;
        // Keeps trying to renew for the successor, until the successor's own ttl is over.
        let limit = case.ttl() + case.hang_limit();
        loop {
            renews(
                &first,
                &stale.lease,
                Renewal::NotHeld,
                "a lease that is over is not renewed",
            )
            .await?;
            let claim = case.claim("n");
            if let Attempt::Granted(_) = judge.try_quietly(&claim).await? {
                held(&judge, &claim).await?;
                break;
            }
            let over = case.now().since(granted) > limit;
            ensure!(
                !over,
                "the backend",
                "a stranger's renewals lengthen nothing; {:?} outlived {limit:?}",
                next.name()
            );
            tokio::time::sleep(case.ttl() / 20).await;
        }
    }
    Ok(())
}

pub(crate) async fn renewal_never_brings_back_an_expired_lock(case: Arc<Case>) -> Outcome {
    let (first, second) = (case.client().await?, case.client().await?);
    let limit = case.ttl() + case.hang_limit();
    // Once without, once with a successor.
    let claim = case.brief_claim("n");
    let grant = case.take(&first, &claim).await?;
    case.is_free_within(&second, claim.name(), limit).await?;
    renews(&first, &grant.lease, Renewal::NotHeld, "an expired lock is not renewed").await?;
    case.is_free(&second, claim.name()).await?;
    let grant = case.take(&first, &case.brief_claim("n")).await?;
    let next = case.claim("n");
    case.take_within(&second, &next, limit).await?;
    renews(
        &first,
        &grant.lease,
        Renewal::NotHeld,
        "a successor's lock is not renewed",
    )
    .await?;
    held(&second, &next).await
}

pub(crate) async fn renewal_after_release_brings_nothing_back(case: Arc<Case>) -> Outcome {
    let (first, second) = (case.client().await?, case.client().await?);
    let claim = case.claim("n");
    let grant = case.take(&first, &claim).await?;
    held(&first, &claim).await?;
    renews(&first, &grant.lease, Renewal::NotHeld, "a released lock is not renewed").await?;
    case.is_free(&second, claim.name()).await
}

pub(crate) async fn a_forced_release_tells_the_victim_within_one_renewal(case: Arc<Case>) -> Outcome {
    case.needs(case.capabilities().force_release, "the backend cannot release by force")?;
    let (victim, other) = (case.party().await?, case.party().await?);
    // Long enough that the victim would believe for much longer if it were not told.
    let ttl = case.ttl_of(Duration::from_secs(12));
    let taken = case.now();
    let guard = victim.locks.lock("n").ttl(ttl).label("the victim").await?;
    let spared = victim.locks.lock("other").ttl(ttl).await?;
    let named = other.locks.force_release("n").await?.pop();
    let lost_after = case.now().since(taken);
    let Some(named) = named else {
        fail!("the backend", "a forced release names the holder; it found none");
    };
    ensure!(
        named.token.is_none_or(|token| token == guard.token()),
        "the backend",
        "the forced release hit {guard:?}; it named {named:?}"
    );
    let next = other.locks.lock("n").ttl(ttl).wait_for(case.hang_limit()).await?;
    rises(guard.token(), next.token())?;
    let told = case.learns_by_a_renewal(&victim, &guard, lost_after, 2).await?;
    ensure!(
        matches!(told, LossReason::NotHeld | LossReason::Revoked | LossReason::Expired),
        "the guard",
        "it says why it was lost; it said {told:?}"
    );
    ensure!(
        !guard.is_held(),
        "the guard",
        "it is not held after it was told of its loss"
    );
    ensure!(
        next.is_held(),
        "the client",
        "the successor is spared by what the victim does then"
    );
    spared.renew_now().await?;
    ensure!(spared.is_held(), "the client", "other locks of the victim stay held");
    drop(spared);
    let outcome = guard.release().await?;
    ensure!(
        outcome == ReleaseOutcome::AlreadyLost,
        "the guard",
        "its release says that it was lost; {outcome:?}"
    );
    next.release().await?;
    Ok(())
}

pub(crate) async fn a_forced_release_of_a_free_name_finds_nobody(case: Arc<Case>) -> Outcome {
    case.needs(case.capabilities().force_release, "the backend cannot release by force")?;
    let client = case.client().await?;
    let found = client.force_release(&case.name("n")).await?;
    ensure!(
        found.is_empty(),
        "the backend",
        "a free name has no holder; it found {found:?}"
    );
    case.is_free(&client, &case.name("n")).await
}

async fn held(client: &Link, claim: &Claim) -> Outcome {
    let released = client.release(claim, None).await?;
    ensure!(
        released == Released::Released,
        "the backend",
        "the holder of {:?} held it until its release; it said {released:?}",
        claim.name()
    );
    Ok(())
}

async fn not_held(client: &Link, claim: &Claim) -> Outcome {
    let released = client.release(claim, None).await?;
    ensure!(
        released == Released::NotHeld,
        "the backend",
        "a release of {:?} by a client that does not hold it is NotHeld; it said {released:?}",
        claim.name()
    );
    Ok(())
}
