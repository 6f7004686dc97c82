//! A clock that all processes of this machine share.

use rustix::time::{ClockId, Timespec, clock_gettime};

/// Nanoseconds since the machine started.
pub(crate) fn now() -> u64 {
    nanoseconds(clock_gettime(ClockId::Monotonic))
}

/// Nanoseconds of a processor that this process has used.
pub(crate) fn processor() -> u64 {
    nanoseconds(clock_gettime(ClockId::ProcessCPUTime))
}

fn nanoseconds(time: Timespec) -> u64 {
    // Neither is negative, nor beyond five centuries.
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
