//! What a path lies on: whether other kernels or a daemon may change its files unseen.

use std::path::Path;

use lock_core::LockError;

#[cfg(any(target_os = "linux", target_os = "android"))]
use crate::failure::unreadable;

/// The kind of file system, if it is one whose files another kernel or a user's daemon may serve.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn shared_file_system(path: &Path, allow_unsafe: bool) -> Result<Option<&'static str>, LockError> {
    match rustix::fs::statfs(path) {
        Ok(found) => Ok(named(found.f_type as u32)),
        Err(e) => unknown(unreadable(path, e.into()), allow_unsafe).map(|()| None),
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn shared_file_system(_path: &Path, _allow_unsafe: bool) -> Result<Option<&'static str>, LockError> {
    Ok(None)
}

/// Whether the path lies on overlayfs, as what is written in a container does unless it lies on a volume.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn is_on_overlay(path: &Path) -> bool {
    const OVERLAYFS: u32 = 0x794C_7630;
    rustix::fs::statfs(path).is_ok_and(|found| found.f_type as u32 == OVERLAYFS)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn is_on_overlay(_path: &Path) -> bool {
    false
}

/// Magic numbers as `statfs(2)` and the file systems' own sources list them.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn named(kind: u32) -> Option<&'static str> {
    Some(match kind {
        0x6969 => "NFS",
        0x517B | 0xFF53_4D42 | 0xFE53_4D42 => "SMB",
        0x0102_1997 => "9p",
        0x6573_5546 => "FUSE or virtiofs",
        0x5346_414F | 0x6B41_4653 => "AFS",
        0x00C3_6400 => "Ceph",
        0x0116_1970 => "GFS2",
        0x7461_636F => "OCFS2",
        0x0BD0_0BD0 => "Lustre",
        0x7375_7245 => "Coda",
        0x564C => "NCP",
        0x786F_4256 => "a VirtualBox shared folder",
        0xBACB_ACBC => "a VMware shared folder",
        0x7C7C_6673 => "a Parallels shared folder",
        0x2003_0528 => "OrangeFS",
        0x1983_0326 => "BeeGFS",
        0x4750_4653 => "GPFS",
        0xAAD7_AAEA => "PanFS",
        0x5346_4846 => "a WSL 1 mount",
        _ => return None,
    })
}

/// Whether something is mounted at exactly this path, as the table in `proc` says.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn is_mount_point(proc: &Path, path: &Path, allow_unsafe: bool) -> Result<bool, LockError> {
    let table = proc.join("self/mountinfo");
    match std::fs::read(&table) {
        Ok(content) => Ok(lists_mount_point(&content, path)),
        Err(e) => unknown(unreadable(&table, e), allow_unsafe).map(|()| false),
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn is_mount_point(_proc: &Path, _path: &Path, _allow_unsafe: bool) -> Result<bool, LockError> {
    Ok(false)
}

/// Whether it is safe could not be found out, so it is not; a shortage passes, whatever is allowed.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn unknown(error: LockError, allow_unsafe: bool) -> Result<(), LockError> {
    match error {
        LockError::Configuration { message, .. } => refuse(allow_unsafe, message),
        passing => Err(passing),
    }
}

/// The mount point is the fifth word; blanks in it are written in octal.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn lists_mount_point(table: &[u8], path: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;

    let mut wanted = Vec::new();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => wanted.extend_from_slice(format!("\\{byte:03o}").as_bytes()),
            _ => wanted.push(byte),
        }
    }
    table
        .split(|&b| b == b'\n')
        .any(|line| line.split(|&b| b == b' ').nth(4) == Some(&wanted))
}

/// Refuses what would make locks unsafe, or warns if that was asked for.
pub(crate) fn refuse(allow_unsafe: bool, message: String) -> Result<(), LockError> {
    if allow_unsafe {
        tracing::warn!(target: "fencelock", "allowed, but locks may not exclude: {message}");
        Ok(())
    } else {
        Err(LockError::unsafe_configuration(message))
    }
}

#[cfg(all(test, any(target_os = "linux", target_os = "android")))]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn network_and_user_space_file_systems_are_known_and_local_ones_are_not() {
        for (kind, name) in [
            (0x6969, "NFS"),
            (0xFE53_4D42, "SMB"),
            (0x0102_1997, "9p"),
            (0x6573_5546, "FUSE or virtiofs"),
        ] {
            assert_eq!(named(kind), Some(name));
        }
        let (ext4, tmpfs, btrfs, xfs, overlay, zfs) =
            (0xEF53, 0x0102_1994, 0x9123_683E, 0x5846_5342, 0x794C_7630, 0x2FC1_2FC1);
        for kind in [ext4, tmpfs, btrfs, xfs, overlay, zfs] {
            assert_eq!(named(kind), None);
        }
    }

    #[test]
    fn mount_points_are_read_with_their_blanks() {
        let table = b"36 35 98:0 /mnt1 /a\\040b/c.db rw,noatime - ext3 /dev/root rw\n";
        assert!(lists_mount_point(table, Path::new("/a b/c.db")));
        assert!(!lists_mount_point(table, Path::new("/a b")));
        let proc = Path::new("/proc");
        assert!(is_mount_point(proc, proc, false).unwrap());
    }

    #[test]
    fn what_cannot_be_found_out_is_unsafe_and_a_shortage_passes() {
        let missing = Path::new("/nowhere");
        for refused in [
            is_mount_point(missing, missing, false).map(drop).unwrap_err(),
            shared_file_system(missing, false).map(drop).unwrap_err(),
        ] {
            assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused}");
        }
        assert!(!is_mount_point(missing, missing, true).unwrap());
        for shortage in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::IO] {
            let error = unknown(unreadable(missing, shortage.into()), true).unwrap_err();
            assert!(error.is_retryable(), "{error}");
        }
    }
}
