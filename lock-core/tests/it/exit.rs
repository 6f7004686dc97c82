//! The end of a process waits for its releases, and not for long.

use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Lease, LockError, Locks, MemoryLock, Released, Renewal,
};

use crate::HANG_LIMIT;
use crate::child::{Child, is_child};

/// Printed once all has been dropped.
const DROPPED: &str = "> dropped";

/// Printed when the lock is released.
const RELEASED: &str = "> released";

const STEPS: u32 = 10;

/// Releases take that long, or are never answered.
#[derive(Debug)]
struct Slow(MemoryLock, Option<Duration>);

#[async_trait]
impl DistributedLock for Slow {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities().with_op_timeout(2 * HANG_LIMIT)
    }
    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.0.try_acquire(claim).await
    }
    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.0.renew(lease).await
    }
    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        let Some(takes) = self.1 else {
            return std::future::pending().await;
        };
        // In steps, so that a process that was stopped meanwhile still has most of it before it.
        for _ in 0..STEPS {
            tokio::time::sleep(takes / STEPS).await;
        }
        println!("{RELEASED}");
        self.0.release(claim, keep).await
    }
}

/// In the child: takes a lock, and drops everything.
fn take_and_drop(takes: Option<Duration>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let locks = Locks::new(Slow(MemoryLock::new(), takes));
        let _guard = locks.lock("n").await.unwrap();
    });
    println!("{DROPPED}");
}

/// Starts that test again as a process that ends, and returns whether its lock was released before the end. `dropped` is called with
/// the number of the process once it has dropped its lock.
fn releases_at_its_end(test: &str, dropped: impl FnOnce(u32)) -> bool {
    let mut child = Child::start(test);
    let mut released = false;
    loop {
        let line = child.next_line().expect("the child drops its lock");
        released |= line.contains(RELEASED);
        if line.contains(DROPPED) {
            break;
        }
    }
    dropped(child.id());
    while let Some(line) = child.next_line() {
        released |= line.contains(RELEASED);
    }
    child.succeeds();
    released
}

#[test]
fn the_end_waits_for_a_release() {
    let test = "exit::the_end_waits_for_a_release";
    if is_child(test) {
        return take_and_drop(Some(Duration::from_millis(50)));
    }
    assert!(releases_at_its_end(test, |_| {}));
}

#[test]
fn the_end_does_not_wait_for_a_server_that_does_not_answer() {
    let test = "exit::the_end_does_not_wait_for_a_server_that_does_not_answer";
    if is_child(test) {
        return take_and_drop(None);
    }
    assert!(!releases_at_its_end(test, |_| {}));
}
