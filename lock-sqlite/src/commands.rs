//! What is asked of the database: one short transaction per operation, and all SQL about locks.
//!
//! # Admission
//!
//! A claim is granted a name beside the live rows of `lock` for it if its mode admits them: an exclusive claim beside none, a shared
//! one beside shared ones, a permit beside fewer than there are permits. Rows of `waiter` set limits, too, so that no claim waits for
//! ever:
//!
//! - A reader waits while a writer waits that came before it.
//! - Each grant counts as a pass for the claims that wait. One that was passed [`PASSES`] times goes before all that came after it.
//!
//! A waiter keeps its row alive. That of a process that ends or is stopped counts for [`WAITER_TTL`] at the most.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use lock_core::{
    Attempt, Busy, Claim, FencingToken, Grant, Holder, Lease, LockError, LockName, Mode, OwnerId, Released, Renewal,
    Stamp,
};
use rusqlite::types::Type;
use rusqlite::{OptionalExtension, Params, Row, ToSql, Transaction, TransactionBehavior, params};

use crate::boot_clock::{BootClock, after, until, wall_clock};
use crate::connection::{self, Connection, InUse};
use crate::error::Failure;
use crate::file_identity::{self, FileIdentity, Place};
use crate::{counter, schema};

/// How many later claims may be granted before one that waits.
pub(crate) const PASSES: u32 = 32;

/// How long the row of a waiter counts without being kept up.
const WAITER_TTL: Duration = Duration::from_secs(1);

/// How many rows each grant searches for expired ones. A grant adds one row, so more than one is enough.
const SWEEP: usize = 4;

/// The longest reservation. It fits an `i64` of nanoseconds.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// An open database and what was true when it was opened.
#[derive(Debug)]
pub(crate) struct Database {
    conn: Connection,
    boot: BootClock,
    files: FileIdentity,
    known: Known,
}

/// What a client remembers from one operation to the next.
#[derive(Debug)]
struct Known {
    /// Stored with every row, so that a client can release all that it holds.
    client: String,
    /// The highest token drawn here, or the start that was made sure of; all that come are higher.
    seen: u64,
    /// Up to where the rows have been searched for expired ones.
    swept: (String, String),
    /// Until when the rows of this client's waiters count.
    waiters: HashMap<OwnerId, i64>,
    /// When the rows of waiters were searched.
    waiters_swept: i64,
}

/// What an operation did, and whether waiters are to be woken.
pub(crate) type Told<T> = (T, bool);

impl Database {
    /// Opens the file, or makes it. `seen` is what the client's last connection had seen.
    pub(crate) fn open(path: &Path, allow_unsafe: bool, client: OwnerId, seen: u64) -> Result<(Self, Place), Failure> {
        let in_use = InUse::begin()?;
        connection::check_version()?;
        let boot = BootClock::find(allow_unsafe)?;
        let _opening = connection::opening();
        let place = Place::prepare(path, allow_unsafe)?;
        let mut conn = Connection::open(&place.real, in_use)?;
        schema::prepare(&mut conn, &place.real)?;
        conn.set_durable(true)?;
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let seen = counter::raise(&tx, seen)?;
        tx.commit()?;
        conn.set_durable(false)?;
        // The log and its index exist now.
        let files = FileIdentity::of(path, &place)?;
        // Processes that come and go bound the log, too.
        conn.checkpoint_if_due(files.check()?);
        for message in file_identity::warnings(path) {
            tracing::warn!(target: "fencelock", "{message}");
        }
        let known = Known {
            client: client.to_string(),
            seen,
            swept: Default::default(),
            waiters: HashMap::new(),
            waiters_swept: 0,
        };
        let database = Self {
            conn,
            boot,
            files,
            known,
        };
        Ok((database, place))
    }

    pub(crate) fn seen(&self) -> u64 {
        self.known.seen
    }

