//! An open database, and one short transaction per operation on it.

use std::path::Path;

use lock_core::{Attempt, Claim, OwnerId, Stamp};
use rusqlite::{Connection, OpenFlags};

use crate::boot_clock::BootClock;
use crate::commands::{Known, Tx};
use crate::connection::{self, InUse, LOG};
use crate::error::Failure;
use crate::file_identity::{self, FileIdentity, Place};
use crate::{counter, schema};

/// An open database and what was true when it was opened.
#[derive(Debug)]
pub(crate) struct Database {
    conn: Connection,
    boot: BootClock,
    pub(crate) files: FileIdentity,
    pub(crate) known: Known,
    /// A longer log is brought into the database.
    due: u64,
    /// Whether the counter of tokens was below what this client had seen when the file was opened.
    pub(crate) was_set_back: bool,
    /// Dropped after the connection is closed.
    _in_use: InUse,
}

impl Database {
    /// Opens the file, or makes it. `seen` is what the client's last connection had seen.
    pub(crate) fn open(path: &Path, allow_unsafe: bool, client: OwnerId, seen: u64) -> Result<Self, Failure> {
        let in_use = InUse::begin()?;
        connection::check_version()?;
        let boot = BootClock::find(allow_unsafe)?;
        let _alone = connection::opening();
        let place = Place::make(path, allow_unsafe)?;
        let conn = connection::open(&place.real, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        // Before the journal mode, which is stored in the file: another program's database must stay untouched.
        let tx = conn.unchecked_transaction()?;
        schema::is_ours(&tx, path)?;
        drop(tx);
        schema::set_journal_mode(&conn, path)?;
        let files = FileIdentity::of(path, place)?;
        connection::set_durable(&conn, true)?;
        let tx = connection::begin(&conn)?;
        if !schema::is_ours(&tx, path)? {
            schema::create(&tx)?;
        }
        let was_set_back = counter::is_below(&tx, seen)?;
        let seen = counter::raise(&tx, seen)?;
        let client = client.to_string();
        let mut known = Known {
            client,
            seen,
            ..Known::default()
        };
        let tx = Tx::new(tx, &boot, &mut known);
        tx.take_over_reservations()?;
        files.check()?;
        tx.commit()?;
        connection::set_durable(&conn, false)?;
        for message in file_identity::warnings(path) {
            tracing::warn!(target: "fencelock", "{message}");
        }
        let mut database = Self {
            conn,
            boot,
            files,
            known,
            due: LOG,
            was_set_back,
            _in_use: in_use,
        };
        // Processes that come and go bound the log, too.
        database.checkpoint_if_due(database.files.check()?);
        Ok(database)
    }

    /// Grants the claim, or tells that the name is busy. If it `waits`, it has a row among the waiters then.
    pub(crate) fn acquire(&mut self, claim: &Claim, sent: Stamp, waits: bool) -> Result<Attempt, Failure> {
        if let Some(busy) = self.read(|tx| tx.look(claim, waits))? {
            return Ok(busy.into());
        }
        if let Some(attempt) = self.write(false, |tx| tx.acquire(claim, sent, waits))? {
            return Ok(attempt);
        }
        // In one transaction: between two of them other processes could draw all tokens below the new ceiling.
        let attempt = self.write(true, |tx| {
            if let Some(attempt) = tx.acquire(claim, sent, waits)? {
                return Ok(Some(attempt));
            }
            tx.raise()?;
            tx.acquire(claim, sent, waits)
        })?;
        attempt.ok_or_else(|| Failure::set_back("its counter of tokens cannot be raised"))
    }

    /// Reads what is held.
    pub(crate) fn read<T>(&mut self, body: impl FnOnce(&Tx<'_>) -> Result<T, Failure>) -> Result<T, Failure> {
        self.files.check()?;
        body(&Tx::new(
            self.conn.unchecked_transaction()?,
            &self.boot,
            &mut self.known,
        ))
    }

    /// Runs `body` in one transaction, which waits for the disk if it is to be durable. If the log has no room to grow, brings it into the
    /// database, so that it begins anew, and runs `body` again.
    pub(crate) fn write<T>(
        &mut self,
        durably: bool,
        body: impl Fn(&mut Tx<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        if durably {
            connection::set_durable(&self.conn, true)?;
        }
        let mut done = self.write_once(&body);
        if done.as_ref().is_err_and(Failure::is_full) && connection::checkpoint(&self.conn, &self.files).is_ok() {
            done = self.write_once(&body);
        }
        if durably {
            connection::set_durable(&self.conn, false)?;
        }
        let (done, log) = done?;
        self.checkpoint_if_due(log);
        Ok(done)
    }

    fn write_once<T>(&mut self, body: &impl Fn(&mut Tx<'_>) -> Result<T, Failure>) -> Result<(T, u64), Failure> {
        let seen = self.known.seen;
        self.known.wakes = false;
        let written = connection::begin(&self.conn).and_then(|tx| {
            // The clock is read under the write lock: no other process's reading comes between this one and what is written.
            let mut tx = Tx::new(tx, &self.boot, &mut self.known);
            let done = body(&mut tx)?;
            // Also when nothing was written: what an orphaned file says does not count.
            let log = self.files.check()?;
            tx.commit()?;
            Ok((done, log))
        });
        if written.is_err() {
            self.known.seen = seen;
        }
        written
    }

    /// Brings in a log of that length if it is too long. If another connection writes, this is left to that client or a later call.
    fn checkpoint_if_due(&mut self, length: u64) {
        if length <= LOG {
            self.due = LOG;
        }
        if length <= self.due {
            return;
        }
        // A reader may keep the log from beginning anew; not every commit is to try.
        self.due = length + LOG / 4;
        match connection::checkpoint(&self.conn, &self.files) {
            Err(failure) if !failure.is_busy() => tracing::warn!(
                target: "fencelock", ?failure, database = %self.files.database().display(),
                "the write-ahead log cannot be brought in, and grows"
            ),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lock_core::{Clock, Mode};

    use super::*;

    #[test]
    fn claims_that_wait_may_go_on_when_their_name_has_room_for_them() {
        let dir = tempfile::tempdir().unwrap();
        let mut database = Database::open(&dir.path().join("a.db"), false, OwnerId::random(), 0).unwrap();
        let permit = Mode::Permit { of: 2 };
        let claim = |name: &str, mode| Claim::new(name.parse().unwrap(), Duration::from_secs(600)).with_mode(mode);
        let mut acquire = |claim: &Claim| {
            let attempt = database.acquire(claim, Clock::system().now(), true).unwrap();
            attempt.granted().is_some()
        };
        let held = [
            ("x", Mode::Exclusive),
            ("r", Mode::Exclusive),
            ("p", permit),
            ("p", permit),
        ];
        let held = held.map(|(name, mode)| claim(name, mode));
        assert!(held.iter().all(&mut acquire));
        let waiting =
            [("x", Mode::Exclusive), ("r", Mode::Shared), ("p", permit)].map(|(name, mode)| claim(name, mode));
        assert!(!waiting.iter().any(acquire));
        let may_go = |database: &mut Database| database.read(|tx| tx.may_go()).unwrap();
        assert!(may_go(&mut database).is_empty());
        for (freed, waiter) in [(0, 0), (1, 1), (3, 2)] {
            database.write(false, |tx| tx.release(&held[freed], None)).unwrap();
            assert_eq!(may_go(&mut database), [waiting[waiter].owner()]);
            assert!(database.known.wakes);
            database.write(false, |tx| tx.leave(&waiting[waiter])).unwrap();
        }
    }
}
