//! Where the database lies: whether locks can be kept there, and whether it is still the same file.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use lock_core::LockError;
use rustix::fs::Access;

use crate::error::{Failure, not_readable, not_writable, permits, unreadable};

/// The files of an open database, as they were when it was opened.
///
/// SQLite keeps its files open, and locks in them, also when the paths lead elsewhere by now: to a restored copy, to a new file, to nothing. A
/// process that opens the path then would share nothing with us. The write-ahead log and its index matter as much as the database: a process
/// that finds none makes its own.
#[derive(Debug)]
pub(crate) struct FileIdentity {
    path: PathBuf,
    /// The database, its log and the index of the log.
    files: [(PathBuf, Identity); 3],
}

/// Device and inode.
type Identity = (u64, u64);

fn identity(file: &Metadata) -> Identity {
    (file.dev(), file.ino())
}

/// What lies at a path before SQLite opens it.
#[derive(Debug)]
pub(crate) struct Place {
    /// Where links lead to. SQLite puts the log beside it.
    pub(crate) real: PathBuf,
    pub(crate) file: Option<Metadata>,
}

impl Place {
    /// Looks at the path, makes nothing, and refuses places where locks would not exclude.
    pub(crate) fn look(path: &Path, allow_unsafe: bool) -> Result<Self, LockError> {
        let place = resolve(path)?;
        examine(path, &place, allow_unsafe)?;
        Ok(place)
    }

    /// The same for a client that takes locks: the file is made if it is missing. No connection of this process may be about to open it.
    pub(crate) fn prepare(path: &Path, allow_unsafe: bool) -> Result<Self, LockError> {
        let mut place = Self::look(path, allow_unsafe)?;
        let parent = place.real.parent().unwrap_or(Path::new("/"));
        if !permits(parent, Access::WRITE_OK | Access::EXEC_OK)? {
            return Err(LockError::configuration(format!(
                "the directory {} is not writable for this process, and the write-ahead log must lie there; change its owner or mode, or \
                 choose another path",
                parent.display()
            )));
        }
        if place.file.is_some() && !permits(&place.real, Access::WRITE_OK)? {
            return Err(LockError::configuration(not_writable(&place.real, "")));
        }
        let made = {
            // Before any client of this process opens the file: what closes it there would drop SQLite's locks.
            let _alone = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
            place.file.is_none().then(|| make(&place.real))
        };
        if let Some(made) = made {
            made.map_err(|e| unreadable(&place.real, e))?;
            // Without this a power loss could take a new file away as a whole. Not every file system can do it.
            let _ = fs::File::open(parent).and_then(|dir| dir.sync_all());
            place.file = Some(fs::metadata(&place.real).map_err(|e| unreadable(&place.real, e))?);
        }
        Ok(place)
    }
}

static MAKING: Mutex<()> = Mutex::new(());

/// Makes an empty file, private or for a group that the umask admits: a user who may only read it could hold up all others by locking bytes of
/// its index. SQLite gives the mode to the log and the index.
fn make(path: &Path) -> io::Result<()> {
    let made = OpenOptions::new().write(true).create_new(true).mode(0o660).open(path);
    let file = match made {
        // Another process was faster.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        made => made?,
    };
    if file.metadata()?.mode() & 0o020 == 0 {
        // Not every file system has modes.
        let _ = file.set_permissions(Permissions::from_mode(0o600));
    }
    Ok(())
}

impl FileIdentity {
    /// Notes which files were opened. All three exist after the first transaction.
    pub(crate) fn of(path: &Path, place: &Place) -> Result<Self, Failure> {
        let at = |file: PathBuf| match fs::metadata(&file) {
            Ok(found) => Ok((file, identity(&found))),
            Err(_) => Err(moved(path)),
        };
        let files = [
            at(path.to_owned())?,
            at(with_suffix(&place.real, "-wal"))?,
            at(with_suffix(&place.real, "-shm"))?,
        ];
        if place.file.as_ref().is_some_and(|before| identity(before) != files[0].1) {
            return Err(moved(path));
        }
        Ok(Self {
            path: path.to_owned(),
            files,
        })
    }

    /// Fails if a path leads elsewhere than when the database was opened, or cannot be looked at. Returns the length of the log.
    pub(crate) fn check(&self) -> Result<u64, Failure> {
        let mut log = 0;
        for (index, (path, before)) in self.files.iter().enumerate() {
            match fs::metadata(path) {
                Ok(found) if identity(&found) == *before => {
                    if index == 1 {
                        log = found.len();
                    }
                }
                Err(e) if !nothing_there(&e) => return Err(unreadable(path, e).into()),
                _ => return Err(moved(&self.path)),
            }
        }
        Ok(log)
    }
}

