//! The open database: one short transaction per operation.

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use lock_core::{
    Attempt, Busy, Claim, FencingToken, Grant, Holder, Lease, LockName, OwnerId, Released, Renewal, Stamp,
};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior};

use crate::boot::{Boot, after};
use crate::checkpoint::Checkpointer;
use crate::counter;
use crate::database::{self, Database, InUse};
use crate::failure::Failure;
use crate::patience;
use crate::place::{Place, with_suffix};
use crate::records::{Records, read_holder};
use crate::reservations;
use crate::schema;
use crate::turns;
use crate::wake::{Alarm, WakePipe};

/// Asks whether somebody still waits for the answer.
pub(crate) type Wanted<'a> = &'a dyn Fn() -> bool;

/// An open database and what was true when it was opened.
#[derive(Debug)]
pub(crate) struct Store {
    conn: Database,
    checkpointer: Checkpointer,
    boot: Boot,
    place: Place,
    /// Stored with every lock, so that a client can let go of all that it holds.
    client: OwnerId,
    /// The highest token drawn here, or the start that was made sure of; all that come are higher.
    seen: u64,
    /// Up to where the rows have been searched for expired ones.
    swept: String,
    /// None if it could not be opened.
    wake: Option<WakePipe>,
    database: PathBuf,
    /// Ends after the connection.
    _in_use: InUse,
}

/// How many rows each grant searches for expired ones. A grant adds one row at most, so more than one is enough.
const SWEEP: usize = 4;

/// Asks whether another connection has changed the database.
pub(crate) const VERSION: &str = "PRAGMA data_version";

impl Store {
    /// Opens the file, or makes it; `seen` is what the client's last store had seen.
    pub(crate) fn open(path: &Path, allow_unsafe: bool, client: OwnerId, seen: u64) -> Result<Self, Failure> {
        let in_use = InUse::begin()?;
        database::check_version()?;
        let boot = Boot::find(allow_unsafe)?;
        let before = Place::inspect(path, allow_unsafe)?;
        let database = before.real().to_owned();
        let _turn = turns::to_open(before.number())?;
        let (mut conn, mut checkpointer) = schema::open(&database)?;
        // The raise writes, so the log and its index exist afterwards.
        let start = counter::raise(&mut conn, None, seen)?;
        let place = Place::settle(path, before)?;
        reservations::take_over(&conn, &boot)?;
        // What else another boot left can never count again, whatever its expiry says.
        conn.execute(
            "DELETE FROM lock WHERE boot <> ?1 OR expires <= ?2",
            (boot.id(), boot.now()),
        )?;
        // Processes that come and go bound the log, too.
        checkpointer.run_if_due(&conn);
        Ok(Self {
            conn,
            checkpointer,
            boot,
            place,
            client,
            seen: start,
            swept: String::new(),
            wake: None,
            database,
            _in_use: in_use,
        })
    }

    /// Tokens from here on are higher.
    pub(crate) fn seen(&self) -> u64 {
        self.seen
    }

    /// Whether the path still leads to the open file.
    pub(crate) fn check_place(&self) -> Result<(), Failure> {
        self.place.check()
    }

    pub(crate) fn try_acquire(&mut self, claim: &Claim, sent: Stamp, wanted: Wanted<'_>) -> Result<Attempt, Failure> {
        loop {
            let granted = self.write(wanted, |tx| {
                let done = tx.grant(claim, sent)?;
                tx.keep = done.is_some();
                Ok(done)
            })?;
            if let Some(attempt) = granted {
                return Ok(attempt);
            }
            self.seen = counter::raise(&mut self.conn, Some(&self.place), self.seen)?;
        }
    }

    pub(crate) fn renew(&mut self, claim: &Claim, wanted: Wanted<'_>) -> Result<Renewal, Failure> {
        self.write(wanted, |tx| {
            let renewed = tx
                .prepare_cached(
                    "UPDATE lock SET expires = max(?1, reserved) \
                     WHERE name = ?2 AND owner = ?3 AND client <> '' AND boot = ?4 AND expires > ?5",
                )?
                .execute((
                    after(tx.now, claim.ttl()),
                    claim.name().as_str(),
                    claim.owner().to_string(),
                    tx.boot.id(),
                    tx.now,
                ))?;
            Ok(if renewed == 1 {
                Renewal::Renewed
            } else {
                Renewal::NotHeld
            })
        })
    }

    pub(crate) fn release(&mut self, claim: &Claim) -> Result<Released, Failure> {
        let released = self.write(&|| true, |tx| tx.release(claim))?;
        if released == Released::Released {
            self.wake_others();
        }
        Ok(released)
    }

    pub(crate) fn force_release(&mut self, name: &LockName) -> Result<Option<Holder>, Failure> {
        let forced = self.write(&|| true, |tx| {
            let holder = match tx.holder(name) {
                Err(Failure::Row(_)) => {
                    let mut damaged = Holder::new();
                    damaged.name = Some(name.clone());
                    Some(damaged)
                }
                holder => holder?,
            };
            tx.prepare_cached("DELETE FROM lock WHERE name = ?1")?
                .execute([name.as_str()])?;
            Ok(holder)
        })?;
        if forced.is_some() {
            self.wake_others();
        }
        Ok(forced)
    }

