//! Whether this process was started with stdout and stderr.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::{Errno, FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::stdio::{stderr, stdout};

/// Bits of the streams that were closed.
static CLOSED: AtomicU8 = AtomicU8::new(0);

fn outputs() -> [(u8, BorrowedFd<'static>); 2] {
    [(1, stdout()), (2, stderr())]
}

/// Runs before `main`, and before the standard library opens `/dev/null` in place of what is closed.
#[ctor::ctor(unsafe)]
fn look() {
    for (bit, stream) in outputs() {
        if fcntl_getfd(stream) == Err(Errno::BADF) {
            CLOSED.fetch_or(bit, Ordering::Relaxed);
        }
    }
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
