//! A client that is shut down in the middle of everything.

use shuttle::future::spawn;

use super::server::Client;
use super::{Time, dawdle, explore, once_in};
use crate::{DistributedLock, LockError, LossReason, MemoryLock};

// A grant that is kept although the client is closing fails the 3rd schedule; a release that is not counted before its task runs, the 1498th; a
// shutdown that does not wait for its tasks, the first.
#[test]
fn a_shutdown_ends_everything_and_answers_everyone() {
    explore(3_200, Time::WhenIdle, |clock, _| async {
        let memory = MemoryLock::with_clock(clock);
        let (client, other) = (Client::of(&memory), Client::of(&memory));
        let elsewhere = other.locks.lock("elsewhere").await.unwrap();
        let mut tasks = Vec::new();
        // One holds, others wait for it here; one waits at the server; one is granted or released meanwhile.
        for name in ["here", "here", "here", "elsewhere", "alone"] {
            let client = client.clone();
            tasks.push(spawn(async move {
                dawdle(4).await;
                let guard = match client.locks.lock(name).await {
                    Ok(guard) => guard,
                    Err(LockError::Closed { .. }) => return,
                    Err(error) => panic!("{error}"),
                };
                if once_in(3) {
                    let reason = guard.lost().await;
                    assert_eq!(reason, LossReason::Shutdown);
                    assert!(!guard.is_held());
                    return;
                }
                dawdle(6).await;
                if once_in(2) {
                    guard.release().await.unwrap();
                }
            }));
        }
        let closers: Vec<_> = (0..2)
            .map(|_| {
                let client = client.clone();
                spawn(async move {
                    dawdle(40).await;
                    client.locks.shutdown().await.unwrap();
                    // As soon as it returns.
                    client.is_idle();
                    client.sent_one_claim_at_a_time();
                    assert!(client.memory.list("").await.unwrap().len() <= 1, "the other client's");
                    let late = client.locks.lock("late").await;
                    assert!(matches!(late, Err(LockError::Closed { .. })), "{late:?}");
                })
            })
            .collect();
        for task in closers.into_iter().chain(tasks) {
            task.await.unwrap();
        }
        assert!(elsewhere.is_held());
        elsewhere.release().await.unwrap();
        other.settle().await;
        client.server_keeps_nothing().await;
    });
}
