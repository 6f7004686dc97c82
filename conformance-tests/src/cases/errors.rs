//! Busy is busy, broken is broken, and every error says which.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, LockError, LockGuard};

use super::{Entry, cases};
use crate::case::Case;
use crate::harness::Fault;
use crate::outcome::{Outcome, ensure, fail};

pub(crate) const CASES: &[Entry] = cases![
    busy_is_never_reported_as_broken,
    a_wait_ends_with_a_failure_that_only_a_person_can_mend,
    a_full_server_keeps_and_releases_what_is_held,
    the_bounds_of_ttls_make_sense,
    what_the_backend_says_it_can_do_it_does,
    a_holder_is_shown_as_it_is,
    a_list_is_in_order_and_of_one_prefix,
];

pub(crate) async fn busy_is_never_reported_as_broken(case: Arc<Case>) -> Outcome {
    let (holder, other) = (case.party().await?.locks, case.client().await?);
    let guard = holder.lock("n").await?;
    for _ in 0..5 {
        let claim = Claim::new(case.name("n"), case.kept_ttl());
        match other.try_acquire(&claim).await {
            Ok(Attempt::Busy(busy)) => {
                let after = busy.retry_after;
                ensure!(
                    after.is_none_or(|after| after <= guard.ttl()),
                    "the backend",
                    "a lock that is not renewed is free after its ttl; it said to ask again after {after:?}"
                );
            }
            other => fail!("the backend", "a held name is busy and no failure; it said {other:?}"),
        }
    }
    // A claim that does not wait is in no queue.
    case.only_leftovers(1).await?;
    guard.release().await?;
    case.is_free(&other, &case.name("n")).await
}

pub(crate) async fn a_wait_ends_with_a_failure_that_only_a_person_can_mend(case: Arc<Case>) -> Outcome {
    let (holder, waiter) = (case.party().await?.locks, case.party().await?.locks);
    let guard = holder.lock("n").ttl(case.steady_ttl()).await?;
    // The second one waits in the client for the first.
    let waits = [0, 1].map(|_| tokio::spawn(waiter.lock("n").wait_forever().into_future()));
    case.eventually("the client", "the requests are under way", || {
        waiter.stats().waiting == 2
    })
    .await?;
    // It awaits the answer that the request before it is given.
    ensure!(
        waiter.try_lock("n").await?.is_none(),
        "the backend",
        "a held lock is busy"
    );
    case.inject(Fault::Revoke).await?;
    // Whether the server lets it go or not, it is free within its ttl.
    let limit = guard.ttl() + case.hang_limit();
    drop(guard);
    for wait in waits {
        let answer = case.within(limit, "a wait that cannot succeed ends", wait).await??;
        ensure!(
            matches!(
                answer,
                Err(LockError::Configuration { .. } | LockError::UnsafeConfiguration { .. })
            ),
            "the backend",
            "it says that a person must change something; it said {answer:?}"
        );
    }
    case.inject(Fault::Permit).await?;
    let again = case.party().await?.locks.lock("n").wait_for(limit).await?;
    again.release().await?;
    Ok(())
}

pub(crate) async fn a_full_server_keeps_and_releases_what_is_held(case: Arc<Case>) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    let (released, kept) = (party.locks.lock("released").await?, party.locks.lock("kept").await?);
    let seen = case.claim("seen");
    case.take(&other, &seen).await?;
    case.inject(Fault::Full).await?;
    let new = case.claim("new");
    match other.try_acquire(&new).await {
        Err(LockError::Unavailable { .. }) => {}
        Ok(Attempt::Granted(_)) => drop(other.release(&new, None).await?),
        answer => fail!(
            "the backend",
            "a full server grants or is Unavailable; it said {answer:?}"
        ),
    }
    released.release().await?;
    case.is_gone(&other, "released").await?;
    other.release(&seen, None).await?;
    case.is_gone(&other, "seen").await?;
    kept.renew_now().await?;
    ensure!(
        kept.is_held(),
        "the client",
        "a full server goes on keeping what is held"
    );
    case.inject(Fault::Room).await?;
    case.is_busy(&other, kept.name()).await?;
    kept.release().await?;
    let again = case.claim("released");
    case.take(&other, &again).await?;
    other.release(&again, None).await?;
    Ok(())
}

