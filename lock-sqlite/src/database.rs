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
        schema::is_ours(&*conn.unchecked_transaction()?, path)?;
        schema::set_journal_mode(&conn, path)?;
        let files = FileIdentity::of(path, place)?;
        connection::set_durable(&conn, true)?;
        let tx = connection::begin(&conn)?;
        if !schema::is_ours(&tx, path)? {
            schema::create(&tx)?;
        }
        let was_set_back = counter::check(&tx, seen).is_err();
        let mut known = Known::new(client, counter::raise(&tx, seen)?);
        let tx = Tx::new(tx, &boot, &mut known);
        tx.take_over_reservations()?;
        let log = files.check()?;
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
        database.checkpoint_if_due(log);
        Ok(database)
    }

    /// Grants the claim, or tells that the name is busy. If it `waits`, it has a row among the waiters then.
    pub(crate) fn acquire(&mut self, claim: &Claim, sent: Stamp, waits: bool) -> Result<Attempt, Failure> {
        if let Some(busy) = self.read(|tx| tx.look(claim, waits))? {
            return Ok(busy.into());
        }
        // If the ceiling of tokens must be raised, then in the transaction of the grant: between two of them other processes could draw all
        // tokens below the new ceiling.
        for durably in [false, true] {
            if let Some(attempt) = self.write(durably, |tx| tx.acquire(claim, sent, waits, durably))? {
                return Ok(attempt);
            }
        }
        Err(Failure::set_back())
    }

    /// Reads what is held.
    pub(crate) fn read<T>(&mut self, body: impl FnOnce(&Tx<'_>) -> Result<T, Failure>) -> Result<T, Failure> {
        self.files.check()?;
        let tx = self.conn.unchecked_transaction()?;
        body(&Tx::new(tx, &self.boot, &mut self.known))
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
                target: "fencelock", ?failure, database = %self.files.database.display(),
                "the write-ahead log cannot be brought in, and grows"
            ),
            _ => {}
        }
    }
}
