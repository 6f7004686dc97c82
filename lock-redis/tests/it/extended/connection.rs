//! What happens in time when the way to the server is bad.

use std::time::{Duration, Instant};

use lock_core::{Claim, DistributedLock, LockError, Locks, Released, Renewal, Wait};

use crate::connection::by_proxy;
use crate::server::{self, LONG, Server, claim, granted, scripts, soon, until, until_queued};

/// Longer than a machine that is busy may not run a test or a server, as all other times here.
const LIMIT: Duration = Duration::from_secs(4);
const TTL: Duration = Duration::from_secs(10);

/// Gives a claim up while its request is held on the way, and delivers that `delay` after it was sent, which is returned.
async fn abandoned(server: &Server, claim: &Claim, delay: Duration) -> Instant {
    let (lock, proxy) = by_proxy(server, LIMIT).await;
    // The script is known, so that one request is all that it takes.
    granted(&lock, &server::claim("warm", TTL)).await;
    let before = scripts(server).await;
    proxy.hold_requests();
    let sent = Instant::now();
    let gone = lock.try_acquire(claim).await.unwrap_err();
    assert!(matches!(gone, LockError::Unavailable { .. }), "{gone}");
    // The clean-up comes first, by another way.
    assert_eq!(
        server.client().await.release(claim, None).await.unwrap(),
        Released::NotHeld
    );
    let released = scripts(server).await;
    assert!(released > before);
    tokio::time::sleep(delay.saturating_sub(sent.elapsed())).await;
    proxy.pass();
    until("the request has arrived", async || scripts(server).await > released).await;
    sent
}

#[tokio::test]
async fn a_request_that_arrives_after_half_of_its_ttl_does_nothing() {
    let server = Server::start();
    let late = claim("n", TTL);
    abandoned(&server, &late, TTL * 3 / 5).await;
    assert_eq!(server.command::<u8>("EXISTS {fencelock:n}:lock").await, 0);
}

#[tokio::test]
async fn a_request_that_arrives_after_its_release_is_gone_one_ttl_after_it_was_sent() {
    /// It arrives long before half of it is over.
    const TTL: Duration = Duration::from_secs(24);
    const DELAY: Duration = Duration::from_secs(6);
    let server = Server::start();
    let late = claim("n", TTL);
    let sent = abandoned(&server, &late, DELAY).await;
    let elapsed = sent.elapsed();
    let left: i64 = server.command("PTTL {fencelock:n}:lock").await;
    let left = Duration::from_millis(u64::try_from(left).expect("the request was carried out"));
    let end = elapsed + left;
    // Not one ttl after it arrived.
    assert!(end < TTL + DELAY * 2 / 3, "{end:?}");
}

#[tokio::test]
async fn a_renewal_that_arrives_after_half_of_its_ttl_does_nothing() {
    let server = Server::start();
    let (lock, proxy) = by_proxy(&server, LIMIT).await;
    let grant = granted(&lock, &claim("n", TTL)).await;
    // The script is known, so that one request is all that it takes.
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    let before = scripts(&server).await;
    proxy.hold_requests();
    let sent = Instant::now();
    assert!(lock.renew(&grant.lease).await.is_err());
    tokio::time::sleep((TTL * 3 / 5).saturating_sub(sent.elapsed())).await;
    proxy.pass();
    until("the renewal has arrived", async || scripts(&server).await > before).await;
    let left: i64 = server.command("PTTL {fencelock:n}:lock").await;
    assert!(left < (TTL / 2).as_millis() as i64, "{left}");
}

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
        proxy.delay(ttl / part * 3 / 2);
        // The release of the first may still be under way.
        let name = format!("n{part}");
        let outcome = match locks.lock(name).ttl(ttl).await {
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
    proxy.hold_requests();
    proxy.cut();
    until("the second waiter has refreshed its entry", async || {
        entry(later_owner).await != before.1
    })
    .await;
    assert_eq!(entry(owner).await, before.0, "the first waiter cannot refresh its own");
    proxy.pass();
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
