//! Reading the database without a trace: no file is made, written to or removed, and no right to write is needed.
//!
//! If there is no log beside the database, all that was ever committed is in it. SQLite then reads it as an immutable file:
//! an ordinary connection would make a log and its index. If there is a log, SQLite takes the index for read-only. It reads
//! the log by itself if no client that may write keeps the index up to date.
//!
//! Clients come and go meanwhile. So the files are looked at before and after, and read again if they have changed.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use lock_core::LockError;
use rusqlite::ErrorCode;

use crate::boot::Boot;
use crate::database::{self, Database, InUse};
use crate::failure::Failure;
use crate::files::Files;
use crate::patience;
use crate::records::Records;
use crate::schema::Found;
use crate::turns;

/// Reads what is held, as long as the patience lasts. A file in which nothing was ever held yields the default.
pub(crate) fn read<T: Default>(
    path: &Path,
    allow_unsafe: bool,
    work: &impl Fn(&Records<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let _in_use = InUse::begin()?;
    database::check_version()?;
    let boot = Boot::find(allow_unsafe)?;
    let mut tries = 0;
    let mut last = None;
    loop {
        let number = std::fs::metadata(path).map_or(0, |file| file.ino());
        let turn = match turns::to_read(number) {
            Ok(turn) => turn,
            // What the look before has found says more.
            Err(busy) => return Err(last.unwrap_or(busy)),
        };
        let before = Files::look(path, allow_unsafe)?;
        let now = SystemTime::now();
        let done = read_once(&before, &boot, work);
        let after = Files::look(path, allow_unsafe)?;
        if before.has_log() && after.has_bare_log() {
            tidy(&after);
        }
        drop(turn);
        let immutable = !before.has_log();
        let same = before.number() == number && after.are_those(&before);
        let steady = same && (!immutable || (after == before && !before.are_fresh(now)));
        let failure = match done {
            Ok(value) if steady => return Ok(value),
            Ok(_) => Failure::busy(),
            Err(Unread::Passing(failure)) => failure,
            Err(Unread::Failed(failure)) if steady => return Err(failure),
            Err(Unread::Failed(failure)) => failure,
        };
        if !patience::wait_for_the_other(tries) {
            return Err(failure);
        }
        last = Some(failure);
        tries += 1;
    }
}

/// Why nothing was read.
enum Unread {
    /// Another client may be about to change that.
    Passing(Failure),
    Failed(Failure),
}

fn read_once<T: Default>(
    files: &Files,
    boot: &Boot,
    work: &impl Fn(&Records<'_>) -> Result<T, Failure>,
) -> Result<T, Unread> {
    if let Some(unfinished) = files.unfinished() {
        return Err(Unread::Passing(left_behind(&unfinished).into()));
    }
    if files.is_empty() {
        return Ok(T::default());
    }
    let reading = || {
        let conn = Database::open_to_read(files.real(), !files.has_log())?;
        let tx = conn.unchecked_transaction()?;
        match Found::look(&tx, files.real())? {
            Found::Nothing => Ok(T::default()),
            Found::Format1 => Err(Failure::Refused(LockError::configuration(format!(
                "{} has format 1, of an earlier version of fencelock; any client that may write to it brings it up to date",
                files.real().display()
            )))),
            Found::Ours => work(&Records::new(&tx, boot)),
        }
    };
    reading().map_err(|failure| match failure {
        Failure::Sqlite(error) => match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::FileLockingProtocolFailed) => {
                Unread::Passing(error.into())
            }
            Some(ErrorCode::ReadOnly) => Unread::Passing(left_behind(files.real()).with_source(error).into()),
            Some(ErrorCode::CannotOpen) => Unread::Passing(
                LockError::unavailable(
                    "opening the database",
                    format!("{} cannot be opened; were too many files open?", files.real().display()),
                )
                .with_source(error)
                .into(),
            ),
            _ => Unread::Failed(error.into()),
        },
        failure => Unread::Failed(failure),
    })
}

