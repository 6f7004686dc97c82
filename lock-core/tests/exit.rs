//! The end of a process waits for its releases, and not for long.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Lease, LockError, Locks, MemoryLock, Released, Renewal,
};

/// Tells a process that it is the one that ends, and how long its releases take, in milliseconds.
const CHILD: &str = "LOCK_CORE_TEST_RELEASE_TAKES";

const STEPS: u32 = 10;

/// What a stall of the machine may add.
const SLACK: Duration = Duration::from_secs(10);

/// Releases take that long.
#[derive(Debug)]
struct Slow(MemoryLock, Duration);

#[async_trait]
impl DistributedLock for Slow {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities().with_op_timeout(3 * SLACK)
    }
    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.0.try_acquire(claim).await
    }
    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.0.renew(lease).await
    }
    async fn release(&self, claim: &Claim) -> Result<Released, LockError> {
        // In steps, so that a process that was stopped meanwhile still has most of it before it.
        for _ in 0..STEPS {
            tokio::time::sleep(self.1 / STEPS).await;
        }
        println!("released {}", claim.name());
        self.0.release(claim).await
    }
}

/// In the child: takes a lock, and drops everything.
fn take_and_drop(takes: &str) {
    let takes = Duration::from_millis(takes.parse().unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let locks = Locks::new(Slow(MemoryLock::new(), takes));
        let _guard = locks.lock("n").await.unwrap();
    });
    println!("dropped");
}

/// Starts this test again as a process that ends, and returns what it said after the drop, and how long it lived on. `dropped` is
/// called with its number after the drop.
fn end_of(test: &str, release_takes: Duration, dropped: impl FnOnce(u32)) -> (String, Duration) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, release_takes.as_millis().to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    // With one test thread the name of the test stands before it.
    while !line.trim_end().ends_with("dropped") {
        line.clear();
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "the child ended");
    }
    let start = Instant::now();
    dropped(child.id());
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    (rest, start.elapsed())
}

#[test]
fn the_end_waits_for_a_release() {
    if let Ok(takes) = std::env::var(CHILD) {
        return take_and_drop(&takes);
    }
    let (said, _) = end_of("the_end_waits_for_a_release", Duration::from_millis(150), |_| {});
    assert!(said.contains("released n"), "{said}");
}

#[test]
#[cfg(unix)]
fn time_in_which_the_process_stood_still_does_not_count() {
    use rustix::process::{Pid, Signal, kill_process};
    if let Ok(takes) = std::env::var(CHILD) {
        return take_and_drop(&takes);
    }
    let test = "time_in_which_the_process_stood_still_does_not_count";
    let (said, _) = end_of(test, Duration::from_millis(300), |child| {
        let child = Pid::from_raw(child.try_into().unwrap()).unwrap();
        // It waits for the release by then; or it has not come to that yet, and everything is easier.
        std::thread::sleep(Duration::from_millis(50));
        kill_process(child, Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        kill_process(child, Signal::CONT).unwrap();
    });
    assert!(said.contains("released n"), "{said}");
}

#[test]
fn the_end_does_not_wait_for_a_server_that_does_not_answer() {
    if let Ok(takes) = std::env::var(CHILD) {
        return take_and_drop(&takes);
    }
    let test = "the_end_does_not_wait_for_a_server_that_does_not_answer";
    let (said, lived_on) = end_of(test, 3 * SLACK, |_| {});
    assert!(!said.contains("released"), "{said}");
    assert!(lived_on < SLACK, "{lived_on:?}");
    println!("lived on for {lived_on:?}");
}
