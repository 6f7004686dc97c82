//! One holder at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, LockName, Released};
use tokio::task::JoinSet;

use super::{Entry, cases, runtime};
use crate::case::Case;
use crate::child::Child;
use crate::outcome::{Outcome, ensure, fail};

pub(crate) const CASES: &[Entry] = cases![
    a_held_name_is_busy_for_another_client,
    distinct_names_do_not_exclude_each_other,
    names_that_look_alike_stay_apart,
    a_name_of_512_bytes_works,
    eight_clients_hold_one_at_a_time,
    twenty_processes_lose_no_update,
    a_thousand_names_are_held_at_once_by_one_client,
    runtime::a_client_used_from_two_runtimes_outlives_the_one_that_ends,
    runtime::a_client_is_made_and_used_outside_of_a_runtime,
    runtime::a_client_whose_own_runtime_ends_ends_with_it,
];

pub(crate) async fn a_held_name_is_busy_for_another_client(case: Arc<Case>) -> Outcome {
    let (first, second) = (case.client().await?, case.client().await?);
    let claim = case.claim("n");
    case.take(&first, &claim).await?;
    case.is_busy(&second, claim.name()).await?;
    first.release(&claim, None).await?;
    case.is_free(&second, claim.name()).await
}

pub(crate) async fn distinct_names_do_not_exclude_each_other(case: Arc<Case>) -> Outcome {
    let (first, second) = (case.client().await?, case.client().await?);
    let claims = ["a", "b", "c"].map(|name| case.claim(name));
    for claim in &claims {
        case.take(&first, claim).await?;
    }
    let other = case.claim("d");
    case.take(&second, &other).await?;
    second.release(&other, None).await?;
    for claim in &claims {
        ensure!(
            first.release(claim, None).await? == Released::Released,
            "the backend",
            "{:?} is still held while others come and go",
            claim.name()
        );
    }
    Ok(())
}

pub(crate) async fn names_that_look_alike_stay_apart(case: Arc<Case>) -> Outcome {
    let alike = [
        "a",
        "A",
        " a",
        "a ",
        "a  ",
        "a/b",
        "a/",
        "/a",
        "a//b",
        "á",
        "a\u{301}",
        "ａ",
        "{a}",
        "{a",
        "a}",
        "{",
        "}",
        "a:lock",
        "a}:lock",
        "a:fence",
        "a}:fence",
        "a:order",
        "a:waiters",
        "'a'",
        "\"a\"",
        "`a`",
        "a'; --",
        "\\",
        "a\\",
        "%",
        "a%",
        "%a%",
        "_",
        "*",
        "a*",
        "?",
        "[a]",
        "..",
        ".",
        "-",
        "--",
        "NULL",
        "null",
        "0",
        "00",
        "1",
        "1.0",
        "🔒",
        "𝔞",
        "\u{200b}a",
        "\u{feff}a",
        "a\u{202e}",
    ];
    let (first, second) = (case.party().await?, case.client().await?);
    // All of them are held when the last one is taken: renewed, as the longest ttl may be shorter than that takes.
    let mut guards = Vec::new();
    for name in alike {
        let Some(guard) = first.locks.try_lock(name).await? else {
            fail!("the backend", "grants {name:?}, which is free; it said that it is held");
        };
        guards.push(guard);
    }
    for guard in &guards {
        case.is_busy(&second, guard.name()).await?;
    }
    for guard in guards {
        let name = guard.name().clone();
        guard.release().await?;
        case.is_free(&second, &name).await?;
    }
    Ok(())
}

pub(crate) async fn a_name_of_512_bytes_works(case: Arc<Case>) -> Outcome {
    let (first, second) = (case.client().await?, case.client().await?);
    for name in ["x".repeat(LockName::MAX_LEN), "é".repeat(LockName::MAX_LEN / 2)] {
        let claim = case.claim(&name);
        let nearly: String = name.chars().skip(1).collect();
        case.take(&first, &claim).await?;
        case.is_busy(&second, claim.name()).await?;
        case.is_free(&second, &case.name(&nearly)).await?;
        first.release(&claim, None).await?;
        case.is_free(&second, claim.name()).await?;
    }
    Ok(())
}

