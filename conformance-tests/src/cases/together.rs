//! Several locks at once, and leaders.

use std::collections::HashMap;
use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lock_core::fence::Fence;
use lock_core::{DistributedLock, FencingToken, Leadership, LockError, Observation};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::{Entry, cases};
use crate::case::Case;
use crate::outcome::{Outcome, Stop, ensure, fail};

pub(crate) const CASES: &[Entry] = cases![
    fifty_tasks_that_take_random_pairs_of_five_names_all_get_their_turns,
    of_all_or_none_nothing_is_left_when_one_is_busy,
    the_loss_of_one_of_several_locks_ends_them_all,
    one_leads_at_a_time_over_two_hundred_forced_changes,
    a_dead_leader_is_replaced_when_its_ttl_is_over,
    those_who_observe_see_each_leader,
];

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

pub(crate) async fn fifty_tasks_that_take_random_pairs_of_five_names_all_get_their_turns(case: Arc<Case>) -> Outcome {
    const CLIENTS: usize = 5;
    const TASKS: usize = 50;
    const TURNS: usize = 4;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(case.party().await?.locks);
    }
    let inside: Arc<HashMap<_, _>> = Arc::new(NAMES.map(|name| (name, AtomicBool::new(false))).into());
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (locks, inside) = (clients[task % CLIENTS].clone(), Arc::clone(&inside));
        tasks.spawn(async move {
            for _ in 0..TURNS {
                let first = fastrand::usize(..NAMES.len());
                let second = (first + fastrand::usize(1..NAMES.len())) % NAMES.len();
                let pair = [NAMES[first], NAMES[second]];
                let guards = locks.lock_all(pair).await?;
                for name in pair {
                    let shared = inside[name].swap(true, Ordering::SeqCst);
                    ensure!(
                        !shared || !guards.is_held(),
                        "the client",
                        "one holds {name:?} at a time"
                    );
                }
                tokio::task::yield_now().await;
                for name in pair {
                    inside[name].store(false, Ordering::SeqCst);
                }
                guards.release().await?;
            }
            Ok(())
        });
    }
    let all = async {
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        Ok(())
    };
    case.within(
        2 * case.hang_limit(),
        "no two requests wait for each other: all end",
        all,
    )
    .await?
}

pub(crate) async fn of_all_or_none_nothing_is_left_when_one_is_busy(case: Arc<Case>) -> Outcome {
    let (here, there) = (case.party().await?.locks, case.party().await?);
    let held = here.lock("c").await?;
    for limit in [Duration::ZERO, Duration::from_millis(50)] {
        match there.locks.lock_all(NAMES).wait_for(limit).await {
            Err(busy) if busy.is_busy() => {}
            other => fail!(
                "the client",
                "a request of which one lock is held is busy; it said {other:?}"
            ),
        }
    }
    let given_up = there.locks.lock_all(NAMES).into_future();
    let given_up = tokio::time::timeout(Duration::from_millis(50), given_up).await;
    ensure!(
        given_up.is_err(),
        "the client",
        "it waits for what is held; it said {given_up:?}"
    );
    there.locks.drain().await;
    for name in NAMES.iter().filter(|name| **name != "c") {
        case.is_free(&there.link, &case.name(name)).await?;
    }
    held.release().await?;
    let all = there.locks.lock_all(NAMES).wait_for(case.hang_limit()).await?;
    for name in NAMES {
        let again = here.try_lock(name).await?;
        ensure!(
            again.is_none(),
            "the backend",
            "{name:?} is held with the others; it gave {again:?}"
        );
    }
    Ok(all.release().await?)
}

pub(crate) async fn the_loss_of_one_of_several_locks_ends_them_all(case: Arc<Case>) -> Outcome {
    case.needs(case.capabilities().force_release, "the backend cannot release by force")?;
    let (party, other) = (case.party().await?, case.client().await?);
    let ttl = case.ttl_of(Duration::from_secs(12));
    let taken = case.now();
    let (begin, mut begun) = mpsc::unbounded_channel();
    let request = party.locks.lock_all(["a", "b", "c"]).ttl(ttl);
    let runs = tokio::spawn(request.with(async move |_| {
        let _ = begin.send(());
        std::future::pending::<()>().await;
    }));
    case.within(case.hang_limit(), "three free locks are granted", begun.recv())
        .await?;
    other.force_release(&case.name("b")).await?;
    let lost_after = case.now().since(taken);
    let ended = case.within(case.hang_limit(), "the loss is seen", runs).await??;
    let sent = party.link.counts().renewals();
    if lost_after > ttl / 4 {
        case.too_slow(format!(
            "how many renewals a loss takes, since it came after {lost_after:.1?}"
        ));
    } else {
        ensure!(
            sent <= 3,
            "the client",
            "the loss of one of three locks is seen within one renewal of each; it took {sent}"
        );
    }
    match ended {
        Err(LockError::Lost { name, .. }) if name.as_str() == "b" => {}
        other => fail!(
            "the client",
            "the body ends with the loss of \"b\"; it ended with {other:?}"
        ),
    }
    party.locks.drain().await;
    for name in ["a", "c"] {
        case.is_free(&other, &case.name(name)).await?;
    }
    Ok(())
}

/// The resource: which candidate wrote with each token, and whether two did with the same.
#[derive(Default)]
struct Ledger {
    leaders: HashMap<FencingToken, usize>,
    shared: bool,
}

