//! `fencelock run`: a command under a lock.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use fencelock::{LockError, LockGuard, LockName, Locks, LossReason, ReleaseOutcome};
use rustix::process::{Signal, kill_current_process_group};

use crate::arguments::Run;
use crate::channel::{End, Why};
use crate::exit::{Failure, LOST, UNAVAILABLE, by_signal};
use crate::locker::{Locker, Outcome};
use crate::manual::NO_COMMAND;
use crate::place::Place;
use crate::processes::proc_is_ours;
use crate::say::{remark, say};
use crate::signals::Signals;
use crate::terminal::Terminal;
use crate::timing::{Timing, shown};
use crate::waiting::{self, Waited};

/// Waits for the lock, runs the command under it, lets go.
pub(crate) async fn run(place: &Place, run: Run) -> Result<ExitCode, Failure> {
    let name = LockName::new(&run.name).map_err(LockError::from)?;
    let timing = Timing::fit(run.ttl, run.grace)?;
    let command = command(run.command, run.shell)?;
    if !proc_is_ours() {
        return Err(Failure::configuration(
            "/proc does not show the processes of this pid namespace, so that what the command leaves behind could not be found \
             and ended; mount it anew, as `unshare --mount-proc` does",
        ));
    }
    let failed = |e| Failure::unavailable(format!("signals cannot be received: {e}"));
    let mut signals = Signals::listen().map_err(failed)?;
    let patience = if run.no_wait { Some(Duration::ZERO) } else { run.wait };
    let locks = place.patient_client(patience.unwrap_or(Duration::MAX))?;

    let mut request = locks.lock(&run.name).ttl(run.ttl);
    if let Some(label) = run.label {
        request = request.label(label);
    }
    request = match run.wait {
        _ if run.no_wait => request.no_wait(),
        Some(limit) => request.wait_for(limit),
        None => request.wait_forever(),
    };
    if let Some(length) = run.at_least {
        request = request.at_least(length);
    }
    let guard = match waiting::acquire(&locks, &name, place, request, &mut signals).await {
        Ok(Waited::Got(guard)) => guard,
        Ok(Waited::Left(signal)) => {
            leave(&locks).await;
            return Ok(died(signal, signal == Signal::INT.as_raw()));
        }
        Err(LockError::TimedOut { holder, .. }) => {
            // Not every server says who it is in the answer. Who cannot be told is left out.
            let holder = match holder {
                Some(holder) => Some(*holder),
                None => locks.holder(name.as_str()).await.ok().flatten(),
            };
            let by = holder.map(|holder| waiting::held_by(&holder)).unwrap_or_default();
            let code = run.conflict_exit_code;
            return Err(Failure::remark(code, format!("{name} is busy{by}")));
        }
        Err(error) => return Err(error.into()),
    };

    let locker = match Locker::start(guard, place, &command, timing, signals, run.at_least.is_some()).await {
        Ok(locker) => locker,
        Err(failure) => {
            leave(&locks).await;
            return Err(failure);
        }
    };
    let (mut outcome, guard, afterwards) = locker.run().await;
    let ttl = guard.ttl();
    let released = let_go(guard).await;
    afterwards.over();
    match &released {
        Ok(lost) if outcome.lost.is_none() && outcome.is_own_end() => outcome.lost = *lost,
        Err(error) if outcome.is_own_end() => {
            say(format_args!("{error:#}; the lock frees itself within {}", shown(ttl)));
        }
        _ => {}
    }
    if outcome.lost.is_some() {
        leave(&locks).await;
    }
    Ok(report(&name, &outcome, released.err()))
}

fn command(mut given: Vec<OsString>, shell: bool) -> Result<Vec<OsString>, Failure> {
    // A name that begins with `-` comes after a `--` of its own, so this one is the second.
    if given.first().is_some_and(|word| word == "--") {
        given.remove(0);
    }
    if given.is_empty() {
        return Err(Failure::usage(NO_COMMAND));
    }
    if !shell {
        return Ok(given);
    }
    let mut line = given.into_iter();
    // Without the `--` a line that begins with `-` would be an option. After the line comes its $0.
    let words = ["/bin/sh", "-c", "--"].map(OsString::from).into_iter();
    Ok(words.chain(line.next()).chain(["sh".into()]).chain(line).collect())
}

