//! Rough use on many threads, in real time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{DistributedLock, LockError, LockGuard, Locks, MemoryLock, Options};
use tokio::runtime::Runtime;

use crate::until;

const NAMES: [&str; 3] = ["a", "b", "c"];

/// What one name has seen: its holders, of which there is one at a time, and the last token.
#[derive(Default)]
struct Seen {
    holders: AtomicUsize,
    token: AtomicU64,
}

impl Seen {
    fn check(&self, guard: &LockGuard) {
        assert_eq!(self.holders.fetch_add(1, Ordering::SeqCst), 0, "two hold the lock");
        let token = guard.token().get();
        assert!(self.token.swap(token, Ordering::SeqCst) < token, "tokens rise");
        self.holders.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Asks `rounds` times in a row, and not much longer than until the client is shut down: with short waits, dropped requests, dropped guards
/// and requests that differ.
async fn task(locks: Locks, number: usize, rounds: usize, seen: Arc<[Seen; 3]>) {
    for round in 0..rounds {
        let name = (number + round) % NAMES.len();
        let request = locks.lock(NAMES[name]).wait_for(Duration::from_micros(300));
        let request = request.label(if round % 5 == 4 { "other" } else { "one" });
        let limit = Duration::from_micros(((number * 7 + round * 13) % 900) as u64);
        match tokio::time::timeout(limit, request).await {
            Ok(Err(LockError::Closed { .. })) => return,
            // A backend whose tasks get no processor for a second is called unavailable.
            Err(_) | Ok(Err(LockError::TimedOut { .. } | LockError::Unavailable { .. })) => {}
            Ok(Err(error)) => panic!("{error}"),
            Ok(Ok(guard)) => {
                if guard.is_held() {
                    seen[name].check(&guard);
                }
                match round % 2 {
                    0 => drop(guard),
                    _ => drop(guard.release().await),
                }
            }
        }
    }
}

async fn rough_use(clients: &[Locks; 2], rounds: usize) {
    let seen = Arc::<[Seen; 3]>::default();
    let tasks: Vec<_> = (0..8)
        .map(|n| tokio::spawn(task(clients[n % 2].clone(), n, rounds, Arc::clone(&seen))))
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

/// Two clients of one store, whose tasks run on `runtime`.
fn clients(memory: &MemoryLock, runtime: &Runtime, linger: Duration) -> [Locks; 2] {
    let options = || Options::new().runtime(runtime.handle().clone()).linger(linger);
    [(); 2].map(|()| Locks::with_options(memory.client(), options()))
}

async fn nothing_is_left(memory: &MemoryLock) {
    let left = memory.list("").await.unwrap();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn rough_use_on_many_threads_leaves_nothing_behind() {
    let (own, runtime) = (Runtime::new().unwrap(), Runtime::new().unwrap());
    for (sharing, linger) in [(false, 0), (true, 0), (false, 200), (false, 3_000)] {
        let memory = MemoryLock::new();
        let memory = if sharing { memory.sharing_leases() } else { memory };
        let clients = clients(&memory, &own, Duration::from_micros(linger));
        runtime.block_on(async {
            rough_use(&clients, 500).await;
            for locks in &clients {
                locks.drain().await;
                until(|| locks.stats().waiting + locks.stats().held + locks.stats().releasing == 0).await;
                let stats = locks.stats();
                assert_eq!((stats.acquired, stats.lost), (stats.released, 0));
            }
            nothing_is_left(&memory).await;
        });
    }
}

#[test]
fn a_shutdown_in_the_middle_of_rough_use_leaves_nothing_behind() {
    let (own, runtime) = (Runtime::new().unwrap(), Runtime::new().unwrap());
    for _ in 0..50 {
        let memory = MemoryLock::new();
        let clients = clients(&memory, &own, Duration::ZERO);
        let shutdown = async {
            until(|| clients.iter().all(|locks| locks.stats().acquired > 0)).await;
            for locks in &clients {
                locks.shutdown().await.unwrap();
            }
            nothing_is_left(&memory).await;
        };
        runtime.block_on(async { tokio::join!(rough_use(&clients, usize::MAX), shutdown) });
        own.block_on(nothing_is_left(&memory));
    }
}
