//! Several processes on one file: stopped, killed, or short of disk space.
//!
//! The processes are this same program, started with the name of a role.

use std::fmt::Display;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use lock_core::{DistributedLock, LockError, Released, Renewal};
use lock_sqlite::{SqliteConfig, SqliteLock};
use rustix::process::{Pid, Signal, kill_process};

use crate::file::{File, LONG, claim, granted, in_time, runtime};

/// The variables with the role and the path of the database.
const ROLE: &str = "FENCELOCK_TEST_ROLE";
const PATH: &str = "FENCELOCK_TEST_PATH";
/// With two threads the harness prints nothing more while the test runs.
const ARGUMENTS: [&str; 6] = [
    "--exact",
    "processes::a_process_plays_its_role",
    "--ignored",
    "--nocapture",
    "--quiet",
    "--test-threads=2",
];
/// What lines of a role begin with: the test harness prints lines as well.
const SAID: &str = "> ";

/// Tells the test that started this process.
fn say(what: impl Display) {
    println!("{SAID}{what}");
}

/// What was said in a line that has ended.
fn said(line: &str) -> Option<&str> {
    Some(line.strip_suffix('\n')?.split_once(SAID)?.1)
}

/// A started process that plays a role.
struct Player {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Player {
    /// Starts it by the program and the arguments before it.
    fn start(before: &[&str], role: &str, path: &Path) -> Self {
        let program = std::env::current_exe().unwrap();
        let words = before
            .iter()
            .copied()
            .chain([program.to_str().unwrap()])
            .chain(ARGUMENTS);
        let words: Vec<_> = words.collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).env(ROLE, role).env(PATH, path);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        Self {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    fn line(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the process has ended");
            if let Some(said) = said(&line) {
                return said.to_owned();
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end, and for the rest of what it said.
    fn rest(mut self) -> (String, bool) {
        self.input = None;
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        (rest, self.child.wait().unwrap().success())
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // A test that failed leaves no process behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a started process does. Without the name of a role it does nothing.
#[test]
#[ignore = "started by other tests, as a process of its own"]
fn a_process_plays_its_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let path = PathBuf::from(std::env::var_os(PATH).expect("the path of the database"));
    runtime().block_on(async {
        match role.as_str() {
            "come once" => come_once(&path).await,
            "stop inside" => stop_inside(&path),
            "fill" => fill(&path).await,
            other => panic!("no role {other}"),
        }
    });
    // As at the end of `main`, and without what the test harness does after a test.
    std::process::exit(0);
}

/// A process that returns from `main` closes the file to the end: a log without its index would be an obstacle to clients that only look.
#[tokio::test]
async fn a_process_that_ends_leaves_no_log_behind() {
    let file = File::new();
    for _ in 0..5 {
        assert!(Player::start(&[], "come once", &file.path()).rest().1);
        assert!(
            !file
                .names()
                .iter()
                .any(|name| name.ends_with("-wal") || name.ends_with("-shm")),
            "{:?}",
            file.names()
        );
    }
}

async fn come_once(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    let grant = granted(&lock, &claim("passing", LONG)).await;
    lock.release(&grant.claim, None).await.unwrap();
}

/// Repeats a request until it is done, for a client whose limit for one is so short that a busy machine can miss it.
async fn until_done<T>(mut request: impl AsyncFnMut() -> Result<T, LockError>) -> T {
    in_time(async {
        loop {
            match request().await {
                Ok(done) => return done,
                Err(error) => assert!(matches!(error, LockError::Unavailable { .. }), "{error}"),
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_process_stopped_inside_a_transaction_is_waited_for_and_recovered_from() {
    let file = File::new();
    let hasty = SqliteConfig::new(file.path()).op_timeout(Duration::from_millis(300));
    let hasty = until_done(async || hasty.clone().connect().await).await;
    let lock = file.client().await;
    let held = claim("held", LONG);
    let grant = granted(&lock, &held).await;
    for end in [Signal::CONT, Signal::KILL] {
        let mut stopped = Player::start(&[], "stop inside", &file.path());
        assert_eq!(stopped.line(), "inside");
        stopped.signal(Signal::STOP);
        let other = claim("other", LONG);
        let failed = in_time(hasty.try_acquire(&other)).await.unwrap_err();
        assert!(matches!(failed, LockError::Unavailable { .. }), "{failed}");
        assert!(
            format!("{failed:#}").contains("stopped inside a transaction"),
            "{failed}"
        );
        let renewal = hasty.renew(&grant.lease).await;
        assert!(matches!(renewal, Err(LockError::Unavailable { .. })), "{renewal:?}");
        // Reading goes on.
        assert!(lock.holders(held.name()).await.unwrap().pop().is_some());
        stopped.signal(end);
        stopped.rest();
        let attempt = until_done(async || hasty.try_acquire(&other).await).await;
        assert!(attempt.granted().is_some());
        lock.release(&other, None).await.unwrap();
        let renewal = until_done(async || hasty.renew(&grant.lease).await).await;
        assert_eq!(renewal, Renewal::Renewed);
    }
    assert_eq!(file.rows(), 1);
}

fn stop_inside(path: &Path) {
    let conn = rusqlite::Connection::open(path).unwrap();
    conn.execute_batch("BEGIN IMMEDIATE; UPDATE counter SET token = token")
        .unwrap();
    say("inside");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    conn.execute_batch("COMMIT").unwrap();
}

fn is_intact(file: &File) -> bool {
    file.number("SELECT count(*) FROM pragma_integrity_check WHERE integrity_check <> 'ok'") == 0
}

pub(crate) async fn full_disk() {
    let file = File::new();
    // For it files end at 160 KiB, which SQLite meets as a full disk. Without the trap the signal would end it.
    let limited = ["sh", "-c", "trap '' XFSZ; ulimit -f 320; exec \"$0\" \"$@\""];
    assert!(Player::start(&limited, "fill", &file.path()).rest().1);
    assert!(is_intact(&file));
    // There is room again, and everything is as it was left.
    let lock = file.client().await;
    let held = lock.list("").await.unwrap();
    assert!(held.len() > 10, "only {} locks", held.len());
    for holder in &held {
        let forced = lock.force_release(holder.name.as_ref().unwrap()).await.unwrap();
        assert_eq!(forced[0].owner, holder.owner);
    }
    granted(&lock, &claim("n", LONG)).await;
}

/// Works where the log cannot grow, and then takes locks until there is no room at all.
async fn fill(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    let held = claim("held", LONG);
    let grant = granted(&lock, &held).await;
    // Far more than the log has room for.
    for _ in 0..300 {
        let claim = claim("n", LONG);
        granted(&lock, &claim).await;
        assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
        assert_eq!(lock.release(&claim, None).await.unwrap(), Released::Released);
    }
    let label = "x".repeat(4_000);
    let mut taken = 1;
    let refused = loop {
        let claim = claim(&format!("n{taken}"), LONG).with_label(label.as_str());
        match lock.try_acquire(&claim).await {
            Ok(attempt) => drop(attempt.granted().unwrap()),
            Err(error) => break error,
        }
        taken += 1;
        assert!(taken < 10_000, "the disk never became full");
    };
    assert!(matches!(refused, LockError::Unavailable { .. }), "{refused}");
    assert!(format!("{refused:#}").contains("free some space"), "{refused}");
    assert_eq!(lock.list("").await.unwrap().len(), taken);
}
