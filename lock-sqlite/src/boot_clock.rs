//! Time and boots as every process of one machine sees them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lock_core::LockError;

/// The clock by which locks expire, and the id of the boot that it belongs to.
///
/// Every process of the machine must read the same clock, or one of them would free what another still holds. On Linux that is the time since
/// boot, counting suspend: no setting of the wall clock changes it. A reading means nothing after a reboot, so the id of the boot is stored
/// beside each one. Other systems have no boot id that can be read without unsafe code. There the wall clock is used.
#[derive(Debug)]
pub(crate) struct BootClock {
    pub(crate) id: String,
}

impl BootClock {
    /// Finds out which boot this is. `allow_unsafe` accepts one that other processes may see differently.
    pub(crate) fn find(allow_unsafe: bool) -> Result<Self, LockError> {
        system::boot_id(allow_unsafe).map(|id| Self { id })
    }

    /// The machine's clock, in nanoseconds.
    pub(crate) fn now(&self) -> i64 {
        system::now()
    }
}

/// A reading `length` later; at most the end of time.
pub(crate) fn after(now: i64, length: Duration) -> i64 {
    now.saturating_add(i64::try_from(length.as_nanos()).unwrap_or(i64::MAX))
}

/// Microseconds of Unix time.
pub(crate) fn wall_clock() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod system {
    use std::fs;
    use std::path::Path;

    use lock_core::LockError;

    use crate::error::unreadable;
    use crate::file_identity::{is_mount_point, refuse};

    pub(super) fn now() -> i64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        t.tv_sec.saturating_mul(1_000_000_000).saturating_add(t.tv_nsec)
    }

    /// What cannot be read is never taken for something harmless: the wrong clock would free what others hold.
    pub(super) fn boot_id(allow_unsafe: bool) -> Result<String, LockError> {
        let path = Path::new("/proc/sys/kernel/random/boot_id");
        let id = fs::read_to_string(path).map_err(|e| unreadable(path, e))?;
        // systemd-nspawn and Incus give each container an id of its own that way.
        if is_mount_point(path)? {
            let message = "/proc/sys/kernel/random/boot_id is replaced by a mount, so this container sees another boot than its neighbours and \
                           would free their locks; remove that mount, or make sure that no process outside of the container uses the file";
            refuse(allow_unsafe, message)?;
        }
        // A kernel that has no such file knows no time namespaces.
        if fs::read_to_string("/proc/self/timens_offsets").is_ok_and(|offsets| is_set_off(&offsets)) {
            let message = "this process is in a time namespace whose boot clock is set off, so its leases would not end when other \
                           processes think; start it outside of the namespace";
            refuse(allow_unsafe, message)?;
        }
        Ok(id.trim().to_owned())
    }

    /// Whether the boot clock is set off. Older kernels wrote the number of the clock.
    pub(super) fn is_set_off(offsets: &str) -> bool {
        let mut clocks = offsets.lines().map(str::split_whitespace);
        clocks.any(|mut words| matches!(words.next(), Some("boottime" | "7")) && words.any(|word| word != "0"))
    }

    #[test]
    fn a_boot_clock_that_is_set_off_is_told_from_one_that_is_not() {
        for same in ["", "monotonic 5 0\nboottime 0 0\n"] {
            assert!(!is_set_off(same), "{same}");
        }
        for other in ["monotonic 0 0\nboottime 100 0\n", "1 0 0\n7 -5 0\n"] {
            assert!(is_set_off(other), "{other}");
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod system {
    pub(super) fn now() -> i64 {
        super::wall_clock().saturating_mul(1_000)
    }

    pub(super) fn boot_id(_allow_unsafe: bool) -> Result<String, lock_core::LockError> {
        Ok("wall clock".to_owned())
    }
}
