//! A child made by `fork`, on every backend: what it finds of its parent's clients, and that it can connect anew.
//!
//! Each test starts this program once more, so that the process that forks has no threads but those of its test.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

use std::fmt::Debug;
use std::future::{Future, IntoFuture, pending};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use fencelock::{LockError, LockGuard, Locks, Options, ReleaseOutcome};
use fork::Fork;
use futures_executor::block_on;
use libtest_mimic::{Arguments, Failed, Trial};
use test_servers::{Kind, Server};
use tokio::runtime::Runtime;

const URL: &str = "FENCELOCK_FORK_URL";

/// The shortest that etcd grants with its usual settings, and one more.
const TTL: Duration = Duration::from_secs(3);

/// What takes longer hangs.
const LONGEST_STEP: Duration = Duration::from_secs(60);
const LIMIT: &str = "300s";

const FORKS: u64 = 3;

fn main() -> ExitCode {
    if let Ok(url) = std::env::var(URL) {
        forks(&url);
        return ExitCode::SUCCESS;
    }
    let (runtime, servers) = (Runtime::new().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let server = |name, kind: &'static Kind| {
        let (runtime, servers) = (runtime.handle().clone(), Arc::clone(&servers));
        Trial::test(name, move || {
            let server = runtime.block_on(Server::start(kind))?;
            let url = server.url().replacen("http:", "etcd:", 1);
            servers.lock().unwrap().push(server);
            run_alone(&url)
        })
    };
    let file = || {
        let folder = tempfile::tempdir()?;
        run_alone(&format!("sqlite:{}", folder.path().join("locks.db").display()))
    };
    let trials = vec![
        Trial::test("memory", || run_alone("memory:fork")),
        Trial::test("sqlite", file),
        server("redis", &Kind::REDIS),
        server("postgres", &Kind::POSTGRES),
        server("etcd", &Kind::ETCD),
    ];
    let code = match cfg!(target_os = "linux") {
        true => libtest_mimic::run(&Arguments::from_args(), trials).exit_code(),
        false => ExitCode::SUCCESS,
    };
    let _runtime = runtime.enter();
    servers.lock().unwrap().clear();
    code
}

/// Runs [`forks`] in a process of its own, and ends that with its children if it hangs.
fn run_alone(url: &str) -> Result<(), Failed> {
    let mut limited = Command::new("timeout");
    limited.arg("--signal=KILL").arg(LIMIT).arg(std::env::current_exe()?);
    let output = limited.env(URL, url).output()?;
    let steps = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{} after these steps:\n{steps}", output.status).into()),
    }
}

/// Tells what comes next, so that a hang has a name.
fn step(what: &str) {
    eprintln!("{} {what}", std::process::id());
}

fn connect(url: &str) -> Result<Locks, LockError> {
    block_on(fencelock::connect_with(url, Options::new().ttl(TTL)))
}

/// Waits until `done`.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    step(what);
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LONGEST_STEP, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn forks(url: &str) {
    step("parent: connects and acquires");
    let (locks, idle) = (connect(url).unwrap(), connect(url).unwrap());
    let held = block_on(locks.lock("held").into_future()).unwrap();
    let mut waiting = Box::pin(locks.lock("held").into_future());
    assert!(
        waiting
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    );
    until("parent: the request waits", || locks.stats().waiting == 1);
    let (over, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let busy = thread::spawn({
        let (locks, over, rounds) = (locks.clone(), Arc::clone(&over), Arc::clone(&rounds));
        move || {
            while !over.load(Ordering::Acquire) {
                block_on(block_on(locks.lock("busy").into_future()).unwrap().release()).unwrap();
                rounds.fetch_add(1, Ordering::AcqRel);
            }
        }
    });
    let mut inherited = Some((locks, idle, held, waiting, busy));
    for fork in 1..=FORKS {
        until("parent: the other thread goes on", || {
            rounds.load(Ordering::Acquire) > 2 * fork
        });
        let Some(child) = forked() else {
            let (locks, idle, held, waiting, busy) = inherited.take().unwrap();
            // This process does not have the thread.
            std::mem::forget(busy);
            return finds(url, locks, idle, held, waiting);
        };
        step("parent: waits for its child");
        assert_eq!(fork::waitpid(child).unwrap(), 0, "the status of the child");
    }
    let (locks, idle, held, waiting, busy) = inherited.unwrap();
    over.store(true, Ordering::Release);
    busy.join().unwrap();
    let renewed = locks.stats().renewed;
    until("parent: goes on renewing", || locks.stats().renewed > renewed + 1);
    assert!(held.is_held());
    if !url.starts_with("memory:") {
        assert!(block_on(connect(url).unwrap().try_lock("held")).unwrap().is_none());
    }
    step("parent: releases, and gives the lock to the request that waits");
    assert_eq!(block_on(held.release()).unwrap(), ReleaseOutcome::Released);
    assert_eq!(
        block_on(block_on(waiting).unwrap().release()).unwrap(),
        ReleaseOutcome::Released
    );
    assert_eq!((locks.stats().lost, locks.stats().renewal_errors), (0, 0));
    step("parent: shuts down");
    block_on(idle.shutdown()).unwrap();
    block_on(locks.shutdown()).unwrap();
    drop((locks, idle));
    match forked() {
        None => uses_a_new_client(url),
        Some(child) => assert_eq!(
            fork::waitpid(child).unwrap(),
            0,
            "the child of a parent without clients"
        ),
    }
}

/// Forks; the child gets `None`.
fn forked() -> Option<i32> {
    match fork::fork().unwrap() {
        Fork::Child => None,
        Fork::Parent(child) => Some(child),
    }
}

/// What a child finds of its parent's clients, and that it can drop it all.
fn finds(url: &str, locks: Locks, idle: Locks, held: LockGuard, waiting: impl Future) {
    for locks in [&idle, &locks] {
        refused("try_lock", || block_on(locks.try_lock("free")));
        refused("lock_all", || block_on(locks.lock_all(["free"]).into_future()));
        refused("observe", || block_on(locks.observe("free").next()).unwrap());
        refused("holder", || block_on(locks.holder("free")));
        refused("force_release", || block_on(locks.force_release("held")));
        refused("shutdown", || block_on(locks.shutdown()));
        step("child: drain");
        block_on(locks.drain());
    }
    refused("run", || block_on(held.run(pending::<()>())));
    refused("renew_now", || block_on(held.renew_now()));
    refused("release", || block_on(held.release()));
    step("child: drops what it inherited");
    drop((waiting, idle, locks));
    if url.starts_with("sqlite:") {
        step("child: connects to the file that its parent has open");
        let error = connect(url).unwrap_err();
        assert!(error.to_string().contains("at the fork"), "{error}");
    } else {
        uses_a_new_client(url);
    }
}

fn refused<T: Debug>(what: &str, ask: impl FnOnce() -> Result<T, LockError>) {
    step(&format!("child: {what}"));
    let error = ask().expect_err(what);
    assert!(matches!(error, LockError::Configuration { .. }), "{what}: {error:?}");
    assert!(error.to_string().contains("made before a fork"), "{what}: {error}");
}

fn uses_a_new_client(url: &str) {
    step("child: connects");
    let locks = connect(url).unwrap();
    step("child: acquires");
    let guard = block_on(locks.lock("of the child").into_future()).unwrap();
    until("child: renews", || locks.stats().renewed > 0);
    step("child: releases");
    assert_eq!(block_on(guard.release()).unwrap(), ReleaseOutcome::Released);
    // Its release is what the end of the process waits for.
    drop(block_on(locks.lock("dropped at the end").into_future()).unwrap());
    step("child: ends");
}