    /// Fails if the paths lead to other files than those that are open.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.files.check().map(drop)
    }

    /// Grants the claim, or tells that the name is busy. If it `waits`, it has a row among the waiters then.
    pub(crate) fn acquire(&mut self, claim: &Claim, sent: Stamp, waits: bool) -> Result<Told<Attempt>, Failure> {
        if let Some(busy) = self.look(claim, waits)? {
            return Ok((busy, false));
        }
        for durably in [false, true] {
            let granted = self.write(durably, |tx| tx.acquire(claim, sent, waits, durably))?;
            if let Some(told) = granted {
                return Ok(told);
            }
        }
        Err(lost("its counter of tokens cannot be raised"))
    }

    /// Whether the name is busy, without keeping others from writing. `None` if that cannot be told, or if there is something to write.
    fn look(&self, claim: &Claim, waits: bool) -> Result<Option<Attempt>, Failure> {
        self.check()?;
        let view = View::new(self.conn.unchecked_transaction()?, &self.boot);
        let (holds, _) = view.holds(claim.name())?;
        if holds.is_empty() || holds.iter().any(|hold| hold.is_of_earlier_boot) {
            return Ok(None);
        }
        // A writer is kept out by the holders alone.
        let waiting = match claim.mode() {
            Mode::Exclusive => Vec::new(),
            _ => view.waiting(claim.name())?.0,
        };
        let kept_up_until = self.known.waiters.get(&claim.owner());
        let is_kept_up = kept_up_until.is_some_and(|until| *until > after(view.now, WAITER_TTL / 2));
        match admission(claim, &holds, &waiting)? {
            Admission::Busy(busy) if !waits || is_kept_up => Ok(Some(busy.into())),
            _ => Ok(None),
        }
    }

    /// Keeps the claim for another ttl, if it is still there.
    pub(crate) fn renew(&mut self, claim: &Claim) -> Result<Renewal, Failure> {
        self.write(false, |tx| {
            let expires = after(tx.view.now, claim.ttl());
            Ok(renewal(tx.update(claim, "expires = max(?5, reserved)", &[expires])?))
        })
    }

    /// Reserves the name if the claim holds it. Waits for the disk: a reservation outlives a loss of power.
    pub(crate) fn reserve(&mut self, claim: &Claim, length: Duration) -> Result<Renewal, Failure> {
        self.write(true, |tx| {
            let set = "expires = max(expires, ?5), reserved = ?5, reserved_wall = ?6";
            Ok(renewal(tx.update(claim, set, &tx.ends(length))?))
        })
    }

    /// Releases the claim, and ends its wait. With `keep` its name stays reserved for that long.
    pub(crate) fn release(&mut self, claim: &Claim, keep: Option<Duration>) -> Result<Told<Released>, Failure> {
        self.write(false, |tx| {
            let set = "client = '', expires = ?5, reserved = ?5, reserved_wall = ?6";
            let was_held = match keep {
                Some(rest) => tx.update(claim, set, &tx.ends(rest))?,
                None => tx.delete(claim)?,
            };
            tx.leave(claim)?;
            let released = match was_held {
                true => Released::Released,
                false => Released::NotHeld,
            };
            Ok((released, tx.is_waited_for(claim.name())?))
        })
    }

    /// Ends the wait of the claim, if it waits.
    pub(crate) fn leave(&mut self, claim: &Claim) -> Result<Told<()>, Failure> {
        if !self.known.waiters.contains_key(&claim.owner()) {
            return Ok(((), false));
        }
        self.write(false, |tx| {
            tx.leave(claim)?;
            Ok(((), tx.is_waited_for(claim.name())?))
        })
    }

    /// Takes the name away from all its holders, and tells who the first one was.
    pub(crate) fn force_release(&mut self, name: &LockName) -> Result<Told<Vec<Holder>>, Failure> {
        self.write(false, |tx| {
            let holders = tx.view.holders(name).unwrap_or_else(|_| {
                let mut damaged = Holder::new();
                damaged.name = Some(name.clone());
                vec![damaged]
            });
            tx.view.execute("DELETE FROM lock WHERE name = ?1", [name.as_str()])?;
            Ok((holders, tx.is_waited_for(name)?))
        })
    }

    /// Releases everything that this client holds. What is reserved stays so.
    pub(crate) fn release_all(&mut self) -> Result<(), Failure> {
        self.write(false, |tx| {
            let (view, client) = (&tx.view, &tx.known.client);
            view.execute(
                "DELETE FROM lock WHERE client = ?1 AND reserved <= ?2",
                (client, view.now),
            )?;
            view.execute(
                "UPDATE lock SET client = '', expires = reserved WHERE client = ?1",
                [client],
            )?;
            view.execute("DELETE FROM waiter WHERE client = ?1", [client]).map(drop)
        })
    }

    /// Reads what is held.
    pub(crate) fn read<T>(&self, work: impl FnOnce(&View<'_>) -> Result<T, Failure>) -> Result<T, Failure> {
        self.check()?;
        work(&View::new(self.conn.unchecked_transaction()?, &self.boot))
    }

    /// Runs `body` in one transaction. If the log has no room to grow, brings it into the database, so that it begins anew, and runs
    /// `body` again.
    fn write<T>(&mut self, durably: bool, body: impl Fn(&mut Tx<'_>) -> Result<T, Failure>) -> Result<T, Failure> {
        if durably {
            self.conn.set_durable(true)?;
        }
        let mut done = self.write_once(&body);
        if done.as_ref().is_err_and(Failure::is_full) && self.conn.checkpoint().is_ok() {
            done = self.write_once(&body);
        }
        if durably {
            self.conn.set_durable(false)?;
        }
        let (done, log) = done?;
        self.conn.checkpoint_if_due(log);
        Ok(done)
    }

    fn write_once<T>(&mut self, body: &impl Fn(&mut Tx<'_>) -> Result<T, Failure>) -> Result<(T, u64), Failure> {
        let seen = self.known.seen;
        let written = self.conn.transaction_with_behavior(TransactionBehavior::Immediate);
        let written = written.map_err(Failure::from).and_then(|tx| {
            // The clock is read under the write lock: no other process's reading comes between this one and what is written.
            let view = View::new(tx, &self.boot);
            let known = &mut self.known;
            let mut tx = Tx { view, known };
            let done = body(&mut tx)?;
            // Also when nothing was written: what an orphaned file says does not count.
            let log = self.files.check()?;
            tx.view.tx.commit()?;
            Ok((done, log))
        });
        if written.is_err() {
            self.known.seen = seen;
        }
        written
    }
}

fn lost(what: &str) -> Failure {
    Failure::Lost(format!(
        "an older state was copied over the file while it was in use, or {what}; the next call opens it anew. Restore by replacing the \
         file, with all its users stopped"
    ))
}

fn renewal(is_held: bool) -> Renewal {
    match is_held {
        true => Renewal::Renewed,
        false => Renewal::NotHeld,
    }
}

/// What is held and waited for, as one transaction sees it.
#[derive(Debug)]
pub(crate) struct View<'a> {
    tx: Transaction<'a>,
    boot: &'a BootClock,
    now: i64,
}

/// A row of `lock` that counts.
struct Hold {
    holder: Holder,
    /// What is left of a reservation by the wall clock, and nothing else.
    is_of_earlier_boot: bool,
}

/// A row of `waiter` that counts.
struct Waiter {
    owner: String,
    mode: Mode,
    place: i64,
    passed: u32,
}

/// The columns of a hold. `?1` is the id of the boot, `?2` the boot clock, `?3` the wall clock. A row of an earlier boot ends with what is
/// left of its reservation by the wall clock, at most its whole length if that clock was set back.
const COLUMNS: &str = "name, owner, token, mode, permits, label, host, pid, acquired_at, client = '' OR boot <> ?1, boot <> ?1, \
    CASE boot WHEN ?1 THEN expires ELSE ?2 + 1000 * min(reserved_wall - ?3, reserved_wall - acquired_at) END AS ends";

/// Whether a row counts no more, with the parameters of [`COLUMNS`].
const IS_DEAD: &str = "CASE boot WHEN ?1 THEN expires <= ?2 ELSE reserved_wall <= ?3 END";

impl<'a> View<'a> {
    pub(crate) fn new(tx: Transaction<'a>, boot: &'a BootClock) -> Self {
        let now = boot.now();
        Self { tx, boot, now }
    }

    /// All that hold the name.
    pub(crate) fn holders(&self, name: &LockName) -> Result<Vec<Holder>, Failure> {
        Ok(self.holds(name)?.0.into_iter().map(|hold| hold.holder).collect())
    }

    /// All that hold names that start with `prefix`, by name.
    pub(crate) fn list(&self, prefix: &str) -> Result<Vec<Holder>, Failure> {
        let sql = format!("SELECT {COLUMNS} FROM lock WHERE name >= ?4 AND ends > ?2 ORDER BY name, token");
        let mut statement = self.tx.prepare_cached(&sql)?;
        let mut rows = statement.query((self.boot.id(), self.now, wall_clock(), prefix))?;
        let mut held = Vec::new();
        // Text is compared byte for byte, so all that start with the prefix stand together.
        while let Some(row) = rows.next()? {
            if !row.get_ref(0)?.as_str().is_ok_and(|name| name.starts_with(prefix)) {
                break;
            }
            match self.hold(row) {
                Ok(hold) => held.push(hold.holder),
                Err(error) => tracing::warn!(target: "fencelock", %error, "a damaged entry is left out of the list"),
            }
        }
        Ok(held)
    }

    /// The rows of the name that count, and whether there are others.
    fn holds(&self, name: &LockName) -> Result<(Vec<Hold>, bool), Failure> {
        let sql = format!("SELECT {COLUMNS} FROM lock WHERE name = ?4 ORDER BY token");
        let mut statement = self.tx.prepare_cached(&sql)?;
        let mut rows = statement.query((self.boot.id(), self.now, wall_clock(), name.as_str()))?;
        let (mut live, mut has_dead) = (Vec::new(), false);
        while let Some(row) = rows.next()? {
            if row.get::<_, i64>(11).is_ok_and(|ends| ends <= self.now) {
                has_dead = true;
                continue;
            }
            live.push(self.hold(row).map_err(|error| {
                let name = name.as_str().escape_debug();
                let told = format!("the entry of \"{name}\" in the file is damaged; force the lock free");
                LockError::configuration(told).with_source(error)
            })?);
        }
        Ok((live, has_dead))
    }

    fn hold(&self, row: &Row<'_>) -> rusqlite::Result<Hold> {
        let mut holder = Holder::new();
        holder.name = Some(parsed(0, LockName::new(row.get_ref(0)?.as_str()?))?);
        holder.owner = Some(parsed(1, row.get_ref(1)?.as_str()?.parse::<OwnerId>())?);
        holder.token = Some(parsed(2, FencingToken::try_from(row.get::<_, i64>(2)?))?);
        holder.mode = mode(row.get(3)?, row.get(4)?);
        (holder.label, holder.host, holder.pid) = (row.get(5)?, row.get(6)?, row.get(7)?);
        let acquired = Duration::from_micros(u64::try_from(row.get::<_, i64>(8)?).unwrap_or(0));
        holder.acquired_at = UNIX_EPOCH.checked_add(acquired);
        holder.is_reserved = row.get(9)?;
        holder.remaining = Some(until(self.now, row.get(11)?));
        let is_of_earlier_boot = row.get(10)?;
        Ok(Hold {
            holder,
            is_of_earlier_boot,
        })
    }

    /// The rows of waiters of the name that count, and whether there are others.
    fn waiting(&self, name: &LockName) -> Result<(Vec<Waiter>, bool), Failure> {
        let mut statement = self.tx.prepare_cached(
            "SELECT owner, mode, permits, place, passed, boot = ?2 AND expires > ?3 FROM waiter WHERE name = ?1 ORDER BY place",
        )?;
        let mut rows = statement.query((name.as_str(), self.boot.id(), self.now))?;
        let (mut live, mut has_dead) = (Vec::new(), false);
        while let Some(row) = rows.next()? {
            if !row.get::<_, bool>(5)? {
                has_dead = true;
                continue;
            }
            live.push(Waiter {
                owner: row.get(0)?,
                mode: mode(row.get(1)?, row.get(2)?),
                place: row.get(3)?,
                passed: row.get(4)?,
            });
        }
        Ok((live, has_dead))
    }

    fn execute(&self, sql: &str, parameters: impl Params) -> Result<usize, Failure> {
        Ok(self.tx.prepare_cached(sql)?.execute(parameters)?)
    }
}

fn parsed<T, E: Error + Send + Sync + 'static>(column: usize, value: Result<T, E>) -> rusqlite::Result<T> {
    value.map_err(|e| rusqlite::Error::FromSqlConversionFailure(column, Type::Null, e.into()))
}

