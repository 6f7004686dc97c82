//! What happens in time when the way to the server is bad.

use std::time::Duration;

use lock_core::{DistributedLock, LockError, Locks, Wait};
use tokio::runtime::Handle;

use crate::server::{Direction, LONG, Server, Traffic, by_proxy, claim, granted, soon, until, until_queued};

/// Longer than a machine that is busy may not run a test or a server, as all other times here.
const LIMIT: Duration = Duration::from_secs(4);
const TTL: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_server_that_is_too_far_away_for_the_ttl_is_said_to_be() {
    let server = Server::start();
    // The lock must not have ended when the renewal fails.
    for (part, ttl, word) in [(4, TTL * 2, "renewal failed"), (1, TTL / 20, "acquire failed")] {
        let (lock, proxy) = by_proxy(&server, LONG).await;
        let locks = Locks::new(lock);
        // The scripts are known then, so that one request is all that it takes.
        let warm = locks.lock("warm").await.unwrap();
        warm.renew_now().await.unwrap();
        // Nothing else is under way, which would hold up what comes after it.
        warm.release().await.unwrap();
        proxy.set(Direction::Both, Traffic::Delayed(ttl / part * 3 / 4));
        // The release of the first may still be under way.
        let name = format!("n{part}");
        let outcome = match locks.lock(name).ttl(ttl).no_wait().await {
            Ok(guard) => guard.renew_now().await,
            Err(error) => Err(error),
        };
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("raise the ttl"), "{error}");
    }
}

#[tokio::test]
async fn a_waiter_that_is_cut_off_for_one_refresh_keeps_its_place() {
    let server = Server::start();
    let holder = server.client().await;
    let held = granted(&holder, &claim("n", LONG)).await;
    let (cut_off, proxy) = by_proxy(&server, LIMIT).await;
    let mut waiting = Vec::new();
    for (place, waiter) in [cut_off, server.client().await].into_iter().enumerate() {
        let claim = claim("n", TTL);
        let owner = claim.owner();
        let wait = tokio::spawn(async move {
            let mut answer = waiter.acquire(&claim, Wait::until(soon())).await;
            while answer.as_ref().is_err_and(LockError::is_retryable) {
                // As the core does.
                answer = waiter.acquire(&claim, Wait::until(soon())).await;
            }
            (waiter, answer.unwrap().granted().unwrap())
        });
        waiting.push((owner, wait));
        until_queued(&server, "n", place + 1).await;
    }
    let entry = async |owner| {
        let ask = format!("HGET {{fencelock:n}}:waiters {owner}");
        server.command::<Option<String>>(&ask).await
    };
    let (later_owner, later) = waiting.pop().unwrap();
    let (owner, first) = waiting.pop().unwrap();
    let before = (entry(owner).await, entry(later_owner).await);
    proxy.set(Direction::ToServer, Traffic::Stalled);
    proxy.cut();
    until("the second waiter has refreshed its entry", async || {
        entry(later_owner).await != before.1
    })
    .await;
    assert_eq!(entry(owner).await, before.0, "the first waiter cannot refresh its own");
    proxy.set(Direction::Both, Traffic::Flows);
    until("the first waiter has come back", async || {
        entry(owner).await != before.0
    })
    .await;
    holder.release(&held.claim, None).await.unwrap();
    let (waiter, grant) = first.await.unwrap();
    assert!(!later.is_finished());
    waiter.release(&grant.claim, None).await.unwrap();
    assert!(later.await.unwrap().1.token > grant.token);
}

#[tokio::test]
async fn a_caller_that_gives_up_soon_ends_no_connection() {
    let server = Server::start();
    let (lock, proxy) = by_proxy(&server, LONG).await;
    let connection = async || server.command::<String>("CLIENT LIST TYPE pubsub").await;
    let id = |list: String| list.split(' ').next().map(str::to_owned);
    let before = id(connection().await);
    proxy.set(Direction::ToClient, Traffic::Stalled);
    let asking = async { lock.try_acquire(&claim("n", LONG)).await };
    let given_up = tokio::time::timeout(Duration::from_millis(300), asking).await;
    assert!(given_up.is_err());
    proxy.set(Direction::Both, Traffic::Flows);
    granted(&lock, &claim("m", LONG)).await;
    assert_eq!(id(connection().await), before);
}

#[tokio::test]
async fn a_request_that_is_answered_and_not_looked_at_ends_no_connection() {
    let server = Server::start();
    let (limit, ttl) = (Duration::from_secs(1), LONG);
    // Works the connection on this thread, so that no answer comes within a poll.
    let config = server.config().runtime(Handle::current()).op_timeout(limit);
    let lock = config.connect().await.unwrap();
    // The scripts are known then, so that one request is all that it takes.
    granted(&lock, &claim("warm", ttl)).await;
    let list = async || server.command::<String>("CLIENT LIST TYPE pubsub").await;
    let first = |list: String| list.split(' ').next().map(str::to_owned);
    let before = first(list().await);
    let wanted = claim("n", ttl);
    let mut asking = Box::pin(lock.try_acquire(&wanted));
    let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(asking.as_mut().poll(cx).is_ready())).await;
    assert!(!polled);
    server.until_locked("n", true).await;
    // Longer than any request may take.
    tokio::time::sleep(limit).await;
    drop(asking);
    granted(&lock, &claim("m", ttl)).await;
    assert_eq!(first(list().await), before);
}

#[tokio::test]
async fn closing_without_a_connection_releases_what_is_held_or_says_that_it_is_not_released() {
    let server = Server::start();
    for is_reachable in [true, false] {
        let (lock, proxy) = by_proxy(&server, LIMIT).await;
        granted(&lock, &claim("n", LONG)).await;
        if !is_reachable {
            proxy.set(Direction::Both, Traffic::Stalled);
        }
        proxy.cut();
        let closed = lock.close().await;
        assert_eq!(closed.is_ok(), is_reachable, "{closed:?}");
        server.until_locked("n", !is_reachable).await;
    }
}
