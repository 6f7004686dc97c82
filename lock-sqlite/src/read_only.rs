//! Reading the database without a trace: no file is made, written to or removed, and no right to write is needed.
//!
//! If there is no log beside the database, all that was ever committed is in it. SQLite then reads it as an immutable file: an ordinary connection
//! would make a log and its index. If there is a log, SQLite takes the index for read-only, or reads the log by itself if no client keeps the index up
//! to date. Clients come and go meanwhile, so the files are looked at before and after, and read again if they have changed.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use rusqlite::{OpenFlags, Transaction, TransactionBehavior};
use rustix::fs::Access;

use crate::boot_clock::BootClock;
use crate::commands::{Known, Tx};
use crate::connection::{self, InUse};
use crate::error::{Failure, lacks};
use crate::file_identity::{Place, nothing_there, with_suffix};
use crate::schema;

/// How often files that only a client that may write can put right are looked at again: such a client may be about to.
const TRIES: usize = 20;

/// Reads what is held. A file in which nothing was ever held yields the default.
///
/// # Errors
///
/// [`Failure::busy`] if the files changed meanwhile.
pub(crate) fn read<T: Default>(
    path: &Path,
    allow_unsafe: bool,
    work: impl Fn(&Tx<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let _in_use = InUse::begin()?;
    connection::check_version()?;
    let boot = BootClock::find(allow_unsafe)?;
    let mut done = look(path, allow_unsafe, &boot, &work);
    for _ in 0..TRIES {
        if !done.as_ref().is_err_and(Failure::cannot_open) {
            break;
        }
        thread::sleep(Duration::from_millis(5));
        done = look(path, allow_unsafe, &boot, &work);
    }
    done
}

fn look<T: Default>(
    path: &Path,
    allow_unsafe: bool,
    boot: &BootClock,
    work: &impl Fn(&Tx<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let _alone = connection::opening();
    match fs::metadata(path) {
        Err(e) if nothing_there(&e) => {
            return Err(Failure::configuration(format!(
                "there is no file {}; check the path. The file is made with the first lock that is taken there",
                path.display()
            )));
        }
        Ok(file) if file.is_file() && file.len() == 0 => return Ok(T::default()),
        _ => {}
    }
    let real = Place::find(path, allow_unsafe)?.real;
    let mut files = ["", "-wal", "-shm"].map(|end| with_suffix(&real, end)).into_iter();
    if let Some(file) = files.find(|file| lacks(file, Access::READ_OK)) {
        return Err(Failure::configuration(format!(
            "{} is not readable for this process; change its owner or mode",
            file.display()
        )));
    }
    let before = seen(&real);
    // An index without a log says nothing; SQLite would make a log for it.
    let has_log = fs::metadata(with_suffix(&real, "-wal")).is_ok_and(|log| log.len() > 0);
    let how = if has_log { "readonly_shm=1" } else { "immutable=1" };
    let encoded = percent_encode(real.as_os_str().as_bytes(), NON_ALPHANUMERIC);
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
    let opened = connection::open(Path::new(&format!("file:{encoded}?mode=ro&{how}")), flags);
    let done = opened.and_then(|conn| {
        let tx = Transaction::new_unchecked(&conn, TransactionBehavior::Deferred)?;
        match schema::is_ours(&tx, &real)? {
            true => work(&Tx::new(tx, boot, &mut Known::default())),
            false => Ok(T::default()),
        }
    });
    match seen(&real) == before {
        true => done,
        false => Err(Failure::busy()),
    }
}

/// What a client changes that comes or goes: which files there are, whether they are empty, and the content of the database.
fn seen(path: &Path) -> impl PartialEq {
    ["", "-wal", "-shm"].map(|end| {
        let file = fs::metadata(with_suffix(path, end)).ok()?;
        let changed = (end.is_empty()).then(|| (file.mtime(), file.mtime_nsec()));
        Some((file.dev(), file.ino(), file.len() > 0, changed))
    })
}
