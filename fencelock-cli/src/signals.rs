//! Signals that are meant for the command.

use std::fs;
use std::future::poll_fn;
use std::io;
use std::task::Poll;

use nix::sys::signal::SigSet;
use nix::sys::signal::Signal::{self, *};
use signal_hook::low_level::emulate_default_handler;
use tokio::signal::unix::{self, SignalKind};

/// What is passed on to the command, and ends the wait for a lock: every signal that ends a process by default, except SIGKILL and those
/// that the kernel sends for a mistake of the process itself.
const FORWARDED: [Signal; 15] = [
    SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGABRT, SIGALRM, SIGIO, SIGPROF, SIGTRAP, SIGVTALRM, SIGXCPU,
    SIGPWR, SIGSTKFLT,
];

/// The signals that are passed on, except those that the caller ignores, as with `nohup`.
#[derive(Debug)]
pub(crate) struct Signals {
    streams: Vec<(Signal, unix::Signal)>,
    /// With a limit for the size of files, a write beyond it is an error then, and not the end of this process.
    _file_size: unix::Signal,
}

impl Signals {
    /// Listens from now on.
    pub(crate) fn listen() -> io::Result<Self> {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let ignored = mask
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .unwrap_or(0);
        let wanted = FORWARDED.into_iter().filter(|&signal| ignored & bit(signal) == 0);
        let streams = wanted.map(|signal| Ok((signal, listen_for(signal)?)));
        Ok(Self {
            streams: streams.collect::<io::Result<_>>()?,
            _file_size: listen_for(SIGXFSZ)?,
        })
    }

    /// The next signal. Cancellation-safe.
    pub(crate) async fn receive(&mut self) -> Signal {
        poll_fn(|context| {
            let mut streams = self.streams.iter_mut();
            let arrived = streams.find_map(|(signal, stream)| stream.poll_recv(context).is_ready().then_some(*signal));
            arrived.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

fn listen_for(signal: Signal) -> io::Result<unix::Signal> {
    unix::signal(SignalKind::from_raw(signal as i32))
}

fn bit(signal: Signal) -> u64 {
    1 << (signal as i32 - 1)
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
    let _ = emulate_default_handler(SIGINT as i32);
}
