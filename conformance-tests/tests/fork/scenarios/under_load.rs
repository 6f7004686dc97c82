//! Forks at any moment: other threads are in the middle of whatever a client does.

use std::future::IntoFuture;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use fencelock::{LockError, Options, ReleaseOutcome};
use fork::Fork;
use futures_executor::block_on;

use super::{LONG, assert_inherited, connect, is_sqlite, scope, step, until};

const FORKS: u32 = 20;
const THREADS: usize = 4;

/// The exit code of a process whose child could start no thread.
const UNLUCKY: u8 = 3;

pub(crate) fn forks(url: &str) -> ExitCode {
    step("parent: connects");
    let scope = scope(std::process::id());
    let locks = connect(url, Options::new()).unwrap().scoped(&scope);
    let (over, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let threads: Vec<_> = (0..THREADS)
        .map(|number| {
            let (locks, over, done) = (locks.clone(), Arc::clone(&over), Arc::clone(&done));
            thread::spawn(move || {
                while !over.load(Ordering::Acquire) {
                    // Two threads for each name, so that there are waits, too.
                    let name = format!("busy {}", number / 2);
                    let guard = block_on(locks.lock(name).wait_for(LONG).into_future())?;
                    if done.fetch_add(1, Ordering::AcqRel) % 2 == 0 {
                        block_on(guard.release())?;
                    }
                }
                Ok::<_, LockError>(())
            })
        })
        .collect();
    // Each thread, and those that they have started, has come up: a fork in the moment of a start is another scenario.
    until("each thread has had its turns", LONG, || {
        done.load(Ordering::Acquire) > 20 * THREADS as u64 || threads.iter().any(|thread| thread.is_finished())
    });
    let mut inherited = Some(locks);
    for fork in 0..FORKS {
        let before = done.load(Ordering::Acquire);
        until("the threads go on", LONG, || {
            done.load(Ordering::Acquire) > before + 2 || threads.iter().any(|thread| thread.is_finished())
        });
        step(&format!("parent: fork {fork}"));
        match fork::fork().unwrap() {
            Fork::Child => {
                let locks = inherited.take().unwrap();
                assert_inherited("child: try_lock", Some(&format!("{scope}/x")), || {
                    block_on(locks.try_lock("x"))
                });
                // Its parent's releases are under way, and never end here.
                step("child: drain");
                block_on(locks.drain());
                drop(locks);
                if is_sqlite(url) {
                    step("child: connects");
                    assert!(matches!(
                        connect(url, Options::new()),
                        Err(LockError::Configuration { .. })
                    ));
                } else {
                    connects(url, &scope);
                }
                // The threads that are not here have handles that cannot be joined.
                std::mem::forget(threads);
                return ExitCode::SUCCESS;
            }
            Fork::Parent(child) => {
                let began = Instant::now();
                let status = fork::waitpid(child).unwrap();
                assert_eq!(status, 0, "the status of the child of fork {fork}");
                assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
            }
        }
    }
    step("parent: its threads end");
    over.store(true, Ordering::Release);
    for thread in threads {
        thread.join().unwrap().unwrap();
    }
    let locks = inherited.unwrap();
    assert_eq!(locks.stats().lost, 0);
    block_on(locks.shutdown()).unwrap();
    ExitCode::SUCCESS
}

/// Each time by a process that has no client so far, and only forks.
pub(crate) fn forks_during_the_first_connect(url: &str) -> ExitCode {
    let scope = scope(std::process::id());
    let mut locked = 0;
    for fork in 0..FORKS {
        step(&format!("fork {fork}"));
        match fork::fork().unwrap() {
            Fork::Child => {
                return match fork_beside_a_connect(url, &scope, Duration::from_micros(50) * fork) {
                    true => ExitCode::SUCCESS,
                    false => ExitCode::from(UNLUCKY),
                };
            }
            Fork::Parent(child) => {
                let status = fork::waitpid(child).unwrap();
                assert!(
                    [0, i32::from(UNLUCKY) << 8].contains(&status),
                    "the status of fork {fork}: {status}"
                );
                locked += u32::from(status == 0);
            }
        }
    }
    assert!(locked > 0, "no child could lock at all");
    ExitCode::SUCCESS
}

/// Tells whether the child could lock.
fn fork_beside_a_connect(url: &str, scope: &str, delay: Duration) -> bool {
    let (begin, begun) = mpsc::channel();
    let connecting = thread::spawn({
        let url = url.to_owned();
        move || {
            begin.send(()).unwrap();
            connect(&url, Options::new())
        }
    });
    begun.recv().unwrap();
    // Not a sleep, which takes longer than it should.
    let began = Instant::now();
    while began.elapsed() < delay {
        std::hint::spin_loop();
    }
    match fork::fork().unwrap() {
        Fork::Child => {
            std::mem::forget(connecting);
            connects(url, scope);
            true
        }
        Fork::Parent(child) => {
            let locks = connecting.join().unwrap().unwrap().scoped(scope);
            let guard = block_on(locks.lock("of the parent").wait_for(LONG).into_future()).unwrap();
            let status = fork::waitpid(child).unwrap();
            assert!([0, 9].contains(&status), "the status of the child: {status}");
            assert_eq!(block_on(guard.release()).unwrap(), ReleaseOutcome::Released);
            block_on(locks.shutdown()).unwrap();
            status == 0
        }
    }
}

/// The fork was in the middle of the start of a thread, with a mutex of the standard library or of tokio. The end of `main` would wait for
/// it, too.
fn no_thread_comes_up(error: &LockError) {
    let told = matches!(error, LockError::Unavailable { .. }) && error.to_string().contains("has not come up within");
    assert!(told, "{error:#}");
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
}

fn connects(url: &str, scope: &str) {
    step("child: connects");
    let locks = match connect(url, Options::new()) {
        Ok(locks) => locks.scoped(scope),
        Err(LockError::Configuration { .. }) if is_sqlite(url) => return,
        Err(error) => return no_thread_comes_up(&error),
    };
    step("child: acquires");
    let guard = match block_on(locks.lock("of the child").wait_for(LONG).into_future()) {
        Ok(guard) => guard,
        Err(error) => return no_thread_comes_up(&error),
    };
    step("child: releases");
    block_on(guard.release()).unwrap();
}
