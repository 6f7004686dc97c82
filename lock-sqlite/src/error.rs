//! What can go wrong with the file, and what a caller is told.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lock_core::LockError;
use rusqlite::{Error, ErrorCode, ffi};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::file_identity::with_suffix;

/// Why an operation on the file failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The words of SQLite.
    Sqlite(Error),
    /// The open file is not what other clients have open: the locks in it are lost, and it has to be opened anew.
    Lost(String),
    /// The connection is as good as before.
    Lock(LockError),
}

impl Failure {
    pub(crate) fn configuration(message: impl Into<String>) -> Self {
        Self::Lock(LockError::configuration(message))
    }

    /// Another connection stood in the way. The operation is worth another try at once.
    pub(crate) fn busy() -> Self {
        Self::Sqlite(Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_BUSY), None))
    }

    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, Self::Sqlite(error) if matches!(
            error.sqlite_error_code(),
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::FileLockingProtocolFailed)
        ))
    }

    /// Whether there was no room to write. SQLite knows a quota and a size limit only as failed writes.
    pub(crate) fn is_full(&self) -> bool {
        let Self::Sqlite(error) = self else { return false };
        let full = [
            ffi::SQLITE_FULL,
            ffi::SQLITE_IOERR_WRITE,
            ffi::SQLITE_IOERR_SHMSIZE,
            ffi::SQLITE_IOERR_TRUNCATE,
        ];
        error.sqlite_error().is_some_and(|e| full.contains(&e.extended_code))
    }

    /// Whether the connection is to be closed.
    pub(crate) fn is_doubtful(&self) -> bool {
        match self {
            Self::Sqlite(_) => !self.is_busy() && !self.is_full(),
            Self::Lost(_) => true,
            Self::Lock(_) => false,
        }
    }

    /// What the caller is told after `waited`.
    pub(crate) fn explain(self, operation: &'static str, path: &Path, waited: Duration) -> LockError {
        let at = path.display();
        let (is_full, is_busy) = (self.is_full(), self.is_busy());
        let error = match self {
            Self::Lock(error) => return error,
            Self::Lost(message) => return LockError::unavailable(operation, message),
            Self::Sqlite(error) => error,
        };
        let is_short = (error.sqlite_error()).is_some_and(|e| e.extended_code == ffi::SQLITE_IOERR_SHORT_READ);
        let (may_pass, message) = match error.sqlite_error_code() {
            _ if is_busy => (true, no_answer(path, waited)),
            _ if is_full => (
                true,
                format!("there is no room to write {at}: the disk, a quota or a size limit is full; free some space"),
            ),
            _ if is_short => (
                true,
                format!(
                    "{at} ends too early: it or its -wal file was renamed, replaced or cut while it was in use. If this stays, stop all \
                     its users and remove its -wal and -shm files"
                ),
            ),
            Some(ErrorCode::NotADatabase) => (false, format!("{at} is not an SQLite database; choose another path")),
            Some(ErrorCode::DatabaseCorrupt) => (
                false,
                format!(
                    "{at} is damaged; stop all its users, then remove it with its -wal and -shm files. Tokens go on above the old ones"
                ),
            ),
            Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => (false, read_only(path, PROTECTED)),
            Some(ErrorCode::CannotOpen) => match shut_out(path) {
                Some(file) => (false, not_writable(&file, PROTECTED)),
                None => (true, format!("{at} cannot be opened; were too many files open?")),
            },
            Some(ErrorCode::Unknown) if error.to_string().contains("no such") => (
                false,
                format!(
                    "{at} is marked as a file of locks but lacks our tables; stop all its users, then remove it with its -wal and -shm \
                     files"
                ),
            ),
            _ => (true, format!("{at} cannot be used")),
        };
        match may_pass {
            true => LockError::unavailable(operation, message).with_source(error),
            false => LockError::configuration(message).with_source(error),
        }
    }
}

/// The message for a file from which no response came in time.
pub(crate) fn no_answer(path: &Path, waited: Duration) -> String {
    format!(
        "{} did not answer within {waited:.1?}: another process may be stopped inside a transaction on it, or the disk hangs",
        path.display()
    )
}

/// The error for a path that cannot be looked at. A shortage passes by itself; a person has to change anything else.
pub(crate) fn unreadable(path: &Path, error: io::Error) -> LockError {
    use Errno as E;

    let shortages = [
        E::MFILE,
        E::NFILE,
        E::NOMEM,
        E::AGAIN,
        E::INTR,
        E::IO,
        E::NOSPC,
        E::DQUOT,
    ];
    let message = format!("{} cannot be read", path.display());
    if Errno::from_io_error(&error).is_some_and(|e| shortages.contains(&e)) {
        LockError::unavailable("looking at the file", message).with_source(error)
    } else {
        LockError::configuration(format!("{message}; change the path, or what this process may see")).with_source(error)
    }
}