fn moved(path: &Path) -> Failure {
    Failure::Lost(format!(
        "{}, or its -wal or -shm file, was replaced or removed while it was in use; locks held through the old one are lost, the next \
         call opens what is there now",
        path.display()
    ))
}

fn nothing_there(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

/// The limits of SQLite (512) and of the system (255), less the longest suffix of a name beside the file, `-journal`.
const LONGEST_PATH: usize = 504;
const LONGEST_NAME: usize = 247;

/// Follows links to the file, which may be missing; its directory may not.
fn resolve(path: &Path) -> Result<Place, LockError> {
    let place = match fs::canonicalize(path) {
        Ok(real) => {
            let file = fs::metadata(&real).map_err(|e| unreadable(path, e))?;
            Place { real, file: Some(file) }
        }
        Err(e) if !nothing_there(&e) => return Err(unreadable(path, e)),
        Err(_) if fs::symlink_metadata(path).is_ok_and(|link| link.is_symlink()) => {
            return Err(LockError::configuration(format!(
                "{} is a symbolic link to what does not exist; make it lead to a file, or remove it",
                path.display()
            )));
        }
        Err(_) => {
            let (parent, name) = (path.parent().unwrap_or(path), path.file_name().unwrap_or_default());
            match fs::canonicalize(parent) {
                Ok(parent) if parent.is_dir() => Place {
                    real: parent.join(name),
                    file: None,
                },
                Err(e) if !nothing_there(&e) => return Err(unreadable(parent, e)),
                _ => {
                    return Err(LockError::configuration(format!(
                        "the directory {} does not exist; create it, it is not made silently",
                        parent.display()
                    )));
                }
            }
        }
    };
    let name = place.real.file_name().map_or(0, OsStr::len);
    if place.real.as_os_str().len() > LONGEST_PATH || name > LONGEST_NAME {
        return Err(LockError::configuration(format!(
            "{} is too long: SQLite takes paths of up to {LONGEST_PATH} bytes, and file names of up to {LONGEST_NAME}",
            place.real.display()
        )));
    }
    Ok(place)
}

/// The smallest page that SQLite knows, so the smallest database. It takes a file of one byte for an empty one and would write over it.
const SMALLEST: u64 = 512;

fn examine(path: &Path, place: &Place, allow_unsafe: bool) -> Result<(), LockError> {
    let (real, at) = (place.real.as_path(), path.display());
    for place in [real.parent(), place.file.is_some().then_some(real)]
        .into_iter()
        .flatten()
    {
        if let Some(kind) = shared_file_system(place, allow_unsafe)? {
            refuse(
                allow_unsafe,
                format!(
                    "{at} lies on {kind}, where other machines or a daemon may change the file unseen; use a local disk, or a backend \
                     with a server"
                ),
            )?;
        }
    }
    let Some(file) = &place.file else { return Ok(()) };
    let wrong = |what: &str| Err(LockError::configuration(format!("{at} {what}")));
    if file.is_dir() {
        return wrong("is a directory; give the path of a file");
    }
    if !file.is_file() {
        return wrong("is not a regular file; give the path of one");
    }
    if (1..SMALLEST).contains(&file.len()) {
        return wrong("is not an SQLite database; choose another path");
    }
    if !permits(real, Access::READ_OK)? {
        return Err(not_readable(path));
    }
    if file.nlink() > 1 {
        refuse(
            allow_unsafe,
            format!(
                "{at} has {} hard links; under another name it would get a write-ahead log of its own. Remove the others",
                file.nlink()
            ),
        )?;
    }
    if is_mount_point(Path::new("/proc"), real, allow_unsafe)? {
        refuse(
            allow_unsafe,
            format!(
                "{at} is mounted as a single file, so its write-ahead log is not shared with it; mount the whole directory"
            ),
        )?;
    }
    Ok(())
}

/// What puts locks at risk at that path, although they can be kept there.
pub(crate) fn warnings(path: &Path) -> Vec<String> {
    let place = resolve(path).ok();
    let is_on_overlay = place.and_then(|place| Some(file_system(place.real.parent()?).ok()? == OVERLAYFS));
    if is_on_overlay != Some(true) {
        return Vec::new();
    }
    vec![format!(
        "{} lies on overlayfs, so mostly in this container's own layer: programs outside of the container, and other containers of the \
         same image, have a file of their own there and are not excluded; put the file on a volume that all of them mount",
        path.display()
    )]
}

/// Refuses what would make locks unsafe, or warns if that was asked for.
pub(crate) fn refuse(allow_unsafe: bool, message: String) -> Result<(), LockError> {
    if !allow_unsafe {
        return Err(LockError::unsafe_configuration(message));
    }
    tracing::warn!(target: "fencelock", "allowed, but locks may not exclude: {message}");
    Ok(())
}

const OVERLAYFS: u32 = 0x794C_7630;

#[cfg(any(target_os = "linux", target_os = "android"))]
fn file_system(path: &Path) -> Result<u32, LockError> {
    let found = rustix::fs::statfs(path).map_err(|e| unreadable(path, e.into()))?;
    Ok(found.f_type as u32)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn file_system(_path: &Path) -> Result<u32, LockError> {
    Ok(0)
}

/// The kind of file system, if it is one whose files another kernel or a user's daemon may serve.
fn shared_file_system(path: &Path, allow_unsafe: bool) -> Result<Option<&'static str>, LockError> {
    match file_system(path) {
        Ok(kind) => Ok(named(kind)),
        Err(error) => unknown(error, allow_unsafe).map(|()| None),
    }
}

/// Magic numbers as `statfs(2)` and the sources of the file systems list them.
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
pub(crate) fn is_mount_point(proc: &Path, path: &Path, allow_unsafe: bool) -> Result<bool, LockError> {
    if !cfg!(any(target_os = "linux", target_os = "android")) {
        return Ok(false);
    }
    let table = proc.join("self/mountinfo");
    match fs::read(&table) {
        Ok(content) => Ok(lists_mount_point(&content, path)),
        Err(e) => unknown(unreadable(&table, e), allow_unsafe).map(|()| false),
    }
}

/// Whether it is safe could not be found out, so it is not. A shortage passes, whatever is allowed.
fn unknown(error: LockError, allow_unsafe: bool) -> Result<(), LockError> {
    match error {
        LockError::Configuration { message, .. } => refuse(allow_unsafe, message),
        passing => Err(passing),
    }
}

/// The mount point is the fifth word; blanks in it are written in octal.
fn lists_mount_point(table: &[u8], path: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;

    let mut wanted = Vec::new();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => wanted.extend_from_slice(format!("\\{byte:03o}").as_bytes()),
            _ => wanted.push(byte),
        }
    }
    let mut lines = table.split(|&b| b == b'\n');
    lines.any(|line| line.split(|&b| b == b' ').nth(4) == Some(&wanted))
}

