//! What can go wrong with the file, and what to tell the caller.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lock_core::LockError;
use rusqlite::{Error, ErrorCode, ffi};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::place::{Moved, with_suffix};

/// Why an operation on the file failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// SQLite said so.
    Sqlite(Error),
    /// The path leads to another file than the one that is open.
    Moved(Moved),
    /// Whether the path still leads to the open file could not be found out.
    Unseen(PathBuf, io::Error),
    /// What lies there under that name is no lock of ours.
    Row(String),
    /// The state is older than what this client has seen: something was copied over the open file.
    WentBack,
    /// Nobody waits for the answer any more.
    Abandoned,
    /// This is what the caller is told.
    Refused(LockError),
}

impl Failure {
    /// Another client of this process, or one that comes and goes, stood in the way.
    pub(crate) fn busy() -> Self {
        Self::Sqlite(Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_BUSY), None))
    }

    /// Whether another connection stood in the way.
    pub(crate) fn is_contention(&self) -> bool {
        matches!(self, Self::Sqlite(error) if contention(error))
    }

    /// Whether there was no room for what was to be written. A quota and a size limit count too; SQLite knows them only
    /// as failed writes.
    pub(crate) fn is_full(&self) -> bool {
        let Self::Sqlite(error) = self else { return false };
        error.sqlite_error_code() == Some(ErrorCode::DiskFull)
            || error.sqlite_error().is_some_and(|e| {
                matches!(
                    e.extended_code,
                    ffi::SQLITE_IOERR_WRITE | ffi::SQLITE_IOERR_SHMSIZE | ffi::SQLITE_IOERR_TRUNCATE
                )
            })
    }

    /// Whether the connection is as good as before.
    pub(crate) fn is_harmless(&self) -> bool {
        match self {
            Self::Abandoned | Self::Refused(_) | Self::Unseen(..) | Self::Row(_) => true,
            Self::Sqlite(_) => self.is_contention() || self.is_full(),
            Self::Moved(_) | Self::WentBack => false,
        }
    }

    /// What the caller is told after `waited`.
    pub(crate) fn explain(self, operation: &'static str, path: &Path, waited: Duration) -> LockError {
        let at = path.display();
        let full = self.is_full();
        let error = match self {
            Self::Refused(error) => return error,
            Self::Abandoned => return LockError::no_answer(operation, waited),
            Self::Unseen(path, error) => return unseen(operation, &path, error),
            Self::Row(name) => return row_damaged(&name),
            Self::Moved(Moved(path)) => {
                let at = path.display();
                return unavailable(
                    operation,
                    format!(
                        "{at}, or its -wal or -shm file, was replaced or removed while it was in use; locks held \
                         through the old one are lost, the next call opens what is there now"
                    ),
                );
            }
            Self::WentBack => {
                return unavailable(
                    operation,
                    format!(
                        "an older state was copied over {at} while it was in use; the next call opens it anew. Restore \
                         by replacing the file, with all its users stopped"
                    ),
                );
            }
            Self::Sqlite(error) => error,
        };
        let message = if full {
            format!("there is no room to write {at}: the disk, a quota or a size limit is full; free some space")
        } else {
            match error.sqlite_error_code() {
                Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::FileLockingProtocolFailed) => {
                    busy(path, waited)
                }
                Some(ErrorCode::NotADatabase) => {
                    return configuration(format!("{at} is not an SQLite database; choose another path"), error);
                }
                Some(ErrorCode::DatabaseCorrupt) => {
                    return configuration(
                        format!(
                            "{at} is damaged; stop all its users, then remove it with its -wal and -shm files. Tokens \
                             go on above the old ones"
                        ),
                        error,
                    );
                }
                Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
                    return configuration(
                        format!("{at} or its directory is read-only for this process; change owner, mode or mount"),
                        error,
                    );
                }
                Some(ErrorCode::CannotOpen) => match shut_out(path) {
                    Some(why) => return configuration(why, error),
                    None => cannot_open(path),
                },
                // Of SQLite's own mistakes with our statements only this one can come from the file.
                Some(ErrorCode::Unknown) if error.to_string().contains("no such") => {
                    return configuration(
                        format!(
                            "{at} is marked as ours but lacks our tables; stop all its users, then remove it with its \
                             -wal and -shm files"
                        ),
                        error,
                    );
                }
                _ if error
                    .sqlite_error()
                    .is_some_and(|e| e.extended_code == ffi::SQLITE_IOERR_SHORT_READ) =>
                {
                    format!(
                        "{at} ends too early: it or its -wal file was renamed, replaced or cut while it was in use. If this \
                     stays, stop all its users and remove its -wal and -shm files"
                    )
                }
                _ => return LockError::unavailable(operation, format!("{at} cannot be used")).with_source(error),
            }
        };
        LockError::unavailable(operation, message).with_source(error)
    }
}

