//! Where the database lies: whether locks can be kept there, and whether it is still the same file.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use lock_core::LockError;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::failure::{Failure, unreadable};
use crate::file_system::{is_mount_point, is_on_overlay, refuse, shared_file_system};

/// The files of an open database, as they were when it was opened.
///
/// SQLite keeps its file open, and locks in it, also when the path leads elsewhere by now: to a restored copy, to a new
/// file, to nothing. Whoever opens the path then would share nothing with us. The write-ahead log and its index matter
/// just as much: a process that finds none makes its own.
#[derive(Debug)]
pub(crate) struct Place {
    path: PathBuf,
    files: Vec<(PathBuf, Identity)>,
}

/// Which file it is, whatever its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    pub(crate) inode: u64,
}

impl Place {
    /// Looks at the path before SQLite opens anything there, and makes the file if it is missing.
    pub(crate) fn inspect(path: &Path, allow_unsafe: bool) -> Result<Before, LockError> {
        // Everything is asked of the file that a link leads to, since that is where SQLite works.
        let (real, file) = resolve(path)?;
        examine(path, &real, file.as_ref(), allow_unsafe, Use::Locking)?;
        let parent = real.parent().unwrap_or(Path::new("/"));
        if !permits(parent, Access::WRITE_OK | Access::EXEC_OK)? {
            return Err(LockError::configuration(format!(
                "the directory {} is not writable for this process, and the write-ahead log must lie there; change its \
                 owner or mode, or choose another path",
                parent.display()
            )));
        }
        let identity = match &file {
            Some(file) => Some(Identity::of(file)),
            None => made(&real)?,
        };
        Ok(Before {
            real,
            identity,
            new: file.is_none(),
        })
    }

    /// Notes which files were opened. All three must exist, so it comes after the first transaction.
    pub(crate) fn settle(path: &Path, before: Before) -> Result<Self, Failure> {
        let real = before.real;
        let mut files = Vec::with_capacity(3);
        for file in [path.to_owned(), with_suffix(&real, "-wal"), with_suffix(&real, "-shm")] {
            let identity = Identity::at(&file)?.ok_or_else(|| Moved(path.to_owned()))?;
            files.push((file, identity));
        }
        if before.identity.is_some_and(|identity| identity != files[0].1) {
            return Err(Moved(path.to_owned()).into());
        }
        if before.new
            && let Some(parent) = real.parent()
        {
            // Without this a power loss could take a new file away as a whole. Not every file system can do it.
            let _ = fs::File::open(parent).and_then(|dir| dir.sync_all());
        }
        for message in warnings(path) {
            tracing::warn!(target: "fencelock", "{message}");
        }
        Ok(Self {
            path: path.to_owned(),
            files,
        })
    }

    /// Fails if any path leads elsewhere than when it was opened, or does not let itself be looked at.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        for (path, identity) in &self.files {
            if Identity::at(path)? != Some(*identity) {
                return Err(Moved(self.path.clone()).into());
            }
        }
        Ok(())
    }
}

/// What a client is going to do with the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Locking,
    Reading,
}

/// Refuses places where locks would not exclude, or where a reader would not see them as they are.
pub(crate) fn examine(
    path: &Path,
    real: &Path,
    file: Option<&fs::Metadata>,
    allow_unsafe: bool,
    wanted: Use,
) -> Result<(), LockError> {
    let parent = real.parent().unwrap_or(Path::new("/"));
    for place in [Some(parent), file.is_some().then_some(real)].into_iter().flatten() {
        if let Some(kind) = shared_file_system(place, allow_unsafe)? {
            refuse(
                allow_unsafe,
                format!(
                    "{} lies on {kind}, where other machines or a daemon may change the file unseen; use a local disk, \
                     or a backend with a server",
                    path.display()
                ),
            )?;
        }
    }
    let Some(file) = file else { return Ok(()) };
    usable(real, file, wanted)?;
    if file.nlink() > 1 {
        refuse(
            allow_unsafe,
            format!(
                "{} has {} hard links; under another name it would get a write-ahead log of its own. Remove the others",
                path.display(),
                file.nlink()
            ),
        )?;
    }
    if is_mount_point(Path::new("/proc"), real, allow_unsafe)? {
        refuse(
            allow_unsafe,
            format!(
                "{} is mounted as a single file, so its write-ahead log is not shared with it; mount the whole directory",
                path.display()
            ),
        )?;
    }
    Ok(())
}

/// What was at the path before it was opened.
#[derive(Clone, Debug)]
pub(crate) struct Before {
    /// Where links lead to; SQLite puts the log beside it.
    real: PathBuf,
    /// None where a file cannot be made without opening it.
    identity: Option<Identity>,
    new: bool,
}

impl Before {
    /// The path to open.
    pub(crate) fn real(&self) -> &Path {
        &self.real
    }

    /// The number of the file, or 0 if it was not there yet.
    pub(crate) fn number(&self) -> u64 {
        self.identity.map_or(0, |identity| identity.inode)
    }
}

