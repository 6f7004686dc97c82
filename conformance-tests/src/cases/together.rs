//! Several locks at once, and leaders.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lock_core::fence::Fence;
use lock_core::{DistributedLock, FencingToken, LockError};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{Entry, cases};
use crate::case::Case;
use crate::outcome::{Outcome, ensure, fail};

pub(crate) const CASES: &[Entry] = cases![
    fifty_tasks_that_take_random_pairs_of_five_names_all_get_their_turns,
    one_leads_at_a_time_over_two_hundred_forced_changes,
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
        let next = case.soon("there is a next leader", begun.recv()).await?;
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
