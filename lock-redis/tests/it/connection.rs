//! What happens when the way to the server is bad.

use std::time::Duration;

use lock_core::{DistributedLock, Released, Wait};
use lock_redis::{RedisConfig, RedisLock};

use crate::server::{LONG, Proxy, Server, claim, granted, name, scripts, soon, until, until_queued};

/// A client whose requests may take that long, and the way that they go.
pub(crate) async fn by_proxy(server: &Server, limit: Duration) -> (RedisLock, Proxy) {
    let proxy = Proxy::to(server.port()).await;
    let config = RedisConfig::new("127.0.0.1", proxy.port()).op_timeout(limit);
    (config.connect().await.unwrap(), proxy)
}

/// Waits until a claim of that client waits for the name `n`, and has been told so: a request whose connection ends before it is answered
/// fails.
async fn until_told(server: &Server, lock: &RedisLock) {
    until_queued(server, "n", 1).await;
    // Answers come in the order of the requests.
    lock.holder(&name("n")).await.unwrap();
}

#[tokio::test]
async fn a_push_that_was_lost_with_its_connection_is_made_up_for() {
    let server = Server::start();
    let (lock, proxy) = by_proxy(&server, LONG).await;
    let holder = server.client().await;
    let (held, wanted) = (claim("n", LONG), claim("n", LONG));
    granted(&holder, &held).await;
    let wait = tokio::spawn({
        let (lock, wanted) = (lock.clone(), wanted.clone());
        async move { lock.acquire(&wanted, Wait::until(soon())).await.unwrap().granted() }
    });
    until_told(&server, &lock).await;
    proxy.hold_answers();
    holder.release(&held, None).await.unwrap();
    until_queued(&server, "n", 0).await;
    proxy.cut();
    // Passed on before the connection has ended, the push would not be lost.
    proxy.until_accepted(1).await;
    proxy.pass();
    assert_eq!(wait.await.unwrap().unwrap().claim, wanted);
}

#[tokio::test]
async fn a_try_whose_connection_is_cut_is_repeated_and_draws_one_token() {
    let server = Server::start();
    let (lock, proxy) = by_proxy(&server, LONG).await;
    // The script is known then, so that one request is all that it takes.
    granted(&lock, &claim("warm", LONG)).await;
    let wanted = claim("n", LONG);
    proxy.hold_answers();
    let trying = tokio::spawn({
        let (lock, wanted) = (lock.clone(), wanted.clone());
        async move { lock.try_acquire(&wanted).await }
    });
    server.until_locked("n", true).await;
    proxy.cut();
    // Passed on before the connection has ended, the answer would not be lost.
    proxy.until_accepted(1).await;
    proxy.pass();
    let grant = trying.await.unwrap().unwrap().granted().unwrap();
    assert_eq!(
        server.command::<String>("GET {fencelock:n}:fence").await,
        grant.token.to_string()
    );
    assert_eq!(lock.release(&wanted, None).await.unwrap(), Released::Released);
}

#[tokio::test]
async fn a_wait_goes_on_when_its_connection_is_cut() {
    let server = Server::start();
    let (lock, proxy) = by_proxy(&server, LONG).await;
    let holder = server.client().await;
    let (held, wanted) = (claim("n", LONG), claim("n", LONG));
    granted(&holder, &held).await;
    let wait = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire(&wanted, Wait::until(soon())).await.unwrap().granted() }
    });
    for _ in 0..3 {
        until_told(&server, &lock).await;
        let before = scripts(&server).await;
        proxy.cut();
        until("the wait has asked again", async || scripts(&server).await > before).await;
    }
    until_queued(&server, "n", 1).await;
    holder.release(&held, None).await.unwrap();
    assert!(wait.await.unwrap().is_some());
}

#[tokio::test]
async fn a_waiter_whose_connection_has_closed_is_passed_over_at_once() {
    let server = Server::start();
    let (lock, proxy) = by_proxy(&server, LONG).await;
    let (holder, next) = (server.client().await, server.client().await);
    let (held, gone, wanted) = (claim("n", LONG), claim("n", LONG), claim("n", LONG));
    granted(&holder, &held).await;
    let waiting = tokio::spawn(async move { lock.acquire(&gone, Wait::until(None)).await });
    until_queued(&server, "n", 1).await;
    let wait = tokio::spawn(async move { next.acquire(&wanted, Wait::until(soon())).await.unwrap() });
    until_queued(&server, "n", 2).await;
    waiting.abort();
    proxy.hold_requests();
    proxy.cut();
    until("the server has seen the end of the connection", async || {
        server.command::<String>("CLIENT LIST").await.matches("sub=1").count() <= 2
    })
    .await;
    holder.release(&held, None).await.unwrap();
    assert!(wait.await.unwrap().granted().is_some());
}