/// What is said to whoever asks for a lock whose entry makes no sense.
pub(crate) fn row_damaged(name: &str) -> LockError {
    LockError::configuration(format!(
        "the entry of \"{}\" in the file is damaged; force the lock free",
        name.escape_debug()
    ))
}

/// What is said when nothing was heard from the file in time.
pub(crate) fn busy(path: &Path, waited: Duration) -> String {
    format!(
        "{} did not answer within {waited:.1?}: another process may be stopped inside a transaction on it, or the disk hangs",
        path.display()
    )
}

/// What is said when `path` cannot be looked at: a shortage passes by itself, anything else is for a person to change.
pub(crate) fn unreadable(path: &Path, error: io::Error) -> LockError {
    unseen("opening the database", path, error)
}

fn unseen(operation: &'static str, path: &Path, error: io::Error) -> LockError {
    let shortage = Errno::from_io_error(&error).is_some_and(|e| {
        matches!(
            e,
            Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN | Errno::INTR | Errno::IO
        )
    });
    let message = format!("{} cannot be read", path.display());
    if shortage {
        LockError::unavailable(operation, message).with_source(error)
    } else {
        LockError::configuration(format!("{message}; change the path, or what this process may see")).with_source(error)
    }
}

/// What this process lacks the right to, of what SQLite opens.
fn shut_out(path: &Path) -> Option<String> {
    let lacks = |path: &Path, access| {
        let denied =
            accessat(CWD, path, access, AtFlags::EACCESS).is_err_and(|e| matches!(e, Errno::ACCESS | Errno::ROFS));
        denied.then(|| {
            format!(
                "{} may not be read and written by this process; change its owner or mode",
                path.display()
            )
        })
    };
    let dir = lacks(path.parent().unwrap_or(path), Access::WRITE_OK | Access::EXEC_OK);
    dir.or_else(|| {
        let files = ["", "-wal", "-shm"].into_iter();
        files
            .map(|end| with_suffix(path, end))
            .find_map(|file| lacks(&file, Access::READ_OK | Access::WRITE_OK))
    })
}

/// Why SQLite cannot open the file. The file itself is not opened to find out: closing it would drop SQLite's locks.
fn cannot_open(path: &Path) -> String {
    let dir = path.parent().unwrap_or(path);
    match std::fs::File::open(dir) {
        Err(e) => format!("{} cannot be opened, nor its directory: {e}", path.display()),
        Ok(_) => format!("{} cannot be opened; were too many files open?", path.display()),
    }
}

/// Whether another connection stood in the way.
pub(crate) fn contention(error: &Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    )
}

fn unavailable(operation: &'static str, message: String) -> LockError {
    LockError::unavailable(operation, message)
}

fn configuration(message: String, source: Error) -> LockError {
    LockError::configuration(message).with_source(source)
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Sqlite(error)
    }
}

impl From<Moved> for Failure {
    fn from(moved: Moved) -> Self {
        Self::Moved(moved)
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        Self::Refused(error)
    }
}
