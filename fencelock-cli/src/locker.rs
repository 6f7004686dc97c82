//! The process that holds the lock while the supervisor runs the command.
//!
//! It tells the supervisor of every renewal and of a loss, passes signals on, and stands in for the command towards the
//! shell: it stops when the command stops and lends it the terminal.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write, stderr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fencelock::{LockGuard, LossReason};
use nix::sys::signal::{self as nix_signal, Signal as NixSignal};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, kill_process, kill_process_group, set_child_subreaper,
    wait, waitid,
};
use signal_hook::consts;
use signal_hook::flag::register_usize;
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::channel::{self, Claim, End, Order, Report, Why};
use crate::exit::Failure;
use crate::place::Place;
use crate::processes::{companions, descendants, in_orphaned_group};
use crate::say::{is_quiet, remark};
use crate::signals::{HeldStop, Signals, not_ignored};
use crate::supervisor;
use crate::terminal::Terminal;
use crate::timing::{Instant, Timing};
use crate::waiting::spelt;

/// What became of the command.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// How and why it ended; `None` if the supervisor ended before it, and everything was killed.
    pub(crate) end: Option<(End, Why)>,
    /// The signal that killed the supervisor, if one did.
    pub(crate) supervisor_killed_by: Option<i32>,
    /// Whether the supervisor has started the command.
    pub(crate) started: bool,
    /// The lock was found lost while the command ran, or before it was started.
    pub(crate) lost: Option<LossReason>,
    /// Whether an end by SIGINT would be due to somebody at the terminal.
    pub(crate) typed_interrupt: bool,
    /// Whether the command had the terminal to itself at its end.
    pub(crate) lent: bool,
}

impl Outcome {
    /// Whether the command ended without anybody ending it.
    pub(crate) fn is_own_end(&self) -> bool {
        matches!(self.end, Some((_, Why::Itself | Why::Leftovers)))
    }
}

/// The supervisor of a command that has ended: it waits until the lock is released, and would do it in this process's place.
pub(crate) struct Afterwards {
    channel: UnixDatagram,
    supervisor: Child,
}

impl Afterwards {
    /// Ends the supervisor. The lock is released, or cannot be.
    pub(crate) fn over(mut self) {
        let _ = channel::send(&self.channel, Order::Over, None);
        let _ = self.supervisor.wait();
    }
}

/// A lock that is held for a command.
pub(crate) struct Locker {
    guard: LockGuard,
    timing: Timing,
    channel: UnixDatagram,
    supervisor: Child,
    signals: Signals,
    terminal: Option<Terminal>,
    /// The command's process group, once it is known.
    group: Option<Pid>,
    /// The deadline that the supervisor knows.
    told: Instant,
    lost: Option<LossReason>,
    interrupted: bool,
    lent: bool,
    /// This process has got a SIGTSTP, and passed it on.
    asked_to_stop: bool,
    /// Which of SIGTSTP and SIGCONT came last.
    last_heard: Arc<AtomicUsize>,
    /// Children that this process had before it was `fencelock`: not ours to end.
    strangers: bool,
}

