//! The end of a process waits for its releases, and not for long.

use std::process::{Command, Stdio};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Lease, LockError, Locks, MemoryLock, Released, Renewal,
};

use crate::HANG_LIMIT;

/// Set for the child process, to how its server answers releases.
const CHILD: &str = "LOCK_CORE_TEST_IN_CHILD";

/// Printed once all has been dropped, and when the lock is released.
const DROPPED: &str = "> dropped";
const RELEASED: &str = "> released";

/// Answers releases late, or not at all.
#[derive(Debug)]
struct Slow(MemoryLock, bool);

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
            true => tokio::time::sleep(Duration::from_millis(50)).await,
            false => std::future::pending().await,
        }
        println!("{RELEASED}");
        self.0.release(claim, keep).await
    }
}

/// Takes a lock, drops everything and ends.
fn child(answers: bool) {
    std::thread::spawn(|| {
        std::thread::sleep(HANG_LIMIT);
        std::process::abort();
    });
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let locks = Locks::new(Slow(MemoryLock::new(), answers));
        let _guard = locks.lock("n").await.unwrap();
    });
    println!("{DROPPED}");
}

#[test]
fn the_end_waits_for_a_release_and_not_for_a_server_that_does_not_answer() {
    if let Ok(answers) = std::env::var(CHILD) {
        return child(answers == "true");
    }
    for answers in [true, false] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--nocapture", "--exact"]);
        child.arg("exit::the_end_waits_for_a_release_and_not_for_a_server_that_does_not_answer");
        let output = child
            .env(CHILD, answers.to_string())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && printed.contains(DROPPED), "{output:?}");
        assert_eq!(printed.contains(RELEASED), answers);
    }
}
