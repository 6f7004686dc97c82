//! What waiting costs, counted in statements of SQLite.

#[cfg(target_os = "linux")]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_core::{Attempt, Claim, Clock, DistributedLock, LockName, Stamp, Wait};
use rusqlite::Connection;
use tempfile::TempDir;
use tokio::sync::oneshot;

use crate::SqliteLock;
use crate::patience;
use crate::records::HOLDER;
use crate::session::{Reply, Session, Settings};
use crate::store::VERSION;
use crate::wait::{PLANNED_LOOKS, Waiter};
use crate::wake::Alarm;
use crate::worker::Worker;

/// Longer than any test.
const LONG: Duration = Duration::from_secs(3_600);

/// So long between planned looks that none comes while a test runs.
#[cfg(any(target_os = "linux", target_os = "android"))]
const DAYS: Duration = Duration::from_secs(864_000);

fn settings(dir: &TempDir, planned_looks: Duration) -> Settings {
    Settings {
        path: dir.path().join("locks.db"),
        op_timeout: Duration::from_secs(60),
        allow_unsafe: false,
        read_only: false,
        planned_looks,
    }
}

fn claim(name: &str) -> Claim {
    Claim::new(name.parse().unwrap(), LONG)
}

/// How often the client asked who holds a name while that many waiters joined, each after another process had written.
fn looks_at_names(waiters: usize) -> i32 {
    let dir = tempfile::tempdir().unwrap();
    // It stands still, so that no planned look becomes due.
    let (clock, _hand) = Clock::manual();
    let mut worker = Worker::new(settings(&dir, PLANNED_LOOKS), clock.clone(), Arc::new(Alarm::new()));
    // A file of another test may be opened at the same time, for which this one waits.
    patience::until(Instant::now() + Duration::from_secs(60));
    let held = claim("n");
    let now = clock.now();
    let granted = worker.on_store(|store| store.try_acquire(&held, now, &|| true));
    assert!(granted.unwrap().granted().is_some());
    let writer = Connection::open(dir.path().join("locks.db")).unwrap();
    writer.execute_batch("PRAGMA synchronous = OFF").unwrap();
    let mut answers = Vec::new();
    let before = worker.on_store(|store| Ok(store.runs(HOLDER))).unwrap();
    for _ in 0..waiters {
        writer
            .execute_batch("UPDATE lock SET acquired_at = acquired_at + 1")
            .unwrap();
        let (reply, answer) = oneshot::channel();
        answers.push(answer);
        let newcomer = Waiter::new(claim("n"), now, None, Reply(reply));
        worker.step(Some(Box::new(|worker| worker.join(newcomer))));
    }
    let looks = worker.on_store(|store| Ok(store.runs(HOLDER))).unwrap() - before;
    // None of them has been forgotten.
    worker.on_store(|store| store.release(&held)).unwrap();
    worker.waiters.freed(held.name());
    worker.step(None);
    let granted = answers.iter_mut().filter_map(|answer| answer.try_recv().ok()).count();
    assert_eq!(granted, 1);
    looks
}

#[test]
fn a_waiter_that_joins_while_others_write_asks_for_itself_alone() {
    let looks = [1_000, 4_000].map(looks_at_names);
    println!("1 000 and 4 000 waiters joined with {looks:?} looks at names");
    assert_eq!(looks, [1_000, 4_000]);
}

#[test]
fn a_grant_that_is_taken_back_goes_to_a_waiter_of_the_same_client() {
    let dir = tempfile::tempdir().unwrap();
    // It stands still, so that no planned look becomes due.
    let (clock, _hand) = Clock::manual();
    let mut worker = Worker::new(settings(&dir, PLANNED_LOOKS), clock.clone(), Arc::new(Alarm::new()));
    // A file of another test may be opened at the same time, for which this one waits.
    patience::until(Instant::now() + Duration::from_secs(60));
    let (unheard, now) = (claim("n"), clock.now());
    let granted = worker.on_store(|store| store.try_acquire(&unheard, now, &|| true));
    assert!(granted.unwrap().granted().is_some());
    let (reply, mut answer) = oneshot::channel();
    let waiter = Waiter::new(claim("n"), now, None, Reply(reply));
    worker.step(Some(Box::new(|worker| worker.join(waiter))));
    answer.try_recv().unwrap_err();
    worker.take_back(&unheard);
    worker.step(None);
    assert!(matches!(answer.try_recv(), Ok(Ok(Attempt::Granted(_)))));
}

async fn taken(lock: &SqliteLock, claim: &Claim, deadline: Option<Stamp>) {
    let attempt = lock.acquire(claim, Wait::until(deadline)).await.unwrap();
    assert!(matches!(attempt, Attempt::Granted(_)), "{attempt:?}");
    // The end of a wait is a look as well.
    assert!(
        deadline.is_none_or(|deadline| Clock::system().now() < deadline),
        "nobody told"
    );
}