#[cfg(all(test, any(target_os = "linux", target_os = "android")))]
mod tests {
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
        let [ext4, tmpfs, btrfs, xfs, zfs] = [0xEF53, 0x0102_1994, 0x9123_683E, 0x5846_5342, 0x2FC1_2FC1];
        for kind in [ext4, tmpfs, btrfs, xfs, zfs, OVERLAYFS] {
            assert_eq!(named(kind), None);
        }
    }

    #[test]
    fn mount_points_are_read_with_their_blanks_and_what_cannot_be_read_is_unsafe() {
        let table = b"36 35 98:0 /mnt1 /a\\040b/c.db rw,noatime - ext3 /dev/root rw\n";
        assert!(lists_mount_point(table, Path::new("/a b/c.db")));
        assert!(!lists_mount_point(table, Path::new("/a b")));
        let (proc, missing) = (Path::new("/proc"), Path::new("/nowhere"));
        assert!(is_mount_point(proc, proc, false).unwrap());
        for refused in [
            is_mount_point(missing, missing, false).map(drop).unwrap_err(),
            shared_file_system(missing, false).map(drop).unwrap_err(),
        ] {
            assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused}");
        }
        assert!(!is_mount_point(missing, missing, true).unwrap());
        let shortage = unknown(unreadable(missing, rustix::io::Errno::MFILE.into()), true).unwrap_err();
        assert!(shortage.is_retryable(), "{shortage}");
    }

    #[test]
    fn a_new_file_is_private_or_for_a_group() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        Place::prepare(&path, false).unwrap();
        let mode = fs::metadata(&path).unwrap().mode() & 0o777;
        assert!([0o600, 0o660].contains(&mode), "{mode:o}");
    }
}
