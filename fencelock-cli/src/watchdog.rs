//! The process that ends the command in time if `fencelock` cannot.
//!
//! **Invariant.** From the last `margin` of the lease on, nothing runs in the command's process group, as far as the kernel lets a
//! SIGKILL through, whatever happens to `fencelock`: the watchdog knows the times, and reads the clock that they are measured with.
//!
//! It reads a pipe, line by line: the [target](Target) once, then [times](Times) that replace the ones before, and `done` at the end. The
//! end of the pipe without `done` means that `fencelock` was killed: the command is ended now, and then the lock is released, so that it
//! is free before its ttl is over. Once SIGTERM was sent there is no way back.

use std::env::ArgsOs;
use std::io::{self, IsTerminal, Write, stderr};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use fencelock::{ENV, LockError, Locks, OwnerId};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, pidfd_send_signal, waitpid};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::runtime::Builder;

use crate::exit::{Failure, USAGE};
use crate::guard::Guard;
use crate::place::Place;
use crate::say::say;
use crate::signals::block_all;
use crate::target::Target;
use crate::timing::{Instant, Times, shown};

/// What the watchdog is started as, and called in a list of processes. Not `fencelock`, so that `pkill -9 fencelock` does not end it too.
pub(crate) const NAME: &str = "lock-watchdog";

/// The owner of a lock that stays reserved: nothing is released.
const NOBODY: &str = "-";

/// Between looks at whether the command has ended, and between tries to release its lock.
const LOOK: Duration = Duration::from_millis(50);

/// For how long SIGKILL may take.
pub(crate) const KILL_TAKES: Duration = Duration::from_secs(1);

/// For how long the release is tried.
const RELEASE_TAKES: Duration = Duration::from_secs(5);

/// The watchdog, as `fencelock` sees it.
pub(crate) struct Watchdog {
    command: Command,
    child: Child,
    target: Option<Target>,
    /// What it knows.
    pub(crate) times: Times,
}

impl Watchdog {
    /// Starts it. It knows nothing yet but which lock to release; a lock that stays `reserved` is not released.
    pub(crate) fn start(guard: &Guard, place: &Place, reserved: bool, times: Times) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        let owner = if reserved {
            NOBODY.to_owned()
        } else {
            guard.owner().to_string()
        };
        command.arg0(NAME).arg(guard.name().as_str()).arg(owner);
        // Not as an argument: an address may be secret.
        match place {
            Place::Address(url) => command.env(ENV, url),
            #[cfg(feature = "sqlite")]
            Place::File(_) => command.env_remove(ENV),
        };
        // Out of reach of the keyboard, and of signals to this process's group.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        let child = command.spawn()?;
        Ok(Self {
            command,
            child,
            target: None,
            times,
        })
    }

    pub(crate) fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Has it watch the command.
    pub(crate) fn watch(&mut self, target: Target) {
        self.target = Some(target);
        let times = self.times;
        self.write(format_args!("{target}\n{times}\n"));
    }

    /// Replaces the times.
    pub(crate) fn set(&mut self, times: Times) {
        self.times = times;
        self.write(format_args!("{times}\n"));
    }

    /// Ends it, as nothing is left to do. It is waited for: not every init would do so.
    pub(crate) fn done(mut self) {
        self.write(format_args!("done\n"));
        if let Some(pid) = self.pid()
            && matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None))
        {
            // It may be stopped.
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }

    /// It was ended by someone: another one takes its place.
    pub(crate) fn replace(&mut self) -> io::Result<()> {
        self.child = self.command.spawn()?;
        if let Some(target) = self.target {
            self.watch(target);
        }
        Ok(())
    }

    fn write(&mut self, lines: std::fmt::Arguments<'_>) {
        // If it has ended, that is noticed elsewhere. In one piece, as this process may be killed in between.
        if let Some(pipe) = &mut self.child.stdin {
            let _ = pipe.write_all(lines.to_string().as_bytes());
        }
    }
}

