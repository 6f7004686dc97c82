//! A server, or the way to it, that is bad for a while.

use std::future::IntoFuture;
use std::time::Duration;

use lock_core::{DistributedLock, LockError, LockGuard, Locks, Mode, Released, Renewal, Wait};
use lock_redis::RedisConfig;
use tokio::runtime::Handle;

use crate::server::{
    Ask, Direction, HANG_LIMIT, LONG, Proxy, Server, Traffic, busy, by_proxy, claim, granted, name, pair, soon, start,
    start_clocked, start_with, until, until_renewed, waiting,
};

/// Longer than a machine that is busy may not run a test or a server.
const LIMIT: Duration = Duration::from_secs(4);

/// Much longer than what is done within it, on such a machine.
const TTL: Duration = Duration::from_secs(20);

#[tokio::test]
async fn a_server_that_is_too_far_away_for_the_ttl_is_said_to_be() {
    let server = start().await;
    // The lock must not have ended when the renewal fails.
    for (part, ttl, word) in [(4, TTL, "renewal failed"), (1, TTL / 40, "acquire failed")] {
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
async fn a_caller_that_gives_up_or_does_not_look_at_its_answer_ends_no_connection() {
    let server = start().await;
    let list = async || server.command::<String>("CLIENT LIST TYPE pubsub").await;
    let first = |list: String| list.split(' ').next().map(str::to_owned);
    // Works the connection on this thread, so that no answer comes within a poll.
    let config = server.config().runtime(Handle::current()).op_timeout(LIMIT);
    let lock = config.connect().await.unwrap();
    granted(&lock, &claim("warm", LONG)).await;
    let before = first(list().await);
    let wanted = claim("n", LONG);
    let mut asking = Box::pin(lock.try_acquire(&wanted));
    let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(asking.as_mut().poll(cx).is_ready())).await;
    assert!(!polled);
    server.until_locked("n", true).await;
    // Longer than any request may take.
    tokio::time::sleep(LIMIT).await;
    drop(asking);
    granted(&lock, &claim("m", LONG)).await;
    assert_eq!(first(list().await), before);
    drop(lock);
    let (lock, proxy) = by_proxy(&server, LONG).await;
    proxy.set(Direction::ToClient, Traffic::Stalled);
    let silent = claim("silent", LONG);
    let given_up = tokio::time::timeout(Duration::from_millis(300), lock.try_acquire(&silent)).await;
    assert!(given_up.is_err());
    proxy.set(Direction::Both, Traffic::Flows);
    granted(&lock, &claim("o", LONG)).await;
    assert_eq!(proxy.counts().connections, 1);
}

#[tokio::test]
async fn closing_without_a_connection_releases_what_is_held_or_says_that_it_is_not_released() {
    let server = start().await;
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

#[tokio::test]
async fn a_password_that_is_wrong_for_a_while_ends_no_wait_of_a_client_that_was_connected() {
    let server = start().await;
    let _: String = server.command("ACL SETUSER joe on >one ~* &* +@all").await;
    let locks = Locks::new(server.config().credentials("joe", "one").connect().await.unwrap());
    locks.lock("a").await.unwrap().release().await.unwrap();
    let _: String = server.command("ACL SETUSER joe resetpass >hunter2").await;
    let _: u32 = server.command("CLIENT KILL USER joe").await;
    let waiting = tokio::spawn(locks.lock("a").wait_for(HANG_LIMIT).into_future());
    until("the refusal is told", async || {
        // The end of the connection may be noticed first.
        let refused = locks.lock("b").no_wait().await.unwrap_err();
        assert!(refused.is_retryable(), "{refused:?}");
        refused.to_string().contains("the password")
    })
    .await;
    let _: String = server.command("ACL SETUSER joe resetpass >one").await;
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn the_socket_of_a_server_and_a_client_of_the_redis_crate_lead_to_the_same_locks() {
    let server = start_with(&["--unixsocket", "redis.sock"]).await;
    let folder: (String, String) = server.command("CONFIG GET dir").await;
    let _: () = server.command("CONFIG SET requirepass p&w").await;
    let socket = format!("redis+unix:{}/redis.sock?password=p%26w&db=3", folder.1);
    let lock = lock_redis::RedisLock::connect(&socket).await.unwrap();
    granted(&lock, &claim("n", LONG)).await;
    let client = lock_redis::redis::Client::open(format!("redis://:p%26w@{}/3", server.authority())).unwrap();
    let same = RedisConfig::from_client(&client).unwrap().connect().await.unwrap();
    busy(&same, &claim("n", LONG)).await;
    let other = server.config().password("p&w").database(4).connect().await.unwrap();
    granted(&other, &claim("n", LONG)).await;
}

/// Renews until that many renewals have failed; the last error.
async fn until_failed(guard: &LockGuard, renewals: u32) -> LockError {
    let (mut failed, mut last) = (0, None);
    until("renewals fail", async || {
        if let Err(error) = guard.renew_now().await {
            failed += 1;
            last = Some(error);
        }
        failed >= renewals
    })
    .await;
    last.unwrap()
}

/// Makes the replica the primary, and the old primary its replica, which is up to date when this is done.
async fn fail_over(old: &Server, new: &Server) {
    new.follow(None).await;
    old.follow(Some(new)).await;
}

#[tokio::test]
async fn waits_and_holds_outlast_the_time_in_which_their_address_leads_to_a_replica() {
    let (server, other) = pair().await;
    let locks = Locks::new(server.client().await);
    let guard = locks.lock("n").ttl(LONG).await.unwrap();
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let config = RedisConfig::new("127.0.0.1", proxy.address().port());
    let waits = Locks::new(config.connect().await.unwrap());
    let waiting = tokio::spawn(waits.lock("n").ttl(TTL).wait_for(HANG_LIMIT).into_future());
    other.until_locked("n", true).await;
    other.until_queued("n", 1).await;
    fail_over(&server, &other).await;
    let error = until_failed(&guard, 3).await;
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(
        format!("{error:#}").contains("connecting failed: Redis became a read-only replica"),
        "{error:#}"
    );
    // Several attempts of the waiter.
    proxy.cut();
    let wanted = proxy.counts().connections + 4;
    let accepted = proxy.counted(|counts| counts.connections >= wanted);
    tokio::time::timeout(HANG_LIMIT, accepted)
        .await
        .expect("it goes on connecting");
    assert!(!waiting.is_finished());
    // What a replica lacks, its primary may have.
    let empty = start_with(&["--repl-diskless-sync-delay", "0"]).await;
    server.follow(Some(&empty)).await;
    server.until_locked("n", false).await;
    let error = guard.renew_now().await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    server.follow(Some(&other)).await;
    fail_over(&other, &server).await;
    until_renewed(&guard).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
    assert!(waiting.await.unwrap().unwrap().is_held());
}

#[tokio::test]
async fn waits_and_holds_outlast_a_failed_background_save() {
    let server = start_with(&["--dbfilename", "data.rdb"]).await;
    let (locks, other) = (Locks::new(server.client().await), Locks::new(server.client().await));
    let guard = locks.lock("n").ttl(TTL).await.unwrap();
    let waiting = tokio::spawn(other.lock("n").ttl(TTL / 10).wait_for(HANG_LIMIT).into_future());
    server.until_queued("n", 1).await;
    // Saving moves a file to this place.
    let folder: (String, String) = server.command("CONFIG GET dir").await;
    let place = format!("{}/data.rdb", folder.1);
    std::fs::create_dir(&place).unwrap();
    let save = lock_redis::redis::cmd("CONFIG")
        .arg("SET")
        .arg("save")
        .arg("3600 1")
        .clone();
    let _: () = server.ask(&save).await;
    let _: () = server.command("BGSAVE").await;
    server.until_info("persistence", "rdb_last_bgsave_status:err").await;
    // The refresh of the waiter comes before any renewal.
    server.until_info("errorstats", "errorstat_MISCONF").await;
    let error = until_failed(&guard, 3).await;
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(format!("{error:#}").contains("stop-writes-on-bgsave-error"), "{error}");
    std::fs::remove_dir(&place).unwrap();
    let _: () = server.command("BGSAVE").await;
    server.until_info("persistence", "rdb_last_bgsave_status:ok").await;
    until_renewed(&guard).await;
    guard.release().await.unwrap();
    assert!(waiting.await.unwrap().unwrap().is_held());
}

/// When the place of the waiter ends, by the server's clock, in milliseconds.
async fn end_of_place(server: &Server) -> Option<u64> {
    let entries: Vec<String> = server.command("HVALS {fencelock:n}:waiters").await;
    let end = entries.first()?.split(' ').nth(1);
    Some(end.unwrap().parse().unwrap())
}

/// The suite fills servers, too, but shows no waiter there.
#[tokio::test]
async fn a_waiter_outlives_its_ttl_in_the_queue_of_a_full_server_and_is_granted_what_is_released() {
    let server = start_clocked().await;
    let lock = server.client().await;
    for mode in [Mode::Exclusive, Mode::Shared] {
        let held = granted(&lock, &claim("n", LONG).with_mode(mode)).await;
        let (waiter, proxy) = by_proxy(&server, LONG).await;
        let wait = waiting(&waiter, &claim("n", TTL));
        server.until_queued("n", 1).await;
        let _: () = server.command("CONFIG SET maxmemory 1").await;
        for step in 1..=3 {
            let before = end_of_place(&server).await;
            // Between two refreshes: a third of the ttl and a little more.
            server.set_clock(step * 8).await.unwrap();
            // Cutting the connection makes it refresh its place.
            proxy.cut();
            until("the place is refreshed", async || {
                assert!(!wait.is_finished(), "the wait has failed");
                end_of_place(&server).await > before
            })
            .await;
        }
        // A claim that comes now has no place.
        for name in ["n", "other"] {
            let error = lock.acquire(&claim(name, LONG), Wait::until(soon())).await.unwrap_err();
            assert!(format!("{error:#}").contains("out of memory"), "{error}");
        }
        assert_eq!(lock.renew(&held.lease).await.unwrap(), Renewal::Renewed);
        assert_eq!(lock.release(&held.claim, None).await.unwrap(), Released::Released);
        let next = wait.await.unwrap();
        assert_eq!(waiter.release(&next.claim, None).await.unwrap(), Released::Released);
        assert_eq!(server.leftovers().await, [""; 0]);
        let _: () = server.command("CONFIG SET maxmemory 0").await;
        server.set_clock(0).await.unwrap();
    }
    // A name is reserved there, and its claim released.
    let held = claim("n", TTL).with_at_least(LONG);
    granted(&lock, &held).await;
    let _: () = server.command("CONFIG SET maxmemory 1").await;
    assert_eq!(lock.reserve(&held, LONG).await.unwrap(), Renewal::Renewed);
    assert_eq!(lock.release(&held, Some(LONG)).await.unwrap(), Released::Released);
    assert!(lock.holders(&name("n")).await.unwrap().pop().unwrap().is_reserved);
}
