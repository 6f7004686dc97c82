//! Where the database lies: whether locks can be kept there, and whether it is still the same file.

use std::ffi::OsString;
use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use lock_core::LockError;

use crate::error::{Failure, not_writable, unreadable};

/// Device and number of a file.
pub(crate) type Inode = (u64, u64);

/// The files of an open database, as they were when it was opened.
///
/// SQLite keeps its files open, and locks in them, also when the paths lead elsewhere by now: to a restored copy, to a new file, to nothing. A
/// process that opens the path then would share nothing with us. The write-ahead log and its index matter as much as the database: a process
/// that finds none makes its own.
#[derive(Debug)]
pub(crate) struct FileIdentity {
    /// The path of the database, without links.
    pub(crate) database: PathBuf,
    /// The database by the configured path, its log and the index of the log.
    files: [(PathBuf, Inode); 3],
}

impl FileIdentity {
    /// Notes which files were opened, right after SQLite has opened the log and its index. `place` is what was there before.
    pub(crate) fn of(path: &Path, Place { real, inode }: Place) -> Result<Self, Failure> {
        let paths = [path.to_owned(), with_suffix(&real, "-wal"), with_suffix(&real, "-shm")];
        let inodes: Option<Vec<Inode>> = paths.iter().map(|file| Some(look(file).ok()?.0)).collect();
        match inodes.as_deref() {
            Some(&[database, log, index]) if database == inode => {
                let [path, wal, shm] = paths;
                let files = [(path, database), (wal, log), (shm, index)];
                Ok(Self { database: real, files })
            }
            _ => Err(moved(path)),
        }
    }

    pub(crate) fn inode(&self) -> Inode {
        self.files[0].1
    }

    /// Fails if a path leads elsewhere than when the database was opened, or cannot be looked at. Returns the length of the log.
    pub(crate) fn check(&self) -> Result<u64, Failure> {
        let mut log = 0;
        for (at, (path, before)) in self.files.iter().enumerate() {
            match look(path) {
                Ok((inode, length)) if inode == *before => log = if at == 1 { length } else { log },
                Err(e) if !nothing_there(&e) => return Err(unreadable(path, e).into()),
                _ => return Err(moved(&self.files[0].0)),
            }
        }
        Ok(log)
    }
}

fn look(file: &Path) -> io::Result<(Inode, u64)> {
    let found = fs::metadata(file)?;
    Ok(((found.dev(), found.ino()), found.len()))
}

fn moved(path: &Path) -> Failure {
    Failure::Lost(format!(
        "{}, or its -wal or -shm file, was replaced or removed while it was in use; locks held through the old one are lost, the next \
         call opens what is there now",
        path.display()
    ))
}

pub(crate) fn nothing_there(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

/// A file before SQLite opens it.
#[derive(Debug)]
pub(crate) struct Place {
    /// Where links lead to. SQLite puts the log beside it.
    pub(crate) real: PathBuf,
    inode: Inode,
}

/// The smallest page that SQLite knows, so the smallest database. It takes a file of one byte for an empty one and would write over it.
const SMALLEST: u64 = 512;

impl Place {
    /// As [`find`](Self::find), and makes the file if it is missing. No connection of this process may have it open, or be about to.
    pub(crate) fn make(path: &Path, allow_unsafe: bool) -> Result<Self, LockError> {
        let parent = path.parent().unwrap_or(path);
        if fs::symlink_metadata(path).is_err_and(|e| nothing_there(&e)) {
            if fs::metadata(parent).is_err_and(|e| nothing_there(&e)) {
                return Err(LockError::configuration(format!(
                    "the directory {} does not exist; create it, it is not made silently",
                    parent.display()
                )));
            }
            check_file_system(path, parent, allow_unsafe)?;
            match make(path) {
                // Another process was faster.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(LockError::configuration(not_writable(parent)).with_source(e));
                }
                made => made.map_err(|e| unreadable(path, e))?,
            }
            // Without this a power loss could take a new file away as a whole. Not every file system can do it.
            let _ = fs::File::open(parent).and_then(|dir| dir.sync_all());
        }
        Self::find(path, allow_unsafe)
    }

    /// Looks at the file, and refuses it where locks would not exclude.
    pub(crate) fn find(path: &Path, allow_unsafe: bool) -> Result<Self, LockError> {
        let at = path.display();
        let real = fs::canonicalize(path).map_err(|e| match nothing_there(&e) {
            true => LockError::configuration(format!(
                "{at} is a symbolic link to what does not exist; make it lead to a file, or remove it"
            )),
            false => unreadable(path, e),
        })?;
        let file = fs::metadata(&real).map_err(|e| unreadable(path, e))?;
        for place in [&real, real.parent().unwrap_or(&real)] {
            check_file_system(path, place, allow_unsafe)?;
        }
        let wrong = match () {
            () if file.is_dir() => "is a directory; give the path of a file",
            () if !file.is_file() => "is not a regular file; give the path of one",
            () if (1..SMALLEST).contains(&file.len()) => "is not an SQLite database; choose another path",
            () => "",
        };
        if !wrong.is_empty() {
            return Err(LockError::configuration(format!("{at} {wrong}")));
        }
        if file.nlink() > 1 {
            let message = "has several hard links; under another name it would get a write-ahead log of its own. Remove the others";
            refuse(allow_unsafe, &format!("{at} {message}"))?;
        }
        if is_mount_point(&real)? {
            let message =
                "is mounted as a single file, so its write-ahead log is not shared with it; mount the whole directory";
            refuse(allow_unsafe, &format!("{at} {message}"))?;
        }
        let inode = (file.dev(), file.ino());
        Ok(Self { real, inode })
    }
}