impl Locker {
    /// Starts the supervisor, and with it the command. The supervisor does not release the lock of a killed locker if its name is
    /// `reserved`: that would end the reservation.
    pub(crate) async fn start(
        guard: LockGuard,
        place: &Place,
        command: &[OsString],
        timing: Timing,
        mut signals: Signals,
        reserved: bool,
    ) -> Result<Self, Failure> {
        // A lock on a lease that others use as well may come with little time left.
        if guard.remaining() < guard.ttl() / 2 {
            guard.renew_now().await?;
        }
        let failed =
            |e: io::Error| Failure::unavailable(format!("the supervisor of the command cannot be started: {e}"));
        signals
            .also(&[consts::SIGCHLD, consts::SIGTSTP, consts::SIGWINCH])
            .map_err(failed)?;
        let last_heard = Arc::default();
        for signal in not_ignored(&[consts::SIGTSTP, consts::SIGCONT]) {
            register_usize(signal, Arc::clone(&last_heard), signal as usize).map_err(failed)?;
        }
        let any = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let strangers = waitid(WaitId::All, any).is_ok();
        // Should the supervisor be killed, what it leaves comes here.
        set_child_subreaper(Some(getpid())).map_err(|e| failed(e.into()))?;

        let (ours, theirs) = channel::pair().map_err(|e| failed(e.into()))?;
        let supervisor = Command::new("/proc/self/exe")
            .arg0(supervisor::NAME)
            .arg(guard.name().as_str())
            .args(command)
            .env("FENCELOCK_NAME", guard.name().as_str())
            .env("FENCELOCK_TOKEN", guard.token().to_string())
            .stdin(theirs)
            // Out of reach of what is typed, and of whoever stops this process's group.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let claim = Claim {
            owner: guard.owner(),
            url: place.needed_elsewhere().map(str::to_owned),
        };
        if !reserved && let Err(error) = channel::send(&ours, Order::Claim(claim), None) {
            tracing::warn!(target: "fencelock", %error, "should this process be killed, its lock will not be free before its ttl is over");
        }
        let told = deadline(&guard);
        let order = Order::Start { deadline: told, timing };
        channel::send(&ours, order, Some(io::stdin().as_fd())).map_err(|e| failed(e.into()))?;
        tracing::debug!(target: "fencelock", supervisor = supervisor.id(), token = %guard.token(), "command started");
        Ok(Self {
            guard,
            timing,
            channel: for_runtime(ours).map_err(failed)?,
            supervisor,
            signals,
            terminal: Terminal::own(),
            group: None,
            told,
            lost: None,
            interrupted: false,
            lent: false,
            asked_to_stop: false,
            last_heard,
            strangers,
        })
    }

    /// Keeps the lock until the command has ended.
    pub(crate) async fn run(mut self) -> (Outcome, LockGuard, Afterwards) {
        let loss = self.guard.lost();
        // Three looks for every renewal would do; these are cheap.
        let mut look = interval((self.guard.ttl() / 20).clamp(Duration::from_millis(5), Duration::from_secs(1)));
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let end = loop {
            tokio::select! {
                biased;
                report = report(&self.channel) => match report {
                    Some(Report::Started(pid)) => self.group = Pid::from_raw(pid),
                    Some(Report::Stopped(signal)) => self.stopped(signal).await,
                    Some(Report::Ended { how, why }) => break Some((how, why)),
                    None => break None,
                },
                reason = loss.wait(), if self.lost.is_none() => {
                    self.lost = Some(reason);
                    self.order(Order::End);
                }
                signal = self.signals.next() => self.heard(signal).await,
                _ = look.tick() => self.tell_deadline(),
            }
        };
        let status = if end.is_none() { self.end_orphans().await } else { None };
        if let (Some(terminal), Some(group)) = (&self.terminal, self.group) {
            terminal.take_back(group);
        }
        let started = self.group.is_some();
        let in_vain = !started && matches!(end, Some((_, Why::Deadline)));
        if in_vain && self.lost.is_none() {
            // The supervisor was faster, as the deadline of a lost lock has come.
            self.lost = timeout(Duration::ZERO, loss.wait()).await.ok();
        }
        // A lease that ran out while this process could not run: the supervisor has acted before, or the command had
        // ended by itself before.
        let lost = self.lost.filter(|reason| in_vain || *reason != LossReason::Expired);
        let outcome = Outcome {
            end,
            supervisor_killed_by: status.and_then(|status| status.signal()),
            started,
            lost,
            typed_interrupt: self.lent || self.interrupted,
            lent: self.lent,
        };
        let afterwards = Afterwards {
            channel: self.channel,
            supervisor: self.supervisor,
        };
        (outcome, self.guard, afterwards)
    }

    fn order(&self, order: Order) {
        if let Err(error) = channel::send(&self.channel, &order, None) {
            tracing::debug!(target: "fencelock", %error, %order, "the supervisor does not listen");
        }
    }

    fn tell_deadline(&mut self) {
        let deadline = deadline(&self.guard);
        // What is left falls as time passes, so a difference is a renewal, or the inaccuracy of two readings.
        if self.guard.is_held() && deadline.since(self.told) > Duration::from_millis(1) {
            tracing::trace!(target: "fencelock", left = ?self.guard.remaining(), "renewed");
            self.told = deadline;
            self.order(Order::Deadline(deadline));
        }
    }

    async fn heard(&mut self, signal: i32) {
        match signal {
            consts::SIGCHLD => self.look_after_supervisor(),
            consts::SIGWINCH if self.lent => {}
            _ => {
                self.interrupted |= signal == consts::SIGINT;
                self.asked_to_stop |= signal == consts::SIGTSTP;
                tracing::debug!(target: "fencelock", signal, "passed on");
                self.order(Order::Signal(signal));
            }
        }
    }

    /// A supervisor that is stopped guards nothing.
    fn look_after_supervisor(&self) {
        let Some(pid) = Pid::from_raw(self.supervisor.id() as i32) else {
            return;
        };
        let stopped = waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG);
        if let Ok(Some(_)) = stopped {
            let _ = kill_process(pid, Signal::CONT);
        }
    }

    /// The command was stopped: it needs the terminal, or somebody wants the whole job to stop.
    async fn stopped(&mut self, signal: i32) {
        let (Some(terminal), Some(group)) = (&self.terminal, self.group) else {
            return;
        };
        let needs_terminal = signal == consts::SIGTTIN || signal == consts::SIGTTOU;
        if needs_terminal && (terminal.is_home() || terminal.is_at(group)) {
            terminal.lend(group);
            self.lent = true;
            self.order(Order::Signal(consts::SIGCONT));
            return;
        }
        let was_lent = self.lent && terminal.is_at(group);
        terminal.take_back(group);
        // Nobody would continue an orphaned job. The kernel does not stop one either.
        if !in_orphaned_group() {
            self.stop(signal, was_lent).await;
        }
        self.asked_to_stop = false;
        // Somebody has continued this process, in the foreground or in the background.
        self.lent = false;
        if let Some(terminal) = &self.terminal
            && (was_lent || needs_terminal)
            && terminal.is_home()
        {
            terminal.lend(group);
            self.lent = true;
        }
        self.tell_deadline();
        self.order(Order::Signal(consts::SIGCONT));
    }

    /// Stops this process, so that the shell sees its job stop. Nothing renews the lock from now on; the supervisor ends
    /// the command in time.
    async fn stop(&mut self, signal: i32, was_lent: bool) {
        // So that there is as much time as possible.
        let _ = timeout(
            Duration::from_millis(500).min(self.guard.ttl() / 4),
            self.guard.renew_now(),
        )
        .await;
        self.tell_deadline();
        if self.is_continued() {
            return;
        }
        let left = self.timing.term_at(self.told).since(Instant::now());
        if stderr().is_terminal() && !is_quiet() {
            // The cursor stands behind the key that was typed.
            let _ = writeln!(stderr());
        }
        remark(format_args!(
            "stopped; if it is not continued within {}, the command is ended and the lock freed",
            spelt(left)
        ));
        let needs_terminal = signal == consts::SIGTTIN || signal == consts::SIGTTOU;
        let companions = companions();
        // A shell that sees the others stop may continue all of them before this process stops.
        let stop = match signal {
            consts::SIGTTIN => HeldStop::new(NixSignal::SIGTTIN),
            consts::SIGTTOU => HeldStop::new(NixSignal::SIGTTOU),
            // There is a handler for SIGTSTP, and SIGSTOP cannot be held back.
            _ if !companions.is_empty() => HeldStop::new(NixSignal::SIGTTOU),
            _ => None,
        };
        if was_lent {
            // Ctrl-Z reached the command only. Scripts and pipelines around it are to stop with it.
            for process in companions {
                process.signal(Signal::TSTP);
            }
        }
        let in_foreground = || self.terminal.as_ref().is_some_and(Terminal::is_home);
        let call_off = self.is_continued() || stop.is_some() && needs_terminal && in_foreground();
        match stop {
            Some(stop) if call_off => return stop.call_off(),
            None if call_off => return,
            _ => self.last_heard.store(0, Ordering::SeqCst),
        }
        match stop {
            Some(stop) => stop.carry_out(),
            None => {
                let _ = nix_signal::raise(NixSignal::SIGSTOP);
            }
        }
        // The handler of the SIGCONT that ended the stop may run later, on another thread. A SIGTSTP that comes before it would
        // look like the older one.
        for _ in 0..100 {
            if self.last_heard.load(Ordering::SeqCst) != 0 {
                break;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Whether a shell that saw others of its job stop has continued all of them by now. It would not do so again.
    fn is_continued(&self) -> bool {
        self.asked_to_stop && self.last_heard.load(Ordering::SeqCst) == consts::SIGCONT as usize
    }

    /// Ends what a supervisor has left that has ended too early. Says how it has ended.
    async fn end_orphans(&mut self) -> Option<ExitStatus> {
        let status = self.supervisor.wait().ok();
        loop {
            let mut left = false;
            if let Some(group) = self.group {
                left |= kill_process_group(group, Signal::KILL).is_ok();
            }
            if !self.strangers {
                for process in descendants() {
                    process.signal(Signal::KILL);
                }
                left = loop {
                    match wait(WaitOptions::NOHANG) {
                        Ok(Some(_)) | Err(Errno::INTR) => {}
                        Ok(None) => break true,
                        Err(_) => break false,
                    }
                };
            }
            if !left {
                return status;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// The runtime knows no sockets of our kind; of this one it only needs to know when there is something to read.
fn for_runtime(channel: OwnedFd) -> io::Result<UnixDatagram> {
    let channel = std::os::unix::net::UnixDatagram::from(channel);
    channel.set_nonblocking(true)?;
    UnixDatagram::from_std(channel)
}

/// What the supervisor says; `None` once it is gone. Cancellation-safe.
async fn report(channel: &UnixDatagram) -> Option<Report> {
    loop {
        channel.readable().await.ok()?;
        match channel.try_io(Interest::READABLE, || Ok(channel::receive::<Report>(channel)?)) {
            Ok(report) => return report.map(|(report, _)| report),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::error!(target: "fencelock", %error, "the supervisor cannot be understood");
                return None;
            }
        }
    }
}

/// When the lock ends unless it is renewed. The clock is read first, so that it is never later than in truth.
fn deadline(guard: &LockGuard) -> Instant {
    let now = Instant::now();
    now.after(guard.remaining())
}
