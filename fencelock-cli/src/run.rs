//! `fencelock run`: a command under a lock.

use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal, stderr};
use std::process::ExitCode;
use std::time::Duration;

use fencelock::{LockError, LockName, Locks, LossReason, Mode, ReleaseOutcome};
use nix::unistd::getpgrp;
use rustix::fs::{Mode as Permissions, OFlags, open};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, setpgid, wait};
use tokio::signal::unix::{Signal as Children, SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval, sleep, sleep_until, timeout};

use crate::arguments::Run;
use crate::exit::{Failure, LOST, by_signal};
use crate::guard::Guard;
use crate::locks::held_by;
use crate::manual::NO_COMMAND;
use crate::place::Place;
use crate::say::{is_quiet, remark, say};
use crate::signals::{Received, Signals, die_of_interrupt, write_from_background};
use crate::starter::Starter;
use crate::target::Target;
use crate::timing::{Instant, Times, Timing, shown};
use crate::watchdog::{KILL_TAKES, Watchdog};

/// The acquisitions that the command runs under, separated by blanks: those of each `fencelock run` around it.
const OWNERS: &str = "FENCELOCK_OWNER";

/// For how long what the command left behind may take to end by itself.
const SETTLE: Duration = Duration::from_millis(200);

/// Between looks at whether anything is left of the command, at first and later.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LOOK: Duration = Duration::from_millis(100);

/// Waits for the lock, runs the command under it, and releases it.
pub(crate) async fn run(place: &Place, run: Run) -> Result<ExitCode, Failure> {
    let name = LockName::new(&run.name).map_err(LockError::from)?;
    if run.max_hold.is_some_and(|longest| longest.is_zero()) {
        return Err(Failure::usage(
            "--max-hold is zero, so that the command would have no time",
        ));
    }
    let timing = Timing::fit(run.ttl.min(run.max_hold.unwrap_or(Duration::MAX)), run.grace)?;
    let command = command(run.command.clone(), run.shell)?;
    let failed = |e: io::Error| Failure::unavailable(format!("signals cannot be received: {e}"));
    let mut signals = Signals::listen().map_err(failed)?;
    // It also has the system keep the exit codes of children, where the caller ignores this signal.
    let children = signal(SignalKind::child()).map_err(failed)?;
    let patience = if run.no_wait { Some(Duration::ZERO) } else { run.wait };
    let locks = place.patient_client(patience.unwrap_or(Duration::MAX))?;
    refuse_own_lock(&locks, &run).await?;
    let guard = match acquire(&locks, &run, place, &mut signals).await {
        Ok(Ok(guard)) => guard,
        Ok(Err(signal)) => {
            leave(&locks).await;
            if signal.typed && signal.number == Signal::INT.as_raw() {
                die_of_interrupt();
            }
            return Ok(ExitCode::from(by_signal(signal.number)));
        }
        Err(LockError::TimedOut { holder, .. }) => {
            // Not every server says in its answer who the holder is.
            let holder = match holder {
                Some(holder) => Some(*holder),
                None => locks.holder(&run.name).await.ok().flatten(),
            };
            let by = holder.map(|holder| held_by(&holder)).unwrap_or_default();
            return Err(Failure::remark(run.conflict_exit_code, format!("{name} is busy{by}")));
        }
        Err(error) => {
            if !error.is_retryable() {
                // A release of what may have been asked for fails in the same way, and is not to be tried again until this process ends.
                leave(&locks).await;
            }
            return Err(error.into());
        }
    };
    let job = Job::start(&guard, place, &run, &command, timing, signals, children).await;
    let mut job = match job {
        Ok(job) => job,
        Err(failure) => {
            let _ = timeout(LEAVING, guard.release()).await;
            return Err(failure);
        }
    };
    let mut end = job.run(&guard).await;
    let (ttl, signal) = (guard.ttl(), guard.lost());
    let released = guard.release().await;
    if let (Ok(ReleaseOutcome::AlreadyLost), None) = (&released, &end.cause) {
        // The command had ended by then.
        end.cause = match timeout(Duration::ZERO, signal.wait()).await {
            Ok(LossReason::Expired) | Err(_) => None,
            Ok(LossReason::Released) => Some(Cause::Lost(LossReason::NotHeld)),
            Ok(reason) => Some(Cause::Lost(reason)),
        };
        end.ended_before = true;
    }
    job.watchdog.done();
    if let (Err(error), None) = (&released, &end.cause) {
        let failure = Failure::from(error.clone());
        say(format_args!("{failure}; the lock frees itself within {}", shown(ttl)));
    }
    if end.cause.is_some() {
        leave(&locks).await;
    }
    Ok(report(&name, &end, released.err()))
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
    let is_own = holder
        .owner
        .is_some_and(|owner| owners.split(' ').any(|own| own == owner.to_string()));
    let together = match holder.mode {
        Mode::Shared => run.shared,
        Mode::Permit { .. } => run.max_holders.is_some(),
        _ => false,
    };
    if is_own && !holder.is_reserved && !together {
        return Err(Failure::new(
            run.conflict_exit_code,
            format!(
                "{} is held by the `fencelock run` that this one runs inside of, and would wait for itself; locks are not re-entrant",
                run.name
            ),
        ));
    }
    Ok(())
}

