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

/// What became of the processors' time since the machine started, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Processors {
    /// By whomever.
    pub(crate) used: u64,
    pub(crate) idle: u64,
    /// By other machines of the same host, if this one is virtual.
    pub(crate) stolen: u64,
}

impl Processors {
    /// None where the system does not tell.
    pub(crate) fn look() -> Option<Self> {
        let text = std::fs::read_to_string("/proc/stat").ok()?;
        let counts = text.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace();
        let counts: Vec<u64> = counts.map(|count| count.parse().ok()).collect::<Option<_>>()?;
        let &[user, nice, system, idle, waiting, interrupts, soft, stolen, ..] = &counts[..] else {
            return None;
        };
        let tick = 1_000_000_000 / rustix::param::clock_ticks_per_second();
        Some(Self {
            used: (user + nice + system + interrupts + soft) * tick,
            idle: (idle + waiting) * tick,
            stolen: stolen * tick,
        })
    }

    /// Which part was stolen since then.
    pub(crate) fn stolen_since(&self, before: &Self) -> f64 {
        let all = |seen: &Self| seen.used + seen.idle + seen.stolen;
        let stolen = self.stolen.saturating_sub(before.stolen);
        stolen as f64 / all(self).saturating_sub(all(before)).max(1) as f64
    }
}

fn nanoseconds(time: Timespec) -> u64 {
    // Neither is negative, nor beyond five centuries.
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
