//! A lock is kept for as long as its holder gives signs of life, and for one ttl after the last.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Claim, DistributedLock, LossReason, Renew, Renewal};

use super::{Entry, cases};
use crate::case::{Case, is_over, renews, rises};
use crate::link::FaultMode;
use crate::outcome::{Outcome, ensure};

pub(crate) const CASES: &[Entry] = cases![
    a_renewed_lock_is_held_past_three_ttls,
    an_unrenewed_lock_is_free_after_its_ttl_and_not_before_its_holder_knows,
    asking_again_keeps_the_lock_for_a_full_ttl => |case| kept_from_the_last_sign(&case, Sign::AskingAgain),
    renewing_keeps_the_lock_for_a_full_ttl => |case| kept_from_the_last_sign(&case, Sign::Renewing),
    a_lock_taken_late_is_not_believed_in_longer_than_the_server_keeps_it,
    the_granted_ttl_is_at_least_the_one_asked_for,
    a_process_that_ends_frees_what_it_held,
    a_stopped_holder_frees_its_lock_within_a_ttl_and_sees_the_loss_when_it_wakes,
];

pub(crate) async fn a_renewed_lock_is_held_past_three_ttls(case: Arc<Case>) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    let guard = party.locks.lock("n").ttl(case.steady_ttl()).await?;
    let (start, mut looked) = (case.now(), case.now());
    while case.now().since(start) < 3 * guard.ttl() + guard.ttl() / 2 {
        let look = async {
            ensure!(
                guard.is_held(),
                "the client",
                "a lock under renewal stays held; lost after {:?}",
                case.now().since(start)
            );
            case.is_busy(&other, guard.name()).await
        };
        let found = look.await;
        let stood_still = case.now().since(looked);
        if stood_still > guard.ttl() / 2 {
            case.too_slow(format!(
                "the machine stood still for {stood_still:?} of a ttl of {:?}",
                guard.ttl()
            ));
            return Ok(());
        }
        found?;
        looked = case.now();
        tokio::time::sleep(case.ttl() / 10).await;
    }
    guard.release().await?;
    Ok(())
}

pub(crate) async fn an_unrenewed_lock_is_free_after_its_ttl_and_not_before_its_holder_knows(
    case: Arc<Case>,
) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    for _ in 0..2 {
        let guard = party.locks.lock("n").ttl(case.ttl()).renew(Renew::Never).await?;
        let next = case.claim("n");
        let believed = case.now() + guard.remaining();
        // The holder's own release, as soon as it knows of its loss, shall not be what frees the lock.
        party.link.set(FaultMode::Silent);
        let (_, at) = case.take_within(&other, &next, guard.ttl() + case.hang_limit()).await?;
        is_over(&guard)?;
        case.margin(believed, at)?;
        party.link.set(FaultMode::None);
        let told = case.soon("the loss is told", guard.lost().wait()).await?;
        ensure!(
            told == LossReason::Expired,
            "the guard",
            "its lease ran out; it said {told:?}"
        );
        other.release(&next, None).await?;
    }
    Ok(())
}

/// How a holder gives a sign of life.
enum Sign {
    AskingAgain,
    Renewing,
}

async fn kept_from_the_last_sign(case: &Case, sign: Sign) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let (claim, next) = (case.brief_claim("n"), case.brief_claim("n"));
    let first = case.take(&client, &claim).await?.lease;
    tokio::time::sleep(case.ttl() / 2).await;
    let sent = case.now();
    let lease = match sign {
        Sign::AskingAgain => case.take(&client, &claim).await?.lease,
        Sign::Renewing => {
            renews(&client, &first, Renewal::Renewed, "it renews what is held").await?;
            first.refreshed(sent, case.now());
            first
        }
    };
    let believed = lease.deadline();
    // At least a ttl less the allowance for drift, or the margin would prove nothing. What a request loses on its way may
    // be missing.
    let took = case.now().since(sent);
    ensure!(
        believed.since(sent) + took >= case.ttl() * 9 / 10,
        "the backend",
        "a holder that gives a sign of life gets a full ttl of {:?}; it got {:?}",
        case.ttl(),
        believed.since(sent)
    );
    let (_, at) = case
        .take_within(&other, &next, 2 * case.ttl() + case.hang_limit())
        .await?;
    case.margin(believed, at)?;
    other.release(&next, None).await?;
    Ok(())
}

