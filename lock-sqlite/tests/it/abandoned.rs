//! A request whose caller goes away leaves nothing behind, not even until the core releases it.

use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::file::{File, LONG, claim, granted, name, until_waiting};
use lock_core::{Claim, DistributedLock, Released, Wait};
use lock_sqlite::SqliteLock;
use rusqlite::Connection;

/// Polls `future` `polls` times, each time that it asks for it, and drops it. True if it came to its end before.
///
/// The database is closed to the client until the first poll is over, so that it finds no answer yet.
async fn dropped_after<T>(polls: usize, file: &File, future: impl Future<Output = T>) -> bool {
    let gate = Connection::open(file.path()).unwrap();
    gate.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut future = pin!(future);
    let mut polled = 0;
    let ended = std::future::poll_fn(|context| {
        if polled == polls {
            return Poll::Ready(false);
        }
        let poll = Pin::as_mut(&mut future).poll(context).map(|_| true);
        polled += 1;
        if polled == 1 {
            gate.execute_batch("ROLLBACK").unwrap();
        }
        poll
    })
    .await;
    if polls == 0 {
        gate.execute_batch("ROLLBACK").unwrap();
    }
    ended
}

/// Everything that was asked of the client before has been worked when this returns.
async fn settled(lock: &SqliteLock) {
    lock.holders(&name("any")).await.unwrap().pop();
}

#[tokio::test]
async fn try_acquire_dropped_at_any_poll_leaves_no_row() {
    let file = File::new();
    let lock = file.client().await;
    let mut finished = false;
    let mut most = 0;
    for polls in 0..10 {
        let claim = claim("n", LONG);
        finished = dropped_after(polls, &file, lock.try_acquire(&claim)).await;
        most = polls;
        if finished {
            break;
        }
        settled(&lock).await;
        assert_eq!(file.rows(), 0, "dropped after {polls} polls");
    }
    assert!(finished && most >= 2, "it took {most} polls");
    assert_eq!(file.rows(), 1);
}

#[tokio::test]
async fn acquire_dropped_at_any_poll_leaves_no_row() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let mut finished = false;
    let mut most = 0;
    for polls in 0..10 {
        let (held, wanted) = (claim("n", LONG), claim("n", LONG));
        granted(&a, &held).await;
        let acquire = dropped_after(polls, &file, b.acquire(&wanted, Wait::until(None)));
        let let_go = async {
            // Late enough that the other one waits already, on most machines; the outcome is the same if not.
            tokio::time::sleep(Duration::from_millis(5)).await;
            assert_eq!(a.release(&held, None).await.unwrap(), Released::Released);
        };
        (finished, ()) = tokio::join!(acquire, let_go);
        most = polls;
        if finished {
            break;
        }
        settled(&b).await;
        assert_eq!(file.rows(), 0, "dropped after {polls} polls");
    }
    assert!(finished && most >= 2, "it took {most} polls");
    assert_eq!(file.rows(), 1);
}

#[tokio::test]
async fn a_wait_that_was_dropped_takes_nothing_when_the_name_becomes_free() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let (held, wanted) = (claim("n", LONG), claim("n", LONG));
    granted(&a, &held).await;
    {
        let mut waiting = pin!(b.acquire(&wanted, Wait::until(None)));
        until_waiting(&b, waiting.as_mut()).await;
    }
    // Given free by the client itself, so that it looks at once.
    b.force_release(held.name()).await.unwrap();
    settled(&b).await;
    settled(&b).await;
    assert_eq!(file.rows(), 0);
}

#[tokio::test]
async fn requests_dropped_at_any_moment_leave_no_row_and_repeat_no_token() {
    let file = File::new();
    let (a, b) = (file.client().await, file.client().await);
    let mut last = 0;
    for i in 0..300 {
        let lock = if i % 2 == 0 { &a } else { &b };
        let claims: Vec<Claim> = (0..3).map(|n| claim(&format!("n{n}"), LONG)).collect();
        let start = Instant::now();
        let cut = Duration::from_micros(fastrand::u64(0..150));
        // Those that were granted while still polled: nobody takes these back.
        let mut heard = Vec::new();
        {
            let mut requests: Vec<_> = claims.iter().map(|c| lock.acquire(c, Wait::until(None))).collect();
            std::future::poll_fn(|context| {
                for (request, claim) in requests.iter_mut().zip(&claims) {
                    if request.as_mut().poll(context).is_ready() {
                        heard.push(claim);
                    }
                }
                Poll::Ready(())
            })
            .await;
            while start.elapsed() < cut {
                std::hint::spin_loop();
            }
        }
        for claim in heard {
            lock.release(claim, None).await.unwrap();
        }
        settled(lock).await;
        assert_eq!(file.rows(), 0, "round {i}");
        let check = claim("n0", LONG);
        let token = granted(lock, &check).await.token.get();
        assert!(token > last, "{token} after {last}");
        last = token;
        lock.release(&check, None).await.unwrap();
    }
}

#[tokio::test]
async fn a_release_is_done_although_its_caller_has_gone() {
    let file = File::new();
    let lock = file.client().await;
    let claim = claim("n", LONG);
    granted(&lock, &claim).await;
    assert!(!dropped_after(1, &file, lock.release(&claim, None)).await);
    settled(&lock).await;
    assert_eq!(file.rows(), 0);
}

#[tokio::test]
async fn a_renewal_whose_caller_has_gone_before_it_ran_lengthens_nothing() {
    let file = File::new();
    let lock = file.client().await;
    let held = claim("n", LONG);
    let grant = granted(&lock, &held).await;
    let before = file.number("SELECT expires FROM lock");
    // Keeps the client's thread busy until the renewal has been dropped.
    let writer = Connection::open(file.path()).unwrap();
    writer.execute_batch("BEGIN IMMEDIATE").unwrap();
    {
        let other = claim("other", LONG);
        let mut first = pin!(lock.try_acquire(&other));
        let mut renewal = pin!(lock.renew(&grant.lease));
        std::future::poll_fn(|context| {
            assert!(first.as_mut().poll(context).is_pending());
            assert!(renewal.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
    }
    writer.execute_batch("ROLLBACK").unwrap();
    settled(&lock).await;
    assert_eq!(file.number("SELECT expires FROM lock"), before);
}