/// Tasks on eight clients take turns; each turn checks that no other is inside.
pub(crate) async fn eight_clients_hold_one_at_a_time(case: Arc<Case>) -> Outcome {
    const CLIENTS: usize = 8;
    const TASKS: usize = 24;
    const TURNS: usize = 4;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(case.party().await?.locks);
    }
    let inside = Arc::new(AtomicUsize::new(0));
    let done = Arc::new(AtomicUsize::new(0));
    let mut all = JoinSet::new();
    for task in 0..TASKS {
        let locks = clients[task % CLIENTS].clone();
        let (case, inside, done) = (Arc::clone(&case), Arc::clone(&inside), Arc::clone(&done));
        all.spawn(async move {
            for _ in 0..TURNS {
                let guard = locks.lock("n").await?;
                let others = inside.fetch_add(1, Ordering::SeqCst);
                ensure!(
                    others == 0 || !guard.is_held(),
                    "the backend",
                    "one holds {:?} at a time; {others} were inside when {guard:?} came",
                    guard.name()
                );
                // Long enough that one that comes too early meets this one.
                tokio::time::sleep(Duration::from_millis(5)).await;
                ensure!(
                    guard.is_held(),
                    "the client",
                    "a lock under renewal stays held for a moment"
                );
                inside.fetch_sub(1, Ordering::SeqCst);
                done.fetch_add(1, Ordering::SeqCst);
                guard.release().await?;
            }
            case.note(format!("task {task} is done"));
            Ok(())
        });
    }
    while let Some(ended) = all.join_next().await {
        ended??;
    }
    let (done, expected) = (done.load(Ordering::SeqCst), TASKS * TURNS);
    ensure!(
        done == expected,
        "the backend",
        "each task gets its turns: {expected}; it were {done}"
    );
    Ok(())
}

/// Processes read, increment and write a number in a file, each time under the lock.
pub(crate) async fn twenty_processes_lose_no_update(case: Arc<Case>) -> Outcome {
    const PROCESSES: usize = 20;
    const TURNS: usize = 50;
    case.needs_processes()?;
    std::fs::write(case.counter(), "0")?;
    let mut children: Vec<Child> = Vec::new();
    for _ in 0..PROCESSES {
        children.push(case.child().await?);
    }
    let ttl = case.ttl_of(Duration::from_secs(10));
    let start = case.now();
    for child in &mut children {
        child.count("n", ttl, TURNS).await?;
    }
    let mut tokens = Vec::new();
    for child in &mut children {
        let own = child.counted(3 * case.hang_limit()).await?;
        ensure!(
            own.is_sorted(),
            "the backend",
            "tokens rise for each process; they were {own:?}"
        );
        tokens.extend(own);
    }
    let took = case.now().since(start);
    let expected = PROCESSES * TURNS;
    case.remark(format!("{PROCESSES} processes x {TURNS} increments took {took:.1?}"));
    let counted: usize = std::fs::read_to_string(case.counter())?.parse().unwrap_or(0);
    ensure!(
        counted == expected,
        "the backend",
        "no update is lost: {expected} were made, {counted} counted"
    );
    tokens.sort_unstable();
    tokens.dedup();
    ensure!(tokens.len() == expected, "the backend", "no token is given twice");
    Ok(())
}

pub(crate) async fn a_thousand_names_are_held_at_once_by_one_client(case: Arc<Case>) -> Outcome {
    const NAMES: usize = 1000;
    let (party, other) = (case.party().await?, case.client().await?);
    let ttl = case.ttl_of(Duration::from_secs(15));
    let mut guards = Vec::with_capacity(NAMES);
    let mut asking = JoinSet::new();
    for i in 0..NAMES {
        asking.spawn(
            party
                .locks
                .lock(format!("name {i}"))
                .ttl(ttl)
                .wait_for(case.hang_limit())
                .into_future(),
        );
    }
    while let Some(guard) = asking.join_next().await {
        guards.push(guard??);
    }
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    ensure!(held == NAMES, "the client", "all {NAMES} are held at once; {held} are");
    for guard in guards.iter().step_by(97) {
        match other.try_acquire(&Claim::new(guard.name().clone(), case.ttl())).await? {
            Attempt::Busy(_) => {}
            granted => fail!("the backend", "{guard:?} excludes others; it said {granted:?}"),
        }
    }
    // While all are held: none may be left because the others were released first.
    party.locks.shutdown().await?;
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    ensure!(
        held == 0,
        "the client",
        "a shutdown releases all {NAMES}; {held} are held after it"
    );
    for guard in guards.iter().step_by(97) {
        case.is_free(&other, guard.name()).await?;
    }
    Ok(())
}