/// Lets go of the lock. Says why if it turns out that it was lost while the command ran.
async fn let_go(guard: LockGuard) -> Result<Option<LossReason>, Failure> {
    let signal = guard.lost();
    Ok(match guard.release().await? {
        ReleaseOutcome::AlreadyLost => match signal.wait().await {
            // The command was gone by then: the supervisor sees to it.
            LossReason::Expired => None,
            // The server did not know us any more.
            LossReason::Released => Some(LossReason::NotHeld),
            reason => Some(reason),
        },
        _ => None,
    })
}

/// Takes back on the server what is under way there. Not for long: it ends by itself.
pub(crate) async fn leave(locks: &Locks) {
    let _ = tokio::time::timeout(Duration::from_secs(2), locks.shutdown()).await;
}

/// Says what became of the command, and of its lock if `trouble` came up in letting go of it.
fn report(name: &LockName, outcome: &Outcome, trouble: Option<Failure>) -> ExitCode {
    let Some((how, why)) = outcome.end else {
        return without_supervisor(outcome);
    };
    match (why, outcome.lost) {
        (Why::Deadline, _) => {
            say(at_deadline(name, outcome, trouble));
            ExitCode::from(LOST)
        }
        (Why::Lost | Why::Orphaned, lost) | (_, lost @ Some(_)) => {
            let lost = lost.unwrap_or(LossReason::Expired);
            let ended = if why == Why::Lost {
                "the command was ended"
            } else {
                "the command had just ended"
            };
            say(format_args!("the lock {name} was lost: {lost}; {ended}"));
            ExitCode::from(LOST)
        }
        (why, None) => {
            if why == Why::Leftovers {
                remark("the command left processes behind in its session; they were ended with it");
            }
            match how {
                End::Exited(code) => ExitCode::from(code),
                End::Killed(signal) => {
                    let typed = signal == Signal::INT.as_raw() && outcome.typed_interrupt;
                    if typed && outcome.lent {
                        // Only the command has seen Ctrl-C so far. Scripts and pipelines around it are to end with it.
                        let _ = kill_current_process_group(Signal::INT);
                    }
                    died(signal, typed)
                }
            }
        }
    }
}

/// Says what became of a command whose supervisor ended first.
fn without_supervisor(outcome: &Outcome) -> ExitCode {
    let command = if outcome.started {
        "the command was killed, too"
    } else {
        "the command was not started"
    };
    match outcome.supervisor_killed_by {
        Some(signal) => {
            say(format_args!(
                "the supervisor of the command was killed by signal {signal}, so {command}"
            ));
            ExitCode::from(by_signal(Signal::KILL.as_raw()))
        }
        None => {
            // It has said why.
            let command = command.trim_end_matches(", too");
            say(format_args!(
                "the supervisor of the command ended too early, so {command}"
            ));
            ExitCode::from(UNAVAILABLE)
        }
    }
}

/// What the supervisor's end of the command at the lock's deadline was due to.
fn at_deadline(name: &LockName, outcome: &Outcome, trouble: Option<Failure>) -> String {
    match outcome.lost {
        // The deadline of a lock that is lost has come at once.
        Some(lost) if !outcome.started => format!("the lock {name} was lost: {lost}; the command was not started"),
        None if !outcome.started => {
            format!("the command could not be started before the lock {name} might have ended; it was not started")
        }
        _ => {
            // What keeps it from being released has most likely kept it from being renewed.
            let trouble = trouble.map(|failure| format!(" ({failure})")).unwrap_or_default();
            format!("the lock {name} could not be renewed in time{trouble}; the command was ended before it ran out")
        }
    }
}

/// The exit code for an end by `signal`. If Ctrl-C was typed, this process does not exit but dies of it as well: shells
/// show the same 130 for both, and go on with a loop or a script unless they see the latter.
fn died(signal: i32, typed: bool) -> ExitCode {
    if typed && Terminal::own().is_some_and(|terminal| terminal.is_home()) {
        let _ = signal_hook::low_level::emulate_default_handler(signal);
    }
    ExitCode::from(by_signal(signal))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_ended_before_the_command_began_was_not_renewed_too_late() {
        let name = "a".parse().unwrap();
        let mut outcome = Outcome {
            end: Some((End::Killed(Signal::KILL.as_raw()), Why::Deadline)),
            supervisor_killed_by: None,
            started: false,
            lost: Some(LossReason::Revoked),
            typed_interrupt: false,
            lent: false,
        };
        let said = at_deadline(&name, &outcome, None);
        assert!(
            said.contains("ended the session") && said.contains("not started"),
            "{said}"
        );
        outcome.lost = None;
        assert!(at_deadline(&name, &outcome, None).contains("not started"));
        outcome.started = true;
        assert!(at_deadline(&name, &outcome, None).contains("could not be renewed in time"));
    }
}
