//! Semaphores, and names of several kinds.

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{Claim, DistributedLock, LockError, Mode, Renew, SemaphoreRequest};
use tokio::task::JoinSet;

use super::modes::admitted;
use crate::case::Case;
use crate::outcome::{Outcome, ensure};

/// How many hold a permit now, as far as they know.
struct Inside(AtomicUsize);

const PERMITS: u32 = 3;

impl Inside {
    /// Holds a permit for a while, if the request is granted in time; then releases or drops it. Says whether it was granted.
    async fn hold(&self, request: SemaphoreRequest) -> Outcome<bool> {
        let is_patient = fastrand::u8(..4) > 0;
        let permit = if is_patient {
            request.await?
        } else {
            // Cancelled somewhere on its way.
            let limit = Duration::from_micros(fastrand::u64(..2000));
            match tokio::time::timeout(limit, request.into_future()).await {
                Ok(permit) => permit?,
                Err(_) => return Ok(false),
            }
        };
        let others = self.0.fetch_add(1, Ordering::SeqCst);
        ensure!(
            others < PERMITS as usize || !permit.is_held(),
            "the backend",
            "at most {PERMITS} hold a permit at once; {others} were inside when {permit:?} came"
        );
        tokio::time::sleep(Duration::from_micros(fastrand::u64(..1000))).await;
        self.0.fetch_sub(1, Ordering::SeqCst);
        if fastrand::bool() {
            permit.release().await?;
        }
        Ok(true)
    }
}

