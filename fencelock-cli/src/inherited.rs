//! What this process got from its caller, read before `main`: the standard library then opens `/dev/null` in place of closed streams, and
//! ignores SIGPIPE.

use std::fs;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use nix::sys::signal::Signal;
use rustix::io::{Errno, FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::stdio::{stderr, stdout};

/// Bits of the streams that were closed.
static CLOSED: AtomicU8 = AtomicU8::new(0);

/// Bits of the signals that were ignored, as by `nohup`: bit 0 is signal 1. None if `/proc` does not tell.
static IGNORED: AtomicU64 = AtomicU64::new(0);

fn outputs() -> [(u8, BorrowedFd<'static>); 2] {
    [(1, stdout()), (2, stderr())]
}

#[ctor::ctor(unsafe)]
fn look() {
    for (bit, stream) in outputs() {
        if fcntl_getfd(stream) == Err(Errno::BADF) {
            CLOSED.fetch_or(bit, Ordering::Relaxed);
        }
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    IGNORED.store(mask.unwrap_or(0), Ordering::Relaxed);
}

/// Has every process that this one starts, or becomes, find closed what was closed here.
pub(crate) fn keep_closed() {
    for (bit, stream) in outputs() {
        if CLOSED.load(Ordering::Relaxed) & bit != 0 {
            // It is the standard library's /dev/null.
            let _ = fcntl_setfd(stream, FdFlags::CLOEXEC);
        }
    }
}

/// Whether nothing can be written to stdout because there is none.
pub(crate) fn is_stdout_closed() -> bool {
    CLOSED.load(Ordering::Relaxed) & 1 != 0
}

/// Whether the caller ignores that signal.
pub(crate) fn ignores(signal: Signal) -> bool {
    IGNORED.load(Ordering::Relaxed) & (1 << (signal as i32 - 1)) != 0
}