pub(crate) async fn the_bounds_of_ttls_make_sense(case: Arc<Case>) -> Outcome {
    let client = case.client().await?;
    let capabilities = client.capabilities();
    let (min, max) = (capabilities.min_ttl, capabilities.max_ttl);
    ensure!(
        !min.is_zero(),
        "the backend",
        "no lock is kept for no time; its shortest ttl is {min:?}"
    );
    ensure!(
        min <= max,
        "the backend",
        "its shortest ttl of {min:?} is at most its longest of {max:?}"
    );
    let drift = min / 100 + Duration::from_millis(2);
    ensure!(
        drift < min,
        "the backend",
        "its shortest ttl leaves something after the allowance for drift; {min:?}"
    );
    let limit = capabilities.op_timeout;
    ensure!(
        !limit.is_zero(),
        "the backend",
        "a request has some time; it has {limit:?}"
    );
    ensure!(
        client.capabilities() == capabilities,
        "the backend",
        "what it can do never changes"
    );
    Ok(())
}

pub(crate) async fn what_the_backend_says_it_can_do_it_does(case: Arc<Case>) -> Outcome {
    let client = case.client().await?;
    let capabilities = client.capabilities();
    let name = case.name("n");
    let claim = case.claim("n");
    case.take(&client, &claim).await?;
    let answers = [
        ("holders", capabilities.holder, client.holders(&name).await.map(drop)),
        ("list", capabilities.list, client.list("").await.map(drop)),
        (
            "force_release",
            capabilities.force_release,
            client.force_release(&name).await.map(drop),
        ),
    ];
    for (operation, promised, answer) in answers {
        ensure!(
            promised == !matches!(answer, Err(LockError::NotSupported { .. })),
            "the backend",
            "{operation} answers exactly if it says so ({promised}); it said {answer:?}"
        );
        if promised {
            answer?;
        }
    }
    client.release(&claim, None).await?;
    Ok(())
}

pub(crate) async fn a_holder_is_shown_as_it_is(case: Arc<Case>) -> Outcome {
    case.needs(case.capabilities().holder, "the backend cannot tell who holds a lock")?;
    let (party, other) = (case.party().await?, case.party().await?);
    let none = other.locks.holder("n").await?;
    ensure!(
        none.is_none(),
        "the backend",
        "a free name has no holder; it named {none:?}"
    );
    let guard = party.locks.lock("n").label("nightly").await?;
    let Some(holder) = other.locks.holder("n").await? else {
        fail!("the backend", "{guard:?} has a holder; it named none");
    };
    let right = holder.name.as_ref().is_none_or(|name| name == guard.name())
        && holder.token.is_none_or(|token| token == guard.token())
        && holder.label.as_deref().is_none_or(|label| label == "nightly")
        && holder.pid.is_none_or(|pid| pid == std::process::id())
        && holder.remaining.is_none_or(|left| left <= guard.ttl());
    ensure!(
        right,
        "the backend",
        "what it tells of {guard:?} is right; it told {holder:?}"
    );
    ensure!(
        holder.label.is_some() || holder.pid.is_some() || holder.owner.is_some(),
        "the backend",
        "it tells something of the holder; it told {holder:?}"
    );
    guard.release().await?;
    let none = other.locks.holder("n").await?;
    ensure!(
        none.is_none(),
        "the backend",
        "a released name has no holder; it named {none:?}"
    );
    Ok(())
}

pub(crate) async fn a_list_is_in_order_and_of_one_prefix(case: Arc<Case>) -> Outcome {
    case.needs(case.capabilities().list, "the backend cannot list locks")?;
    let (party, other) = (case.party().await?, case.party().await?);
    let names = [
        "b", "a/2", "a", "a/10", "a%", "a%b", "aa", "A", "A%", "á", "_", "a_b", "a/1", "a*", "a*b", "a?b", "[a]",
        "a\\", "a𝔞",
    ];
    let mut guards = Vec::new();
    for name in names {
        guards.push(party.locks.lock(name).await?);
    }
    for prefix in [
        "", "a", "a/", "a/1", "a%", "a_", "_", "b", "nothing", "%", "a*", "a?", "[", "a\\", "a𝔞",
    ] {
        let listed = other.locks.list(prefix).await?;
        for holder in &listed {
            let known = guards
                .iter()
                .find(|guard: &&LockGuard| Some(guard.name()) == holder.name.as_ref());
            ensure!(
                known.is_some_and(|guard| holder.token.is_none_or(|token| token == guard.token())),
                "the backend",
                "a list has the name of each lock of a client that is alive, and no other token; it has {holder:?}"
            );
        }
        let listed: Vec<_> = listed
            .into_iter()
            .filter_map(|holder| Some(holder.name?.to_string()))
            .collect();
        let mut expected: Vec<_> = names
            .iter()
            .filter(|name| name.starts_with(prefix))
            .map(ToString::to_string)
            .collect();
        expected.sort();
        ensure!(
            listed == expected,
            "the backend",
            "under {prefix:?} there are {expected:?}; it listed {listed:?}"
        );
    }
    for guard in guards {
        guard.release().await?;
    }
    Ok(())
}