/// The path leads elsewhere than when it was opened.
#[derive(Debug)]
pub(crate) struct Moved(pub(crate) PathBuf);

impl Identity {
    pub(crate) fn of(file: &fs::Metadata) -> Self {
        Self {
            device: file.dev(),
            inode: file.ino(),
        }
    }

    /// None only if nothing is there.
    pub(crate) fn at(path: &Path) -> Result<Option<Self>, Failure> {
        match fs::metadata(path) {
            Ok(file) => Ok(Some(Self::of(&file))),
            Err(e) if nothing_there(&e) => Ok(None),
            Err(e) => Err(Failure::Unseen(path.to_owned(), e)),
        }
    }
}

pub(crate) fn nothing_there(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Follows links to the file, which may be missing; its directory may not.
pub(crate) fn resolve(path: &Path) -> Result<(PathBuf, Option<fs::Metadata>), LockError> {
    let (real, file) = match fs::canonicalize(path) {
        Ok(real) => {
            let file = fs::metadata(&real).map_err(|e| unreadable(path, e))?;
            (real, Some(file))
        }
        Err(e) if nothing_there(&e) => {
            if fs::symlink_metadata(path).is_ok_and(|link| link.is_symlink()) {
                return Err(LockError::configuration(format!(
                    "{} is a symbolic link to what does not exist; make it lead to a file, or remove it",
                    path.display()
                )));
            }
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(unreadable(path, e));
            };
            let real = match fs::canonicalize(parent) {
                Ok(parent) if parent.is_dir() => parent.join(name),
                Err(e) if !nothing_there(&e) => return Err(unreadable(parent, e)),
                _ => {
                    return Err(LockError::configuration(format!(
                        "the directory {} does not exist; create it, it is not made silently",
                        parent.display()
                    )));
                }
            };
            (real, None)
        }
        Err(e) => return Err(unreadable(path, e)),
    };
    let name = real.file_name().map_or(0, OsStr::len);
    if real.as_os_str().len() > LONGEST_PATH || name > LONGEST_NAME {
        return Err(LockError::configuration(format!(
            "{} is too long: SQLite takes paths of up to {LONGEST_PATH} bytes, and file names of up to {LONGEST_NAME}",
            real.display()
        )));
    }
    Ok((real, file))
}

/// SQLite's limit of 512 and the system's of 255, less the suffix of the longest name beside the file, `-journal`.
const LONGEST_PATH: usize = 504;
const LONGEST_NAME: usize = 247;