/// Removes the empty log that SQLite makes for a reader that comes right after the last client has closed the file: a client that opens and
/// closes the file takes it along.
fn tidy(files: &Files) {
    // SQLite would open the file read-only, make an index too, and leave both.
    if !files.may_be_written() {
        tracing::warn!(
            target: "fencelock",
            "an empty log was left beside {}, which this user may not write to; remove it if clients cannot open the database",
            files.real().display()
        );
        return;
    }
    let tidied = Database::open(files.real(), false)
        .and_then(|conn| conn.query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(())));
    if let Err(error) = tidied {
        tracing::debug!(target: "fencelock", %error, "an empty log was left beside the database");
    }
}

fn left_behind(file: &Path) -> LockError {
    LockError::configuration(format!(
        "{} was left behind unfinished, and this client is read-only; a client that may write puts it right, such as \
         fencelock check",
        file.display()
    ))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::path::PathBuf;
    use std::time::{Duration, Instant};

    use lock_core::{Claim, OwnerId};
    use rusqlite::Connection;
    use tempfile::TempDir;

    use super::*;
    use crate::store::Store;

    /// A client that holds those locks.
    fn database(path: &Path, names: &[&str]) -> Store {
        patience::until(Instant::now() + Duration::from_secs(60));
        let mut store = Store::open(path, false, OwnerId::random(), 0).unwrap();
        for name in names {
            let claim = Claim::new(name.parse().unwrap(), Duration::from_secs(60));
            let sent = lock_core::Clock::system().now();
            store.try_acquire(&claim, sent, &|| true).unwrap().granted().unwrap();
        }
        store
    }

    fn dir() -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("locks.db");
        (dir, path)
    }

    /// What a reader sees if that happens while it reads for the first time, and how often it reads.
    fn read_while(path: &Path, happens: impl Fn()) -> (Vec<String>, u32) {
        let reads = Cell::new(0);
        let names = read(path, false, &|records| {
            let held = records.list("")?;
            reads.set(reads.get() + 1);
            if reads.get() == 1 {
                happens();
            }
            Ok(held
                .iter()
                .filter_map(|holder| Some(holder.name.as_ref()?.to_string()))
                .collect())
        });
        (names.unwrap(), reads.get())
    }

    /// Takes the age of its last change from the file, after which a reader would wait by itself.
    fn grow_old(path: &Path) {
        let there = || Files::look(path, false).unwrap();
        while there().are_fresh(SystemTime::now()) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_immutable_file_that_changes_meanwhile_is_read_again() {
        let (_dir, path) = dir();
        drop(database(&path, &["a"]));
        grow_old(&path);
        assert_eq!(read_while(&path, || ()), (vec!["a".to_owned()], 1));
        let (names, reads) = read_while(&path, || {
            // As a client of another process: it comes, writes and takes its log along.
            let conn = Connection::open(&path).unwrap();
            conn.execute("UPDATE lock SET name = 'b'", []).unwrap();
        });
        assert_eq!(names, ["b"]);
        assert!(reads > 1);
    }

    #[test]
    fn a_client_that_connects_meanwhile_is_not_overlooked() {
        let (_dir, path) = dir();
        drop(database(&path, &["a"]));
        grow_old(&path);
        let client = Cell::new(None);
        let (names, _) = read_while(&path, || {
            let conn = Connection::open(&path).unwrap();
            // It stays in the log.
            conn.execute("UPDATE lock SET name = 'b'", []).unwrap();
            client.set(Some(conn));
        });
        assert_eq!(names, ["b"]);
    }

    #[test]
    fn a_file_that_is_replaced_meanwhile_is_read_again() {
        let (dir, path) = dir();
        let other = dir.path().join("other.db");
        drop(database(&other, &["b"]));
        for connected in [false, true] {
            let store = Cell::new(Some(database(&path, &["a"])));
            if !connected {
                store.take();
                grow_old(&path);
            }
            let (names, _) = read_while(&path, || {
                let new = dir.path().join("new.db");
                fs::copy(&other, &new).unwrap();
                store.take();
                fs::rename(new, &path).unwrap();
                for left in ["locks.db-wal", "locks.db-shm"] {
                    let _ = fs::remove_file(dir.path().join(left));
                }
            });
            assert_eq!(names, ["b"], "connected: {connected}");
            fs::remove_file(&path).unwrap();
        }
    }
}