/// Waits for the lock, or for a signal. Tells a person at a terminal after a second what is waited for.
async fn acquire(
    locks: &Locks,
    run: &Run,
    place: &Place,
    signals: &mut Signals,
) -> Result<Result<Guard, Received>, LockError> {
    let mut acquiring = Guard::acquire(locks, run);
    let mut is_told = is_quiet() || !stderr().is_terminal();
    let second = tokio::time::Instant::now() + Duration::from_secs(1);
    loop {
        tokio::select! {
            biased;
            signal = signals.receive() => return Ok(Err(signal)),
            answer = &mut acquiring => return answer.map(Ok),
            () = sleep_until(second), if !is_told => {
                is_told = true;
                let holder = locks.holder(&run.name).await.ok().flatten();
                let by = holder.map(|holder| held_by(&holder)).unwrap_or_default();
                say(format_args!("waiting for {}{by}, in {place}", run.name));
            }
        }
    }
}

/// For how long what is under way on the server is taken back at most: it ends by itself.
const LEAVING: Duration = Duration::from_secs(2);

pub(crate) async fn leave(locks: &Locks) {
    let _ = timeout(LEAVING, locks.shutdown()).await;
}

/// Why a command is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Lost(LossReason),
    /// The lock could not be renewed before the command had to be ended.
    Late,
    /// The watchdog cannot be replaced.
    Unwatched,
}

/// What became of the command.
#[derive(Clone, Copy)]
struct End {
    /// None if it runs on.
    status: Option<WaitStatus>,
    cause: Option<Cause>,
    /// The command ended before the cause came.
    ended_before: bool,
    /// Processes that it left behind were ended with it.
    had_leftovers: bool,
    /// Why processes are left that got SIGKILL.
    left: Option<&'static str>,
    /// Ctrl-C was typed.
    interrupted: bool,
}

/// A command that runs under a lock.
struct Job {
    watchdog: Watchdog,
    target: Target,
    timing: Timing,
    max_hold: Option<Instant>,
    signals: Signals,
    children: Children,
    end: End,
}

impl Job {
    async fn start(
        guard: &Guard,
        place: &Place,
        run: &Run,
        command: &[OsString],
        timing: Timing,
        signals: Signals,
        children: Children,
    ) -> Result<Self, Failure> {
        // A lock on a lease that others use as well may come with little time left.
        if guard.remaining() < guard.ttl() / 2 && run.max_hold.is_none() {
            guard.renew_now().await?;
        }
        let failed = |e: io::Error| Failure::unavailable(format!("no process can be started: {e}"));
        let times = timing.times(lease_end(guard));
        let mut watchdog = Watchdog::start(guard, place, run.min_hold.is_some(), times).map_err(failed)?;
        let inherited = env::var(OWNERS).map(|owners| owners + " ").unwrap_or_default();
        let mut set = vec![
            ("FENCELOCK_NAME", guard.name().to_string()),
            (OWNERS, format!("{inherited}{}", guard.owner())),
        ];
        set.extend(guard.token().map(|token| ("FENCELOCK_TOKEN", token.to_string())));
        // Without a terminal the command has a group of its own.
        let shared = has_terminal().then(own_group).flatten();
        let starter = match Starter::start(command, &set, &signals.blocked(), shared.is_none()) {
            Ok(starter) => starter,
            Err(error) => {
                watchdog.done();
                return Err(failed(error));
            }
        };
        let target = Target {
            command: starter.pid,
            group: shared.unwrap_or(starter.pid),
        };
        watchdog.watch(target);
        if Instant::now() >= times.term_at || !guard.is_held() {
            watchdog.done();
            let name = guard.name();
            let why = match timeout(Duration::ZERO, guard.lost().wait()).await {
                Ok(reason) => format!("the lock {name} was lost: {reason}"),
                Err(_) => format!("the lock {name} might have ended before the command was started"),
            };
            return Err(Failure::new(LOST, format!("{why}; the command was not started")));
        }
        starter.go();
        tracing::debug!(target: "fencelock", pid = %target.command.as_raw_nonzero(), owner = %guard.owner(), "command started");
        Ok(Self {
            watchdog,
            target,
            timing,
            max_hold: run.max_hold.map(|longest| Instant::now().after(longest)),
            signals,
            children,
            end: End {
                status: None,
                cause: None,
                ended_before: false,
                had_leftovers: false,
                left: None,
                interrupted: false,
            },
        })
    }