/// Makes an empty file, so that it is known which one SQLite is going to open, and tells which one it is.
///
/// Without opening it: closing it would drop the locks of another client in this process that was faster.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn made(path: &Path) -> Result<Option<Identity>, LockError> {
    use rustix::fs::{FileType, Mode, chmod, mknodat};

    // Who can read the index of the log can lock bytes in it, and so hold up every user of the file. A group that the umask admits
    // may write, too.
    let shared = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP;
    let made = mknodat(CWD, path, FileType::RegularFile, shared, 0);
    if made.is_ok() && exposed(path) {
        // Not every file system has modes; what is exposed there is warned of.
        let _ = chmod(path, Mode::RUSR | Mode::WUSR);
    }
    match made {
        Ok(()) | Err(Errno::EXIST) => match fs::metadata(path) {
            Ok(file) => Ok(Some(Identity::of(&file))),
            Err(e) => Err(unreadable(path, e)),
        },
        // SQLite makes it, or says why it cannot.
        Err(_) => Ok(None),
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn made(_path: &Path) -> Result<Option<Identity>, LockError> {
    Ok(None)
}

/// Whether a class of users may reach and read the file that may not write to it.
fn exposed(path: &Path) -> bool {
    let mode = |path: &Path| fs::metadata(path).map_or(0, |there| there.mode());
    let (file, parent) = (mode(path), path.parent().map_or(0, mode));
    [0o070, 0o007].into_iter().any(|class| {
        let (read, write, search) = (class & 0o444, class & 0o222, class & 0o111);
        parent & search != 0 && file & read != 0 && file & write == 0
    })
}

/// What puts locks at risk at that path, although they can be kept there.
pub(crate) fn warnings(path: &Path) -> Vec<String> {
    let Ok((real, _)) = resolve(path) else {
        return Vec::new();
    };
    let mut warnings = exposures(&real);
    if real.parent().is_some_and(is_on_overlay) {
        warnings.push(format!(
            "{} lies on overlayfs, so mostly in this container's own layer: programs outside of the container, and other \
             containers of the same image, have a file of their own there and are not excluded; put the file on a volume \
             that all of them mount",
            path.display()
        ));
    }
    warnings
}

/// Warns of files that users may read who may not write to them: they can hold up all locks in the file, and end what is held.
fn exposures(real: &Path) -> Vec<String> {
    let files = [real.to_owned(), with_suffix(real, "-wal"), with_suffix(real, "-shm")];
    let open: Vec<_> = files
        .into_iter()
        .filter(|file| exposed(file))
        .map(|file| file.display().to_string())
        .collect();
    if open.is_empty() {
        return Vec::new();
    }
    vec![format!(
        "users who cannot take locks may read {files}, and can so hold up all locks and end those that are held; make it private \
         with chmod 600 (or 660 for a group)",
        files = open.join(", ")
    )]
}

/// Whether this process, with the rights that it acts with, may do that. What cannot be said is left to SQLite to find.
fn permits(path: &Path, wanted: Access) -> Result<bool, LockError> {
    match accessat(CWD, path, wanted, AtFlags::EACCESS) {
        Ok(()) | Err(Errno::NOSYS | Errno::INVAL | Errno::PERM) => Ok(true),
        Err(Errno::ACCESS | Errno::ROFS) => Ok(false),
        Err(e) => Err(unreadable(path, e.into())),
    }
}

/// The smallest page that SQLite knows, so the smallest database.
const SMALLEST: u64 = 512;

fn usable(path: &Path, file: &fs::Metadata, wanted: Use) -> Result<(), LockError> {
    let wrong = |what: &str| Err(LockError::configuration(format!("{} {what}", path.display())));
    if file.is_dir() {
        return wrong("is a directory; give the path of a file");
    }
    if !file.is_file() {
        return wrong("is not a regular file; give the path of one");
    }
    // SQLite takes a file of one byte for an empty one and would write over it.
    if (1..SMALLEST).contains(&file.len()) {
        return wrong("is not an SQLite database; choose another path");
    }
    if !permits(path, Access::READ_OK)? {
        return Err(unreadable_here(path));
    }
    if wanted == Use::Locking && !permits(path, Access::WRITE_OK)? {
        return wrong("is read-only for this process; change its owner or mode, or the mount");
    }
    Ok(())
}

pub(crate) fn unreadable_here(path: &Path) -> LockError {
    LockError::configuration(format!(
        "{} is not readable for this process; change its owner or mode",
        path.display()
    ))
}

pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_that_was_removed_or_replaced_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        for name in ["a.db", "a.db-wal", "a.db-shm"] {
            fs::write(dir.path().join(name), [0; 512]).unwrap();
        }
        for name in ["a.db", "a.db-wal", "a.db-shm"] {
            let file = dir.path().join(name);
            let place = Place::settle(&path, Place::inspect(&path, false).unwrap()).unwrap();
            place.check().unwrap();
            let copy = dir.path().join("copy");
            fs::copy(&file, &copy).unwrap();
            fs::rename(&copy, &file).unwrap();
            place.check().unwrap_err();
            let place = Place::settle(&path, Place::inspect(&path, false).unwrap()).unwrap();
            fs::remove_file(&file).unwrap();
            place.check().unwrap_err();
            fs::write(&file, [0; 512]).unwrap();
        }
    }

    #[test]
    fn a_second_hard_link_is_refused_unless_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        fs::write(&path, "").unwrap();
        fs::hard_link(&path, dir.path().join("b.db")).unwrap();
        let refused = Place::inspect(&path, false).unwrap_err();
        assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused}");
        Place::inspect(&path, true).unwrap();
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    #[test]
    fn nobody_may_read_a_new_file_who_may_not_write_to_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let path = dir.path().join("a.db");
        Place::inspect(&path, false).unwrap();
        let mode = fs::metadata(&path).unwrap().mode() & 0o777;
        assert!([0o600, 0o660].contains(&mode), "{mode:o}");
        assert_eq!(exposures(&path), [""; 0]);
    }

    #[test]
    fn files_that_others_may_only_read_are_warned_of() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).unwrap();
        assert_eq!(exposures(&path), [""; 0], "the directory is private");
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        for (file, mode, warned) in [
            ("a.db", 0o600, false),
            ("a.db", 0o660, false),
            ("a.db", 0o666, false),
            ("a.db", 0o640, true),
            ("a.db", 0o604, true),
            ("a.db", 0o644, true),
            ("a.db", 0o600, false),
            ("a.db-shm", 0o644, true),
            ("a.db-shm", 0o600, false),
        ] {
            let file = dir.path().join(file);
            fs::write(&file, "").unwrap();
            fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
            let told = exposures(&path);
            assert_eq!(!told.is_empty(), warned, "{mode:o} {told:?}");
            assert!(
                told.iter().all(|told| told.contains(&file.display().to_string())),
                "{told:?}"
            );
        }
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    #[test]
    fn a_new_file_that_is_replaced_while_it_is_opened_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let before = Place::inspect(&path, false).unwrap();
        fs::write(dir.path().join("other"), "").unwrap();
        fs::rename(dir.path().join("other"), &path).unwrap();
        for name in ["a.db-wal", "a.db-shm"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert!(matches!(Place::settle(&path, before), Err(Failure::Moved(_))));
    }
}