pub(crate) async fn a_lock_taken_late_is_not_believed_in_longer_than_the_server_keeps_it(case: Arc<Case>) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    // Long enough that a server which looks at its leases twice a second does not hide the difference.
    let ttl = 3 * case.ttl();
    let early = party.locks.lock("early").ttl(ttl).await?;
    // A renewal would make the lease young again, and so may a client that finds it to be a third over.
    party.link.set(FaultMode::RenewalsFail);
    tokio::time::sleep(ttl / 5).await;
    let late = party.locks.lock("late").ttl(ttl).await?;
    party.link.set(FaultMode::Silent);
    let guards = [early, late].map(|guard| (case.now() + guard.remaining(), guard));
    for (believed, guard) in &guards {
        let next = Claim::new(guard.name().clone(), case.ttl()).with_own_lease();
        let (_, at) = case.take_within(&other, &next, guard.ttl() + case.hang_limit()).await?;
        is_over(guard)?;
        case.margin(*believed, at)?;
        other.release(&next, None).await?;
    }
    party.link.set(FaultMode::None);
    Ok(())
}

pub(crate) async fn the_granted_ttl_is_at_least_the_one_asked_for(case: Arc<Case>) -> Outcome {
    let (party, client) = (case.party().await?, case.client().await?);
    let capabilities = case.capabilities();
    let odd = case.ttl() + Duration::from_micros(1_234);
    for ttl in [
        capabilities.min_ttl,
        odd,
        case.ttl_of(Duration::from_secs(3600)),
        capabilities.max_ttl,
    ] {
        let ttl = ttl.clamp(capabilities.min_ttl, capabilities.max_ttl);
        let claim = Claim::new(case.name("n"), ttl);
        let grant = case.take(&client, &claim).await?;
        let kept = grant.lease.ttl();
        ensure!(
            kept >= ttl,
            "the backend",
            "it keeps a lock for the {ttl:?} asked for; it granted {kept:?}"
        );
        client.release(&claim, None).await?;
        // A grant that takes longer to arrive than it lasts is none, and a machine may stand still.
        let ttl = ttl
            .max(case.steady_ttl() + Duration::from_micros(1_234))
            .min(capabilities.max_ttl);
        let guard = party.locks.lock("n").ttl(ttl).wait_for(case.hang_limit()).await?;
        ensure!(
            guard.ttl() >= ttl,
            "the guard",
            "it has the ttl of {ttl:?} asked for; it has {:?}",
            guard.ttl()
        );
        guard.release().await?;
    }
    Ok(())
}

/// The end of `main`, and `exit` after the client has drained.
pub(crate) async fn a_process_that_ends_frees_what_it_held(case: Arc<Case>) -> Outcome {
    const TIMES: usize = 10;
    const LONGEST: Duration = Duration::from_millis(400);
    case.needs_processes()?;
    let other = case.client().await?;
    let ttl = case.ttl_of(Duration::from_secs(30));
    for exits in [false, true] {
        let mut judged = 0;
        for time in 0..TIMES {
            case.note(format!("end {time}, by exit: {exits}"));
            // Of its own, as what is not judged may be held until its ttl is over.
            let name = format!("{time}-{exits}");
            let mut child = case.child().await?;
            child.lock(&name, ttl).await?;
            let start = case.now();
            child.end(exits).await?;
            // The end of main waits for half a second. After a stall of the machine it may be without an answer.
            if exits || case.now().since(start) < LONGEST {
                case.is_free(&other, &case.name(&name)).await?;
                judged += 1;
            }
        }
        ensure!(
            judged > 0,
            "a child process",
            "it ends within {LONGEST:?}; it did not, {TIMES} times"
        );
    }
    Ok(())
}

pub(crate) async fn a_stopped_holder_frees_its_lock_within_a_ttl_and_sees_the_loss_when_it_wakes(
    case: Arc<Case>,
) -> Outcome {
    case.needs_processes()?;
    let (mut child, other) = (case.child().await?, case.client().await?);
    let old = child.lock("n", case.ttl()).await?;
    child.stop()?;
    let next = case.claim("n");
    let limit = case.ttl() + case.hang_limit();
    let taken = case.take_within(&other, &next, limit).await;
    child.wake()?;
    let (grant, _) = taken?;
    ensure!(
        !child.is_held("n").await?,
        "the woken holder",
        "it sees its loss at its next look"
    );
    rises(old, grant.token)?;
    // What the woken holder does about its loss does no harm.
    case.is_busy(&other, next.name()).await?;
    other.release(&next, None).await?;
    Ok(())
}
