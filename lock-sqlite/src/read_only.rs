//! Reading the database without a trace: no file is made, written to or removed, and no right to write is needed.
//!
//! If there is no log beside the database, all that was ever committed is in it. SQLite then reads it as an immutable file: an ordinary connection
//! would make a log and its index. If there is a log, SQLite takes the index for read-only, or reads the log by itself if no client keeps the index up
//! to date. Clients come and go meanwhile, so the files are looked at before and after, and read again if they have changed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use lock_core::LockError;
use rusqlite::{ErrorCode, Transaction, TransactionBehavior};
use rustix::fs::Access;

use crate::boot_clock::BootClock;
use crate::client::Settings;
use crate::commands::View;
use crate::connection::{self, Connection, InUse};
use crate::error::{Failure, not_readable, permits};
use crate::file_identity::{Place, with_suffix};
use crate::schema;

/// How often files that only a client that may write can put right are looked at again: such a client may be about to.
const TRIES: u32 = 20;

/// Reads what is held. A file in which nothing was ever held yields the default.
///
/// # Errors
///
/// [`Failure::busy`] if the files changed meanwhile.
pub(crate) fn read<T: Default>(
    settings: &Settings,
    work: impl Fn(&View<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    for _ in 1..TRIES {
        let mut is_left_behind = false;
        let done = read_once(settings, &mut is_left_behind, &work);
        if !is_left_behind {
            return done;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    read_once(settings, &mut false, &work)
}

fn read_once<T: Default>(
    settings: &Settings,
    is_left_behind: &mut bool,
    work: impl Fn(&View<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let in_use = InUse::begin()?;
    connection::check_version()?;
    let boot = BootClock::find(settings.allow_unsafe)?;
    let _looking = connection::looking();
    let path = &settings.path;
    let missing = || {
        LockError::configuration(format!(
            "there is no file {}; check the path. The file is made with the first lock that is taken there",
            path.display()
        ))
    };
    // Before what is said of a directory that is missing.
    if fs::metadata(path).is_err_and(|e| {
        matches!(
            e.kind(),
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
        )
    }) {
        return Err(missing().into());
    }
    let place = Place::look(path, settings.allow_unsafe)?;
    let Some(file) = &place.file else {
        return Err(missing().into());
    };
    if file.len() == 0 {
        return Ok(T::default());
    }
    let [log, index] = ["-wal", "-shm"].map(|end| with_suffix(&place.real, end));
    for file in [&log, &index] {
        if file.exists() && !permits(file, Access::READ_OK)? {
            return Err(not_readable(file).into());
        }
    }
    let before = seen(&place.real);
    if with_suffix(&place.real, "-journal").exists() {
        *is_left_behind = true;
        return Err(left_behind(&with_suffix(&place.real, "-journal")).into());
    }
    let has_log = fs::metadata(&log).is_ok_and(|file| file.len() > 0) || index.exists();
    let done = read_open(&place.real, &boot, !has_log, in_use, work);
    if seen(&place.real) != before {
        return Err(Failure::busy());
    }
    match done {
        Err(Failure::Sqlite(error))
            if matches!(
                error.sqlite_error_code(),
                Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen)
            ) =>
        {
            *is_left_behind = true;
            Err(left_behind(&log).with_source(error).into())
        }
        done => done,
    }
}

fn read_open<T: Default>(
    path: &Path,
    boot: &BootClock,
    immutable: bool,
    in_use: InUse,
    work: impl Fn(&View<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let conn = Connection::open_to_read(path, immutable, in_use)?;
    let tx = Transaction::new_unchecked(&conn, TransactionBehavior::Deferred)?;
    match schema::is_ours(&tx, path)? {
        true => work(&View::new(tx, boot)),
        false => Ok(T::default()),
    }
}

fn left_behind(file: &Path) -> LockError {
    LockError::configuration(format!(
        "{} was left behind by a client that was ended in the middle of its work, and this process may only read; any client that may write \
         puts that right, such as fencelock check",
        file.display()
    ))
}

/// What a client changes that comes or goes: which files there are, and the content of the database.
fn seen(path: &Path) -> Vec<Option<(u64, u64, i64, i64)>> {
    let look = |end: &str| {
        let file = fs::metadata(with_suffix(path, end)).ok()?;
        let is_log = !end.is_empty();
        let times = if is_log {
            (0, 0)
        } else {
            (file.mtime(), file.mtime_nsec())
        };
        Some((file.dev(), file.ino(), times.0, times.1))
    };
    ["", "-wal", "-shm", "-journal"].map(look).into()
}