    /// Lets go of everything that this client holds. What is reserved stays so.
    pub(crate) fn release_all(&mut self) -> Result<(), Failure> {
        let client = self.client.to_string();
        self.write(&|| true, |tx| {
            tx.prepare_cached("DELETE FROM lock WHERE client = ?1 AND reserved <= ?2")?
                .execute((&client, tx.now))?;
            tx.prepare_cached("UPDATE lock SET client = '', expires = reserved WHERE client = ?1")?
                .execute([&client])?;
            Ok(())
        })?;
        self.wake_others();
        Ok(())
    }

    /// What is held, without keeping anybody from writing.
    pub(crate) fn records(&self) -> Records<'_> {
        Records::new(&self.conn, &self.boot)
    }

    /// Changes whenever another connection has changed the database.
    pub(crate) fn version(&self) -> Result<i64, Failure> {
        Ok(self.conn.prepare_cached(VERSION)?.query_row([], |row| row.get(0))?)
    }

    /// Listens for releases by other clients. `None` if that is not possible.
    pub(crate) fn listen(&mut self, alarm: &Alarm) -> Option<&WakePipe> {
        let listening = self.wake_pipe()?.listen(alarm);
        if let Err(error) = listening {
            tracing::trace!(target: "fencelock", %error, "releases by other processes are looked for, not told");
            return None;
        }
        self.wake.as_ref()
    }

    /// Whether a release by another client is told.
    pub(crate) fn is_listening(&mut self) -> bool {
        self.wake_pipe().is_some_and(|pipe| pipe.is_listening())
    }

    /// Tells clients in other processes that a name is free.
    pub(crate) fn wake_others(&mut self) {
        if let Some(pipe) = self.wake_pipe() {
            pipe.wake_all();
        }
    }

    /// The pipe that is there now.
    fn wake_pipe(&mut self) -> Option<&mut WakePipe> {
        if self.wake.as_ref().is_none_or(WakePipe::is_removed) {
            self.wake = WakePipe::open(&with_suffix(&self.database, "-wake"), &self.database)
                .inspect_err(|error| tracing::trace!(target: "fencelock", %error, "no pipe for wake-ups"))
                .ok();
        }
        self.wake.as_mut()
    }

    /// How often that statement was run.
    #[cfg(test)]
    pub(crate) fn runs(&self, sql: &str) -> i32 {
        let statement = self
            .conn
            .prepare_cached(sql)
            .expect("a statement that was prepared before");
        statement.get_status(rusqlite::StatementStatus::Run)
    }

    /// As `write`, and waits until what was written is on the disk.
    pub(crate) fn write_durably<T>(
        &mut self,
        wanted: Wanted<'_>,
        body: impl Fn(&mut Tx<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.conn.pragma_update(None, "synchronous", "FULL")?;
        let written = self.write(wanted, body);
        self.conn.pragma_update(None, "synchronous", "NORMAL")?;
        written
    }

    /// Runs `body` in one transaction, and makes room and runs it again if the disk is full.
    pub(crate) fn write<T>(
        &mut self,
        wanted: Wanted<'_>,
        body: impl Fn(&mut Tx<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        /// Readers keep the log from beginning anew, for microseconds each.
        const ATTEMPTS: i32 = 8;
        let mut done = self.write_once(wanted, &body);
        for attempt in 0..ATTEMPTS {
            let Err(full) = done else { break };
            if !full.is_full() {
                return Err(full);
            }
            // Once the log's content is in the database, the log is written again from its start, in space that it has already. So a
            // release mostly gets through on a full disk.
            let blocked = match self.checkpointer.run(&self.conn) {
                Ok(complete) => !complete,
                Err(_) => return Err(full),
            };
            if attempt == 0 {
                tracing::warn!(target: "fencelock", blocked,
                    "no room for the write-ahead log; starting over at its beginning"
                );
            }
            done = self.write_once(wanted, &body);
            if done.as_ref().is_err_and(Failure::is_full) && !patience::wait_for_the_other(attempt) {
                break;
            }
        }
        if done.is_ok() {
            self.checkpointer.run_if_due(&self.conn);
        }
        done
    }

    fn write_once<T>(
        &mut self,
        wanted: Wanted<'_>,
        body: &impl Fn(&mut Tx<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        if !wanted() {
            return Err(Failure::Abandoned);
        }
        let tx = Transaction::new(&mut self.conn, TransactionBehavior::Immediate)?;
        if !wanted() {
            return Err(Failure::Abandoned);
        }
        let mut tx = Tx {
            // Read under the write lock: no other process's reading comes between this one and what is written.
            now: self.boot.now(),
            tx,
            boot: &self.boot,
            client: self.client,
            seen: self.seen,
            swept: &mut self.swept,
            keep: true,
        };
        let done = body(&mut tx)?;
        // Also when nothing was written: what an orphaned file says counts for nobody.
        self.place.check()?;
        if !wanted() {
            return Err(Failure::Abandoned);
        }
        if tx.keep {
            let seen = tx.seen;
            tx.tx.commit()?;
            self.seen = seen;
        }
        Ok(done)
    }
}

/// An operation under way, in its transaction.
pub(crate) struct Tx<'a> {
    tx: Transaction<'a>,
    now: i64,
    boot: &'a Boot,
    client: OwnerId,
    seen: u64,
    swept: &'a mut String,
    /// Whether there is anything to commit.
    keep: bool,
}

impl Tx<'_> {
    /// The reading of the machine's clock that the operation goes by.
    pub(crate) fn now(&self) -> i64 {
        self.now
    }

    pub(crate) fn boot(&self) -> &Boot {
        self.boot
    }

    /// Grants the name if it is free or already this owner's. `None`: the ceiling of tokens must be raised first.
    fn grant(&mut self, claim: &Claim, sent: Stamp) -> Result<Option<Attempt>, Failure> {
        let tokens = match self.holder(claim.name())? {
            Some(holder) if holder.owner == Some(claim.owner()) && holder.token.is_some() && !holder.is_reserved => {
                self.prepare_cached("UPDATE lock SET expires = max(?1, reserved), ttl = ?2 WHERE name = ?3")?
                    .execute((after(self.now, claim.ttl()), nanos(claim.ttl()), claim.name().as_str()))?;
                // Of a block, the last token is stored.
                holder.token.map(|token| (token, token))
            }
            Some(holder) => {
                let busy = Busy::default().with_retry_after(holder.remaining.unwrap_or_default());
                return Ok(Some(busy.with_holder(holder).into()));
            }
            None => match counter::draw(&self.tx, claim.tokens_wanted())? {
                Some((first, _)) if first.get() <= self.seen => return Err(Failure::WentBack),
                Some((first, token)) => {
                    self.insert(claim, token)?;
                    self.sweep()?;
                    self.seen = token.get();
                    Some((first, token))
                }
                None => None,
            },
        };
        let lease = Lease::for_claim(claim, sent);
        Ok(tokens
            .map(|(first, token)| Attempt::Granted(Grant::new(claim.clone(), token, lease).with_first_token(first))))
    }

    fn insert(&self, claim: &Claim, token: FencingToken) -> Result<(), Failure> {
        let holder = Holder::of(claim);
        let acquired = holder
            .acquired_at
            .and_then(|at| at.duration_since(UNIX_EPOCH).ok())
            .unwrap_or_default();
        self.prepare_cached(
            "INSERT OR REPLACE INTO lock \
             (name, owner, client, token, boot, expires, ttl, label, host, pid, acquired_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        )?
        .execute((
            claim.name().as_str(),
            claim.owner().to_string(),
            self.client.to_string(),
            token.as_i64(),
            self.boot.id(),
            after(self.now, claim.ttl()),
            nanos(claim.ttl()),
            holder.label,
            holder.host,
            holder.pid,
            i64::try_from(acquired.as_micros()).unwrap_or(i64::MAX),
        ))?;
        Ok(())
    }

    fn release(&self, claim: &Claim) -> Result<Released, Failure> {
        let held: Option<bool> = self
            .prepare_cached(
                "DELETE FROM lock WHERE name = ?1 AND owner = ?2 RETURNING client <> '' AND boot = ?3 AND expires > ?4",
            )?
            .query_row(
                (
                    claim.name().as_str(),
                    claim.owner().to_string(),
                    self.boot.id(),
                    self.now,
                ),
                |row| row.get(0),
            )
            .optional()?;
        Ok(if held == Some(true) {
            Released::Released
        } else {
            Released::NotHeld
        })
    }

    fn holder(&self, name: &LockName) -> Result<Option<Holder>, Failure> {
        read_holder(&self.tx, self.boot, self.now, name)
    }

    /// Deletes a few of the rows whose holders never came back. The search goes on where it ended the last time.
    fn sweep(&mut self) -> Result<(), Failure> {
        let mut rows = Vec::with_capacity(SWEEP);
        {
            let mut statement = self.prepare_cached(
                "SELECT name, boot <> ?1 OR expires <= ?2 FROM lock WHERE name > ?3 ORDER BY name LIMIT ?4",
            )?;
            let mut found = statement.query((self.boot.id(), self.now, self.swept.as_str(), SWEEP as i64))?;
            while let Some(row) = found.next()? {
                rows.push((row.get::<_, String>(0)?, row.get::<_, bool>(1)?));
            }
        }
        for (name, _) in rows.iter().filter(|(_, dead)| *dead) {
            self.prepare_cached("DELETE FROM lock WHERE name = ?1")?
                .execute([name])?;
        }
        *self.swept = match rows.pop() {
            Some((last, _)) if rows.len() + 1 == SWEEP => last,
            _ => String::new(),
        };
        Ok(())
    }
}

impl std::ops::Deref for Tx<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.tx
    }
}

fn nanos(d: Duration) -> i64 {
    i64::try_from(d.as_nanos()).unwrap_or(i64::MAX)
}
