//! Whatever was given up, wherever it was, leaves no lock on the server.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use lock_core::{DistributedLock, Locks, Options, Wait};
use lock_postgres::PostgresLock;
use tokio::runtime::Handle;
use tokio::spawn;

use crate::server::{Database, claim, granted, soon};

pub(crate) const TTL: Duration = Duration::from_secs(30);

/// The outcome of the future, unless it is dropped right after that many polls.
async fn polled<T>(future: impl Future<Output = T>, polls: usize) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|cx| {
        if left > 0
            && let Poll::Ready(done) = future.as_mut().poll(cx)
        {
            return Poll::Ready(Some(done));
        }
        left = left.saturating_sub(1);
        if left == 0 { Poll::Ready(None) } else { Poll::Pending }
    })
    .await
}

/// More polls than anything takes that ends by itself.
const MOST_POLLS: usize = 100;

/// The client's own thread may have the answer before the first look for it. Only what ends that often in a row before it
/// can be dropped takes no more polls.
const ENDS_IN_A_ROW: usize = 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_dropped_at_any_poll_leaves_nothing_beside_another_lock_that_is_held() {
    let server = Database::new().await;
    let lock = server.client().await;
    let locks = Locks::with_options(lock.clone(), Options::new().ttl(TTL));
    let kept = locks.lock("kept").await.unwrap();
    let (mut polls, mut ends) = (0, 0);
    while ends < ENDS_IN_A_ROW {
        let claim = claim("a", TTL);
        granted(&lock, &claim).await;
        let ended = polled(lock.release(&claim, None), polls).await.is_some();
        lock.release(&claim, None).await.unwrap();
        (polls, ends) = if ended { (polls, ends + 1) } else { (polls + 1, 0) };
        assert!(polls < MOST_POLLS, "it never ends");
    }
    server.until_locks(1).await;
    assert!(kept.is_held());
    println!("dropped at each of up to {polls} polls");
    assert!(polls >= 2);
    kept.release().await.unwrap();
    server.until_locks(0).await;
}

/// The client's own thread works what it is asked in the order in which it was asked. Several threads do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_given_up_leaves_nothing_when_its_release_overtakes_it_on_another_thread() {
    let server = Database::new().await;
    let lock = server.config().runtime(Handle::current()).connect().await.unwrap();
    let locks = Locks::with_options(lock.clone(), Options::new().ttl(TTL));
    let kept = locks.lock("kept").await.unwrap();
    let giving_up = |name| give_up_again_and_again(lock.clone(), name);
    tokio::try_join!(spawn(giving_up("a")), spawn(giving_up("b"))).unwrap();
    server.until_locks(1).await;
    assert!(kept.is_held());
}

async fn give_up_again_and_again(lock: PostgresLock, name: &'static str) {
    for _ in 0..500 {
        let [tried, waited, held] = std::array::from_fn(|_| claim(name, TTL));
        polled(lock.try_acquire(&tried), 1).await;
        lock.release(&tried, None).await.unwrap();
        polled(lock.acquire(&waited, Wait::until(soon())), 1).await;
        lock.release(&waited, None).await.unwrap();
        granted(&lock, &held).await;
        polled(lock.release(&held, None), 1).await;
        lock.release(&held, None).await.unwrap();
    }
}
