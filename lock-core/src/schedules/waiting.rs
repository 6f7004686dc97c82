//! Waiters that come, stay or go away while a lock passes from one to the next.

use std::future::IntoFuture;
use std::sync::{Arc, Mutex};

use shuttle::future::{JoinHandle, spawn, yield_now};
use tokio::sync::oneshot;

use super::server::Client;
use super::{Time, dawdle, explore, once_in};
use crate::sync::checked::time;
use crate::{LockError, LockGuard, MemoryLock};

/// How often other tasks may run before a waiter is cancelled.
const LATE: usize = 24;

/// Asks for the lock until `cancel` comes or its sender is gone. `None` if it came first.
async fn unless(client: &Client, name: &str, cancel: oneshot::Receiver<()>) -> Option<Result<LockGuard, LockError>> {
    let request = client.locks.lock(name).into_future();
    tokio::select! {
        biased;
        Ok(()) = cancel => None,
        guard = request => Some(guard),
    }
}

/// Keeps the lock for a moment, and lets go of it in one way or the other.
async fn keeps(guard: LockGuard) {
    dawdle(3).await;
    if once_in(2) {
        guard.release().await.unwrap();
    }
}

/// Sends after a while.
fn later(cancel: oneshot::Sender<()>) -> JoinHandle<()> {
    spawn(async move {
        dawdle(LATE).await;
        let _ = cancel.send(());
    })
}

// A hand-over that loses the guard which the waiter refused fails the 11th schedule, a queue that takes out its last waiter the first.
#[test]
fn the_lock_passes_to_each_waiter_that_stays_in_order_and_one_claim_is_at_the_server() {
    explore(3_000, Time::WhenIdle, |clock, _| async {
        let memory = MemoryLock::with_clock(clock);
        let client = Client::of(&memory);
        let first = client.locks.lock("a").await.unwrap();
        let served = Arc::new(Mutex::new(Vec::new()));
        let (mut tasks, mut cancellations, mut stay) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..4 {
            let (cancel, cancelled) = oneshot::channel();
            let (waiter, seen) = (client.clone(), Arc::clone(&served));
            tasks.push(spawn(async move {
                if let Some(guard) = unless(&waiter, "a", cancelled).await {
                    seen.lock().unwrap().push(number);
                    keeps(guard.unwrap()).await;
                }
            }));
            while client.locks.core.queue.waiting() <= number {
                yield_now().await;
            }
            // Kept to the end: a sender that is dropped cancels nothing.
            if once_in(3) {
                cancellations.push(cancel);
            } else {
                stay.push((number, cancel));
            }
        }
        tasks.extend(cancellations.into_iter().map(later));
        keeps(first).await;
        for task in tasks {
            task.await.unwrap();
        }
        client.settle().await;
        let served = served.lock().unwrap().clone();
        assert!(served.is_sorted(), "{served:?}");
        assert!(stay.iter().all(|(number, _)| served.contains(number)), "{served:?}");
        client.sent_one_claim_at_a_time();
        client.is_idle();
        client.server_keeps_nothing().await;
    });
}

/// Two clients ask for one lock, and cancel wherever they are then.
async fn contend(memory: MemoryLock, failures: bool) -> [Client; 2] {
    let clients = [Client::of(&memory), Client::of(&memory)];
    let mut tasks = Vec::new();
    for client in [&clients[0], &clients[1], &clients[0], &clients[1], &clients[0]] {
        let (cancel, cancelled) = oneshot::channel();
        let client = client.clone();
        let cancels = once_in(2);
        tasks.push(spawn(async move {
            // The one that stays keeps its sender, which cancels nothing then.
            let stays = if cancels {
                drop(later(cancel));
                None
            } else {
                Some(cancel)
            };
            dawdle(3).await;
            match unless(&client, "a", cancelled).await {
                Some(Ok(guard)) => keeps_or_loses(guard).await,
                Some(Err(error)) => assert!(matches!(error, LockError::Unavailable { .. }), "{error}"),
                None => assert!(stays.is_none()),
            }
        }));
    }
    if failures {
        clients[0].memory.set_reachable(false);
        dawdle(3).await;
        clients[0].memory.set_reachable(true);
    }
    for task in tasks {
        task.await.unwrap();
    }
    for client in &clients {
        client.settle().await;
    }
    clients
}

/// As [`keeps`], where time may pass during a release.
async fn keeps_or_loses(guard: LockGuard) {
    dawdle(3).await;
    if once_in(2) {
        match guard.release().await {
            Ok(_) | Err(LockError::Unavailable { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

// Without the clean-up of dropped claims the first schedule fails, as with a clean-up that passes the turn on first; a release that does so
// fails the 3rd one with few preemptions.
#[test]
fn a_request_that_is_dropped_anywhere_leaves_nothing_behind() {
    explore(3_000, Time::WhenIdle, |clock, _| async {
        for client in contend(MemoryLock::with_clock(clock), false).await {
            client.sent_one_claim_at_a_time();
            client.is_idle();
            client.server_keeps_nothing().await;
        }
    });
}

// If a failed release is not tried again, the 184th schedule fails.
#[test]
fn nothing_is_left_behind_when_requests_run_out_of_time() {
    explore(2_000, Time::OnceIn(40), |clock, _| async {
        time::let_pass();
        for client in contend(MemoryLock::with_clock(clock), true).await {
            client.is_idle();
            client.server_keeps_nothing().await;
        }
    });
}
