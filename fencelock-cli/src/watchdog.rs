//! The process that ends the command in time if `fencelock` cannot.
//!
//! **Invariant.** From the last `margin` of the lease on, nothing runs in the command's process group, as far as the kernel lets a
//! SIGKILL through, whatever happens to `fencelock`: the watchdog knows the times, and reads the clock that they are measured with.
//!
//! It reads a pipe: lines with the command, its group and the two [times](Times), of which the last counts, and `done` at the end. The end
//! of the pipe without `done` means that `fencelock` was killed: the command is ended now, and then the lock is released, so that it is
//! free before its ttl is over. Once SIGTERM was sent there is no way back.

use std::env::ArgsOs;
use std::io::{self, BufRead, BufReader, IsTerminal, Stdin, Write, stderr, stdin};
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

use crate::exit::{Failure, USAGE};
use crate::place::Place;
use crate::say::say;
use crate::signals::block_all;
use crate::target::Target;
use crate::timing::{Instant, Times, now, shown};

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

const ZERO: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The watchdog, as `fencelock` sees it.
pub(crate) struct Watchdog {
    command: Command,
    child: Child,
    target: Option<Target>,
    /// What it knows.
    pub(crate) times: Times,
}

impl Watchdog {
    /// Starts it. It knows nothing yet but which lock to release; one without an `owner` stays reserved, and is not released.
    pub(crate) fn start(name: &str, owner: Option<OwnerId>, place: &Place, times: Times) -> io::Result<Self> {
        let owner = owner.map_or_else(|| NOBODY.to_owned(), |owner| owner.to_string());
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME).arg(name).arg(owner);
        // Not as an argument: an address may be secret.
        command.env(ENV, place.url());
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
        self.set(self.times);
    }

    /// Replaces the times.
    pub(crate) fn set(&mut self, times: Times) {
        self.times = times;
        if let Some(Target { command, group }) = self.target {
            let [command, group] = [command, group].map(Pid::as_raw_nonzero);
            let [term_at, kill_at] = [times.term_at, times.kill_at].map(|at| at.as_nanos());
            self.write(format!("{command} {group} {term_at} {kill_at}\n"));
        }
    }

    /// Ends it, as nothing is left to do. It is waited for: not every init would do so.
    pub(crate) fn done(mut self) {
        self.write("done\n".to_owned());
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
        self.set(self.times);
        Ok(())
    }

    fn write(&mut self, line: String) {
        // If it has ended, that is noticed elsewhere. In one piece, as this process may be killed in between.
        if let Some(pipe) = &mut self.child.stdin {
            let _ = pipe.write_all(line.as_bytes());
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
    match (
        Watched::new(&name).and_then(Watched::run),
        owner.to_string_lossy().parse(),
    ) {
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
    /// None at its end.
    pipe: Option<BufReader<Stdin>>,
    orders: Option<(Target, Times)>,
    /// The command itself: it may have left the group, as an interactive shell does.
    command: Option<OwnedFd>,
    phase: Phase,
    /// When to warn that no renewal has come.
    warn_at: Option<Instant>,
    done: bool,
}

impl<'a> Watched<'a> {
    fn new(name: &'a str) -> io::Result<Self> {
        Ok(Self {
            name,
            timer: timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC)?,
            pipe: Some(BufReader::new(stdin())),
            orders: None,
            command: None,
            phase: Phase::Running,
            warn_at: None,
            done: false,
        })
    }

    /// Watches to the end. True if `fencelock` was killed, and nothing is left of the command: the lock is to be released.
    fn run(mut self) -> io::Result<bool> {
        while !self.done {
            let next = self.orders.and_then(|(target, times)| self.act(target, times));
            if self.pipe.is_some() {
                self.wait(next)?;
                continue;
            }
            let Some((target, times)) = self.orders else {
                return Ok(true);
            };
            if !self.is_left(target) {
                return Ok(true);
            }
            if self.phase == Phase::Killed && now() >= times.kill_at + KILL_TAKES {
                say(format_args!(
                    "processes of the command under the lock {} could not be ended: {}",
                    self.name,
                    target.why_left()
                ));
                return Ok(false);
            }
            let look = now() + LOOK;
            self.wait(Some(next.map_or(look, |at| at.min(look))))?;
        }
        Ok(false)
    }

    /// Does what is due, and returns when the next thing is.
    fn act(&mut self, target: Target, times: Times) -> Option<Instant> {
        let now = now();
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
        match self.phase {
            Phase::Running if self.warn_at.is_some_and(|at| now >= at) => {
                self.warn_at = None;
                say(format_args!(
                    "unless the lock {} is renewed (is its job stopped?), its command is ended in {}",
                    self.name,
                    shown(times.term_at - now)
                ));
                Some(times.term_at)
            }
            Phase::Running => Some(self.warn_at.map_or(times.term_at, |at| at.min(times.term_at))),
            Phase::Told => Some(times.kill_at),
            Phase::Killed => None,
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
            poll(&mut ended, Some(&ZERO)).is_ok_and(|ready| ready > 0)
        };
        target.is_left() || self.command.as_ref().is_some_and(|command| !has_ended(command))
    }

    /// Waits for a line, for the end of the pipe, or until `at`.
    fn wait(&mut self, at: Option<Instant>) -> io::Result<()> {
        // Zero means never. This clock runs on in suspend: a watchdog that wakes late acts at once.
        let at = at.map_or(Duration::ZERO, |at| at.max(Duration::from_nanos(1)));
        let time = Itimerspec {
            it_interval: ZERO,
            it_value: Timespec::try_from(at).map_err(io::Error::other)?,
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &time)?;
        let descriptor = rustix::stdio::stdin();
        let mut ready = vec![PollFd::new(&self.timer, PollFlags::IN)];
        if self.pipe.is_some() {
            ready.push(PollFd::new(&descriptor, PollFlags::IN));
        }
        match poll(&mut ready, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        match ready.get(1).is_some_and(|pipe| !pipe.revents().is_empty()) {
            true => self.read(),
            false => Ok(()),
        }
    }

    /// Reads what is there. Lines come in one piece each, so that none keeps it waiting.
    fn read(&mut self) -> io::Result<()> {
        while let Some(pipe) = &mut self.pipe {
            let mut line = String::new();
            if pipe.read_line(&mut line)? == 0 {
                self.pipe = None;
                self.orphaned();
                break;
            }
            let is_last = pipe.buffer().is_empty();
            self.take(line.trim_end())
                .ok_or_else(|| io::Error::other("it is started by `fencelock run` only"))?;
            if is_last {
                break;
            }
        }
        Ok(())
    }

    fn take(&mut self, line: &str) -> Option<()> {
        if line == "done" {
            self.done = true;
            return Some(());
        }
        let numbers: Option<Vec<u64>> = line.split(' ').map(|number| number.parse().ok()).collect();
        let &[command, group, term_at, kill_at] = numbers?.as_slice() else {
            return None;
        };
        let pid = |number: u64| Pid::from_raw(number.try_into().ok()?);
        let target = Target {
            command: pid(command)?,
            group: pid(group)?,
        };
        if self.orders.is_none() {
            self.command = pidfd_open(target.command, PidfdFlags::empty()).ok();
        }
        let [term_at, kill_at] = [term_at, kill_at].map(Duration::from_nanos);
        self.orders = Some((target, Times { term_at, kill_at }));
        let left = term_at.checked_sub(now()).filter(|_| stderr().is_terminal());
        self.warn_at = left.map(|left| term_at - left / 4);
        Some(())
    }

    /// `fencelock` has ended, but did not say that all is done.
    fn orphaned(&mut self) {
        if let (false, Some((target, times))) = (self.done, self.orders) {
            if self.is_left(target) {
                let name = self.name;
                say(format_args!(
                    "fencelock was killed, so its command, under the lock {name}, is ended"
                ));
            }
            self.orders = Some((target, times.now()));
        }
    }
}

/// Releases the lock of a `fencelock` that was killed: this acquisition alone, whose owner no later one has.
fn release(name: &str, owner: OwnerId) {
    let work = || -> Result<(), Failure> {
        let locks = Place::find(None)?.client()?;
        let releasing = async { tokio::time::timeout(RELEASE_TAKES, until_answered(&locks, name, owner)).await };
        let released = crate::runtime()?.block_on(releasing);
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
