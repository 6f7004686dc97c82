//! Everything at once, judged by the oracle.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lock_core::fence::Fence;
use lock_core::{LockError, LockGuard, LockName, Options};
use tokio::task::JoinSet;

use super::{Entry, cases};
use crate::case::{Case, Party};
use crate::child::Child;
use crate::link::FaultMode;
use crate::oracle::{Event, Log};
use crate::outcome::{Outcome, ensure};

pub(crate) const CASES: &[Entry] = cases![
    a_mixed_load_with_faults_keeps_every_invariant,
    processes_that_are_killed_and_stopped_keep_every_invariant,
];

const CLIENTS: usize = 4;
const TASKS: usize = 12;
const NAMES: usize = 3;
/// The least time that it goes on.
const TIME: Duration = Duration::from_secs(6);

/// What all tasks share.
struct Field {
    log: Arc<Log>,
    names: Vec<LockName>,
    // A resource per name, and the mutex that keeps its writes and their records in one order.
    resources: Vec<Mutex<Fence<u64>>>,
}

pub(crate) async fn a_mixed_load_with_faults_keeps_every_invariant(case: Arc<Case>) -> Outcome {
    let log = Arc::new(Log::new());
    let names: Vec<_> = (0..NAMES).map(|i| case.name(&format!("n {i}"))).collect();
    let resources = names
        .iter()
        .map(|name| Mutex::new(Fence::new(name.as_str(), 0)))
        .collect();
    let field = Arc::new(Field {
        log: Arc::clone(&log),
        names,
        resources,
    });
    let mut parties = Vec::new();
    for client in 0..CLIENTS {
        // Every other one keeps what it releases.
        let linger = if client % 2 == 0 {
            case.ttl() / 8
        } else {
            Duration::ZERO
        };
        parties.push(case.logged_party(&log, Options::new().linger(linger)).await?);
    }
    let end = case.now() + time(&case);
    let mut tasks = JoinSet::new();
    for actor in 0..TASKS {
        let (case, field, party) = (Arc::clone(&case), Arc::clone(&field), parties[actor % CLIENTS].clone());
        tasks.spawn(async move {
            while case.now() < end {
                turn(&case, &field, &party, actor).await;
            }
        });
    }
    while case.now() < end {
        let party = &parties[fastrand::usize(..CLIENTS)];
        log.record(usize::MAX, &field.names[0], Event::fault("network"));
        party
            .link
            .set([FaultMode::Silent, FaultMode::RepliesLost][fastrand::usize(..2)]);
        tokio::time::sleep(case.ttl().mul_f64(fastrand::f64() * 1.2)).await;
        party.link.set(FaultMode::None);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    while let Some(ended) = tasks.join_next().await {
        ended?;
    }
    log.record(usize::MAX, &field.names[0], Event::Healed);
    for (name, party) in field.names.iter().zip(&parties) {
        log.record(TASKS, name, Event::Invoke);
        let guard = party
            .locks
            .lock(name)
            .wait_for(2 * case.ttl() + case.hang_limit())
            .await?;
        log.record(TASKS, name, Event::Ok(guard.token()));
        guard.release().await?;
    }
    let verdict = log.verdict();
    case.remark(format!("mixed load: {verdict}"));
    ensure!(
        verdict.violations.is_empty(),
        "the backend",
        "its history is one that locks may have; {verdict}"
    );
    Ok(())
}

/// Long enough for several faults, each of which may outlast a ttl.
fn time(case: &Case) -> Duration {
    TIME.max(case.ttl() * 6)
}

/// Asks for a lock in some way, and does something with it if it comes.
async fn turn(case: &Case, field: &Field, party: &Party, actor: usize) {
    let place = fastrand::usize(..NAMES);
    let name = &field.names[place];
    let wait = case.ttl().mul_f64(fastrand::f64() * 2.0);
    let request = party.locks.lock(name).ttl(case.ttl());
    let request = if fastrand::u8(..4) == 0 {
        request.no_wait()
    } else {
        request.wait_for(wait)
    };
    field.log.record(actor, name, Event::Invoke);
    let answer = if fastrand::u8(..5) == 0 {
        // Cancelled after a while.
        tokio::time::timeout(case.ttl().mul_f64(fastrand::f64() * 0.2), request.into_future())
            .await
            .ok()
    } else {
        Some(request.await)
    };
    match answer {
        Some(Ok(guard)) => hold(case, field, place, actor, guard).await,
        Some(Err(LockError::TimedOut { .. })) => field.log.record(actor, name, Event::Busy),
        Some(Err(_)) | None => {
            field.log.record(actor, name, Event::Unknown);
            // A server that is out of reach is not asked in a loop.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn hold(case: &Case, field: &Field, place: usize, actor: usize, guard: LockGuard) {
    let (log, name, token) = (&field.log, &field.names[place], guard.token());
    log.record(actor, name, Event::Ok(token));
    let until = case.now() + case.ttl().mul_f64(fastrand::f64().powi(4) * 2.5);
    let mut looks = 0;
    while log.look(actor, &guard) {
        if looks % 8 == 0 {
            write(field, place, actor, &guard);
        }
        looks += 1;
        if case.now() >= until {
            break;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    log.look(actor, &guard);
    log.record(actor, name, Event::Released(token));
    if fastrand::bool() {
        // Whether it worked is told by what happens next.
        let _ = guard.release().await;
    }
}

fn write(field: &Field, place: usize, actor: usize, guard: &LockGuard) {
    let resource = field.resources[place]
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let token = guard.token();
    let accepted = resource.write(token, |writes| *writes += 1).is_ok();
    field
        .log
        .record(actor, &field.names[place], Event::Write { token, accepted });
}

const PROCESSES: usize = 4;

pub(crate) async fn processes_that_are_killed_and_stopped_keep_every_invariant(case: Arc<Case>) -> Outcome {
    case.needs_processes()?;
    let log = Arc::new(Log::new());
    let names = ["a", "b"];
    let end = case.now() + time(&case);
    let mut tasks = JoinSet::new();
    for actor in 0..PROCESSES {
        let (case, log) = (Arc::clone(&case), Arc::clone(&log));
        tasks.spawn(async move {
            let mut child = case.child().await?;
            while case.now() < end {
                let name = names[fastrand::usize(..names.len())];
                if life_of_a_process(&case, &log, &mut child, actor, name)
                    .await?
                    .is_break()
                {
                    child = case.child().await?;
                }
            }
            Outcome::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    log.record(usize::MAX, &case.name(names[0]), Event::Healed);
    let party = case.party().await?;
    for name in names {
        log.record(PROCESSES, &case.name(name), Event::Invoke);
        let limit = 2 * case.ttl() + case.hang_limit();
        let guard = party.locks.lock(name).wait_for(limit).await?;
        log.record(PROCESSES, &case.name(name), Event::Ok(guard.token()));
        guard.release().await?;
    }
    let verdict = log.verdict();
    case.remark(format!("processes killed and stopped: {verdict}"));
    ensure!(
        verdict.violations.is_empty(),
        "the backend",
        "its history is one that locks may have; {verdict}"
    );
    Ok(())
}

/// A process asks for a lock, and is killed or stopped somewhere on the way, or not. Breaks if it is dead.
async fn life_of_a_process(
    case: &Case,
    log: &Log,
    child: &mut Child,
    actor: usize,
    name: &str,
) -> Outcome<ControlFlow<()>> {
    let name = case.name(name);
    let fault = |what| log.record(usize::MAX, &name, Event::fault(what));
    let some_time = || case.ttl().mul_f64(fastrand::f64());
    log.record(actor, &name, Event::Invoke);
    child.ask(name.as_str(), case.ttl(), Some(some_time())).await?;
    if fastrand::u8(..6) == 0 {
        tokio::time::sleep(some_time() / 8).await;
        fault("kill");
        child.kill().await?;
        log.record(actor, &name, Event::Unknown);
        return Ok(ControlFlow::Break(()));
    }
    let token = match child.told(case.hang_limit()).await? {
        Ok(Some(token)) => token,
        Ok(None) => {
            log.record(actor, &name, Event::Busy);
            return Ok(ControlFlow::Continue(()));
        }
        // Another may have been stopped where everybody has to wait for it.
        Err(_) => {
            log.record(actor, &name, Event::Unknown);
            return Ok(ControlFlow::Continue(()));
        }
    };
    log.record(actor, &name, Event::Ok(token));
    let fate = fastrand::u8(..4);
    match fate {
        0 => {
            fault("kill");
            child.kill().await?;
            return Ok(ControlFlow::Break(()));
        }
        1 => {
            fault("pause");
            child.stop()?;
            tokio::time::sleep(2 * some_time()).await;
            child.wake()?;
        }
        _ => tokio::time::sleep(some_time() / 4).await,
    }
    // Whoever holds at its look has held since before it was asked.
    let asked = case.now();
    let event = if child.is_held(name.as_str()).await? {
        Event::Held(token)
    } else {
        Event::Lost(token)
    };
    log.record_since(asked, actor, &name, event);
    log.record(actor, &name, Event::Released(token));
    child.release(name.as_str()).await?;
    Ok(ControlFlow::Continue(()))
}
