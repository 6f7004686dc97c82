//! Signals that are meant for the command.

use std::io;

use nix::libc;
use nix::sys::signal::Signal::*;
use nix::sys::signal::{SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tokio::io::unix::AsyncFd;

use crate::inherited;

/// What is passed on to the command, and ends the wait for a lock: every signal that ends a process by default, except SIGKILL and those
/// that the kernel sends for a mistake of the process itself.
const FORWARDED: [Signal; 15] = [
    SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGABRT, SIGALRM, SIGIO, SIGPROF, SIGTRAP, SIGVTALRM, SIGXCPU,
    SIGPWR, SIGSTKFLT,
];

/// A signal to this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) number: i32,
    /// Ctrl-C or Ctrl-\ at the terminal: every process of the job has got it.
    pub(crate) typed: bool,
}

impl Received {
    pub(crate) fn is_ctrl_c(self) -> bool {
        self.typed && self.number == libc::SIGINT
    }
}

/// The signals that are passed on, except those that the caller ignores. They are blocked, and read from a descriptor, so none is missed.
#[derive(Debug)]
pub(crate) struct Signals {
    descriptor: AsyncFd<SignalFd>,
    /// What the command must not find blocked.
    blocked: SigSet,
}

impl Signals {
    /// Listens from now on. Before this process has other threads, as they inherit what is blocked.
    pub(crate) fn listen() -> io::Result<Self> {
        let wanted: SigSet = FORWARDED
            .into_iter()
            .filter(|&signal| !inherited::ignores(signal))
            .collect();
        let mut blocked = wanted;
        // With a limit for the size of files, a write beyond it is an error then, and not the end of this process.
        blocked.add(SIGXFSZ);
        let before = SigSet::thread_get_mask()?;
        blocked.thread_block()?;
        for signal in before.iter() {
            blocked.remove(signal);
        }
        let descriptor = SignalFd::with_flags(&wanted, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        #[expect(
            deprecated,
            reason = "what took its place is unsafe, and a SignalFd keeps its descriptor open"
        )]
        let descriptor = AsyncFd::new(descriptor)?;
        Ok(Self { descriptor, blocked })
    }

    /// The next signal. Cancellation-safe.
    pub(crate) async fn receive(&mut self) -> Received {
        loop {
            let Ok(mut ready) = self.descriptor.readable().await else {
                return std::future::pending().await;
            };
            if let Some(received) = self.arrived() {
                return received;
            }
            ready.clear_ready();
        }
    }

    /// A signal that is here already.
    pub(crate) fn arrived(&self) -> Option<Received> {
        let info = self.descriptor.get_ref().read_signal().ok()??;
        let number = info.ssi_signo as i32;
        Some(Received {
            number,
            typed: info.ssi_code == libc::SI_KERNEL && [libc::SIGINT, libc::SIGQUIT].contains(&number),
        })
    }

    /// The numbers of the signals that a process started from here has to unblock, for [`unblock`].
    pub(crate) fn blocked(&self) -> String {
        let numbers: Vec<String> = self.blocked.iter().map(|signal| (signal as i32).to_string()).collect();
        numbers.join(",")
    }
}

/// Unblocks what [`Signals::blocked`] lists.
pub(crate) fn unblock(numbers: &str) {
    let signals = numbers
        .split(',')
        .filter_map(|number| Signal::try_from(number.parse::<i32>().ok()?).ok());
    let _ = signals.collect::<SigSet>().thread_unblock();
}

/// Blocks all signals, so that only SIGKILL and SIGSTOP have an effect on this process.
pub(crate) fn block_all() {
    let _ = SigSet::all().thread_block();
}

/// Lets this process write to a terminal that is set to stop writers in the background.
pub(crate) fn write_from_background() {
    let _ = SigSet::from(SIGTTOU).thread_block();
}

/// Ends this process by SIGINT, as Ctrl-C does without a handler: a shell ends its loop or script only then.
pub(crate) fn die_of_interrupt() {
    let _ = SigSet::from(SIGINT).thread_unblock();
    let _ = raise(SIGINT);
}
