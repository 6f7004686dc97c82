//! `fencelock run`: a command under a lock.

use std::env;
use std::ffi::OsString;
use std::io::{IsTerminal, stderr};
use std::process::ExitCode;
use std::time::Duration;

use fencelock::{LockError, LockName, LockRequest, Locks, LossReason, Mode, ReleaseOutcome};
use rustix::process::Signal;
use tokio::time::{sleep, timeout};

use crate::args::Run;
use crate::exit::{Failure, LOST, by_signal};
use crate::guard::{Guard, loss};
use crate::job::{Cause, End, Job, OWNERS};
use crate::location::{LEAVING, Location, leave};
use crate::locks::held_by;
use crate::manual::NO_COMMAND;
use crate::output::{is_quiet, remark, say};
use crate::signals::{Received, Signals, die_of_interrupt};
use crate::timing::{Timing, shown};

/// Waits for the lock, runs the command under it, and releases it.
pub(crate) async fn run(location: &Location, run: Run) -> Result<ExitCode, Failure> {
    let name = LockName::new(&run.name).map_err(LockError::from)?;
    if run.max_hold.is_some_and(|longest| longest.is_zero()) {
        return Err(Failure::usage(
            "--max-hold is zero, so that the command would have no time",
        ));
    }
    if run.min_hold > Some(LockRequest::MAX_AT_LEAST) {
        let longest = shown(LockRequest::MAX_AT_LEAST);
        return Err(Failure::usage(format!(
            "--min-hold is too long; give at most {longest}"
        )));
    }
    let timing = Timing::fit(run.ttl.min(run.max_hold.unwrap_or(Duration::MAX)), run.grace);
    let timing = timing.map_err(Failure::usage)?;
    let command = command(&run)?;
    let signals = Signals::listen();
    let mut signals = signals.map_err(|e| Failure::unavailable(format!("signals cannot be received: {e}")))?;
    let patience = if run.no_wait { Some(Duration::ZERO) } else { run.wait };
    let locks = location.patient_client(patience.unwrap_or(Duration::MAX))?;
    let guard = match acquire(&locks, &run, location, &mut signals).await? {
        Ok(guard) => guard,
        Err(signal) => {
            leave(&locks).await;
            if signal.is_ctrl_c() {
                die_of_interrupt();
            }
            return Ok(ExitCode::from(by_signal(signal.number)));
        }
    };
    let mut job = match Job::start(&guard, location, &run, &command, timing, signals).await {
        Ok(job) => job,
        Err(failure) => {
            let _ = timeout(LEAVING, guard.release()).await;
            return Err(failure);
        }
    };
    job.run(&guard).await;
    let (signal, ttl) = (guard.lost(), guard.ttl());
    let released = guard.release().await;
    let mut end = job.done();
    match (&released, &end.cause) {
        (Ok(ReleaseOutcome::AlreadyLost), None) => {
            // The command had ended by then.
            let reason = loss(&signal).await.filter(|reason| *reason != LossReason::Expired);
            end.cause = reason.map(|reason| match reason {
                LossReason::Released => Cause::Lost(LossReason::NotHeld),
                reason => Cause::Lost(reason),
            });
            end.was_over = true;
        }
        (Err(error), None) => {
            let (failure, ttl) = (Failure::from(error.clone()), shown(ttl));
            say(format_args!("{failure}; the lock frees itself within {ttl}"));
        }
        _ => {}
    }
    if end.cause.is_some() {
        leave(&locks).await;
    }
    Ok(report(&name, &end, released.err()))
}

/// The command and its arguments.
fn command(run: &Run) -> Result<Vec<OsString>, Failure> {
    // A name that begins with `-` comes after a `--` of its own, so this one is the second.
    let given = match run.command.split_first() {
        Some((first, rest)) if first == "--" => rest,
        _ => &run.command,
    };
    match given.split_first() {
        None => Err(Failure::usage(NO_COMMAND)),
        // Without the `--` a line that begins with `-` would be an option. After the line comes its $0.
        Some((line, arguments)) if run.shell => {
            let words = ["/bin/sh".into(), "-c".into(), "--".into(), line.clone(), "sh".into()];
            Ok([&words, arguments].concat())
        }
        Some(_) => Ok(given.to_vec()),
    }
}

