//! Many locks, and many ttls, of one client.

use std::time::{Duration, Instant};

use lock_core::{Clock, DistributedLock, Grant};
use lock_postgres::PostgresLock;

use crate::server::{HANG_LIMIT, Server, claim, granted};

/// Long enough that nothing has to be renewed meanwhile.
const TTL: Duration = Duration::from_secs(600);

/// How many locks are held in the end; a hundred thousand by hand.
fn most() -> usize {
    std::env::var("FENCELOCK_MANY_LOCKS").map_or(8_000, |most| most.parse().unwrap())
}

/// Takes the locks with these numbers, several at a time, and says what each of them took.
async fn take(lock: &PostgresLock, numbers: std::ops::Range<usize>) -> (Vec<Grant>, Duration) {
    let (start, count) = (Instant::now(), numbers.len());
    let mut grants = Vec::new();
    for number in numbers {
        grants.push(granted(lock, &claim(&format!("n {number}"), TTL)).await);
    }
    (grants, start.elapsed() / u32::try_from(count).unwrap())
}

/// What one lock takes and its release, beside those that each client holds: the medians. In turns, so that whatever else the
/// machine does hits both.
async fn one_more(clients: [&PostgresLock; 2]) -> [Duration; 2] {
    let mut times = [(); 2].map(|()| Vec::new());
    for _ in 0..400 {
        for (lock, times) in clients.into_iter().zip(&mut times) {
            let claim = claim("one more", TTL);
            let start = Instant::now();
            granted(lock, &claim).await;
            lock.release(&claim, None).await.unwrap();
            times.push(start.elapsed());
        }
    }
    times.map(|mut times| {
        times.sort_unstable();
        times[times.len() / 2]
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_costs_no_more_beside_many_than_beside_a_thousand() {
    let room = format!("max_locks_per_transaction={}", 64 + most() / 100);
    let server = Server::with(&[&room, "max_connections=300"]);
    let [few, many] = [server.client().await, server.client().await];
    let (_, thousand) = take(&few, most()..most() + 900).await;
    let (grants, all) = take(&many, 0..most()).await;
    let [beside_few, beside_many] = one_more([&few, &many]).await;
    let sessions = server.sessions().await.len();
    println!(
        "{thousand:?} each of 900, {all:?} each of {}; one more {beside_few:?} and {beside_many:?}; {sessions} sessions",
        most()
    );
    let now = Clock::system().now();
    assert!(grants.iter().all(|grant| grant.lease.is_valid(now)));
    assert!(beside_many < 2 * beside_few, "{beside_many:?} and {beside_few:?}");
    assert!(sessions <= most() / 1000 + 3, "{sessions} sessions");
    let start = Instant::now();
    for grant in grants {
        many.release(&grant.claim, None).await.unwrap();
    }
    println!("released within {:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_hundred_ttls_take_a_few_sessions() {
    let server = Server::with(&["max_connections=400"]);
    let lock = server.client().await;
    let mut grants = Vec::new();
    for number in 0..400 {
        let ttl = Duration::from_millis(20_000 + 777 * number);
        let grant = granted(&lock, &claim(&format!("n {number}"), ttl)).await;
        assert!(grant.lease.ttl() >= ttl);
        assert!(grant.lease.ttl() <= ttl * 3 / 2, "{:?} for {ttl:?}", grant.lease.ttl());
        grants.push(grant);
    }
    let held = server.sessions().await.len();
    for grant in grants {
        lock.release(&grant.claim, None).await.unwrap();
    }
    let start = Instant::now();
    let mut left = server.sessions().await.len();
    while left > 2 && start.elapsed() < HANG_LIMIT {
        tokio::time::sleep(Duration::from_millis(50)).await;
        left = server.sessions().await.len();
    }
    println!("{held} sessions for 400 ttls, {left} after the last release");
    assert!(held <= 15, "{held} sessions");
    assert!(left <= 2, "{left} sessions that hold nothing");
}
