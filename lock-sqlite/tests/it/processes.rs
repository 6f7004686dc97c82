//! A process that ends. It is this same program, started with a path.

use std::process::{Command, Stdio};

use lock_core::DistributedLock;
use lock_sqlite::SqliteLock;

use crate::file::{File, LONG, claim, granted, runtime};

/// The variable with the path of the database.
const PATH: &str = "FENCELOCK_TEST_PATH";

#[test]
#[ignore = "started by another test, as a process of its own"]
fn a_process_comes_once() {
    let Some(path) = std::env::var_os(PATH) else { return };
    runtime().block_on(async {
        let lock = SqliteLock::open(path).await.unwrap();
        let grant = granted(&lock, &claim("passing", LONG)).await;
        lock.release(&grant.claim, None).await.unwrap();
    });
    // As at the end of `main`, and without what the test harness does after a test.
    std::process::exit(0);
}

/// A process that returns from `main` closes the file to the end: a log without its index would be an obstacle to clients that only look.
#[test]
fn a_process_that_ends_leaves_no_log_behind() {
    let file = File::new();
    for _ in 0..5 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "processes::a_process_comes_once",
            "--ignored",
            "--test-threads=2",
        ]);
        let ended = command.env(PATH, file.path()).stdout(Stdio::null()).status().unwrap();
        assert!(ended.success());
        let mut names = file.names().into_iter();
        assert!(
            !names.any(|name| name.ends_with("-wal") || name.ends_with("-shm")),
            "{:?}",
            file.names()
        );
    }
}