/// Fails if the lock is held by a `fencelock run` that this one runs inside of: waiting for it would never end.
async fn refuse_own_lock(locks: &Locks, run: &Run) -> Result<(), Failure> {
    let owners = env::var(OWNERS).unwrap_or_default();
    if owners.is_empty() {
        return Ok(());
    }
    // What keeps the holder from being seen is told by the request.
    let Ok(Some(holder)) = locks.holder(&run.name).await else {
        return Ok(());
    };
    let owner = holder.owner.map(|owner| owner.to_string());
    let is_own = owner.is_some_and(|owner| owners.split(' ').any(|own| own == owner));
    let together = match holder.mode {
        Mode::Shared => run.shared,
        Mode::Permit { .. } => run.max_holders.is_some(),
        _ => false,
    };
    if !is_own || holder.is_reserved || together {
        return Ok(());
    }
    Err(Failure::new(
        run.conflict_exit_code,
        format!(
            "{} is held by the `fencelock run` that this one runs inside of, and would wait for itself; locks are not re-entrant",
            run.name
        ),
    ))
}

/// Waits for the lock, or for a signal. Tells a person at a terminal after a second what is waited for.
async fn acquire(
    locks: &Locks,
    run: &Run,
    location: &Location,
    signals: &mut Signals,
) -> Result<Result<Guard, Received>, Failure> {
    let acquiring = ask(locks, run);
    let telling = async {
        sleep(Duration::from_secs(1)).await;
        let by = who_holds(locks, run).await;
        say(format_args!("waiting for {}{by}, in {location}", run.name));
    };
    tokio::pin!(acquiring, telling);
    let mut is_told = is_quiet() || !stderr().is_terminal();
    loop {
        tokio::select! {
            biased;
            signal = signals.receive() => return Ok(Err(signal)),
            answer = &mut acquiring => return answer.map(Ok),
            () = &mut telling, if !is_told => is_told = true,
        }
    }
}

/// Asks for the lock, and says why it is not granted.
async fn ask(locks: &Locks, run: &Run) -> Result<Guard, Failure> {
    refuse_own_lock(locks, run).await?;
    match Guard::acquire(locks, run).await {
        Ok(guard) => Ok(guard),
        Err(LockError::TimedOut { holder, .. }) => {
            // Not every server says in its answer who the holder is.
            let by = match holder {
                Some(holder) => held_by(&holder),
                None => who_holds(locks, run).await,
            };
            let busy = format!("{} is busy{by}", run.name);
            Err(Failure::remark(run.conflict_exit_code, busy))
        }
        Err(error) => {
            if !error.is_retryable() {
                // A release of what may have been asked for fails in the same way, and is not to be tried again until this process ends.
                leave(locks).await;
            }
            Err(error.into())
        }
    }
}

/// `, held by ...`, or nothing if that is not to be seen within a second.
async fn who_holds(locks: &Locks, run: &Run) -> String {
    let holder = timeout(Duration::from_secs(1), locks.holder(&run.name)).await;
    let holder = holder.ok().and_then(Result::ok).flatten();
    holder.map(|holder| held_by(&holder)).unwrap_or_default()
}

/// Says what became of the command, and of its lock if `trouble` came up in its release.
fn report(name: &LockName, end: &End, trouble: Option<LockError>) -> ExitCode {
    if let Some(cause) = end.cause {
        let what = match cause {
            Cause::Unwatched => format!("the lock {name} could not be guarded any more"),
            Cause::Lost(LossReason::MaxHold) => format!("the lock {name} was held for as long as --max-hold permits"),
            Cause::Lost(LossReason::Expired) => {
                // What keeps it from being released has most likely kept it from being renewed.
                let trouble = trouble.map(|error| format!(" ({})", Failure::from(error)));
                format!(
                    "the lock {name} could not be renewed in time{}",
                    trouble.unwrap_or_default()
                )
            }
            Cause::Lost(reason) => format!("the lock {name} was lost: {reason}"),
        };
        let fate = match (end.left, end.status) {
            (Some(why), None) => format!("the command was told to end, and runs on without the lock: {why}"),
            (Some(why), Some(_)) => format!("the command was ended, but processes that it had started run on: {why}"),
            _ if end.was_over => "the command had just ended".to_owned(),
            _ => "the command was ended".to_owned(),
        };
        say(format_args!("{what}; {fate}"));
        return ExitCode::from(LOST);
    }
    match (end.had_leftovers, end.left) {
        (true, None) => remark(
            "the command ended, but processes that it had started still ran, such as jobs in the background; they were ended, as the lock \
             ends with the command (start with setsid what is to stay)",
        ),
        (true, Some(why)) => say(format_args!(
            "the command ended, but processes that it had started run on without the lock: {why}"
        )),
        (false, _) => {}
    }
    match end.status.and_then(|status| status.terminating_signal()) {
        Some(signal) => {
            if end.interrupted && signal == Signal::INT.as_raw() {
                // A shell shows 130 either way, and ends its loop or script only if this process dies of the signal.
                die_of_interrupt();
            }
            ExitCode::from(by_signal(signal))
        }
        None => {
            let code = end.status.and_then(|status| status.exit_status());
            ExitCode::from(code.map_or(LOST, |code| code as u8))
        }
    }
}
