//! Signals that are meant for the command.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use nix::sys::signal::{SigSet, SigmaskHow, Signal as StopSignal, raise};
use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts;
use signal_hook::flag::register;
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;
use tokio::net::UnixStream;

use crate::processes::ignored_signals;

/// What is passed on to the command, and ends the wait for a lock: everything that asks a process to end, or would end it, except
/// what the kernel sends for a mistake of the process itself.
pub(crate) const FORWARDED: &[i32] = &[
    consts::SIGHUP,
    consts::SIGINT,
    consts::SIGQUIT,
    consts::SIGTERM,
    consts::SIGUSR1,
    consts::SIGUSR2,
    consts::SIGABRT,
    consts::SIGALRM,
    consts::SIGIO,
    consts::SIGPROF,
    consts::SIGTRAP,
    consts::SIGVTALRM,
    consts::SIGXCPU,
    StopSignal::SIGPWR as i32,
    StopSignal::SIGSTKFLT as i32,
];

/// Survives a limit for the size of files: what is written beyond it fails, and is told as an error.
pub(crate) fn survive_file_size_limit() -> io::Result<()> {
    not_ignored(&[consts::SIGXFSZ]).try_for_each(|signal| register(signal, Arc::default()).map(drop))
}

/// Signals as they come in, except those that this process was started to ignore. None is missed from the moment on in
/// which its handler is there.
#[derive(Debug)]
pub(crate) struct Signals {
    delivery: SignalDelivery<UnixStream, SignalOnly>,
    heard: VecDeque<i32>,
}

impl Signals {
    /// Listens to what is forwarded, from now on.
    pub(crate) fn listen() -> io::Result<Self> {
        survive_file_size_limit()?;
        let (read, write) = UnixStream::pair()?;
        let write = write.into_std()?;
        Ok(Self {
            delivery: SignalDelivery::with_pipe(read, write, SignalOnly, not_ignored(FORWARDED))?,
            heard: VecDeque::new(),
        })
    }

    /// Listens to these too.
    pub(crate) fn also(&mut self, wanted: &[i32]) -> io::Result<()> {
        not_ignored(wanted).try_for_each(|signal| self.delivery.handle().add_signal(signal))
    }

    /// The next one. Cancellation-safe.
    pub(crate) async fn next(&mut self) -> i32 {
        loop {
            if let Some(signal) = self.heard.pop_front() {
                return signal;
            }
            let wake = self.delivery.get_read();
            if wake.readable().await.is_err() {
                return std::future::pending().await;
            }
            // First the bell, then who has rung it: whoever comes in between rings it again.
            while wake.try_read(&mut [0; 64]).is_ok_and(|length| length > 0) {}
            self.heard.extend(self.delivery.pending());
        }
    }
}

/// A stop of this process that is under way, but held back. Whoever continues the process meanwhile takes it away, so
/// that a SIGCONT never comes before the stop that it is to end: the kernel sees to it for signals that are pending.
#[derive(Debug)]
pub(crate) struct HeldStop {
    mask_before: SigSet,
}

impl HeldStop {
    /// Holds back a stop by `signal`, which has no handler. `None` if the signal is ignored, or nothing can be held back.
    pub(crate) fn new(signal: StopSignal) -> Option<Self> {
        not_ignored(&[signal as i32]).next()?;
        let mask_before = SigSet::from(signal).thread_swap_mask(SigmaskHow::SIG_BLOCK).ok()?;
        let held = Self { mask_before };
        raise(signal).ok()?;
        Some(held)
    }

    /// Stops unless this process was continued since.
    pub(crate) fn carry_out(self) {
        drop(self);
    }

    /// Does not stop.
    pub(crate) fn call_off(self) {
        let _ = kill_process(getpid(), Signal::CONT);
    }
}

impl Drop for HeldStop {
    fn drop(&mut self) {
        let _ = self.mask_before.thread_set_mask();
    }
}

/// Those of `wanted` that this process was not started to ignore, as `nohup` or `&` in a script do it.
pub(crate) fn not_ignored(wanted: &[i32]) -> impl Iterator<Item = i32> {
    let ignored = ignored_signals().unwrap_or(0);
    wanted
        .iter()
        .copied()
        .filter(move |signal| ignored & (1 << (signal - 1)) == 0)
}

/// A signal by its number.
pub(crate) fn named(signal: i32) -> Option<Signal> {
    Signal::from_named_raw(signal)
}