    /// Keeps the lock until the command, and what it has left in its group, has ended.
    async fn run(&mut self, guard: &Guard) -> End {
        let loss = guard.lost();
        let mut look = interval((guard.ttl() / 20).clamp(Duration::from_millis(5), Duration::from_secs(1)));
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.end.status.is_none() && !self.is_given_up() {
            tokio::select! {
                biased;
                _ = self.children.recv() => self.reap(),
                signal = self.signals.receive() => self.pass_on(signal),
                reason = loss.wait(), if self.end.cause.is_none() => self.ended_by(match reason {
                    LossReason::Expired => Cause::Late,
                    reason => Cause::Lost(reason),
                }),
                _ = look.tick() => {}
            }
            self.look_at_time(guard);
        }
        self.end_leftovers(guard).await;
        self.end
    }

    /// Tells the watchdog of a renewal, or notices that it acts by now.
    fn look_at_time(&mut self, guard: &Guard) {
        if self.end.cause.is_some() {
            return;
        }
        if Instant::now() >= self.watchdog.times.term_at {
            return self.ended_by(Cause::Late);
        }
        let times = self.timing.times(lease_end(guard));
        // What is left falls as time passes, so a difference is a renewal, or the inaccuracy of two readings.
        if guard.is_held() && times.kill_at.since(self.watchdog.times.kill_at) > Duration::from_millis(1) {
            let without_grace =
                self.watchdog.times.term_at == self.watchdog.times.kill_at && self.timing.grace > Duration::ZERO;
            self.watchdog
                .set(if without_grace { times.without_grace() } else { times });
        }
    }

    /// The command has to go.
    fn ended_by(&mut self, mut cause: Cause) {
        let end = self.watchdog.times.kill_at.after(self.timing.margin);
        if cause == Cause::Late && self.max_hold.is_some_and(|longest| end.after(KILL_TAKES) >= longest) {
            cause = Cause::Lost(LossReason::MaxHold);
        }
        self.end.cause = Some(cause);
        self.end_now();
        if self.target.is_shared() {
            // This process outlives the group, to say what has happened, and to release the lock.
            write_from_background();
            let _ = setpgid(None, self.watchdog.pid());
        }
    }

    /// SIGTERM now, and the grace from now on.
    fn end_now(&mut self) {
        let kill_at = self.watchdog.times.kill_at;
        let term_at = kill_at.before(self.timing.grace);
        self.watchdog.set(Times { term_at, kill_at }.now());
    }

    /// Whether even SIGKILL had no effect.
    fn is_given_up(&self) -> bool {
        self.end.cause.is_some() && Instant::now() >= self.watchdog.times.kill_at.after(KILL_TAKES)
    }

