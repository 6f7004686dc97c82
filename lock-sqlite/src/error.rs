//! What can go wrong with the file, and what a caller is told.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lock_core::LockError;
use rusqlite::{Error, ErrorCode, ffi};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno as E;

use crate::file_identity::with_suffix;

/// Why an operation on the file failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error of SQLite.
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

    /// The file says less than this client has seen in it.
    pub(crate) fn set_back() -> Self {
        Self::Lost(
            "an older state was copied over the file while it was in use, or its counter of tokens was set back; the next call opens it \
             anew. Restore by replacing the file, with all its users stopped"
                .to_owned(),
        )
    }

    /// Another connection stood in the way. The operation is worth another try.
    pub(crate) fn busy() -> Self {
        Self::Sqlite(Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_BUSY), None))
    }

    fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Sqlite(error) => error.sqlite_error_code(),
            _ => None,
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        use ErrorCode::{DatabaseBusy, DatabaseLocked, FileLockingProtocolFailed};

        matches!(
            self.code(),
            Some(DatabaseBusy | DatabaseLocked | FileLockingProtocolFailed)
        )
    }

    pub(crate) fn cannot_open(&self) -> bool {
        self.code() == Some(ErrorCode::CannotOpen)
    }

    /// Whether there was no room to write. SQLite knows a quota and a size limit only as failed writes.
    pub(crate) fn is_full(&self) -> bool {
        use ffi::{SQLITE_FULL, SQLITE_IOERR_SHMSIZE, SQLITE_IOERR_TRUNCATE, SQLITE_IOERR_WRITE};

        let Self::Sqlite(error) = self else { return false };
        let code = error.sqlite_error().map(|e| e.extended_code);
        matches!(
            code,
            Some(SQLITE_FULL | SQLITE_IOERR_WRITE | SQLITE_IOERR_SHMSIZE | SQLITE_IOERR_TRUNCATE)
        )
    }

    /// Whether the connection is to be closed.
    pub(crate) fn is_doubtful(&self) -> bool {
        match self {
            Self::Sqlite(_) => !self.is_busy() && !self.is_full(),
            Self::Lost(_) => true,
            Self::Lock(_) => false,
        }
    }

    /// The error for the caller, after `waited`.
    pub(crate) fn explain(self, operation: &'static str, path: &Path, waited: Duration) -> LockError {
        const REMOVE: &str = "stop all its users, then remove it with its -wal and -shm files";

        let (at, is_full, is_busy) = (path.display(), self.is_full(), self.is_busy());
        let error = match self {
            Self::Lock(error) => return error,
            Self::Lost(message) => return LockError::unavailable(operation, message),
            Self::Sqlite(error) => error,
        };
        let code = error.sqlite_error_code();
        let lasting = match code {
            Some(ErrorCode::NotADatabase) => Some(format!("{at} is not an SQLite database; choose another path")),
            Some(ErrorCode::DatabaseCorrupt) => {
                Some(format!("{at} is damaged; {REMOVE}. Tokens go on above the old ones"))
            }
            Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
                Some(not_writable(&shut_out(path).unwrap_or_else(|| path.to_owned())))
            }
            Some(ErrorCode::CannotOpen) => shut_out(path).map(|file| not_writable(&file)),
            Some(ErrorCode::Unknown) if error.to_string().contains("no such") => Some(format!(
                "{at} is marked as a file of locks but lacks our tables; {REMOVE}"
            )),
            _ => None,
        };
        if let Some(message) = lasting {
            return LockError::configuration(message).with_source(error);
        }
        let message = if is_busy {
            format!(
                "{at} did not answer within {waited:.1?}: another process may be stopped inside a transaction on it, or the disk hangs"
            )
        } else if is_full {
            format!("there is no room to write {at}: the disk, a quota or a size limit is full; free some space")
        } else if code == Some(ErrorCode::CannotOpen) {
            format!(
                "{at} cannot be opened: too many files are open, its path is too long, or a client that was killed left a log without an \
                 index, which any client puts right that may write"
            )
        } else {
            format!("{at} cannot be used; if this stays, {REMOVE}")
        };
        LockError::unavailable(operation, message).with_source(error)
    }
}

/// The error for a path that cannot be looked at. A shortage passes by itself; a person has to change anything else.
pub(crate) fn unreadable(path: &Path, error: io::Error) -> LockError {
    let message = format!("{} cannot be read", path.display());
    match E::from_io_error(&error) {
        Some(E::MFILE | E::NFILE | E::NOMEM | E::AGAIN | E::INTR | E::IO | E::NOSPC | E::DQUOT) => {
            LockError::unavailable("looking at the file", message)
        }
        _ => LockError::configuration(format!("{message}; change the path, or what this process may see")),
    }
    .with_source(error)
}

/// The message for a file or directory that this process may not write to.
pub(crate) fn not_writable(path: &Path) -> String {
    let found = fs::metadata(path).map(|file| (file.uid(), file.mode() & 0o7777));
    let owner = found.map(|(user, mode)| format!(", which belongs to user {user} and has mode {mode:o},"));
    format!(
        "{}{} is read-only for this process; change its owner or mode, or the mount. In a directory with the sticky bit, such as /tmp, \
         the setting fs.protected_regular of the kernel keeps users from files of others",
        path.display(),
        owner.unwrap_or_default()
    )
}

/// What this process may not write to, of what SQLite opens.
fn shut_out(path: &Path) -> Option<PathBuf> {
    let dir = path.parent().unwrap_or(path).to_owned();
    let files = ["", "-wal", "-shm"].map(|end| (with_suffix(path, end), Access::READ_OK | Access::WRITE_OK));
    let mut all = [(dir, Access::WRITE_OK | Access::EXEC_OK)].into_iter().chain(files);
    all.find(|(file, access)| lacks(file, *access)).map(|(file, _)| file)
}

/// Whether this process, with the rights that it acts with, may not do that. What cannot be told is left to SQLite to find.
pub(crate) fn lacks(path: &Path, access: Access) -> bool {
    matches!(accessat(CWD, path, access, AtFlags::EACCESS), Err(E::ACCESS | E::ROFS))
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
