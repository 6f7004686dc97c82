//! The end of a process waits for its releases, and not for long.

use std::process::{Command, Stdio};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Lease, LockError, Locks, MemoryLock, Released, Renewal,
};

use crate::HANG_LIMIT;

/// Names the test that a child process runs.
const TEST: &str = "LOCK_CORE_TEST_IN_CHILD";

/// Printed once all has been dropped, and when the lock is released.
const DROPPED: &str = "> dropped";
const RELEASED: &str = "> released";

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
        match self.1 {
            Some(takes) => tokio::time::sleep(takes).await,
            None => std::future::pending().await,
        }
        println!("{RELEASED}");
        self.0.release(claim, keep).await
    }
}

/// Runs that test as a process of its own, which takes a lock, drops everything and ends. Returns whether the lock was released before the
/// end; `None` in that process.
fn releases_at_its_end(test: &str, takes: Option<Duration>) -> Option<bool> {
    if std::env::var(TEST).is_ok_and(|name| name == test) {
        std::thread::spawn(|| {
            std::thread::sleep(HANG_LIMIT);
            std::process::abort();
        });
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let locks = Locks::new(Slow(MemoryLock::new(), takes));
            let _guard = locks.lock("n").await.unwrap();
        });
        println!("{DROPPED}");
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(TEST, test);
    let output = child.stdin(Stdio::null()).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains(DROPPED), "{output:?}");
    Some(printed.contains(RELEASED))
}

#[test]
fn the_end_waits_for_a_release() {
    let released = releases_at_its_end("exit::the_end_waits_for_a_release", Some(Duration::from_millis(50)));
    assert_ne!(released, Some(false));
}

#[test]
fn the_end_does_not_wait_for_a_server_that_does_not_answer() {
    let test = "exit::the_end_does_not_wait_for_a_server_that_does_not_answer";
    assert_ne!(releases_at_its_end(test, None), Some(true));
}
