//! The parent of a child that is told apart from it.

use std::collections::BTreeSet;
use std::future::{Future, IntoFuture, pending};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use fencelock::backend::DistributedLock;
use fencelock::{FencingToken, LockError, LockGuard, Locks, LossReason, Options, OwnerId, ReleaseOutcome};
use fork::Fork;

use super::{Driver, Ending, LONG, Place, TTL, backend, child, connect, is_memory, scope, step};

/// How many owners each side draws.
pub(crate) const OWNERS: usize = 100;

pub(crate) type Waiting<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// All that the child finds of its parent.
pub(crate) struct Inherited {
    pub(crate) driver: Driver,
    pub(crate) locks: Locks,
    pub(crate) idle: Locks,
    /// Of which there is no client so far.
    pub(crate) backend: Arc<dyn DistributedLock>,
    pub(crate) held: LockGuard,
    /// That the child tries to release.
    pub(crate) released: LockGuard,
    /// Requests that wait at the server; one is polled in the child, one is dropped.
    pub(crate) polled: Waiting<Result<LockGuard, LockError>>,
    pub(crate) dropped: Waiting<Result<LockGuard, LockError>>,
    /// The same of one that waits for a loss, and of work under a lock.
    pub(crate) signals: [Waiting<LossReason>; 2],
    pub(crate) working: [Waiting<Result<(), LockError>>; 2],
    pub(crate) last: FencingToken,
    pub(crate) scope: String,
    /// Where the child tells the owners that it draws.
    pub(crate) owners: UnixStream,
}

pub(crate) fn forks(url: &str, place: Place, ending: Ending) -> ExitCode {
    let driver = Driver::new(place);
    step("parent: connects");
    let options = driver.options();
    let connecting = fencelock::connect_with(url, options.clone().ttl(TTL).op_timeout(Duration::from_secs(5)));
    let scope = scope(std::process::id());
    let locks = driver.run(connecting).unwrap().scoped(&scope);
    let connecting = fencelock::connect_with(url, options.ttl(TTL));
    let idle = driver.run(connecting).unwrap().scoped(&scope);
    let backend = driver.run(backend(url)).unwrap();
    step("parent: acquires");
    let take = |name: &str| driver.run(locks.lock(name).wait_for(LONG).into_future()).unwrap();
    let (held, released) = (take("held"), take("released in the child"));
    let (first, second) = (take("work polled in the child"), take("work dropped in the child"));
    let free = take("free");
    let last = free.token();
    driver.run(free.release()).unwrap();
    let (mut told, owners) = UnixStream::pair().unwrap();
    let mut inherited = Inherited {
        polled: locks.lock("held").into_future(),
        dropped: idle.lock("held").into_future(),
        signals: [held.lost().into_future(), held.lost().into_future()],
        working: [work_under(first), work_under(second)],
        driver,
        locks,
        idle,
        backend,
        held,
        released,
        last,
        scope: scope.clone(),
        owners,
    };
    begin(&mut inherited);
    step("parent: forks");
    let child = match fork::fork().unwrap() {
        Fork::Child => return child::finds(url, inherited, ending),
        Fork::Parent(child) => child,
    };
    let Inherited {
        driver,
        locks,
        idle,
        backend,
        held,
        released,
        polled,
        dropped,
        signals,
        working,
        owners,
        ..
    } = inherited;
    drop(owners);
    step("parent: compares owners");
    let mut drawn: BTreeSet<_> = (0..OWNERS).map(|_| OwnerId::random().to_string()).collect();
    let mut of_child = String::new();
    told.read_to_string(&mut of_child).unwrap();
    drawn.extend(of_child.lines().map(str::to_owned));
    assert_eq!(drawn.len(), 2 * OWNERS, "no owner twice");
    step("parent: waits for its child");
    let status = loop {
        if let Some(status) = fork::waitpid_nohang(child).unwrap() {
            break status;
        }
        driver.pass(Duration::from_millis(20));
    };
    match ending {
        Ending::Returns => assert_eq!(status, 0, "the status of the child"),
        Ending::Killed => assert_eq!(status, 9, "the child ends by SIGKILL after all steps"),
    }
    step("parent: goes on holding");
    let renewed = locks.stats().renewed;
    let ended = Instant::now();
    while ended.elapsed() < TTL * 3 / 2 {
        assert!(
            held.is_held(),
            "after {:?}: {:?}",
            ended.elapsed(),
            driver.run(held.lost().into_future())
        );
        driver.pass(Duration::from_millis(50));
    }
    assert!(locks.stats().renewed > renewed, "the lease is renewed");
    assert_eq!(locks.stats().renewal_errors, 0);
    // Asked at the server, by a client that knows nothing else.
    let fresh = connect(url, Options::new()).unwrap().scoped(&scope);
    for name in ["held", "released in the child", "work polled in the child"] {
        let taken = futures_executor::block_on(fresh.try_lock(name)).unwrap();
        assert!(taken.is_none(), "{name} is held by the parent");
    }
    step("parent: releases");
    drop((polled, dropped, signals, working));
    driver.run(locks.drain());
    driver.run(idle.drain());
    for guard in [held, released] {
        let name = guard.name().clone();
        assert_eq!(driver.run(guard.release()).unwrap(), ReleaseOutcome::Released, "{name}");
    }
    step("parent: acquires once more");
    for client in [&locks, &idle] {
        let guard = driver.run(client.try_lock("held")).unwrap().expect("it is free");
        assert_eq!(driver.run(guard.release()).unwrap(), ReleaseOutcome::Released);
        assert_eq!(client.stats().lost, 0);
    }
    step("parent: makes a client of the backend that the child had, too");
    let late = Locks::new(backend).scoped(&scope);
    let guard = driver.run(late.try_lock("late")).unwrap().expect("it is free");
    assert_eq!(driver.run(guard.release()).unwrap(), ReleaseOutcome::Released);
    driver.run(late.shutdown()).unwrap();
    step("parent: ends");
    driver.run(idle.shutdown()).unwrap();
    driver.run(locks.shutdown()).unwrap();
    drop((locks, idle));
    ExitCode::SUCCESS
}