/// The kernel's setting that keeps users from opening files of others in directories such as `/tmp`.
const PROTECTED: &str = "/proc/sys/fs/protected_regular";

/// The message for a database that SQLite could open for reading only.
fn read_only(path: &Path, setting: &str) -> String {
    let file = shut_out(path).or_else(|| files(path).into_iter().find(|file| protected(file, setting).is_some()));
    not_writable(&file.unwrap_or_else(|| path.to_owned()), setting)
}

/// The message for a file or directory that this process may not write to.
pub(crate) fn not_writable(path: &Path, setting: &str) -> String {
    let owner = std::fs::metadata(path).map_or_else(
        |_| String::new(),
        |file| {
            format!(
                ", which belongs to user {} and has mode {:o},",
                file.uid(),
                file.mode() & 0o7777
            )
        },
    );
    let at = path.display();
    match protected(path, setting) {
        Some(value) => format!(
            "{at}{owner} is read-only for this process: fs.protected_regular = {value} keeps users from files of others in a directory \
             with the sticky bit; use another directory, or set fs.protected_regular to 0"
        ),
        None => format!("{at}{owner} is read-only for this process; change its owner or mode, or the mount"),
    }
}

/// The message for a file that this process may not read.
pub(crate) fn not_readable(path: &Path) -> LockError {
    LockError::configuration(format!(
        "{} is not readable for this process; change its owner or mode",
        path.display()
    ))
}

/// The value of the kernel's setting, if it applies to the file.
fn protected(file: &Path, setting: &str) -> Option<u8> {
    const STICKY: u32 = 0o1000;
    let value = std::fs::read_to_string(setting).ok()?.trim().parse().ok()?;
    let (file, parent) = (std::fs::metadata(file).ok()?, std::fs::metadata(file.parent()?).ok()?);
    let is_foreign = file.uid() != rustix::process::geteuid().as_raw() && file.uid() != parent.uid();
    (value > 0 && file.is_file() && is_foreign && parent.mode() & STICKY != 0).then_some(value)
}

fn files(path: &Path) -> Vec<PathBuf> {
    ["", "-wal", "-shm"].map(|end| with_suffix(path, end)).into()
}

/// What this process may not write to, of what SQLite opens.
fn shut_out(path: &Path) -> Option<PathBuf> {
    let lacks = |file: &PathBuf, access| !permits(file, access).unwrap_or(true);
    let dir = path.parent().unwrap_or(path).to_owned();
    if lacks(&dir, Access::WRITE_OK | Access::EXEC_OK) {
        return Some(dir);
    }
    files(path)
        .into_iter()
        .find(|file| lacks(file, Access::READ_OK | Access::WRITE_OK))
}

/// Whether this process, with the rights that it acts with, may do that. What cannot be told is left to SQLite to find.
pub(crate) fn permits(path: &Path, wanted: Access) -> Result<bool, LockError> {
    match accessat(CWD, path, wanted, AtFlags::EACCESS) {
        Ok(()) | Err(Errno::NOSYS | Errno::INVAL | Errno::PERM) => Ok(true),
        Err(Errno::ACCESS | Errno::ROFS) => Ok(false),
        Err(e) => Err(unreadable(path, e.into())),
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Sqlite(error)
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn a_file_that_is_read_only_is_told_with_its_owner_and_the_setting_of_the_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let (path, setting) = (dir.path().join("a.db"), dir.path().join("setting"));
        fs::write(&path, "").unwrap();
        fs::write(&setting, "2\n").unwrap();
        let told = || read_only(&path, setting.to_str().unwrap());
        let owner = fs::metadata(&path).unwrap().uid();
        assert!(
            told().contains(&format!("belongs to user {owner} and has mode")),
            "{}",
            told()
        );
        assert!(told().contains("change its owner or mode"), "{}", told());
        // Only root can give files away.
        if chown(with_suffix(&path, ""), Some(4_321), None).is_ok() {
            fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o1777)).unwrap();
            assert!(
                told().contains("user 4321") && told().contains("fs.protected_regular = 2"),
                "{}",
                told()
            );
            fs::write(&setting, "0\n").unwrap();
            assert!(!told().contains("protected_regular"), "{}", told());
        }
    }
}
