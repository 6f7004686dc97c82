//! The process between the locker and the command: it ends the command when the lock ends, whatever the locker does.
//!
//! **Invariant.** From the last `margin` of the lease on, nothing that descends from the command runs, as far as the
//! kernel lets a SIGKILL through. The supervisor needs nobody for that: it knows the deadline, and reads the clock that
//! the deadline is measured with.
//!
//! Should the locker be killed, it releases the lock once all has ended: that one acquisition, which the locker has named to it.
//!
//! It holds one end of the channel as its stdin; the command gets the stdin that came over the channel.

mod ending;
mod releasing;

use std::env::ArgsOs;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, getppid, kill_process, kill_process_group, set_child_subreaper, wait,
};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use crate::channel::{self, Claim, End, Order, Report, Why};
use crate::exit::{NOT_EXECUTABLE, USAGE};
use crate::processes::group_of;
use crate::say::say;
use crate::signals::{self, FORWARDED, named};
use crate::starter;
use crate::terminal::Terminal;
use crate::timing::{Instant, Timing};

use ending::Ending;

/// What the supervisor is called in a list of processes, and started as.
pub(crate) const NAME: &str = "lock-supervisor";

/// Runs as the supervisor of the command in `args`, which follows the lock's name.
pub(crate) fn main(mut args: ArgsOs) -> ExitCode {
    // `ps` and `top` show this one; exec has made it "exe".
    let _ = rustix::thread::set_name(c"lock-supervisor");
    let name = args.next().unwrap_or_default();
    let command: Vec<OsString> = args.collect();
    match supervise(&name.to_string_lossy(), &command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("the supervisor of the command failed: {error}"));
            ExitCode::from(USAGE)
        }
    }
}

fn supervise(name: &str, command: &[OsString]) -> io::Result<()> {
    let channel = rustix::stdio::stdin();
    let signals = listen()?;
    let timer = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
    // Whatever loses its parent below becomes a child of this process, not of init, and can be found and waited for.
    set_child_subreaper(Some(getpid()))?;
    let locker = getppid();
    let First { claim, start } = first_orders(channel)?;
    let Some((deadline, timing, stdin)) = start else {
        // The locker is gone, and nothing was started.
        if let Some(claim) = claim {
            releasing::release(name, claim, Instant::now().after(releasing::SHORT));
        }
        return Ok(());
    };
    if Instant::now() >= timing.kill_at(deadline) {
        let report = Report::Ended {
            how: End::Killed(Signal::KILL.as_raw()),
            why: Why::Deadline,
        };
        return Ok(channel::send(channel, report, None)?);
    }
    let child = match spawn(command, stdin) {
        Ok(child) => child,
        Err(error) => {
            say(format_args!("no process could be started: {error}"));
            let report = Report::Ended {
                how: End::Exited(NOT_EXECUTABLE),
                why: Why::Itself,
            };
            return Ok(channel::send(channel, report, None)?);
        }
    };
    let orphaned = Supervisor {
        locker,
        terminal: locker.and_then(group_of).and_then(Terminal::open),
        signals,
        timer,
        connected: true,
        child,
        deadline,
        timing,
        ended: None,
        ending: None,
        childless: false,
    }
    .run(channel)?;
    if let (Some(Orphaned { deadline }), Some(claim)) = (orphaned, claim) {
        releasing::release(name, claim, deadline);
    }
    Ok(())
}

/// Hears of its children. It is not ended by what ends or is passed on by the locker, as when a service manager sends
/// SIGTERM to every process of a service: it has to outlive the command. What the caller ignores stays ignored.
fn listen() -> io::Result<SignalDelivery<UnixStream, SignalOnly>> {
    signals::survive_file_size_limit()?;
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    let wanted = signals::not_ignored(FORWARDED).chain([signal_hook::consts::SIGCHLD]);
    SignalDelivery::with_pipe(read, write, SignalOnly, wanted)
}

/// What the locker says first.
struct First {
    claim: Option<Claim>,
    /// When the lease ends, and the command's stdin. `None` if the locker went away before.
    start: Option<(Instant, Timing, Option<OwnedFd>)>,
}