/// The columns `mode` and `permits`.
fn columns(mode: Mode) -> [i64; 2] {
    match mode {
        Mode::Shared => [1, 0],
        Mode::Permit { of } => [2, of.into()],
        _ => [0, 0],
    }
}

fn mode(mode: i64, permits: u32) -> Mode {
    match mode {
        0 => Mode::Exclusive,
        1 => Mode::Shared,
        _ => Mode::Permit { of: permits },
    }
}

enum Admission {
    /// The claim holds the name already.
    Held(FencingToken),
    Free,
    Busy(Busy),
}

fn admission(claim: &Claim, holds: &[Hold], waiting: &[Waiter]) -> Result<Admission, LockError> {
    let (name, asked, owner) = (claim.name(), claim.mode(), claim.owner().to_string());
    let holders = || holds.iter().map(|hold| &hold.holder);
    let mine = holders().find(|holder| holder.owner == Some(claim.owner()) && !holder.is_reserved);
    if let Some((held, token)) = mine.and_then(|holder| Some((holder.mode, holder.token?))) {
        // A writer can become a reader.
        return match held == asked || (held, asked) == (Mode::Exclusive, Mode::Shared) {
            true => Ok(Admission::Held(token)),
            false => Err(LockError::invalid_mode(name, asked, held)),
        };
    }
    let others = || waiting.iter().filter(|waiter| waiter.owner != owner);
    let found = holders()
        .map(|holder| holder.mode)
        .chain(others().map(|waiter| waiter.mode));
    if let Some(found) = found.take(1).find(|found| !found.is_same_kind(asked)) {
        return Err(LockError::invalid_mode(name, asked, found));
    }
    let mine = waiting.iter().find(|waiter| waiter.owner == owner);
    let place = mine.map_or(i64::MAX, |waiter| waiter.place);
    let before = || others().filter(|waiter| waiter.place < place);
    let first = before().filter(|waiter| waiter.passed >= PASSES).count();
    let is_free = match asked {
        Mode::Shared => holders().all(|holder| holder.mode == asked) && !before().any(|waiter| waiter.mode != asked),
        Mode::Permit { of } => holds.len() + first < of as usize,
        _ => holds.is_empty() && first == 0,
    };
    if is_free {
        return Ok(Admission::Free);
    }
    let mut busy = Busy::default();
    // The one that ends first makes room.
    if let Some(holder) = holders().min_by_key(|holder| holder.remaining) {
        busy = busy
            .with_retry_after(holder.remaining.unwrap_or_default())
            .with_holder(holder.clone());
    }
    Ok(Admission::Busy(busy))
}

