//! Names that stay taken after their holder has released them.

use std::time::Duration;

use lock_core::{Claim, DistributedLock, Locks, Released, Renewal};
use lock_redis::RedisLock;

use crate::server::{self, Direction, LONG, Proxy, Server, Traffic, claim, granted, scripts, until};

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

pub(crate) fn reserving(length: Duration) -> Claim {
    claim("n", LONG).with_label("nightly").with_at_least(length)
}

/// What the name has left on the server, if it is taken.
pub(crate) async fn left(server: &Server) -> Option<Duration> {
    let left: i64 = server.command("PTTL {fencelock:n}:lock").await;
    u64::try_from(left).ok().map(Duration::from_millis)
}

/// A client that holds `claim`, and whose requests may take that long, and the way that they go. The script that reserves is known to the server, so that one
/// request is all that a reservation takes.
pub(crate) async fn by_proxy(server: &Server, claim: &Claim, limit: Duration) -> (RedisLock, Proxy) {
    let (lock, proxy) = server::by_proxy(server, limit).await;
    granted(&lock, claim).await;
    let warm = server::claim("warm", LONG).with_at_least(HOUR);
    granted(&lock, &warm).await;
    lock.reserve(&warm, HOUR).await.unwrap();
    lock.release(&warm, None).await.unwrap();
    (lock, proxy)
}

/// Delivers the one request that is on its way.
pub(crate) async fn deliver(server: &Server, proxy: &Proxy) {
    let before = scripts(server).await;
    proxy.set(Direction::Both, Traffic::Flows);
    until("the request has arrived", async || scripts(server).await > before).await;
}

#[tokio::test]
async fn a_late_reservation_does_not_count_for_a_later_grant_of_the_same_claim() {
    let server = Server::start();
    let mine = reserving(HOUR);
    let (lock, proxy) = by_proxy(&server, &mine, LONG).await;
    let other = server.client().await;
    proxy.set(Direction::ToServer, Traffic::Stalled);
    let asked = tokio::spawn({
        let (lock, mine) = (lock.clone(), mine.clone());
        async move { lock.reserve(&mine, HOUR).await }
    });
    // An acquire that the network held back arrives after the release.
    other.release(&mine, None).await.unwrap();
    granted(&other, &mine).await;
    deliver(&server, &proxy).await;
    assert_eq!(asked.await.unwrap().unwrap(), Renewal::NotHeld);
    assert!(left(&server).await.unwrap() <= LONG);
}

#[tokio::test]
async fn a_release_whose_answer_was_lost_can_be_repeated() {
    let server = Server::start();
    let mine = reserving(HOUR);
    let (lock, proxy) = by_proxy(&server, &mine, LONG).await;
    lock.reserve(&mine, HOUR).await.unwrap();
    proxy.set(Direction::ToClient, Traffic::Lost);
    let asked = tokio::spawn({
        let (lock, mine) = (lock.clone(), mine.clone());
        async move { lock.release(&mine, Some(HOUR)).await }
    });
    until("the release has arrived", async || {
        server
            .command::<String>("GET {fencelock:n}:lock")
            .await
            .contains("reserved:")
    })
    .await;
    proxy.cut();
    proxy.set(Direction::Both, Traffic::Flows);
    // It is sent once more, and that answer does not say what became of the first one.
    let error = asked.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("not held now"), "{error}");
    assert_eq!(lock.release(&mine, Some(LONG)).await.unwrap(), Released::NotHeld);
    assert!(left(&server).await.unwrap() > HOUR - LONG, "the first one counts");
}

#[tokio::test]
async fn a_lock_without_a_reservation_costs_one_script_for_each_request() {
    const ROUNDS: u64 = 20;
    let server = Server::start();
    let locks = Locks::new(server.client().await);
    let mut before = 0;
    // In the first two the server gets to know the scripts.
    for round in 0..ROUNDS + 2 {
        if round == 2 {
            before = scripts(&server).await;
        }
        locks.lock("n").await.unwrap().release().await.unwrap();
    }
    assert_eq!(scripts(&server).await - before, 2 * ROUNDS);
}
