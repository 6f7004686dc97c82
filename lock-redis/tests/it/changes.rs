//! Changes of holders, as they are pushed.

use std::time::Duration;

use lock_core::{Changes, DistributedLock};
use lock_redis::{RedisConfig, RedisLock};
use tokio::runtime::Handle;

use crate::server::{HANG_LIMIT, Proxy, Server, name, rights, until};

async fn observe(lock: &RedisLock, observed: &str) -> Changes {
    let changes = lock.changes(&name(observed)).await.unwrap();
    changes.expect("the server pushes")
}

async fn next(changes: &mut Changes) -> Option<()> {
    tokio::time::timeout(HANG_LIMIT, changes.next())
        .await
        .expect("a change")
}

/// Whether nothing has been pushed. Pushes and answers come in order.
async fn is_quiet(lock: &RedisLock, changes: &mut Changes) -> bool {
    lock.holder(&name("n")).await.unwrap();
    let pushed = tokio::time::timeout(Duration::from_millis(20), changes.next());
    pushed.await.is_err()
}

async fn subscribers(server: &Server, observed: &str) -> u32 {
    let ask = format!("PUBSUB NUMSUB fencelock:changes:{observed}");
    server.command::<(String, u32)>(&ask).await.1
}

async fn connections(server: &Server) -> usize {
    let clients: String = server.command("CLIENT LIST").await;
    clients.lines().count()
}

#[tokio::test]
async fn each_observer_is_told_of_its_name_and_of_no_other() {
    let server = Server::start();
    let (lock, other) = (server.client().await, server.client().await);
    let (mut a, mut again) = (observe(&lock, "a").await, observe(&lock, "a").await);
    let mut b = observe(&lock, "b").await;
    other.announce(&name("a")).await.unwrap();
    assert_eq!((next(&mut a).await, next(&mut again).await), (Some(()), Some(())));
    assert!(is_quiet(&lock, &mut b).await);
    // The client that announces is told as well.
    lock.announce(&name("b")).await.unwrap();
    assert_eq!(next(&mut b).await, Some(()));
    assert!(is_quiet(&lock, &mut a).await);
}

#[tokio::test]
async fn a_thousand_observers_of_a_name_share_one_subscription_which_ends_with_the_last() {
    let server = Server::start();
    let lock = server.client().await;
    let before = connections(&server).await;
    let mut observers = Vec::new();
    for _ in 0..1000 {
        observers.push(observe(&lock, "n").await);
    }
    let names: Vec<_> = (0..100).map(|i| format!("n{i}")).collect();
    let mut others = Vec::new();
    for name in &names {
        others.push(observe(&lock, name).await);
    }
    assert_eq!(subscribers(&server, "n").await, 1);
    assert_eq!(connections(&server).await, before);
    observers.truncate(1);
    drop(others);
    for name in &names {
        until("it is unsubscribed", async || subscribers(&server, name).await == 0).await;
    }
    lock.announce(&name("n")).await.unwrap();
    assert_eq!(next(&mut observers[0]).await, Some(()));
    drop(observers);
    until("it is unsubscribed", async || subscribers(&server, "n").await == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_observer_that_comes_while_the_last_one_goes_is_told() {
    let server = Server::start();
    let config = server.config().runtime(Handle::current());
    let (lock, other) = (config.connect().await.unwrap(), server.client().await);
    let mut observer = observe(&lock, "n").await;
    for _ in 0..2000 {
        let coming = tokio::spawn({
            let lock = lock.clone();
            async move { observe(&lock, "n").await }
        });
        drop(observer);
        observer = coming.await.unwrap();
        other.announce(&name("n")).await.unwrap();
        assert_eq!(next(&mut observer).await, Some(()));
    }
    drop(observer);
    until("it is unsubscribed", async || subscribers(&server, "n").await == 0).await;
}

#[tokio::test]
async fn a_call_that_is_given_up_leaves_no_subscription() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let lock = RedisConfig::new("127.0.0.1", proxy.port()).connect().await.unwrap();
    proxy.hold_answers();
    let asked = tokio::spawn({
        let lock = lock.clone();
        async move { lock.changes(&name("n")).await }
    });
    until("it is subscribed", async || subscribers(&server, "n").await == 1).await;
    asked.abort();
    proxy.pass();
    until("it is unsubscribed", async || subscribers(&server, "n").await == 0).await;
}

#[tokio::test]
async fn the_end_of_a_connection_is_a_change_and_the_next_one_is_observed() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let lock = RedisConfig::new("127.0.0.1", proxy.port()).connect().await.unwrap();
    let mut changes = observe(&lock, "n").await;
    for _ in 0..3 {
        proxy.cut();
        assert_eq!(next(&mut changes).await, Some(()));
        // Another one after it is subscribed again, unless both are one.
        until("it is subscribed again", async || subscribers(&server, "n").await == 1).await;
        until("nothing more is told", async || is_quiet(&lock, &mut changes).await).await;
        server.client().await.announce(&name("n")).await.unwrap();
        assert_eq!(next(&mut changes).await, Some(()));
    }
}

#[tokio::test]
async fn observing_ends_with_the_client() {
    let server = Server::start();
    let (closed, dropped) = (server.client().await, server.client().await);
    for (lock, close) in [(closed, true), (dropped, false)] {
        let mut changes = observe(&lock, "n").await;
        if close {
            lock.close().await.unwrap();
        }
        drop(lock);
        until("the client is gone", async || subscribers(&server, "n").await == 0).await;
        while next(&mut changes).await.is_some() {}
    }
}

/// A user with the rights that the documentation lists, and then with those that an earlier version listed: for each, a client, and whether
/// it may subscribe.
pub(crate) async fn users(server: &Server) -> [(RedisLock, bool); 2] {
    let rule = rights("locks");
    let earlier = rule.replace(" &fencelock:changes:*", "").replace(" +unsubscribe", "");
    assert_eq!(earlier.split(' ').count(), rule.split(' ').count() - 2);
    let earlier = earlier.replacen("locks", "earlier", 1);
    let client = async |user: &str, rule: &str| {
        let _: () = server.command(&format!("ACL SETUSER {rule}")).await;
        let config = server.config().credentials(user, "hunter2");
        config.connect().await.unwrap()
    };
    [
        (client("locks", &rule).await, true),
        (client("earlier", &earlier).await, false),
    ]
}

#[tokio::test]
async fn a_user_that_may_not_subscribe_is_pushed_no_changes() {
    let server = Server::start();
    for (lock, pushes) in users(&server).await {
        for _ in 0..2 {
            assert_eq!(lock.changes(&name("n")).await.unwrap().is_some(), pushes);
        }
        assert_eq!(lock.announce(&name("n")).await.is_ok(), pushes);
    }
}