pub(crate) fn forks_after_shutdown(url: &str) -> ExitCode {
    step("parent: connects, and shuts down");
    let locks = connect(url, Options::new()).unwrap();
    let held = futures_executor::block_on(locks.lock("held").into_future()).unwrap();
    futures_executor::block_on(held.release()).unwrap();
    futures_executor::block_on(locks.shutdown()).unwrap();
    drop(locks);
    step("parent: forks");
    match fork::fork().unwrap() {
        Fork::Child => {
            child::uses_a_new_client(url, "after-shutdown", None);
            ExitCode::SUCCESS
        }
        Fork::Parent(child) => {
            let scope = "beside-it";
            child::uses_a_new_client(url, scope, None);
            assert_eq!(fork::waitpid(child).unwrap(), 0, "the status of the child");
            ExitCode::SUCCESS
        }
    }
}

fn work_under(guard: LockGuard) -> Waiting<Result<(), LockError>> {
    Box::pin(async move { guard.run(pending::<()>()).await })
}

/// Polls everything once, and lets the requests come to wait at the server.
fn begin(inherited: &mut Inherited) {
    let Inherited {
        driver,
        locks,
        idle,
        polled,
        dropped,
        signals,
        working,
        ..
    } = inherited;
    driver.run(async {
        let mut context = Context::from_waker(Waker::noop());
        assert!(polled.as_mut().poll(&mut context).is_pending());
        assert!(dropped.as_mut().poll(&mut context).is_pending());
        for signal in signals {
            assert!(signal.as_mut().poll(&mut context).is_pending());
        }
        for work in working {
            assert!(work.as_mut().poll(&mut context).is_pending());
        }
    });
    let began = Instant::now();
    while locks.stats().waiting == 0 || idle.stats().waiting == 0 || began.elapsed() < Duration::from_millis(200) {
        driver.pass(Duration::from_millis(10));
        assert!(began.elapsed() < LONG);
    }
}

/// What a name of the parent is for the child: stores in memory belong to one process.
pub(crate) fn is_shared(url: &str) -> bool {
    !is_memory(url)
}
