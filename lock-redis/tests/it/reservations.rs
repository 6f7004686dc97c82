//! Names that stay taken after their holder has released them.

use std::time::{Duration, Instant};

use lock_core::{Claim, DistributedLock, Holder, Locks, Released, Renewal};
use lock_redis::RedisLock;

use crate::connection;
use crate::server::{self, LONG, Proxy, Server, claim, granted, name, scripts, until};

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

pub(crate) fn reserving(length: Duration) -> Claim {
    claim("n", LONG).with_label("nightly").with_at_least(length)
}

async fn holder(lock: &RedisLock) -> Holder {
    lock.holders(&name("n"))
        .await
        .unwrap()
        .pop()
        .expect("the name is taken")
}

/// What the name has left on the server, if it is taken.
pub(crate) async fn left(server: &Server) -> Option<Duration> {
    let left: i64 = server.command("PTTL {fencelock:n}:lock").await;
    u64::try_from(left).ok().map(Duration::from_millis)
}

/// A client that holds `claim`, and whose requests may take that long, and the way that they go. The script that reserves is known to the server, so that one
/// request is all that a reservation takes.
pub(crate) async fn by_proxy(server: &Server, claim: &Claim, limit: Duration) -> (RedisLock, Proxy) {
    let (lock, proxy) = connection::by_proxy(server, limit).await;
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
    proxy.pass();
    until("the request has arrived", async || scripts(server).await > before).await;
}

#[tokio::test]
async fn a_late_reservation_does_not_count_for_a_later_grant_of_the_same_claim() {
    let server = Server::start();
    let mine = reserving(HOUR);
    let (lock, proxy) = by_proxy(&server, &mine, LONG).await;
    let other = server.client().await;
    proxy.hold_requests();
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
    proxy.hold_answers();
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
    proxy.pass();
    // It is sent once more, and that answer does not say what became of the first one.
    let error = asked.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("not held now"), "{error}");
    assert_eq!(lock.release(&mine, Some(LONG)).await.unwrap(), Released::NotHeld);
    assert!(left(&server).await.unwrap() > HOUR - LONG, "the first one counts");
}

#[tokio::test]
async fn closing_leaves_what_is_reserved_and_frees_what_is_not_any_more() {
    let server = Server::start();
    let (lock, other) = (server.client().await, server.client().await);
    let (mine, brief) = (
        reserving(HOUR),
        claim("brief", LONG).with_at_least(Duration::from_millis(1)),
    );
    for (claim, length) in [(&mine, HOUR), (&brief, Duration::from_millis(1))] {
        granted(&lock, claim).await;
        lock.reserve(claim, length).await.unwrap();
    }
    let over = Instant::now() + Duration::from_millis(1);
    until("a millisecond has passed", async || Instant::now() > over).await;
    lock.close().await.unwrap();
    let shown = holder(&other).await;
    assert!(shown.is_reserved && shown.remaining.unwrap() > HOUR - LONG);
    assert!(other.holders(brief.name()).await.unwrap().pop().is_none());
}

#[tokio::test]
async fn a_reservation_survives_a_restart_with_data() {
    let mut server = Server::with(&["--appendonly", "yes"]);
    let locks = Locks::new(server.client().await);
    let guard = locks.lock("n").at_least(HOUR).await.unwrap();
    let token = guard.token();
    guard.release().await.unwrap();
    server.until_written().await;
    server.kill();
    server.revive();
    let shown = holder(&server.client().await).await;
    assert!(shown.is_reserved && shown.remaining.unwrap() > HOUR - LONG);
    assert_eq!(shown.token, Some(token));
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