/// An operation that may write, in its transaction.
struct Tx<'a> {
    view: View<'a>,
    known: &'a mut Known,
}

impl Tx<'_> {
    /// `None`: the ceiling of tokens must be raised first.
    fn acquire(
        &mut self,
        claim: &Claim,
        sent: Stamp,
        waits: bool,
        raise: bool,
    ) -> Result<Option<Told<Attempt>>, Failure> {
        let name = claim.name();
        let (mut holds, has_dead) = self.view.holds(name)?;
        if holds.iter().any(|hold| hold.is_of_earlier_boot) {
            self.take_over(name)?;
            (holds, _) = self.view.holds(name)?;
        }
        let (waiting, has_dead_waiters) = self.view.waiting(name)?;
        let [mode, permits] = columns(claim.mode());
        let expires = after(self.view.now, claim.ttl());
        let (first, last, wakes) = match admission(claim, &holds, &waiting)? {
            Admission::Busy(busy) => {
                if waits {
                    self.wait(claim)?;
                }
                return Ok(Some((busy.into(), false)));
            }
            Admission::Held(token) => {
                let set = "expires = max(?5, reserved), mode = ?6, permits = ?7";
                self.update(claim, set, &[expires, mode, permits])?;
                // Readers can hold beside a writer that has become one. Of a block, the last token is stored.
                (token, token, !waiting.is_empty())
            }
            Admission::Free => {
                if raise {
                    self.known.seen = counter::raise(&self.view.tx, self.known.seen)?;
                }
                let Some((first, last)) = counter::draw(&self.view.tx, claim.tokens_wanted())? else {
                    return Ok(None);
                };
                if first.get() <= self.known.seen {
                    return Err(lost("its counter was set back"));
                }
                self.known.seen = last.get();
                self.clear(name, has_dead, has_dead_waiters)?;
                if !waiting.is_empty() {
                    self.leave(claim)?;
                    self.view
                        .execute("UPDATE waiter SET passed = passed + 1 WHERE name = ?1", [name.as_str()])?;
                }
                self.insert(claim, last, expires)?;
                self.sweep()?;
                (first, last, false)
            }
        };
        self.known.waiters.remove(&claim.owner());
        let grant = Grant::new(claim.clone(), last, Lease::for_claim(claim, sent)).with_first_token(first);
        Ok(Some((Attempt::Granted(grant), wakes)))
    }

    /// Removes the rows of the name that count no more.
    fn clear(&self, name: &LockName, has_dead: bool, has_dead_waiters: bool) -> Result<(), Failure> {
        let (boot, now, name) = (self.view.boot.id(), self.view.now, name.as_str());
        if has_dead {
            let sql = format!("DELETE FROM lock WHERE name = ?4 AND {IS_DEAD}");
            self.view.execute(&sql, (boot, now, wall_clock(), name))?;
        }
        if has_dead_waiters {
            let sql = "DELETE FROM waiter WHERE name = ?1 AND (boot <> ?2 OR expires <= ?3)";
            self.view.execute(sql, (name, boot, now))?;
        }
        Ok(())
    }

    fn insert(&self, claim: &Claim, token: FencingToken, expires: i64) -> Result<(), Failure> {
        let (Holder { label, host, pid, .. }, [mode, permits]) = (Holder::of(claim), columns(claim.mode()));
        let (name, owner, client) = (claim.name().as_str(), claim.owner().to_string(), &self.known.client);
        let (token, boot, acquired) = (token.as_i64(), self.view.boot.id(), wall_clock());
        self.view.execute(
            "INSERT OR REPLACE INTO lock (name, owner, client, mode, permits, token, boot, expires, label, host, pid, acquired_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
            params![name, owner, client, mode, permits, token, boot, expires, label, host, pid, acquired],
        )?;
        Ok(())
    }

    /// Gives the claim a row among the waiters, or keeps up the one that it has.
    fn wait(&mut self, claim: &Claim) -> Result<(), Failure> {
        let (boot, now) = (self.view.boot.id(), self.view.now);
        let expires = after(now, WAITER_TTL);
        if now > after(self.known.waiters_swept, WAITER_TTL) {
            self.view
                .execute("DELETE FROM waiter WHERE boot <> ?1 OR expires <= ?2", (boot, now))?;
            self.known.waiters_swept = now;
        }
        let (name, owner, client) = (claim.name().as_str(), claim.owner().to_string(), &self.known.client);
        let [mode, permits] = columns(claim.mode());
        self.view.execute(
            "INSERT INTO waiter (name, owner, client, mode, permits, boot, expires, place) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, (SELECT coalesce(max(place), 0) + 1 FROM waiter WHERE name = ?1)) \
             ON CONFLICT (name, owner) DO UPDATE SET boot = excluded.boot, expires = excluded.expires",
            (name, owner, client, mode, permits, boot, expires),
        )?;
        self.known.waiters.insert(claim.owner(), expires);
        Ok(())
    }

    /// Ends the wait of the claim, if it waits.
    fn leave(&mut self, claim: &Claim) -> Result<(), Failure> {
        if self.known.waiters.contains_key(&claim.owner()) {
            let row = (claim.name().as_str(), claim.owner().to_string());
            self.view
                .execute("DELETE FROM waiter WHERE name = ?1 AND owner = ?2", row)?;
            self.known.waiters.remove(&claim.owner());
        }
        Ok(())
    }

    fn is_waited_for(&self, name: &LockName) -> Result<bool, Failure> {
        let sql = "SELECT 1 FROM waiter WHERE name = ?1 AND expires > ?2 LIMIT 1";
        Ok(self
            .view
            .tx
            .prepare_cached(sql)?
            .exists((name.as_str(), self.view.now))?)
    }

    /// The end of a reservation by the boot clock and by the wall clock.
    fn ends(&self, length: Duration) -> [i64; 2] {
        let length = length.min(LONGEST);
        [after(self.view.now, length), wall_clock() + length.as_micros() as i64]
    }

    /// Changes the row of a claim, with parameters from `?5` on. Tells whether the claim holds the name.
    fn update(&self, claim: &Claim, set: &str, values: &[i64]) -> Result<bool, Failure> {
        let sql = format!(
            "UPDATE lock SET {set} WHERE name = ?1 AND owner = ?2 AND client <> '' AND boot = ?3 AND expires > ?4"
        );
        let (name, owner, boot) = (claim.name().as_str(), claim.owner().to_string(), self.view.boot.id());
        let mut parameters = params![name, owner, boot, self.view.now].to_vec();
        parameters.extend(values.iter().map(|value| value as &dyn ToSql));
        Ok(self.view.execute(&sql, &*parameters)? == 1)
    }

    /// Deletes the row of the claim. Tells whether it held the name until now.
    fn delete(&self, claim: &Claim) -> Result<bool, Failure> {
        let sql =
            "DELETE FROM lock WHERE name = ?1 AND owner = ?2 RETURNING client <> '' AND boot = ?3 AND expires > ?4";
        let row = (
            claim.name().as_str(),
            claim.owner().to_string(),
            self.view.boot.id(),
            self.view.now,
        );
        let held = self
            .view
            .tx
            .prepare_cached(sql)?
            .query_row(row, |row| row.get(0))
            .optional()?;
        Ok(held == Some(true))
    }

    /// Puts what is left of the name's reservations by the wall clock under the clock of this boot.
    fn take_over(&self, name: &LockName) -> Result<(), Failure> {
        self.view.execute(
            "UPDATE lock SET boot = ?1, client = '', expires = ?2 + 1000 * min(reserved_wall - ?3, reserved_wall - acquired_at), \
             reserved = ?2 + 1000 * min(reserved_wall - ?3, reserved_wall - acquired_at) \
             WHERE name = ?4 AND boot <> ?1 AND reserved_wall > ?3",
            (self.view.boot.id(), self.view.now, wall_clock(), name.as_str()),
        )?;
        Ok(())
    }

    /// Deletes a few of the rows whose holders never came back. The search goes on where it ended the last time.
    fn sweep(&mut self) -> Result<(), Failure> {
        let sql = format!(
            "SELECT name, owner, {IS_DEAD} FROM lock WHERE (name, owner) > (?4, ?5) ORDER BY name, owner LIMIT {SWEEP}"
        );
        let (name, owner) = &self.known.swept;
        let parameters = (self.view.boot.id(), self.view.now, wall_clock(), name, owner);
        let mut statement = self.view.tx.prepare_cached(&sql)?;
        let found = statement.query_map(parameters, |row| Ok(((row.get(0)?, row.get(1)?), row.get(2)?)))?;
        let mut rows: Vec<((String, String), bool)> = found.collect::<Result<_, _>>()?;
        for ((name, owner), _) in rows.iter().filter(|(_, is_dead)| *is_dead) {
            self.view
                .execute("DELETE FROM lock WHERE name = ?1 AND owner = ?2", (name, owner))?;
        }
        self.known.swept = match rows.pop() {
            Some((last, _)) if rows.len() + 1 == SWEEP => last,
            _ => Default::default(),
        };
        Ok(())
    }
}
