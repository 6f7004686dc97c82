//! The command while it runs, and its end.

use std::env;
use std::ffi::OsString;
use std::io;
use std::time::Duration;

use fencelock::LossReason;
use nix::unistd::getpgrp;
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, setpgid, wait};
use tokio::signal::unix::{Signal as Children, SignalKind, signal};
use tokio::time::sleep;

use crate::args::Run;
use crate::command::{Starter, Target};
use crate::exit::{Failure, LOST};
use crate::guard::{Guard, loss};
use crate::location::Location;
use crate::output::say;
use crate::signals::{Received, Signals, write_from_background};
use crate::timing::{Instant, Times, Timing, now};
use crate::watchdog::{KILL_TAKES, Watchdog};

/// The acquisitions that the command runs under, separated by blanks: those of each `fencelock run` around it.
pub(crate) const OWNERS: &str = "FENCELOCK_OWNER";

/// For how long what the command left behind may take to end by itself.
const SETTLE: Duration = Duration::from_millis(200);

/// Between looks at the lock, and at whether anything is left of the command.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LAST_LOOK: Duration = Duration::from_millis(100);

/// Why a command is ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cause {
    /// With `Expired` the lock could not be renewed before the command had to be ended.
    Lost(LossReason),
    /// The watchdog cannot be replaced.
    Unwatched,
}

/// What became of the command.
#[derive(Debug, Default)]
pub(crate) struct End {
    /// None if it runs on.
    pub(crate) status: Option<WaitStatus>,
    pub(crate) cause: Option<Cause>,
    /// The command had ended before the cause came.
    pub(crate) was_over: bool,
    /// Processes that it left behind were ended with it.
    pub(crate) had_leftovers: bool,
    /// Why processes are left that got SIGKILL.
    pub(crate) left: Option<&'static str>,
    /// Ctrl-C was typed.
    pub(crate) interrupted: bool,
}

/// A command that runs under a lock.
pub(crate) struct Job {
    watchdog: Watchdog,
    target: Target,
    timing: Timing,
    /// It was told to end before, and gets no further grace if this process is killed.
    was_told: bool,
    /// Between looks at the lock.
    look: Duration,
    max_hold: Option<Instant>,
    signals: Signals,
    /// Tells of children that have ended or were stopped. It also has the system keep their exit codes, where the caller ignores this signal.
    children: Children,
    pub(crate) end: End,
}

impl Job {
    pub(crate) async fn start(
        guard: &Guard,
        location: &Location,
        run: &Run,
        command: &[OsString],
        timing: Timing,
        signals: Signals,
    ) -> Result<Self, Failure> {
        // A lock on a lease that others use as well may come with little time left.
        if guard.remaining() < run.ttl / 2 && run.max_hold.is_none() {
            guard.renew_now().await?;
        }
        let failed = |e: io::Error| Failure::unavailable(format!("no process can be started: {e}"));
        let children = signal(SignalKind::child()).map_err(failed)?;
        // Without a terminal the command has a group of its own.
        let shared = has_terminal().then(own_group).flatten();
        let timing = if shared.is_some() {
            timing.in_shared_group()
        } else {
            timing
        };
        let name = &run.name;
        let around = env::var(OWNERS).map(|owners| owners + " ").unwrap_or_default();
        let owners = format!("{around}{}", guard.owner());
        let token = guard.token().map(|token| ("FENCELOCK_TOKEN", token.to_string()));
        let set = [("FENCELOCK_NAME", name.clone()), (OWNERS, owners)]
            .into_iter()
            .chain(token);
        let starter = Starter::start(command, set, &signals.blocked(), shared.is_none()).map_err(failed)?;
        let target = Target {
            command: starter.pid,
            group: shared.unwrap_or(starter.pid),
        };
        let times = Times::new(lease_end(guard).saturating_sub(timing.margin), timing.grace);
        let owner = run.min_hold.is_none().then(|| guard.owner());
        let watchdog = match Watchdog::start(name, owner, location, target, times) {
            Ok(watchdog) => watchdog,
            Err(error) => {
                starter.end();
                return Err(failed(error));
            }
        };
        if now() >= times.term_at || guard.remaining().is_zero() {
            starter.end();
            watchdog.done();
            let why = match loss(&guard.lost()).await {
                Some(reason) => format!("the lock {name} was lost: {reason}"),
                None => format!("the lock {name} might have ended before the command was started"),
            };
            return Err(Failure::new(LOST, format!("{why}; the command was not started")));
        }
        starter.go();
        tracing::debug!(target: "fencelock", pid = %target.command.as_raw_nonzero(), owner = %guard.owner(), "command started");
        Ok(Self {
            watchdog,
            target,
            timing,
            was_told: false,
            look: (run.ttl / 20).clamp(FIRST_LOOK, Duration::from_secs(1)),
            max_hold: run.max_hold.map(|longest| now().saturating_add(longest)),
            signals,
            children,
            end: End::default(),
        })
    }

