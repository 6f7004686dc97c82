//! What locks cost, counted by the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::server::{
    Etcd, LONG, claim, client, granted, leases_granted, plain, requests, start, transactions, until, until_queued,
    waited, watchers,
};
use lock_core::{DistributedLock, Locks};
use lock_etcd::EtcdLock;
use tokio::task::JoinSet;

/// The middle of what was measured.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test]
async fn an_uncontended_lock_and_release_are_two_transactions_and_so_are_those_of_the_next_waiter_of_a_client() {
    const ROUNDS: u64 = 20;
    let server = start().await;
    let locks = Locks::new(client(&server).await);
    locks.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
    let before = (transactions(&server).await, leases_granted(&server).await);
    for _ in 0..ROUNDS {
        locks.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
    }
    let after = (transactions(&server).await, leases_granted(&server).await);
    assert_eq!((after.0 - before.0, after.1 - before.1), (2 * ROUNDS, 0));

    let mut guard = locks.lock("n").ttl(LONG).await.unwrap();
    let before = transactions(&server).await;
    for _ in 0..ROUNDS {
        let next = tokio::spawn(locks.lock("n").ttl(LONG).into_future());
        until(async || locks.stats().waiting > 0).await;
        guard.release().await.unwrap();
        guard = next.await.unwrap().unwrap();
    }
    assert_eq!(transactions(&server).await - before, 2 * ROUNDS);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn clients_that_take_turns_cost_each_other_nothing() {
    const ROUNDS: u64 = 20;
    let server = start().await;
    let clients = [Locks::new(client(&server).await), Locks::new(client(&server).await)];
    let round = async || {
        for (locks, name) in clients.iter().zip(["a", "b"]) {
            // With one that waits in the same client.
            let guard = locks.lock(name).ttl(LONG).await.unwrap();
            let next = tokio::spawn(locks.lock(name).ttl(LONG).into_future());
            until(async || locks.stats().waiting > 0).await;
            guard.release().await.unwrap();
            next.await.unwrap().unwrap().release().await.unwrap();
        }
    };
    // The second has raised the base since the first looked at it, which the first finds out here.
    round().await;
    let before = requests(&server).await;
    for _ in 0..ROUNDS {
        round().await;
    }
    assert_eq!(requests(&server).await - before, 2 * 4 * ROUNDS);
}

#[tokio::test]
async fn of_many_waiters_a_release_wakes_one_and_the_others_send_nothing() {
    const WAITERS: usize = 100;
    let server = start().await;
    let etcd = plain(&server).await;
    let holder = Locks::new(client(&server).await);
    let guard = holder.lock("n").ttl(LONG).await.unwrap();
    let mut waiting = Vec::new();
    for waiters in 1..=WAITERS {
        let locks = Locks::new(client(&server).await);
        let asked = locks.lock("n").ttl(LONG).into_future();
        waiting.push((locks, tokio::spawn(asked)));
        until_queued(&etcd, "n", waiters).await;
    }
    // Whoever has just come still asks to be told.
    let before = quiet(&server).await;
    guard.release().await.unwrap();
    let (locks, first) = waiting.remove(0);
    let next = first.await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let sent = requests(&server).await - before;
    println!("{sent} requests for a release and the next grant, with {WAITERS} waiters");
    // The release and the verification; whoever holds now watches what it waited for for a moment longer.
    assert!((2..=4).contains(&sent), "{sent}");
    assert!(waiting.iter().all(|(_, waiter)| !waiter.is_finished()));
    for (_, waiter) in &waiting {
        waiter.abort();
    }
    next.release().await.unwrap();
    locks.shutdown().await.unwrap();
}

#[tokio::test]
async fn who_waits_behind_the_same_ones_again_asks_for_no_new_watch() {
    const CLIENTS: usize = 3;
    const ROUNDS: u64 = 40;
    let server = start().await;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(Locks::new(client(&server).await));
    }
    let turns = async |rounds: u64| {
        let mut turns = JoinSet::new();
        for locks in clients.clone() {
            turns.spawn(async move {
                for _ in 0..rounds {
                    locks.lock("n").ttl(LONG).await.unwrap().release().await.unwrap();
                }
            });
        }
        turns.join_all().await;
    };
    turns(5).await;
    let before = requests(&server).await;
    turns(ROUNDS).await;
    let sent = requests(&server).await - before;
    let each = sent as f64 / (ROUNDS * CLIENTS as u64) as f64;
    println!("{each:.2} requests for each acquisition of {CLIENTS} clients that wait for each other");
    // Enqueue, verify, release; a watch and its end would be two more, and each wait has two.
    assert!(each < 3.5, "{each}");

    // What has gone before is no news to who waits for it again.
    let guard = clients[0].lock("n").ttl(LONG).await.unwrap();
    let waiting = tokio::spawn(clients[1].lock("n").ttl(LONG).into_future());
    until_queued(&plain(&server).await, "n", 1).await;
    quiet(&server).await;
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

/// Waits until nobody asks the server for anything, and says how many requests it has received.
async fn quiet(server: &Etcd) -> u64 {
    let mut before = 0;
    until(async || {
        before = requests(server).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        requests(server).await == before
    })
    .await;
    before
}

/// How long it takes from a release to the grant of a waiter in another process who has come just before, each time.
async fn hand_overs(server: &Etcd, rounds: usize) -> Vec<Duration> {
    let clients = [client(server).await, client(server).await];
    hand_overs_between(server, &clients, "n", rounds).await
}

async fn hand_overs_between(server: &Etcd, clients: &[EtcdLock; 2], name: &str, rounds: usize) -> Vec<Duration> {
    let etcd = plain(server).await;
    let mut held = claim(name, LONG);
    granted(&clients[0], &held).await;
    let mut times = Vec::with_capacity(rounds);
    for round in 0..rounds {
        let (from, to) = (&clients[round % 2], clients[(round + 1) % 2].clone());
        let next = claim(name, LONG);
        let wanted = next.clone();
        let waiting = tokio::spawn(async move { (waited(&to, &wanted).await, Instant::now()) });
        until_queued(&etcd, name, 1).await;
        let released = Instant::now();
        from.release(&held, None).await.unwrap();
        let (grant, at) = waiting.await.unwrap();
        assert_eq!(grant.claim, next);
        times.push(at - released);
        held = next;
    }
    clients[rounds % 2].release(&held, None).await.unwrap();
    times
}

#[tokio::test]
async fn the_server_watches_nothing_for_waits_that_are_over() {
    const ROUNDS: usize = 30;
    let server = start().await;
    // Clients that go end their watches with their connections; these stay.
    let clients = [client(&server).await, client(&server).await];
    for round in 0..ROUNDS {
        hand_overs_between(&server, &clients, &format!("n{round}"), 1).await;
    }
    // Each watches the lease that it goes on keeping.
    until(async || watchers(&server).await <= clients.len() as u64).await;
}

#[tokio::test]
async fn of_many_waits_that_are_over_at_once_few_are_watched_on() {
    const NAMES: u64 = 300;
    /// What a client goes on watching at most, and the lease of each.
    const MOST: u64 = 256 + 2;
    /// Less than a watch goes on without a crowd.
    const SOON: Duration = Duration::from_secs(2);
    /// A machine that stalls for that long shows nothing.
    const TRIES: usize = 10;
    let server = start().await;
    for tries in 1.. {
        let left = watched_after_a_crowd(&server, NAMES, MOST, SOON).await;
        if left <= MOST {
            break;
        }
        assert!(tries < TRIES, "{left} watches");
    }
}

/// Has as many waits end at once, and returns how many watches are left when that is few enough, or after the time.
async fn watched_after_a_crowd(server: &Etcd, names: u64, few: u64, time: Duration) -> u64 {
    let clients = [Locks::new(client(server).await), Locks::new(client(server).await)];
    let [held, waiting] = clients.each_ref().map(|locks| {
        let asked = |n| tokio::spawn(locks.lock(format!("n{n}")).ttl(LONG).into_future());
        move || (0..names).map(asked).collect::<Vec<_>>()
    });
    let mut guards = Vec::new();
    for guard in held() {
        guards.push(guard.await.unwrap().unwrap());
    }
    let waiting = waiting();
    // Its own key and the one before it, for each.
    until(async || watchers(server).await >= 2 * names).await;
    drop(guards);
    let mut granted = Vec::new();
    for guard in waiting {
        granted.push(guard.await.unwrap().unwrap());
    }
    let thinned = until(async || watchers(server).await <= few);
    let _ = tokio::time::timeout(time, thinned).await;
    watchers(server).await
}

#[tokio::test]
#[cfg_attr(debug_assertions, ignore = "speed is judged with optimizations")]
async fn a_waiter_who_has_just_come_is_told_at_once_while_others_write() {
    /// How often etcd looks for watches that begin with a revision that there is already.
    const LAG: Duration = Duration::from_millis(100);
    const ROUNDS: usize = 200;
    const WRITES_PER_SECOND: u32 = 500;
    let server = start().await;
    let quiet = median(hand_overs(&server, ROUNDS).await);
    let etcd = plain(&server).await;
    let written = Arc::new(AtomicUsize::new(0));
    let writing = tokio::spawn({
        let written = Arc::clone(&written);
        async move {
            let mut beat = tokio::time::interval(Duration::from_secs(1) / WRITES_PER_SECOND);
            let mut under_way = JoinSet::new();
            loop {
                beat.tick().await;
                let (mut kv, written) = (etcd.kv_client(), Arc::clone(&written));
                under_way.spawn(async move {
                    kv.put("foreign", "1", None).await.unwrap();
                    written.fetch_add(1, Ordering::Relaxed);
                });
                while under_way.try_join_next().is_some() {}
            }
        }
    });
    let began = Instant::now();
    let mut times = hand_overs(&server, ROUNDS).await;
    writing.abort();
    let rate = written.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64();
    times.sort_unstable();
    let (p50, p90, last) = (times[ROUNDS / 2], times[ROUNDS / 10 * 9], times[ROUNDS - 1]);
    println!(
        "from a release to the grant of who has just come: p50 {quiet:?} on a quiet cluster; with {rate:.0} foreign writes a second p50 \
         {p50:?}, p90 {p90:?}, at most {last:?}"
    );
    // Beside what it takes on a quiet cluster, at whatever pace this machine has.
    assert!(p50.saturating_sub(quiet) < LAG / 4, "{p50:?}");
}
