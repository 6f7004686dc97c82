//! The process that ends the command in time if `fencelock` cannot.
//!
//! **Invariant.** From the last `margin` of the lease on, nothing runs in the command's process group, as far as the kernel lets a
//! SIGKILL through, whatever happens to `fencelock`: the watchdog knows the times, and reads the clock that they are measured with.
//!
//! It reads a pipe: lines with the two [times](Times), of which the last counts, and `done` at the end. The end of the pipe without `done`
//! means that `fencelock` was killed: the command is ended now, and then the lock is released, so that it is free before its ttl is over.
//! Once SIGTERM was sent there is no way back.

use std::env::ArgsOs;
use std::io::{self, BufRead, BufReader, IsTerminal, Write, stderr, stdin};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::Duration;

use fencelock::{ENV, LockError, OwnerId};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, pidfd_send_signal, waitpid};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::time::timeout;

use crate::command::Target;
use crate::exit::{Failure, USAGE};
use crate::location::{Location, runtime};
use crate::output::say;
use crate::signals::block_all;
use crate::timing::{Instant, Times, now, shown};

/// What the watchdog is started as, and called in a list of processes. Not `fencelock`, so that `pkill -9 fencelock` does not end it too.
pub(crate) const NAME: &str = "lock-watchdog";

/// Between looks at whether the command has ended, and between tries to release its lock.
const LOOK: Duration = Duration::from_millis(50);

/// For how long SIGKILL may take.
pub(crate) const KILL_TAKES: Duration = Duration::from_secs(1);

/// For how long the release is tried.
const RELEASE_TAKES: Duration = Duration::from_secs(5);

const ZERO: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The watchdog, as `fencelock` sees it.
pub(crate) struct Watchdog {
    command: Command,
    child: Child,
    /// What it knows.
    pub(crate) times: Times,
}

impl Watchdog {
    /// Has a process watch the command, and release that lock. One without an `owner` stays reserved, and is not released.
    pub(crate) fn start(
        name: &str,
        owner: Option<OwnerId>,
        location: &Location,
        target: Target,
        times: Times,
    ) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        let pids = [target.command, target.group].map(|pid| pid.as_raw_nonzero().to_string());
        let owner = owner.map(|owner| owner.to_string()).unwrap_or_default();
        command.arg0(NAME).args([name, &owner]).args(pids);
        // Not as an argument: an address may be secret.
        command.env(ENV, &location.url);
        // Out of reach of the keyboard, and of signals to this process's group.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        let child = command.spawn()?;
        let mut watchdog = Self { command, child, times };
        watchdog.set(times);
        Ok(watchdog)
    }

    pub(crate) fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Replaces the times.
    pub(crate) fn set(&mut self, times: Times) {
        self.times = times;
        let [term_at, kill_at] = [times.term_at, times.kill_at].map(|at| at.as_nanos());
        self.write(&format!("{term_at} {kill_at}\n"));
    }

    /// Ends it, as nothing is left to do. It is waited for: not every init would do so.
    pub(crate) fn done(mut self) {
        self.write("done\n");
        if let Some(pid) = self.pid()
            && matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None))
        {
            // It may be stopped.
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }

    /// Starts another one in the place of one that was ended.
    pub(crate) fn replace(&mut self) -> io::Result<()> {
        self.child = self.command.spawn()?;
        self.set(self.times);
        Ok(())
    }

    fn write(&mut self, line: &str) {
        // If it has ended, that is noticed elsewhere. In one piece, as this process may be killed in between.
        if let Some(pipe) = &mut self.child.stdin {
            let _ = pipe.write_all(line.as_bytes());
        }
    }
}

/// Runs as the watchdog. The arguments are the lock's name and its owner, the command and its group.
pub(crate) fn main(args: ArgsOs) -> ExitCode {
    let _ = rustix::thread::set_name(c"lock-watchdog");
    // It has to outlive the command, also where a service manager signals every process of a service.
    block_all();
    let args: Vec<String> = args.map(|arg| arg.to_string_lossy().into_owned()).collect();
    let [name, owner] = [0, 1].map(|at| args.get(at).map_or("", String::as_str));
    let [command, group] = [2, 3].map(|at| Pid::from_raw(args.get(at)?.parse().ok()?));
    let target = command.zip(group).map(|(command, group)| Target { command, group });
    let watched = target.ok_or_else(not_for_people).and_then(|target| watch(name, target));
    match (watched, owner.parse()) {
        (Ok(true), Ok(owner)) => release(name, owner),
        // What stays reserved has no owner here.
        (Ok(_), _) => {}
        (Err(error), _) => {
            say(format_args!("the watchdog of the lock {name} failed: {error}"));
            return ExitCode::from(USAGE);
        }
    }
    ExitCode::SUCCESS
}

fn not_for_people() -> io::Error {
    io::Error::other("it is started by `fencelock run` only")
}

/// Watches to the end. True if `fencelock` was killed, and nothing is left of the command: the lock is to be released.
fn watch(name: &str, target: Target) -> io::Result<bool> {
    let timer = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC)?;
    let mut pipe = BufReader::new(stdin());
    let mut watched = Watched {
        name,
        target,
        command: pidfd_open(target.command, PidfdFlags::empty()).ok(),
        times: Times::never(),
        phase: Phase::Running,
        warn_at: None,
    };
    loop {
        let mut is_readable = wait(&timer, watched.act())?;
        while is_readable {
            let mut line = String::new();
            if pipe.read_line(&mut line)? == 0 {
                return Ok(watched.end());
            }
            if line == "done\n" {
                return Ok(false);
            }
            watched.set(times(&line).ok_or_else(not_for_people)?);
            // Lines come in one piece each, so that none keeps it waiting.
            is_readable = !pipe.buffer().is_empty();
        }
    }
}

