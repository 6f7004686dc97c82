//! Time and boots as every process of one machine sees them.

use std::time::Duration;
#[cfg(any(target_os = "linux", target_os = "android"))]
use std::{fs, io, path::Path};

use lock_core::LockError;

#[cfg(any(target_os = "linux", target_os = "android"))]
use crate::failure::unreadable;
#[cfg(any(target_os = "linux", target_os = "android"))]
use crate::file_system::{is_mount_point, refuse};

/// The clock by which locks expire, and the boot that it belongs to.
///
/// Every process of the machine must read the same clock, or one of them would free what another still holds. On Linux
/// that is the time since boot, counting suspend, as the initial time namespace sees it: nobody can step it. A reading
/// means nothing after a reboot, so the boot's id is stored beside each one.
///
/// Other systems offer no boot id that can be read without unsafe code. There the wall clock is used, and a step of the
/// wall clock lengthens or shortens the leases that are running.
#[derive(Clone, Debug)]
pub(crate) struct Boot {
    id: String,
    /// How far this process's clock runs ahead of the machine's, in nanoseconds.
    ahead: i64,
}

impl Boot {
    /// The id of this boot.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The machine's clock, in nanoseconds.
    pub(crate) fn now(&self) -> i64 {
        clock().saturating_sub(self.ahead)
    }

    /// Finds out which boot this is. `allow_unsafe` accepts one that other processes may see differently.
    pub(crate) fn find(allow_unsafe: bool) -> Result<Self, LockError> {
        find(allow_unsafe)
    }
}

/// A reading `ttl` later; a ttl that ends after the end of time ends there.
pub(crate) fn after(now: i64, ttl: Duration) -> i64 {
    now.saturating_add(i64::try_from(ttl.as_nanos()).unwrap_or(i64::MAX))
}

/// How long it is from `now` until `then`; zero if it is past.
pub(crate) fn until(now: i64, then: i64) -> Duration {
    Duration::from_nanos(u64::try_from(then.saturating_sub(now)).unwrap_or(0))
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn clock() -> i64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    t.tv_sec.saturating_mul(1_000_000_000).saturating_add(t.tv_nsec)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn find(allow_unsafe: bool) -> Result<Boot, LockError> {
    find_in(Path::new("/proc"), allow_unsafe)
}

/// What cannot be read is never taken for something harmless: the wrong clock would free what others hold.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn find_in(proc: &Path, allow_unsafe: bool) -> Result<Boot, LockError> {
    let id = proc.join("sys/kernel/random/boot_id");
    let text = fs::read_to_string(&id).map_err(|e| unreadable(&id, e))?;
    // systemd-nspawn and Incus give each container an id of its own that way; such a container would free what others
    // hold, because their locks seem to be from before a reboot.
    if is_mount_point(proc, &id, allow_unsafe)? {
        refuse(
            allow_unsafe,
            format!(
                "{} is replaced by a mount, so this container sees another boot than its neighbours and would free \
                 their locks; remove that mount, or make sure that nobody outside of the container uses the file",
                id.display()
            ),
        )?;
    }
    // A process between unshare(CLONE_NEWTIME) and exec reads the offsets of its children there, not its own.
    let (own, children) = (proc.join("self/ns/time"), proc.join("self/ns/time_for_children"));
    let own = if_there(&own, fs::read_link(&own))?;
    let children = if_there(&children, fs::read_link(&children))?;
    if own != children {
        refuse(
            allow_unsafe,
            "this process has prepared a time namespace without entering it, so its clock cannot be compared with \
             other processes'; start it with exec"
                .to_owned(),
        )?;
    }
    // Kernels without time namespaces have no such file, and no offset.
    let offsets = proc.join("self/timens_offsets");
    let ahead = match if_there(&offsets, fs::read_to_string(&offsets))? {
        None => 0,
        Some(text) => boottime_offset(&text).ok_or_else(|| {
            LockError::configuration(format!(
                "{} does not tell the offset of the boot clock, so it cannot be compared with other processes'; update \
                 this program",
                offsets.display()
            ))
        })?,
    };
    Ok(Boot {
        id: text.trim().to_owned(),
        ahead,
    })
}