pub(crate) async fn one_leads_at_a_time_over_two_hundred_forced_changes(case: Arc<Case>) -> Outcome {
    const CANDIDATES: usize = 8;
    const CHANGES: usize = 200;
    case.needs(case.capabilities().force_release, "the backend cannot release by force")?;
    let (observer, ttl) = (case.client().await?, case.ttl());
    let resource = Arc::new(Fence::new("the resource", Ledger::default()));
    let (begin, mut begun) = mpsc::unbounded_channel();
    let mut campaigns = JoinSet::new();
    let mut parties = Vec::new();
    for candidate in 0..CANDIDATES {
        let party = case.party().await?;
        let (locks, begin, resource) = (party.locks.clone(), begin.clone(), Arc::clone(&resource));
        parties.push(party);
        campaigns.spawn(async move {
            let lead = locks.lock("leader").ttl(ttl).lead(|term| {
                let (begin, resource) = (begin.clone(), Arc::clone(&resource));
                async move {
                    let mut has_begun = false;
                    let mut write = || {
                        resource.write(term.token(), |ledger| {
                            let leader = ledger.leaders.entry(term.token()).or_insert(candidate);
                            ledger.shared |= *leader != candidate;
                            // Here, so that terms are seen in the order of their first writes.
                            if !std::mem::replace(&mut has_begun, true) {
                                let _ = begin.send(term.token());
                            }
                        })
                    };
                    // Until the resource says that there is a later leader, which may be before this one is told.
                    while write().is_ok() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    std::future::pending::<()>().await;
                }
            });
            lead.await
        });
    }
    let mut last = None;
    for change in 0..CHANGES {
        let next = case
            .within(case.hang_limit(), "there is a next leader", begun.recv())
            .await?;
        ensure!(
            next > last,
            "the backend",
            "tokens of leaders rise; {next:?} came after {last:?} at change {change}"
        );
        last = next;
        observer.force_release(&case.name("leader")).await?;
    }
    for party in parties {
        party.locks.shutdown().await?;
    }
    while let Some(ended) = campaigns.join_next().await {
        match ended? {
            Err(LockError::Closed { .. } | LockError::Lost { .. }) => {}
            other => fail!("the client", "a shutdown ends a campaign; it ended with {other:?}"),
        }
    }
    let shared = resource.read().shared;
    ensure!(!shared, "the backend", "no two leaders write with one token");
    Ok(())
}

pub(crate) async fn a_dead_leader_is_replaced_when_its_ttl_is_over(case: Arc<Case>) -> Outcome {
    let (dead, party) = (case.client().await?, case.party().await?);
    // Nothing renews it.
    let claim = case.brief_claim("leader");
    let old = case.take(&dead, &claim).await?;
    let lead = party.locks.lock("leader").lead(|term| async move { term.token() });
    let limit = claim.ttl() + case.hang_limit();
    let new = case
        .within(limit, "the next leader leads when the ttl is over", lead)
        .await??;
    ensure!(
        new > old.token,
        "the backend",
        "the next leader's token is higher; {new:?} came after {old:?}"
    );
    Ok(())
}

pub(crate) async fn those_who_observe_see_each_leader(case: Arc<Case>) -> Outcome {
    const TERMS: usize = 3;
    case.needs(case.capabilities().holder, "the backend cannot tell holders")?;
    let (candidates, observer) = ([case.party().await?, case.party().await?], case.party().await?);
    let mut leaders = observer.locks.observe("leader");
    let mut took = Vec::new();
    let first = case
        .within(case.hang_limit(), "the holder is told", leaders.next())
        .await?
        .transpose()?;
    ensure!(
        first == Some(Leadership::Vacant),
        "the backend",
        "there is no leader before the first one; it said {first:?}"
    );
    for term in 0..TERMS {
        let label = format!("term {term}");
        let (begin, begun) = oneshot::channel();
        let (end, ended) = oneshot::channel::<()>();
        let mut ends = Some((begin, ended));
        let request = candidates[term % candidates.len()]
            .locks
            .lock("leader")
            .label(label.as_str());
        let leads = tokio::spawn(request.lead(move |_| {
            let ends = ends.take();
            async move {
                if let Some((begin, ended)) = ends {
                    let _ = begin.send(());
                    let _ = ended.await;
                }
            }
        }));
        case.within(case.hang_limit(), "a candidate leads", begun)
            .await?
            .map_err(|_| Stop::Failed("expected of the client: a term begins".to_owned()))?;
        let start = case.now();
        let seen = case
            .within(
                case.hang_limit(),
                "those who observe see the new leader",
                leaders.next(),
            )
            .await?
            .transpose()?;
        took.push(case.now().since(start));
        let leader = seen.as_ref().and_then(Leadership::holder);
        let shown = leader.and_then(|leader| leader.label.as_deref());
        ensure!(
            shown == Some(label.as_str()),
            "the backend",
            "those who observe see the leader of {label:?}; they see {seen:?}"
        );
        let _ = end.send(());
        case.within(case.hang_limit(), "a term ends with its body", leads)
            .await???;
        let start = case.now();
        let seen = case
            .within(
                case.hang_limit(),
                "those who observe see the end of a term",
                leaders.next(),
            )
            .await?
            .transpose()?;
        took.push(case.now().since(start));
        ensure!(
            seen == Some(Leadership::Vacant),
            "the backend",
            "there is no leader between two terms; they see {seen:?}"
        );
    }
    case.prompt(
        &observer,
        "those who observe see a change",
        took,
        2 * Observation::DEFAULT_INTERVAL,
    )
    .await
}
