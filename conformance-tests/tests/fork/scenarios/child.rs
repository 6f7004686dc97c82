//! What a child finds of its parent's client, and what it does with its own.

use std::future::{IntoFuture, pending};
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fencelock::{FencingToken, LockError, Locks, LossReason, Options, OwnerId, ReleaseOutcome};
use futures_executor::block_on;

use super::parent::{Inherited, OWNERS, is_shared};
use super::{AT_ONCE, Driver, Ending, LONG, TTL, assert_inherited, connect, is_sqlite, step, until};

pub(crate) fn finds(url: &str, inherited: Inherited, ending: Ending) -> ExitCode {
    let Inherited {
        driver,
        locks,
        idle,
        backend,
        held,
        released,
        polled,
        dropped,
        signals: [polled_signal, dropped_signal],
        working: [polled_work, dropped_work],
        last,
        scope,
        mut owners,
    } = inherited;
    step("child: draws owners");
    let drawn: String = (0..OWNERS).map(|_| format!("{}\n", OwnerId::random())).collect();
    owners.write_all(drawn.as_bytes()).unwrap();
    drop(owners);
    for locks in [&idle, &locks] {
        let free = format!("{scope}/free");
        let free = Some(free.as_str());
        assert_inherited("child: try_lock", free, || block_on(locks.try_lock("free")));
        assert_inherited("child: lock", free, || block_on(locks.lock("free").into_future()));
        assert_inherited("child: with", free, || block_on(locks.lock("free").with(async |_| ())));
        assert_inherited("child: holder", free, || block_on(locks.holder("free")));
        assert_inherited("child: force_release", free, || block_on(locks.force_release("free")));
        assert_inherited("child: release_owned", free, || {
            block_on(locks.release_owned("free", held.owner()))
        });
        assert_inherited("child: list", None, || block_on(locks.list("")));
        assert_inherited("child: backend_version", None, || block_on(locks.backend_version()));
        assert_inherited("child: warnings", None, || block_on(locks.warnings()));
        assert_inherited("child: shutdown", None, || block_on(locks.shutdown()));
        step("child: drain, stats, Debug");
        block_on(locks.drain());
        let _ = (locks.stats(), format!("{locks:?}"));
    }
    let late = Locks::new(Arc::clone(&backend));
    assert_inherited(
        "child: try_lock of a client of an inherited backend",
        Some("late"),
        || block_on(late.try_lock("late")),
    );
    step("child: the inherited runtime polls a request");
    assert_inherited("child: try_lock", Some(&format!("{scope}/free")), || {
        driver.run(idle.try_lock("free"))
    });

    step("child: looks at the guard");
    assert!(!held.is_held());
    assert_eq!(held.remaining(), Duration::ZERO);
    assert_eq!(held.token(), held.token());
    let _ = format!("{held:?}");
    assert_eq!(
        at_once("lost", || block_on(held.lost().into_future())),
        LossReason::Forked
    );
    assert_eq!(at_once("lost", || block_on(polled_signal)), LossReason::Forked);
    assert_lost("run", at_once("run", || block_on(held.run(pending::<()>()))));
    assert_lost("renew_now", at_once("renew_now", || block_on(held.renew_now())));
    assert_lost("release", at_once("release", || block_on(released.release())));
    assert_lost("work under way", at_once("work under way", || block_on(polled_work)));
    assert_inherited(
        "child: polls an inherited request",
        Some(&format!("{scope}/held")),
        || block_on(polled),
    );

    step("child: drops what it inherited");
    let tasks = driver.tasks();
    drop(dropped);
    drop(dropped_signal);
    drop(dropped_work);
    drop(held);
    drop(late);
    drop(backend);
    drop(idle);
    drop(locks);
    assert_eq!(driver.tasks(), tasks, "nothing is left to the inherited runtime");
    match driver {
        // Its end would wait for its threads, which are not here.
        Driver::Threads(runtime) => std::mem::forget(runtime),
        // It drops all of its tasks. A plain drop would wait for threads that work for it beside.
        Driver::CurrentThread(runtime) => runtime.shutdown_background(),
        Driver::Background => {}
    }
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    assert_eq!(threads, 1, "nothing goes on in the child");

    if is_sqlite(url) {
        step("child: connects to the file that its parent has open");
        let error = at_once("connect", || connect(url, Options::new())).unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
        assert!(error.to_string().contains("at the fork"), "{error}");
    } else {
        uses_a_new_client(url, &scope, Some(last));
    }
    if ending == Ending::Killed {
        step("child: ends by SIGKILL");
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    step("child: returns");
    ExitCode::SUCCESS
}

/// All that a client can do. `last` is a token that was drawn for the name "free" before.
pub(crate) fn uses_a_new_client(url: &str, scope: &str, last: Option<FencingToken>) {
    step("connects anew");
    let connect = || connect(url, Options::new()).unwrap().scoped(scope);
    let (locks, other) = (connect(), connect());
    step("acquires what is free");
    let free = block_on(locks.try_lock("free")).unwrap().expect("it is free");
    if let Some(last) = last {
        step("finds what its parent holds");
        assert_eq!(block_on(locks.try_lock("held")).unwrap().is_none(), is_shared(url));
        if is_shared(url) {
            assert!(free.token() > last, "{} is not above {last}", free.token());
        }
    }
    step("holds for longer than a ttl");
    let began = Instant::now();
    until("longer than a ttl", TTL * 2, || {
        assert!(free.is_held());
        began.elapsed() > TTL + TTL / 4
    });
    assert!(block_on(other.try_lock("free")).unwrap().is_none() || !is_shared(url));
    assert!(locks.stats().renewed > 0);
    step("waits, and is woken");
    let waiting = std::thread::spawn({
        let request = locks.lock("free").wait_for(LONG);
        move || block_on(request.into_future())
    });
    until("the request waits", LONG, || locks.stats().waiting == 1);
    assert_eq!(block_on(free.release()).unwrap(), ReleaseOutcome::Released);
    let free = waiting.join().unwrap().unwrap();
    step("loses a lock");
    block_on(locks.force_release("free")).unwrap().expect("it was held");
    let reason = block_on(free.lost().into_future());
    assert_ne!(reason, LossReason::Forked);
    assert_eq!(block_on(free.release()).unwrap(), ReleaseOutcome::AlreadyLost);
    step("drops a guard");
    drop(block_on(locks.lock("free").wait_for(LONG).into_future()).unwrap());
    block_on(locks.drain());
    assert!(block_on(locks.holder("free")).unwrap().is_none());
    block_on(other.shutdown()).unwrap();
    // Its release is what the end of the process waits for.
    drop(block_on(locks.lock("dropped at the end").wait_for(LONG).into_future()).unwrap());
}

fn at_once<T>(what: &str, ask: impl FnOnce() -> T) -> T {
    step(&format!("child: {what}"));
    let began = Instant::now();
    let done = ask();
    let took = began.elapsed();
    assert!(took < AT_ONCE, "{what} took {took:?}");
    done
}

fn assert_lost<T: std::fmt::Debug>(what: &str, ended: Result<T, LockError>) {
    let error = ended.expect_err(what);
    let reason = match &error {
        LockError::Lost { reason, .. } => *reason,
        other => panic!("{what}: {other:?}"),
    };
    assert_eq!(reason, LossReason::Forked, "{what}");
    assert!(!error.is_retryable(), "{what}");
}
