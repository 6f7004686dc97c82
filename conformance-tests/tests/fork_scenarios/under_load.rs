//! Forks at any moment: other threads are in the middle of whatever a client does.

use std::future::IntoFuture;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fencelock::{LockError, Options};
use fork::Fork;
use futures_executor::block_on;

use super::{LONG, assert_inherited, connect, is_sqlite, scope, step, until};

const FORKS: usize = 20;
const THREADS: usize = 4;

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
                drop(locks);
                connects(url, &scope);
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

fn connects(url: &str, scope: &str) {
    step("child: connects");
    if is_sqlite(url) {
        assert!(matches!(
            connect(url, Options::new()),
            Err(LockError::Configuration { .. })
        ));
        return;
    }
    let locks = connect(url, Options::new()).unwrap().scoped(scope);
    step("child: acquires");
    let guard = block_on(locks.lock("of the child").wait_for(LONG).into_future()).unwrap();
    step("child: releases");
    block_on(guard.release()).unwrap();
}