    /// Keeps the lock until the command, and what it has left in its group, has ended.
    pub(crate) async fn run(&mut self, guard: &Guard) {
        let loss = guard.lost();
        while self.end.status.is_none() && !self.is_given_up() {
            // On time for SIGTERM, so that this process leaves a group that it shares before SIGKILL.
            let left = self.watchdog.times.term_at.saturating_sub(now());
            let look = if self.end.cause.is_none() {
                self.look.min(left)
            } else {
                self.look
            };
            tokio::select! {
                biased;
                _ = self.children.recv() => self.reap(),
                signal = self.signals.receive() => self.pass_on(signal),
                reason = loss.wait(), if self.end.cause.is_none() => self.ended_by(Cause::Lost(reason)),
                () = sleep(look) => {}
            }
            self.look_at_time(guard);
        }
        // What has ended the command may be told after its end.
        while let Some(signal) = self.signals.arrived() {
            self.pass_on(signal);
        }
        self.end_leftovers(guard).await;
        // A release may last longer than the lease. Nothing is to be ended then, least of all the group that a command on a terminal shares.
        if self.end.cause.is_none() && self.end.left.is_none() {
            self.watchdog.set(Times::never());
        }
    }

    /// What became of the command, once its lock is released. Nothing is left to watch.
    pub(crate) fn done(self) -> End {
        self.watchdog.done();
        self.end
    }

    /// Tells the watchdog of a renewal, or notices that it acts by now.
    fn look_at_time(&mut self, guard: &Guard) {
        if self.end.cause.is_some() {
            return;
        }
        if now() >= self.watchdog.times.term_at {
            return self.ended_by(Cause::Lost(LossReason::Expired));
        }
        let kill_at = lease_end(guard).saturating_sub(self.timing.margin);
        // What is left falls as time passes, so a difference is a renewal, or the inaccuracy of two readings.
        if kill_at.saturating_sub(self.watchdog.times.kill_at) > Duration::from_millis(1) {
            self.end_at(kill_at);
        }
    }

    /// Has the watchdog end the command by then.
    fn end_at(&mut self, kill_at: Instant) {
        let grace = if self.was_told {
            self.timing.shortest_grace
        } else {
            self.timing.grace
        };
        self.watchdog.set(Times::new(kill_at, grace));
    }

    /// The command has to go.
    fn ended_by(&mut self, mut cause: Cause) {
        let end = self.watchdog.times.kill_at + self.timing.margin + KILL_TAKES;
        if matches!(cause, Cause::Lost(LossReason::Expired)) && self.max_hold.is_some_and(|longest| end >= longest) {
            cause = Cause::Lost(LossReason::MaxHold);
        }
        self.end.cause = Some(cause);
        if self.target.is_shared() {
            // This process outlives the group, to say what has happened, and to release the lock.
            write_from_background();
            let _ = setpgid(None, self.watchdog.pid());
        }
        self.end_now();
    }

    /// SIGTERM now, and the grace from now on.
    fn end_now(&mut self) {
        self.watchdog
            .set(Times::new(self.watchdog.times.kill_at, self.timing.grace).now());
    }

    /// Whether even SIGKILL had no effect.
    fn is_given_up(&self) -> bool {
        (self.end.cause.is_some() || self.end.had_leftovers) && now() >= self.watchdog.times.kill_at + KILL_TAKES
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
        self.end.interrupted |= signal.is_ctrl_c();
        let Some(named) = Signal::from_named_raw(signal.number) else {
            return;
        };
        let passed_on = match self.target.is_shared() {
            // It has got it from the terminal, or is gone, and its number may be that of another process.
            true if signal.typed || self.end.status.is_some() => return,
            true => kill_process(self.target.command, named),
            false => self.target.signal(named),
        };
        tracing::debug!(target: "fencelock", signal = signal.number, ?passed_on, "passed on");
        // The watchdog's own SIGTERM reaches this process too if it shares the group.
        let is_late = now() >= self.watchdog.times.term_at;
        if named == Signal::TERM && self.end.cause.is_none() && !is_late {
            // A process that kills this one next has waited for the end of the command. A `fencelock run` around this one does that
            // when its own lock ends, and everything below it has to go then.
            self.was_told = true;
            self.end_at(self.watchdog.times.kill_at);
        }
    }

    /// The command has ended: what it has left in a group of its own ends with it.
    async fn end_leftovers(&mut self, guard: &Guard) {
        if self.target.is_shared() && (self.end.cause.is_none() || own_group() == Some(self.target.group)) {
            // The group is the whole job, and this process is in it.
            self.end.left = (self.end.status.is_none()).then(|| self.target.why_left());
            return;
        }
        let settled = now() + SETTLE;
        let mut look = FIRST_LOOK;
        while self.target.is_left() {
            let is_due = now() >= settled || guard.remaining().is_zero();
            if self.end.cause.is_none() && !self.end.had_leftovers && is_due {
                self.end.had_leftovers = true;
                self.end_now();
            }
            if self.is_given_up() {
                self.end.left = Some(self.target.why_left());
                return;
            }
            tokio::select! {
                signal = self.signals.receive() => self.pass_on(signal),
                () = sleep(look) => look = LAST_LOOK.min(look * 2),
            }
            self.reap();
        }
    }
}

/// When the lock ends unless it is renewed. The clock is read first, so that it is never later than in truth.
fn lease_end(guard: &Guard) -> Instant {
    let now = now();
    now + guard.remaining()
}

/// The group of this process, if it has a number in this pid namespace.
fn own_group() -> Option<Pid> {
    Pid::from_raw(getpgrp().as_raw())
}

/// Whether this process has a terminal.
fn has_terminal() -> bool {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    open("/dev/tty", flags, Mode::empty()).is_ok()
}