    /// Takes note of children that have ended, or of a watchdog that was stopped.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if Some(pid) == self.watchdog.pid() {
                self.look_after_watchdog(pid, status);
            } else if pid == self.target.command && !status.stopped() {
                self.end.status = Some(status);
            }
        }
    }

    fn look_after_watchdog(&mut self, pid: Pid, status: WaitStatus) {
        if status.stopped() {
            // It guards nothing until it goes on.
            let _ = kill_process(pid, Signal::CONT);
            return;
        }
        tracing::warn!(target: "fencelock", ?status, "the watchdog of the command was ended; another one is started");
        if let Err(error) = self.watchdog.replace() {
            say(format_args!(
                "no process can be started that would end the command in time: {error}"
            ));
            self.ended_by(Cause::Unwatched);
            let _ = match own_group() == Some(self.target.group) {
                true => kill_process(self.target.command, Signal::KILL),
                false => self.target.signal(Signal::KILL),
            };
        }
    }

    fn pass_on(&mut self, signal: Received) {
        self.end.interrupted |= signal.typed && signal.number == Signal::INT.as_raw();
        let Some(named) = Signal::from_named_raw(signal.number) else {
            return;
        };
        let passed_on = match self.target.is_shared() {
            // It has got it from the terminal.
            true if signal.typed => return,
            true => kill_process(self.target.command, named),
            false => self.target.signal(named),
        };
        tracing::debug!(target: "fencelock", signal = signal.number, ?passed_on, "passed on");
        // The watchdog's own SIGTERM reaches this process too if it shares the group.
        let is_late = Instant::now() >= self.watchdog.times.term_at;
        if named == Signal::TERM && self.end.cause.is_none() && !is_late {
            // Whoever kills this process next has waited for the end of the command. A `fencelock run` around this one does that
            // when its own lock ends, and everything below it has to go then.
            self.watchdog.set(self.watchdog.times.without_grace());
        }
    }

    /// The command has ended: what it has left in a group of its own ends with it.
    async fn end_leftovers(&mut self, guard: &Guard) {
        let is_ended = self.end.cause.is_some();
        if self.target.is_shared() && (!is_ended || own_group() == Some(self.target.group)) {
            // The group is the whole job, and this process is in it.
            self.end.left = (self.end.status.is_none()).then(|| self.target.why_left());
            return;
        }
        let settled = Instant::now().after(SETTLE);
        let mut look = FIRST_LOOK;
        while self.target.is_left() {
            let is_due = Instant::now() >= settled || !guard.is_held();
            if self.end.cause.is_none() && !self.end.had_leftovers && is_due {
                self.end.had_leftovers = true;
                self.end_now();
            }
            let is_told = self.end.cause.is_some() || self.end.had_leftovers;
            if is_told && Instant::now() >= self.watchdog.times.kill_at.after(KILL_TAKES) {
                self.end.left = Some(self.target.why_left());
                return;
            }
            tokio::select! {
                signal = self.signals.receive() => self.pass_on(signal),
                () = sleep(look) => look = LOOK.min(look * 2),
            }
            self.reap();
        }
    }
}

/// When the lock ends unless it is renewed. The clock is read first, so that it is never later than in truth.
fn lease_end(guard: &Guard) -> Instant {
    let now = Instant::now();
    now.after(guard.remaining())
}

/// The group of this process, if it has a number in this pid namespace.
fn own_group() -> Option<Pid> {
    Pid::from_raw(getpgrp().as_raw())
}

/// Whether this process has a terminal.
fn has_terminal() -> bool {
    open(
        "/dev/tty",
        OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
        Permissions::empty(),
    )
    .is_ok()
}

/// Says what became of the command, and of its lock if `trouble` came up in its release.
fn report(name: &LockName, end: &End, trouble: Option<LockError>) -> ExitCode {
    if let Some(cause) = end.cause {
        let what = match cause {
            Cause::Lost(LossReason::MaxHold) => format!("the lock {name} was held for as long as --max-hold permits"),
            Cause::Lost(reason) => format!("the lock {name} was lost: {reason}"),
            Cause::Unwatched => format!("the lock {name} could not be guarded any more"),
            Cause::Late => {
                // What keeps it from being released has most likely kept it from being renewed.
                let trouble = trouble
                    .map(|error| format!(" ({})", Failure::from(error)))
                    .unwrap_or_default();
                format!("the lock {name} could not be renewed in time{trouble}")
            }
        };
        let fate = match (end.left, end.status) {
            (Some(why), None) => format!("the command was told to end, and runs on without the lock: {why}"),
            (Some(why), Some(_)) => format!("the command was ended, but processes that it had started run on: {why}"),
            _ if end.ended_before => "the command had just ended".to_owned(),
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
    let Some(status) = end.status else {
        return ExitCode::from(LOST);
    };
    match status.terminating_signal() {
        Some(signal) => {
            if end.interrupted && signal == Signal::INT.as_raw() {
                // A shell shows 130 either way, and ends its loop or script only if this process dies of the signal.
                die_of_interrupt();
            }
            ExitCode::from(by_signal(signal))
        }
        None => ExitCode::from(status.exit_status().unwrap_or_default() as u8),
    }
}