/// Waits until `at`, or until there is a line to be read or the end of the pipe, and says whether there is.
fn wait(timer: &OwnedFd, at: Option<Instant>) -> io::Result<bool> {
    // Zero means never. This clock runs on in suspend: a watchdog that wakes late acts at once.
    let at = at.map_or(Duration::ZERO, |at| at.max(Duration::from_nanos(1)));
    let time = Itimerspec {
        it_interval: ZERO,
        it_value: Timespec::try_from(at).map_err(io::Error::other)?,
    };
    timerfd_settime(timer, TimerfdTimerFlags::ABSTIME, &time)?;
    let pipe = rustix::stdio::stdin();
    let mut ready = [PollFd::new(timer, PollFlags::IN), PollFd::new(&pipe, PollFlags::IN)];
    match poll(&mut ready, None) {
        Ok(_) => Ok(!ready[1].revents().is_empty()),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The times in a line of the pipe.
fn times(line: &str) -> Option<Times> {
    let (term_at, kill_at) = line.trim_end().split_once(' ')?;
    Some(Times {
        term_at: Duration::from_nanos(term_at.parse().ok()?),
        kill_at: Duration::from_nanos(kill_at.parse().ok()?),
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    Told,
    Killed,
}

/// The command, and how near its end is.
struct Watched<'a> {
    name: &'a str,
    target: Target,
    /// The command itself: it may have left the group, as an interactive shell does.
    command: Option<OwnedFd>,
    times: Times,
    phase: Phase,
    /// When to warn that no renewal has come.
    warn_at: Option<Instant>,
}

impl Watched<'_> {
    fn set(&mut self, times: Times) {
        self.times = times;
        let left = times.term_at.checked_sub(now()).filter(|_| stderr().is_terminal());
        self.warn_at = left.map(|left| times.term_at - left / 4);
    }

    /// Does what is due, and returns when the next thing is.
    fn act(&mut self) -> Option<Instant> {
        let (now, Times { term_at, kill_at }) = (now(), self.times);
        if self.phase == Phase::Running && now >= term_at {
            self.phase = Phase::Told;
            // What is stopped can only act on SIGTERM once it is continued.
            self.signal(Signal::TERM);
            self.signal(Signal::CONT);
        }
        if self.phase == Phase::Told && now >= kill_at {
            self.phase = Phase::Killed;
            self.signal(Signal::KILL);
        }
        if self.phase == Phase::Running && self.warn_at.is_some_and(|at| now >= at) {
            self.warn_at = None;
            let (name, left) = (self.name, shown(term_at - now));
            say(format_args!(
                "unless the lock {name} is renewed (is its job stopped?), its command is ended in {left}"
            ));
        }
        match self.phase {
            Phase::Running => Some(self.warn_at.map_or(term_at, |at| at.min(term_at))),
            Phase::Told => Some(kill_at),
            Phase::Killed => None,
        }
    }

    fn signal(&self, signal: Signal) {
        let _ = self.target.signal(signal);
        if let Some(command) = &self.command {
            let _ = pidfd_send_signal(command, signal);
        }
    }

    fn is_left(&self) -> bool {
        let has_ended = |command: &OwnedFd| {
            let mut ended = [PollFd::new(command, PollFlags::IN)];
            poll(&mut ended, Some(&ZERO)).is_ok_and(|ready| ready > 0)
        };
        self.target.is_left() || self.command.as_ref().is_some_and(|command| !has_ended(command))
    }

    /// `fencelock` was killed, so the command is ended. False if processes are left.
    fn end(mut self) -> bool {
        let name = self.name;
        if self.is_left() {
            say(format_args!(
                "fencelock was killed, so its command, under the lock {name}, is ended"
            ));
        }
        self.times = self.times.now();
        loop {
            let next = self.act().map_or(LOOK, |at| at.saturating_sub(now()));
            if !self.is_left() {
                return true;
            }
            if self.phase == Phase::Killed && now() >= self.times.kill_at + KILL_TAKES {
                let why = self.target.why_left();
                say(format_args!(
                    "processes of the command under the lock {name} could not be ended: {why}"
                ));
                return false;
            }
            sleep(next.min(LOOK));
        }
    }
}

/// Releases the lock of a `fencelock` that was killed: this acquisition alone, whose owner no later one has.
fn release(name: &str, owner: OwnerId) {
    let work = || -> Result<(), Failure> {
        let locks = Location::find(None)?.client()?;
        let releasing = async {
            loop {
                match locks.release_owned(name, owner).await {
                    Err(error) if error.is_retryable() => tokio::time::sleep(LOOK).await,
                    answered => return answered.map(drop),
                }
            }
        };
        let released = runtime()?.block_on(async { timeout(RELEASE_TAKES, releasing).await });
        released
            .map_err(|_| Failure::unavailable("there was no answer in time"))?
            .map_err(LockError::into)
    };
    if let Err(failure) = work() {
        say(format_args!(
            "the lock {name} of a fencelock that was killed could not be released: {failure}; it is free when its ttl is over"
        ));
    }
}
