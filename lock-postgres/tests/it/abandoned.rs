//! A request that its caller gives up leaves no lock on the server.

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

/// Polls the future that many times, and then drops it.
async fn polled(future: impl Future, polls: usize) {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|cx| {
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Pending if left > 0 => Poll::Pending,
            _ => Poll::Ready(()),
        }
    })
    .await;
}

/// On the client's own thread requests are worked in the order in which they were made. On several threads a release may overtake
/// the request that it cleans up after.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_given_up_leaves_nothing_also_if_its_release_overtakes_it_on_another_thread() {
    let server = Database::new().await;
    for config in [server.config(), server.config().runtime(Handle::current())] {
        let lock = config.connect().await.unwrap();
        let locks = Locks::with_options(lock.clone(), Options::new().ttl(TTL));
        let kept = locks.lock("kept").await.unwrap();
        let giving_up = |name| give_up_again_and_again(lock.clone(), name);
        tokio::try_join!(spawn(giving_up("a")), spawn(giving_up("b"))).unwrap();
        server.until_locks(1).await;
        assert!(kept.is_held());
        kept.release().await.unwrap();
        server.until_locks(0).await;
    }
}

async fn give_up_again_and_again(lock: PostgresLock, name: &'static str) {
    for round in 0..400 {
        // A release is also given up between its polls.
        let polls = 1 + round % 4;
        let [tried, waited, held] = std::array::from_fn(|_| claim(name, TTL));
        polled(lock.try_acquire(&tried), 1).await;
        lock.release(&tried, None).await.unwrap();
        polled(lock.acquire(&waited, Wait::until(soon())), 1).await;
        lock.release(&waited, None).await.unwrap();
        granted(&lock, &held).await;
        polled(lock.release(&held, None), polls).await;
        lock.release(&held, None).await.unwrap();
    }
}