fn client(dir: &TempDir, planned_looks: Duration) -> SqliteLock {
    SqliteLock::new(Session::start(settings(dir, planned_looks)).unwrap())
}

/// How often the client has asked whether anything changed.
async fn looks(lock: &SqliteLock) -> i32 {
    let counted = lock.session().run("counting", |store, _| Ok(store.runs(VERSION)));
    counted.await.unwrap()
}

#[tokio::test]
async fn a_client_that_waits_looks_seldom_while_nothing_changes() {
    let dir = tempfile::tempdir().unwrap();
    let (holder, waiter) = (client(&dir, PLANNED_LOOKS), client(&dir, PLANNED_LOOKS));
    taken(&holder, &claim("n"), None).await;
    let (wanted, start) = (claim("n"), Clock::system().now());
    let attempt = waiter
        .acquire(&wanted, Wait::until(Some(start + Duration::from_secs(4))))
        .await;
    let waited = Clock::system().now().since(start);
    assert!(matches!(attempt, Ok(Attempt::Busy(_))), "{attempt:?}");
    let looks = looks(&waiter).await;
    println!("{looks} looks in {waited:.1?}");
    // At first every few milliseconds, and from the second second on 8 times a second at the most.
    let most = 40 + 8 * waited.as_secs();
    assert!(u64::try_from(looks).unwrap() < most, "{looks} looks in {waited:?}");
}

#[cfg(any(target_os = "linux", target_os = "android"))]
#[tokio::test]
async fn a_release_by_another_client_is_told_without_a_planned_look() {
    let dir = tempfile::tempdir().unwrap();
    // After the first look of a wait the next one is never due.
    let (one, other) = (client(&dir, DAYS), client(&dir, DAYS));
    for (holder, waiter) in [(&one, &other), (&other, &one)].repeat(20) {
        let (held, wanted) = (claim("n"), claim("n"));
        let before = looks(waiter).await;
        taken(holder, &held, None).await;
        let end = Clock::system().now() + Duration::from_secs(60);
        let waiting = tokio::spawn({
            let (waiter, wanted) = (waiter.clone(), wanted.clone());
            async move { taken(&waiter, &wanted, Some(end)).await }
        });
        // The look after the first one would come later than the end of the wait.
        while looks(waiter).await == before {
            tokio::task::yield_now().await;
        }
        holder.release(&held, None).await.unwrap();
        waiting.await.unwrap();
        waiter.release(&wanted, None).await.unwrap();
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
#[tokio::test]
async fn a_forced_release_and_the_end_of_a_client_are_told_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (client(&dir, DAYS), client(&dir, DAYS));
    let name: LockName = "n".parse().unwrap();
    for end in ["forced", "closed"] {
        let before = looks(&other).await;
        taken(&one, &claim("n"), None).await;
        let wanted = claim("n");
        let waiting = tokio::spawn({
            let (other, wanted) = (other.clone(), wanted.clone());
            let end = Clock::system().now() + Duration::from_secs(60);
            async move { taken(&other, &wanted, Some(end)).await }
        });
        while looks(&other).await == before {
            tokio::task::yield_now().await;
        }
        match end {
            "forced" => drop(one.force_release(&name).await.unwrap()),
            _ => one.close().await.unwrap(),
        }
        waiting.await.unwrap();
        other.release(&wanted, None).await.unwrap();
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_client_that_is_dropped_while_it_sleeps_ends_its_thread() {
    let dir = tempfile::tempdir().unwrap();
    let (holder, waiter) = (client(&dir, DAYS), client(&dir, DAYS));
    let (held, other) = (claim("n"), claim("other"));
    taken(&holder, &held, None).await;
    taken(&holder, &other, None).await;
    // The holder has the pipe open.
    holder.release(&other, None).await.unwrap();
    let before = looks(&waiter).await;
    let waiting = tokio::spawn({
        let waiter = waiter.clone();
        async move { waiter.acquire(&claim("n"), Wait::until(None)).await }
    });
    while looks(&waiter).await == before {
        tokio::task::yield_now().await;
    }
    let pipe = dir.path().canonicalize().unwrap().join("locks.db-wake");
    let open = || {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        descriptors
            .filter(|file| std::fs::read_link(file.path()).is_ok_and(|to| to == pipe))
            .count()
    };
    assert_eq!(open(), 2);
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    let thread = waiter
        .session()
        .run("asking", |_, _| Ok(std::fs::read_link("/proc/thread-self").unwrap()));
    let state = PathBuf::from("/proc").join(thread.await.unwrap()).join("stat");
    while !std::fs::read_to_string(&state).unwrap().contains(") S ") {
        tokio::task::yield_now().await;
    }
    drop(waiter);
    let end = Instant::now() + Duration::from_secs(60);
    while open() == 2 {
        assert!(Instant::now() < end, "the thread still sleeps");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
