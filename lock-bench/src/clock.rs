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

/// Nanoseconds of all processors that were used, by whomever; None where the system does not tell.
pub(crate) fn machine() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let counts = text.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace();
    let counts: Vec<u64> = counts.map(|count| count.parse().ok()).collect::<Option<_>>()?;
    // For user, nice, system, idle, iowait, irq, softirq: two of them are rest.
    let &[user, nice, system, _, _, irq, softirq, ..] = &counts[..] else {
        return None;
    };
    let ticks = user + nice + system + irq + softirq;
    Some(ticks * (1_000_000_000 / rustix::param::clock_ticks_per_second()))
}

fn nanoseconds(time: Timespec) -> u64 {
    // Neither is negative, nor beyond five centuries.
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