/// Runs as the watchdog. The arguments are the lock's name and its owner.
pub(crate) fn main(mut args: ArgsOs) -> ExitCode {
    let _ = rustix::thread::set_name(c"lock-watchdog");
    // It has to outlive the command, also where a service manager signals every process of a service.
    block_all();
    let name = args.next().unwrap_or_default().to_string_lossy().into_owned();
    let owner = args.next().unwrap_or_default();
    let watched = Watched::new(&name).and_then(Watched::run);
    match (watched, owner.to_string_lossy().parse()) {
        (Ok(true), Ok(owner)) => release(&name, owner),
        (Ok(_), _) => {}
        (Err(error), _) => {
            say(format_args!("the watchdog of the lock {name} failed: {error}"));
            return ExitCode::from(USAGE);
        }
    }
    ExitCode::SUCCESS
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    Told,
    Killed,
}

struct Watched<'a> {
    name: &'a str,
    timer: OwnedFd,
    unread: String,
    target: Option<Target>,
    /// The command itself: it may have left the group, as an interactive shell does.
    command: Option<OwnedFd>,
    times: Option<Times>,
    phase: Phase,
    /// When to warn that no renewal has come.
    warn_at: Option<Instant>,
    connected: bool,
    done: bool,
}

impl<'a> Watched<'a> {
    fn new(name: &'a str) -> io::Result<Self> {
        Ok(Self {
            name,
            timer: timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC)?,
            unread: String::new(),
            target: None,
            command: None,
            times: None,
            phase: Phase::Running,
            warn_at: None,
            connected: true,
            done: false,
        })
    }

    /// Watches to the end. True if `fencelock` was killed, and nothing is left of the command: the lock is to be released.
    fn run(mut self) -> io::Result<bool> {
        loop {
            if self.done {
                return Ok(false);
            }
            let (Some(target), Some(times)) = (self.target, self.times) else {
                if !self.connected {
                    return Ok(true);
                }
                self.wait(None)?;
                continue;
            };
            self.act(target, times);
            if !self.connected {
                if !self.is_left(target) {
                    return Ok(true);
                }
                if self.phase == Phase::Killed && Instant::now() >= times.kill_at.after(KILL_TAKES) {
                    let (name, why) = (self.name, target.why_left());
                    say(format_args!(
                        "processes of the command under the lock {name} could not be ended: {why}"
                    ));
                    return Ok(false);
                }
            }
            let next = match self.phase {
                Phase::Running => Some(self.warn_at.map_or(times.term_at, |at| at.min(times.term_at))),
                Phase::Told => Some(times.kill_at),
                Phase::Killed => None,
            };
            let look = (!self.connected).then(|| Instant::now().after(LOOK));
            self.wait(next.into_iter().chain(look).min())?;
        }
    }

    /// Does what is due.
    fn act(&mut self, target: Target, times: Times) {
        let now = Instant::now();
        if self.phase == Phase::Running && now >= times.term_at {
            self.phase = Phase::Told;
            // What is stopped can only act on SIGTERM once it is continued.
            self.signal(target, Signal::TERM);
            self.signal(target, Signal::CONT);
        }
        if self.phase == Phase::Told && now >= times.kill_at {
            self.phase = Phase::Killed;
            self.signal(target, Signal::KILL);
        }
        if self.phase == Phase::Running && self.warn_at.is_some_and(|at| now >= at) {
            self.warn_at = None;
            say(format_args!(
                "unless the lock {} is renewed (is its job stopped?), its command is ended in {}",
                self.name,
                shown(times.term_at.since(now))
            ));
        }
    }

    fn signal(&self, target: Target, signal: Signal) {
        let _ = target.signal(signal);
        if let Some(command) = &self.command {
            let _ = pidfd_send_signal(command, signal);
        }
    }

    fn is_left(&self, target: Target) -> bool {
        let has_ended = |command: &OwnedFd| {
            let mut ended = [PollFd::new(command, PollFlags::IN)];
            poll(&mut ended, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
        };
        target.is_left() || self.command.as_ref().is_some_and(|command| !has_ended(command))
    }

    /// Waits for a line, for the end of the pipe, or until `at`.
    fn wait(&mut self, at: Option<Instant>) -> io::Result<()> {
        // Zero means never. This clock runs on in suspend: a watchdog that wakes late acts at once.
        let at = at.map_or(0, |at| at.0.max(1));
        let it_value = Timespec {
            tv_sec: i64::try_from(at / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (at % 1_000_000_000) as _,
        };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        timerfd_settime(
            &self.timer,
            TimerfdTimerFlags::ABSTIME,
            &Itimerspec { it_interval, it_value },
        )?;
        let pipe = rustix::stdio::stdin();
        let mut ready = vec![PollFd::new(&self.timer, PollFlags::IN)];
        if self.connected {
            ready.push(PollFd::new(&pipe, PollFlags::IN));
        }
        match poll(&mut ready, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if ready.get(1).is_some_and(|pipe| !pipe.revents().is_empty()) {
            drop(ready);
            self.read()?;
        }
        Ok(())
    }

    fn read(&mut self) -> io::Result<()> {
        let mut part = [0; 4_096];
        let length = rustix::io::read(rustix::stdio::stdin(), &mut part)?;
        self.unread += &String::from_utf8_lossy(&part[..length]);
        while let Some((line, rest)) = self.unread.split_once('\n') {
            let (line, rest) = (line.to_owned(), rest.to_owned());
            self.unread = rest;
            self.take(&line)
                .map_err(|()| io::Error::other("it is started by `fencelock run` only"))?;
        }
        if length == 0 {
            self.connected = false;
            self.orphaned();
        }
        Ok(())
    }

    fn take(&mut self, line: &str) -> Result<(), ()> {
        if line == "done" {
            self.done = true;
        } else if self.target.is_none() {
            let target: Target = line.parse()?;
            self.target = Some(target);
            self.command = pidfd_open(target.command, PidfdFlags::empty()).ok();
        } else {
            let times: Times = line.parse()?;
            let now = Instant::now();
            self.times = Some(times);
            let is_shown = times.term_at > now && stderr().is_terminal();
            self.warn_at = is_shown.then(|| times.term_at.before(times.term_at.since(now) / 4));
        }
        Ok(())
    }

    /// `fencelock` has ended, but did not say that all is done.
    fn orphaned(&mut self) {
        if let (false, Some(target), Some(times)) = (self.done, self.target, self.times) {
            if self.is_left(target) {
                let name = self.name;
                say(format_args!(
                    "fencelock was killed, so its command, under the lock {name}, is ended"
                ));
            }
            self.times = Some(times.now());
        }
    }
}

/// Releases the lock of a `fencelock` that was killed: this acquisition alone, whose owner no later one has.
fn release(name: &str, owner: OwnerId) {
    let work = || -> Result<(), Failure> {
        let locks = Place::find(None)?.client()?;
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| Failure::unavailable(format!("no runtime could be started: {e}")))?;
        let released =
            runtime.block_on(async { tokio::time::timeout(RELEASE_TAKES, until_answered(&locks, name, owner)).await });
        Ok(released.map_err(|_| Failure::unavailable("there was no answer in time"))??)
    };
    if let Err(failure) = work() {
        say(format_args!(
            "the lock {name} of a fencelock that was killed could not be released: {failure}; it is free when its ttl is over"
        ));
    }
}

async fn until_answered(locks: &Locks, name: &str, owner: OwnerId) -> Result<(), LockError> {
    loop {
        match locks.release_owned(name, owner).await {
            Err(error) if error.is_retryable() => tokio::time::sleep(LOOK).await,
            answered => return answered.map(drop),
        }
    }
}