pub(crate) async fn a_semaphore_has_no_permit_too_many_over_a_thousand_random_holds(case: Arc<Case>) -> Outcome {
    const CLIENTS: usize = 4;
    const TASKS: usize = 12;
    const HOLDS: usize = 84;
    case.needs_permits()?;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(case.party().await?.locks);
    }
    let inside = Arc::new(Inside(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (locks, inside) = (clients[task % CLIENTS].clone(), Arc::clone(&inside));
        tasks.spawn(async move {
            let mut holds = 0;
            while holds < HOLDS {
                holds += usize::from(inside.hold(locks.semaphore("n", PERMITS)).await?);
            }
            Outcome::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    // None is missing after it either.
    let mut permits = Vec::new();
    for (locks, _) in clients.iter().zip(0..PERMITS) {
        permits.push(locks.semaphore("n", PERMITS).wait_for(case.hang_limit()).await?);
    }
    let next = clients[0].semaphore("n", PERMITS).no_wait().await;
    ensure!(
        next.as_ref().is_err_and(LockError::is_busy),
        "the backend",
        "of {PERMITS} permits {PERMITS} are held and no more; it gave {next:?}"
    );
    for permit in permits {
        permit.release().await?;
    }
    Ok(())
}

pub(crate) async fn permits_of_holders_that_expire_come_back_within_a_ttl(case: Arc<Case>) -> Outcome {
    let mode = Mode::Permit { of: 3 };
    case.needs_permits()?;
    let (silent, other) = (case.client().await?, case.client().await?);
    // One of a guard that is not renewed, two of a client that shows no sign of life.
    let locks = case.party().await?.locks;
    let guard = locks.semaphore("n", 3).ttl(case.ttl()).renew(Renew::Never).await?;
    let mut belief_end = case.now() + guard.remaining();
    for _ in 0..2 {
        let claim = case.brief_claim("n").with_mode(mode);
        let grant = admitted(&silent, &claim, "a semaphore of three has three permits").await?;
        belief_end = belief_end.min(grant.lease.deadline());
    }
    let mut claims = Vec::new();
    for turn in 0..3 {
        let claim = case.claim_as(mode);
        let limit = case.ttl() + case.hang_limit();
        let (_, granted) = case.take_within(&other, &claim, limit).await?;
        if turn == 0 {
            case.in_turn(belief_end, granted)?;
        }
        claims.push(claim);
    }
    ensure!(
        !guard.is_held(),
        "the client",
        "a permit that is not renewed ends with its ttl"
    );
    for claim in claims {
        other.release(&claim, None).await?;
    }
    Ok(())
}

pub(crate) async fn a_name_has_one_kind_while_it_is_held(case: Arc<Case>) -> Outcome {
    const TWO: Mode = Mode::Permit { of: 2 };
    const THREE: Mode = Mode::Permit { of: 3 };
    case.needs_shares()?;
    case.needs_permits()?;
    let (holder, other) = (case.client().await?, case.client().await?);
    let locks = case.party().await?.locks;
    for (held, others) in [
        (TWO, &[Mode::Exclusive, Mode::Shared, THREE][..]),
        (Mode::Exclusive, &[TWO]),
        (Mode::Shared, &[TWO]),
    ] {
        let claim = case.claim_as(held);
        case.take(&holder, &claim).await?;
        for &mode in others {
            let asked = case.claim_as(mode);
            let answer = other.try_acquire(&asked).await;
            ensure!(
                matches!(answer, Err(LockError::InvalidMode { found, .. }) if found == held),
                "the backend",
                "a request for {mode} is refused for good where there is {held}; it said {answer:?}"
            );
            other.release(&asked, None).await?;
        }
        // Nor does a request wait for the end of the other kind.
        let waits = if held == TWO {
            locks.lock("n").wait_for(case.hang_limit()).await.map(drop)
        } else {
            locks.semaphore("n", 2).wait_for(case.hang_limit()).await.map(drop)
        };
        ensure!(
            matches!(waits, Err(LockError::InvalidMode { .. })),
            "the client",
            "a request for what {held} is not is refused for good; it said {waits:?}"
        );
        holder.release(&claim, None).await?;
    }
    case.is_free(&other, &case.name("n")).await
}

pub(crate) async fn a_waiter_gets_the_permit_of_a_holder_that_expires_before_others(case: Arc<Case>) -> Outcome {
    let mode = Mode::Permit { of: 2 };
    case.needs_permits()?;
    let (silent, waiter) = (case.client().await?, case.party().await?.locks);
    // The one that came first ends last.
    let claims = [case.claim_as(mode), case.brief_claim("n").with_mode(mode)];
    for claim in &claims {
        admitted(&silent, claim, "a semaphore of two has two permits").await?;
    }
    let limit = case.ttl() + case.hang_limit();
    let permit = case
        .within(
            limit,
            "a waiter gets the permit that expired",
            waiter.semaphore("n", 2).into_future(),
        )
        .await??;
    permit.release().await?;
    for claim in &claims {
        silent.release(claim, None).await?;
    }
    Ok(())
}

pub(crate) async fn a_list_has_every_holder_with_its_mode(case: Arc<Case>) -> Outcome {
    const THREE: Mode = Mode::Permit { of: 3 };
    case.needs_shares()?;
    case.needs_permits()?;
    case.needs(case.capabilities().list, "the backend cannot list locks")?;
    let clients = [case.client().await?, case.client().await?];
    let (mut held, mut wanted) = (Vec::new(), Vec::new());
    for (place, (name, mode)) in [
        ("c", THREE),
        ("a", Mode::Shared),
        ("b", Mode::Exclusive),
        ("c", THREE),
        ("a", Mode::Shared),
        ("c", THREE),
    ]
    .into_iter()
    .enumerate()
    {
        let claim = Claim::new(case.name(name), case.kept_ttl()).with_mode(mode);
        let client = &clients[place % 2];
        let grant = admitted(client, &claim, "what several may hold is granted to them").await?;
        wanted.push((name, mode, grant.token));
        held.push((client, claim));
    }
    // Those of one name have no order.
    wanted.sort_unstable_by_key(|(name, _, token)| (*name, *token));
    for prefix in ["", "c"] {
        let listed = clients[0].list(prefix).await?;
        let name = |at: usize| listed[at].name.as_ref().map_or("", |name| name.as_str());
        let mut found: Vec<_> = (0..listed.len())
            .map(|at| (name(at), listed[at].mode, listed[at].token))
            .collect();
        ensure!(
            found.is_sorted_by_key(|(name, ..)| *name),
            "the backend",
            "a list is in the order of names; it was {found:?}"
        );
        found.sort_unstable_by_key(|(name, _, token)| (*name, *token));
        let mut wanted = wanted.iter().filter(|(name, ..)| name.starts_with(prefix));
        let is_as_wanted = found.iter().all(|(name, mode, token)| {
            wanted
                .next()
                .is_some_and(|held| (*name, *mode) == (held.0, held.1) && token.is_none_or(|token| token == held.2))
        });
        ensure!(
            is_as_wanted && wanted.next().is_none(),
            "the backend",
            "a list has each holder, with its mode; under {prefix:?} it has {found:?}"
        );
    }
    for (client, claim) in held {
        client.release(&claim, None).await?;
    }
    Ok(())
}