/// Makes an empty file, private or for a group that the umask admits: a user who may only read it could hold up all others by locking bytes of
/// its index. SQLite gives the mode to the log and the index.
fn make(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o660).open(path)?;
    if file.metadata()?.mode() & 0o020 == 0 {
        // Not every file system has modes.
        let _ = file.set_permissions(Permissions::from_mode(0o600));
    }
    Ok(())
}

fn check_file_system(path: &Path, place: &Path, allow_unsafe: bool) -> Result<(), LockError> {
    let (at, kind) = (path.display(), file_system(place)?);
    if !SHARED.contains(&kind) {
        return Ok(());
    }
    refuse(
        allow_unsafe,
        &format!(
            "{at} lies on a network or FUSE file system (of type {kind:#x}), where other machines or a daemon may change the file unseen; \
             use a local disk, or a backend with a server"
        ),
    )
}

/// What puts locks at risk at that path, although they can be kept there.
pub(crate) fn warnings(path: &Path) -> Vec<String> {
    let kind = fs::canonicalize(path).map(|real| file_system(&real));
    if !matches!(kind, Ok(Ok(OVERLAYFS))) {
        return Vec::new();
    }
    vec![format!(
        "{} lies on overlayfs, so mostly in this container's own layer: programs outside of the container, and other containers of the \
         same image, have a file of their own there and are not excluded; put the file on a volume that all of them mount",
        path.display()
    )]
}

/// Refuses what would make locks unsafe, or warns if that was asked for.
pub(crate) fn refuse(allow_unsafe: bool, message: &str) -> Result<(), LockError> {
    if !allow_unsafe {
        return Err(LockError::unsafe_configuration(message));
    }
    tracing::warn!(target: "fencelock", "allowed, but locks may not exclude: {message}");
    Ok(())
}

const OVERLAYFS: u32 = 0x794C_7630;

/// File systems whose files another kernel or a user's daemon may serve, as `statfs(2)` and their sources list them: NFS, SMB (3), 9p, FUSE or
/// virtiofs; AFS (2), Ceph, GFS2, OCFS2; Lustre, Coda, NCP, shared folders of VirtualBox, VMware and Parallels; OrangeFS, BeeGFS, GPFS, PanFS,
/// WSL 1.
#[rustfmt::skip]
const SHARED: [u32; 21] = [
    0x6969, 0x517B, 0xFF53_4D42, 0xFE53_4D42, 0x0102_1997, 0x6573_5546,
    0x5346_414F, 0x6B41_4653, 0x00C3_6400, 0x0116_1970, 0x7461_636F,
    0x0BD0_0BD0, 0x7375_7245, 0x564C, 0x786F_4256, 0xBACB_ACBC, 0x7C7C_6673,
    0x2003_0528, 0x1983_0326, 0x4750_4653, 0xAAD7_AAEA,
];

#[cfg(any(target_os = "linux", target_os = "android"))]
fn file_system(path: &Path) -> Result<u32, LockError> {
    let found = rustix::fs::statfs(path).map_err(|e| unreadable(path, e.into()))?;
    Ok(found.f_type as u32)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn file_system(_path: &Path) -> Result<u32, LockError> {
    Ok(0)
}

/// Whether something is mounted at exactly this path. In the table it is the fifth word; blanks in it are written in octal.
pub(crate) fn is_mount_point(path: &Path) -> Result<bool, LockError> {
    if !cfg!(any(target_os = "linux", target_os = "android")) {
        return Ok(false);
    }
    let mut wanted = Vec::new();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => wanted.extend_from_slice(format!("\\{byte:03o}").as_bytes()),
            _ => wanted.push(byte),
        }
    }
    let table = Path::new("/proc/self/mountinfo");
    let content = fs::read(table).map_err(|e| unreadable(table, e))?;
    let mut lines = content.split(|&b| b == b'\n');
    Ok(lines.any(|line| line.split(|&b| b == b' ').nth(4) == Some(&wanted)))
}