/// What was read at `path`; none only if it does not exist.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn if_there<T>(path: &Path, read: io::Result<T>) -> Result<Option<T>, LockError> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(unreadable(path, e)),
    }
}

/// The offset of the boot clock in nanoseconds; lines are `clock seconds nanoseconds`.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn boottime_offset(text: &str) -> Option<i64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        // Older kernels wrote the clock's number.
        let (clock, seconds, nanos) = (words.next()?, words.next()?, words.next()?);
        let seconds: i64 = matches!(clock, "boottime" | "7").then(|| seconds.parse().ok())??;
        Some(
            seconds
                .saturating_mul(1_000_000_000)
                .saturating_add(nanos.parse().ok()?),
        )
    })
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn clock() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn find(_allow_unsafe: bool) -> Result<Boot, LockError> {
    Ok(Boot {
        id: "wall clock".to_owned(),
        ahead: 0,
    })
}

#[cfg(any(target_os = "linux", target_os = "android"))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_the_boot_clock_is_read_in_both_notations() {
        let text = "monotonic           5         6\nboottime       864000 500000000\n";
        assert_eq!(boottime_offset(text), Some(864_000_500_000_000));
        assert_eq!(boottime_offset("1 0 0\n7 3 1\n"), Some(3_000_000_001));
        assert_eq!(boottime_offset("boottime   -2 500000000\n"), Some(-1_500_000_000));
        for nonsense in ["", "monotonic 5 6\n", "boottime x 6\n", "boottime 5\n"] {
            assert_eq!(boottime_offset(nonsense), None, "{nonsense:?}");
        }
    }

    /// What there is to read in a /proc, and nothing else.
    fn readable_proc() -> tempfile::TempDir {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir_all(proc.path().join("sys/kernel/random")).unwrap();
        fs::create_dir_all(proc.path().join("self/ns")).unwrap();
        fs::write(proc.path().join("sys/kernel/random/boot_id"), "an-id\n").unwrap();
        fs::write(proc.path().join("self/mountinfo"), "").unwrap();
        proc
    }

    #[test]
    fn a_kernel_without_time_namespaces_has_no_offset() {
        let boot = find_in(readable_proc().path(), false).unwrap();
        assert_eq!((boot.id(), boot.ahead), ("an-id", 0));
    }

    #[test]
    fn what_cannot_be_read_is_an_error_and_not_taken_for_missing() {
        for file in ["timens_offsets", "ns/time", "ns/time_for_children", "mountinfo"] {
            let proc = readable_proc();
            let path = proc.path().join("self").join(file);
            let _ = fs::remove_file(&path);
            // Neither to be read as a file nor as a link.
            fs::create_dir(&path).unwrap();
            find_in(proc.path(), false).unwrap_err();
        }
        let proc = readable_proc();
        fs::write(proc.path().join("self/timens_offsets"), "gibberish\n").unwrap();
        find_in(proc.path(), false).unwrap_err();
    }

    #[test]
    fn a_replaced_boot_id_is_refused() {
        let proc = readable_proc();
        let id = proc.path().join("sys/kernel/random/boot_id");
        let table = format!("36 35 98:0 / {} rw - tmpfs none rw\n", id.display());
        fs::write(proc.path().join("self/mountinfo"), table).unwrap();
        let refused = find_in(proc.path(), false).unwrap_err();
        assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused}");
        find_in(proc.path(), true).unwrap();
    }

    #[test]
    fn a_clock_that_runs_ahead_is_set_back() {
        let machine = Boot::find(false).unwrap();
        let ahead = Boot {
            ahead: machine.ahead + 5_000_000_000,
            ..machine.clone()
        };
        let (before, set_back, after) = (machine.now(), ahead.now(), machine.now());
        let then = set_back + 5_000_000_000;
        assert!((before..=after).contains(&then), "{then} between {before} and {after}");
    }

    #[test]
    fn boots_have_an_id_and_ends_saturate() {
        assert!(Boot::find(false).unwrap().id().len() >= 32);
        assert_eq!(after(5, Duration::MAX), i64::MAX);
        assert_eq!(until(5, 3), Duration::ZERO);
    }
}