/// Waits for the order to start.
fn first_orders(channel: impl AsFd) -> io::Result<First> {
    let mut claim = None;
    loop {
        match channel::receive::<Order>(&channel) {
            Ok(Some((Order::Claim(of), _))) => claim = Some(of),
            Ok(Some((Order::Start { deadline, timing }, stdin))) => {
                let start = Some((deadline, timing, stdin));
                return Ok(First { claim, start });
            }
            Ok(Some(_)) => return Err(Errno::PROTO.into()),
            Ok(None) => return Ok(First { claim, start: None }),
            Err(Errno::AGAIN) => wait_for_order(&channel)?,
            Err(Errno::NOTSOCK) => return Err(io::Error::other("it is started by `fencelock run` only")),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Waits until the locker has released the lock. False if it was killed before.
fn is_released(channel: impl AsFd) -> io::Result<bool> {
    loop {
        match channel::receive::<Order>(&channel) {
            Ok(Some((Order::Over, _))) => return Ok(true),
            // On its way when the command ended.
            Ok(Some(_)) => {}
            Ok(None) => return Ok(false),
            Err(Errno::AGAIN) => wait_for_order(&channel)?,
            Err(error) => return Err(error.into()),
        }
    }
}

fn wait_for_order(channel: impl AsFd) -> io::Result<()> {
    let mut fds = [PollFd::new(&channel, PollFlags::IN)];
    match poll(&mut fds, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Starts the command at the head of a process group of its own.
fn spawn(command: &[OsString], stdin: Option<OwnedFd>) -> io::Result<Pid> {
    let mut starter = Command::new("/proc/self/exe");
    starter
        .arg0(starter::NAME)
        .arg(getpid().to_string())
        .args(command)
        .stdin(stdin.map_or_else(Stdio::null, Stdio::from))
        .process_group(0);
    let child = starter.spawn()?;
    Pid::from_raw(child.id() as i32).ok_or_else(|| io::Error::other("a process without a number"))
}

/// The locker has ended before it released the lock.
struct Orphaned {
    /// When the lease ends by itself.
    deadline: Instant,
}

struct Supervisor {
    locker: Option<Pid>,
    /// The terminal as the locker's group uses it.
    terminal: Option<Terminal>,
    signals: SignalDelivery<UnixStream, SignalOnly>,
    timer: OwnedFd,
    /// Whether the locker may still be heard.
    connected: bool,
    /// The command, which is also the number of its group.
    child: Pid,
    deadline: Instant,
    timing: Timing,
    ended: Option<End>,
    ending: Option<Ending>,
    /// No process descends from this one any more.
    childless: bool,
}

impl Supervisor {
    /// Runs until all has ended.
    fn run(mut self, channel: impl AsFd) -> io::Result<Option<Orphaned>> {
        self.tell(&channel, Report::Started(self.child.as_raw_nonzero().get()));
        loop {
            self.reap(&channel);
            self.hear(&channel)?;
            if let Some((how, why)) = self.is_over() {
                if let Some(terminal) = &self.terminal {
                    terminal.take_back(self.child);
                }
                let over = self.tell(&channel, Report::Ended { how, why }) && is_released(&channel)?;
                let deadline = self.deadline;
                return Ok((!over).then_some(Orphaned { deadline }));
            }
            self.set_timer()?;
            let own = self.connected.then(|| PollFd::new(&channel, PollFlags::IN));
            let mut fds = vec![
                PollFd::new(self.signals.get_read(), PollFlags::IN),
                PollFd::new(&self.timer, PollFlags::IN),
            ];
            fds.extend(own);
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            drop(fds);
            // A child may have changed, which the next round finds out. What else came is for others.
            self.signals.pending().for_each(drop);
        }
    }

    /// Takes what the locker says. Its silence means nothing, its end means the end.
    fn hear(&mut self, channel: impl AsFd) -> io::Result<()> {
        while self.connected {
            match channel::receive::<Order>(&channel) {
                Ok(Some((Order::Deadline(deadline), _))) => self.deadline = self.deadline.max(deadline),
                Ok(Some((Order::Signal(signal), _))) => self.signal_group(signal),
                Ok(Some((Order::End, _))) => self.end(Why::Lost),
                Ok(Some((Order::Claim(_) | Order::Start { .. } | Order::Over, _))) => return Err(Errno::PROTO.into()),
                Ok(None) => {
                    self.connected = false;
                    self.end(Why::Orphaned);
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Takes note of children that ended, stopped or went on, the command and whatever this process inherited.
    fn reap(&mut self, channel: impl AsFd) {
        loop {
            match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED) {
                Ok(Some((pid, status))) if pid == self.child => self.command_changed(status, &channel),
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return,
                Err(_) => {
                    self.childless = true;
                    return;
                }
            }
        }
    }

    fn command_changed(&mut self, status: WaitStatus, channel: impl AsFd) {
        if let Some(code) = status.exit_status() {
            self.ended = Some(End::Exited(code as u8));
        } else if let Some(signal) = status.terminating_signal() {
            self.ended = Some(End::Killed(signal));
        } else if let (Some(signal), None) = (status.stopping_signal(), &self.ending) {
            self.tell(channel, Report::Stopped(signal));
        } else if let (true, Some(locker)) = (status.continued() && self.connected, self.locker) {
            // The locker stopped when the command did, so it goes on when the command does.
            let _ = kill_process(locker, Signal::CONT);
        }
    }

    /// Does what the clock demands, and says whether all is over.
    fn is_over(&mut self) -> Option<(End, Why)> {
        if Instant::now() >= self.timing.term_at(self.deadline) && !self.childless {
            self.end(Why::Deadline);
        }
        if let Some(end) = self.ended {
            if self.childless {
                return Some((end, self.why()));
            }
            self.end(Why::Leftovers);
        }
        let group = self.group();
        let done = self.ending.as_mut().is_some_and(|ending| ending.step(group));
        match self.ended {
            Some(end) if done => Some((end, self.why())),
            _ => None,
        }
    }

    fn why(&self) -> Why {
        self.ending.as_ref().map_or(Why::Itself, Ending::why)
    }

    /// Starts to end the command, unless that is under way for a reason at least as strong.
    fn end(&mut self, why: Why) {
        if self.ending.as_ref().is_some_and(|ending| ending.covers(why)) {
            return;
        }
        let limit = self.timing.kill_at(self.deadline);
        let grace = self.timing.grace;
        self.ending = Some(match why {
            Why::Leftovers => Ending::of_leftovers(grace, limit),
            why => Ending::of_all(why, self.group(), Instant::now().after(grace).min(limit)),
        });
    }

    fn set_timer(&self) -> io::Result<()> {
        let term_at = self.timing.term_at(self.deadline);
        let at = match &self.ending {
            Some(ending) if ending.covers(Why::Deadline) => ending.next_step(),
            Some(ending) => ending.next_step().min(term_at),
            None => term_at,
        };
        // Zero would mean never.
        let at = at.max(Instant(1));
        let at = Timespec {
            tv_sec: i64::try_from(at.0 / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (at.0 % 1_000_000_000) as _,
        };
        let once = Timespec { tv_sec: 0, tv_nsec: 0 };
        // This clock runs on in suspend: whoever wakes late acts at once.
        timerfd_settime(
            &self.timer,
            TimerfdTimerFlags::ABSTIME,
            &Itimerspec {
                it_interval: once,
                it_value: at,
            },
        )?;
        Ok(())
    }

    fn signal_group(&self, signal: i32) {
        if let (Some(signal), Some(group)) = (named(signal), self.group()) {
            let _ = kill_process_group(group, signal);
        }
    }

    /// The command's group, as long as that number is sure to be its own: until the command is waited for.
    fn group(&self) -> Option<Pid> {
        self.ended.is_none().then_some(self.child)
    }

    /// Whether the locker was there to be told.
    fn tell(&self, channel: impl AsFd, report: Report) -> bool {
        self.connected && channel::send(channel, report, None).is_ok()
    }
}
