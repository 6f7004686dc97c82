//! All SQL about locks: what an operation does in its transaction.

use std::time::{Duration, UNIX_EPOCH};

use lock_core::{Attempt, Busy, Claim, FencingToken, Grant, Holder, Lease, LockError, LockName, Mode, OwnerId, Stamp};
use rusqlite::types::Type;
use rusqlite::{OptionalExtension, Params, Row, ToSql, Transaction, params};

use crate::admission::{Admission, Waiter, admission};
use crate::boot_clock::{BootClock, after, wall_clock};
use crate::counter;
use crate::error::Failure;

/// How long the row of a waiter counts without being kept up.
const WAITER_TTL: Duration = Duration::from_secs(1);

/// How many rows are searched for expired ones per grant, on average. A grant adds one row, so more than one is enough.
const SWEEP: i64 = 4;

/// The longest reservation. It fits an `i64` of nanoseconds.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// What a client remembers from one operation to the next.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Stored with every row, so that a client can release all that it holds.
    client: String,
    /// The highest token drawn here, or the start that was made sure of; all that come are higher.
    pub(crate) seen: u64,
    /// How many grants there are before the next search for expired rows.
    sweep_after: i64,
    /// Whether the last operation left something that claims wait for.
    pub(crate) wakes: bool,
}

impl Known {
    pub(crate) fn new(client: OwnerId, seen: u64) -> Self {
        Self {
            client: client.to_string(),
            seen,
            ..Self::default()
        }
    }
}

/// When a row ends to count, by the boot clock. `?1` is the id of the boot, `?2` the boot clock, `?3` the wall clock. A row of an earlier boot ends
/// with what is left of its reservation by the wall clock, at most its whole length if that clock was set back.
const ENDS: &str =
    "CASE boot WHEN ?1 THEN expires ELSE ?2 + 1000 * min(reserved_wall - ?3, reserved_wall - acquired_at) END";

/// Makes a reservation with the values of [`Tx::ends`]. Its length counts from now at the latest, whatever the wall clock was when the name was
/// acquired.
const RESERVE: &str = "reserved = ?5, reserved_wall = ?6, acquired_at = min(acquired_at, ?7)";

/// An operation in its transaction.
#[derive(Debug)]
pub(crate) struct Tx<'a> {
    tx: Transaction<'a>,
    boot: &'a BootClock,
    now: i64,
    known: &'a mut Known,
}

impl<'a> Tx<'a> {
    pub(crate) fn new(tx: Transaction<'a>, boot: &'a BootClock, known: &'a mut Known) -> Self {
        let now = boot.now();
        Self { tx, boot, now, known }
    }

    pub(crate) fn commit(self) -> Result<(), Failure> {
        Ok(self.tx.commit()?)
    }

    /// All that hold the name.
    pub(crate) fn holders(&self, name: &LockName) -> Result<Vec<Holder>, Failure> {
        let rows = self.select("name = ?4", name.as_str())?.into_iter();
        let holders: rusqlite::Result<_> = rows.collect();
        holders.map_err(|error| {
            let name = name.as_str().escape_debug();
            let told = format!("the entry of \"{name}\" in the file is damaged; force the lock free");
            LockError::configuration(told).with_source(error).into()
        })
    }

    /// All that is held under names that start with `prefix`.
    pub(crate) fn list(&self, prefix: &str) -> Result<Vec<Holder>, Failure> {
        let rows = self.select("name >= ?4 AND substr(name, 1, length(?4)) = ?4", prefix)?;
        let legible = rows.into_iter().filter_map(|row| {
            row.inspect_err(
                |error| tracing::warn!(target: "fencelock", %error, "a damaged entry is left out of the list"),
            )
            .ok()
        });
        Ok(legible.collect())
    }

    /// The rows that count and fulfil a condition on the text `?4`.
    fn select(&self, condition: &str, text: &str) -> Result<Vec<rusqlite::Result<Holder>>, Failure> {
        let sql = format!(
            "SELECT name, owner, token, mode, permits, label, host, pid, acquired_at, client = '' OR boot <> ?1, {ENDS} AS ends \
             FROM lock WHERE {condition} AND ends > ?2 ORDER BY name, token"
        );
        let mut statement = self.tx.prepare_cached(&sql)?;
        let parameters = (&self.boot.id, self.now, wall_clock(), text);
        let rows = statement.query_map(parameters, |row| Ok(self.holder(row)))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn holder(&self, row: &Row<'_>) -> rusqlite::Result<Holder> {
        let mut holder = Holder::new();
        holder.name = Some(parsed(0, LockName::new(row.get_ref(0)?.as_str()?))?);
        holder.owner = Some(parsed(1, row.get_ref(1)?.as_str()?.parse::<OwnerId>())?);
        holder.token = Some(parsed(2, FencingToken::try_from(row.get::<_, i64>(2)?))?);
        holder.mode = mode(row.get(3)?, row.get(4)?);
        (holder.label, holder.host, holder.pid) = (row.get(5)?, row.get(6)?, row.get(7)?);
        let acquired = Duration::from_micros(u64::try_from(row.get::<_, i64>(8)?).unwrap_or(0));
        holder.acquired_at = UNIX_EPOCH.checked_add(acquired);
        holder.is_reserved = row.get(9)?;
        let left = row.get::<_, i64>(10)?.saturating_sub(self.now);
        holder.remaining = Some(Duration::from_nanos(left.unsigned_abs()));
        Ok(holder)
    }

    /// The rows of waiters of the name that count.
    fn waiting(&self, name: &LockName) -> Result<Vec<Waiter>, Failure> {
        let mut statement = self.tx.prepare_cached(
            "SELECT owner, mode, permits, place, passed, expires FROM waiter WHERE name = ?1 AND boot = ?2 AND expires > ?3 ORDER BY place",
        )?;
        let waiters = statement.query_map((name.as_str(), &self.boot.id, self.now), |row| {
            Ok(Waiter {
                owner: row.get(0)?,
                mode: mode(row.get(1)?, row.get(2)?),
                place: row.get(3)?,
                passed: row.get(4)?,
                expires: row.get(5)?,
            })
        })?;
        Ok(waiters.collect::<Result<_, _>>()?)
    }

    /// The claims of this client that wait, and whose names may have become free for them.
    pub(crate) fn may_go(&self) -> Result<Vec<OwnerId>, Failure> {
        let mut statement = self.tx.prepare_cached(
            "SELECT owner FROM waiter WHERE client = ?1 AND max(permits, 1) > (SELECT count(*) FROM lock \
             WHERE lock.name = waiter.name AND lock.boot = ?2 AND lock.expires > ?3 AND (waiter.mode <> 1 OR lock.mode = 0))",
        )?;
        let parameters = (&self.known.client, &self.boot.id, self.now);
        let owners = statement.query_map(parameters, |row| parsed(0, row.get_ref(0)?.as_str()?.parse()))?;
        Ok(owners.collect::<Result<_, _>>()?)
    }

    /// Whether the name is busy, without keeping others from writing. `None` if that cannot be told, or if there is something to write.
    pub(crate) fn look(&self, claim: &Claim, waits: bool) -> Result<Option<Busy>, Failure> {
        let holders = self.holders(claim.name())?;
        if holders.is_empty() {
            return Ok(None);
        }
        // A writer is kept out by the holders alone.
        let waiting = match (claim.mode(), waits) {
            (Mode::Exclusive, false) => Vec::new(),
            _ => self.waiting(claim.name())?,
        };
        let (owner, soon) = (claim.owner().to_string(), after(self.now, WAITER_TTL / 2));
        let is_kept_up = waiting
            .iter()
            .any(|waiter| waiter.owner == owner && waiter.expires > soon);
        match admission(claim, &holders, &waiting)? {
            Admission::Busy(busy) if !waits || is_kept_up => Ok(Some(busy)),
            _ => Ok(None),
        }
    }

    /// `None`: the ceiling of tokens must be raised first, which takes a transaction that is done `durably`.
    pub(crate) fn acquire(
        &mut self,
        claim: &Claim,
        sent: Stamp,
        waits: bool,
        durably: bool,
    ) -> Result<Option<Attempt>, Failure> {
        let name = claim.name();
        let (holders, waiting) = (self.holders(name)?, self.waiting(name)?);
        let [mode, permits] = columns(claim.mode());
        let expires = after(self.now, claim.ttl());
        let (first, last) = match admission(claim, &holders, &waiting)? {
            Admission::Busy(busy) => {
                if waits {
                    self.wait(claim)?;
                }
                return Ok(Some(busy.into()));
            }
            Admission::Held(token) => {
                let set = "expires = max(?5, reserved), mode = ?6, permits = ?7";
                self.update(claim, set, &[expires, mode, permits])?;
                // Readers can hold beside a writer that has become one.
                self.known.wakes = !waiting.is_empty();
                // Of a block, the last token is stored.
                (token, token)
            }
            Admission::Free => {
                let wanted = claim.tokens_wanted();
                let mut drawn = counter::draw(&self.tx, self.known.seen, wanted)?;
                if drawn.is_none() && durably {
                    self.known.seen = counter::raise(&self.tx, self.known.seen)?;
                    drawn = counter::draw(&self.tx, self.known.seen, wanted)?;
                }
                let Some((first, last)) = drawn else { return Ok(None) };
                self.known.seen = last.get();
                self.sweep()?;
                if !waiting.is_empty() {
                    self.end_wait(claim)?;
                    self.execute("UPDATE waiter SET passed = passed + 1 WHERE name = ?1", [name.as_str()])?;
                }
                self.insert(claim, last, expires)?;
                (first, last)
            }
        };
        let grant = Grant::new(claim.clone(), last, Lease::for_claim(claim, sent)).with_first_token(first);
        Ok(Some(Attempt::Granted(grant)))
    }

    /// Keeps the claim for another ttl. Tells whether it holds the name.
    pub(crate) fn renew(&self, claim: &Claim) -> Result<bool, Failure> {
        let expires = after(self.now, claim.ttl());
        self.update(claim, "expires = max(?5, reserved)", &[expires])
    }

    /// Reserves the name if the claim holds it, and tells whether it does. To be done durably: a reservation outlives a loss of power.
    pub(crate) fn reserve(&self, claim: &Claim, length: Duration) -> Result<bool, Failure> {
        let set = format!("{RESERVE}, expires = max(expires, ?5)");
        self.update(claim, &set, &self.ends(length))
    }

    /// Releases the claim, and ends its wait. With `keep` its name stays reserved for that long. Tells whether it held the name.
    pub(crate) fn release(&mut self, claim: &Claim, keep: Option<Duration>) -> Result<bool, Failure> {
        let set = format!("{RESERVE}, expires = ?5, client = ''");
        let was_held = match keep {
            Some(rest) => self.update(claim, &set, &self.ends(rest))?,
            None => self.delete(claim)?,
        };
        self.leave(claim)?;
        Ok(was_held)
    }

    /// Ends the wait of the claim, if it waits. Others may go on without it.
    pub(crate) fn leave(&mut self, claim: &Claim) -> Result<(), Failure> {
        let (waiting, owner) = (self.waiting(claim.name())?, claim.owner().to_string());
        self.known.wakes = waiting.iter().any(|waiter| waiter.owner != owner);
        match waiting.iter().any(|waiter| waiter.owner == owner) {
            true => self.end_wait(claim),
            false => Ok(()),
        }
    }

    /// Takes the name away from all its holders, and tells who they were.
    pub(crate) fn force_release(&mut self, name: &LockName) -> Result<Vec<Holder>, Failure> {
        let holders = self.holders(name).unwrap_or_else(|_| {
            let mut damaged = Holder::new();
            damaged.name = Some(name.clone());
            vec![damaged]
        });
        self.execute("DELETE FROM lock WHERE name = ?1", [name.as_str()])?;
        self.known.wakes = !self.waiting(name)?.is_empty();
        Ok(holders)
    }

    /// Releases everything that this client holds. What is reserved stays so.
    pub(crate) fn release_all(&mut self) -> Result<(), Failure> {
        let client = self.known.client.as_str();
        let held = "DELETE FROM lock WHERE client = ?1 AND reserved <= ?2";
        self.execute(held, (client, self.now))?;
        let reserved = "UPDATE lock SET client = '', expires = reserved WHERE client = ?1";
        self.execute(reserved, [client])?;
        self.execute("DELETE FROM waiter WHERE client = ?1", [client])?;
        self.known.wakes = true;
        Ok(())
    }

    /// Has what is left of reservations by the wall clock go by the clock of this boot from now on.
    pub(crate) fn take_over_reservations(&self) -> Result<(), Failure> {
        let sql = format!(
            "UPDATE lock SET boot = ?1, client = '', expires = {ENDS}, reserved = {ENDS} WHERE boot <> ?1 AND {ENDS} > ?2"
        );
        self.execute(&sql, (&self.boot.id, self.now, wall_clock())).map(drop)
    }

    fn insert(&self, claim: &Claim, token: FencingToken, expires: i64) -> Result<(), Failure> {
        let (Holder { label, host, pid, .. }, [mode, permits]) = (Holder::of(claim), columns(claim.mode()));
        let (name, owner, client) = (claim.name().as_str(), claim.owner().to_string(), &self.known.client);
        let (token, boot, acquired) = (token.as_i64(), &self.boot.id, wall_clock());
        self.execute(
            "INSERT OR REPLACE INTO lock (name, owner, client, mode, permits, token, boot, expires, label, host, pid, acquired_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
            params![name, owner, client, mode, permits, token, boot, expires, label, host, pid, acquired],
        )
        .map(drop)
    }

    /// Gives the claim a row among the waiters, or keeps up the one that it has.
    fn wait(&self, claim: &Claim) -> Result<(), Failure> {
        let (name, owner, client) = (claim.name().as_str(), claim.owner().to_string(), &self.known.client);
        let ([mode, permits], expires) = (columns(claim.mode()), after(self.now, WAITER_TTL));
        self.execute(
            "INSERT INTO waiter (name, owner, client, mode, permits, boot, expires, place) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, (SELECT coalesce(max(place), 0) + 1 FROM waiter WHERE name = ?1)) \
             ON CONFLICT (name, owner) DO UPDATE SET boot = excluded.boot, expires = excluded.expires",
            (name, owner, client, mode, permits, &self.boot.id, expires),
        )
        .map(drop)
    }

    fn end_wait(&self, claim: &Claim) -> Result<(), Failure> {
        let row = (claim.name().as_str(), claim.owner().to_string());
        let sql = "DELETE FROM waiter WHERE name = ?1 AND owner = ?2";
        self.execute(sql, row).map(drop)
    }

    /// The end of a reservation by the boot clock and by the wall clock, and the wall clock.
    fn ends(&self, length: Duration) -> [i64; 3] {
        let (length, wall) = (length.min(LONGEST), wall_clock());
        [after(self.now, length), wall + length.as_micros() as i64, wall]
    }

    /// Changes the row of a claim, with parameters from `?5` on. Tells whether the claim holds the name.
    fn update(&self, claim: &Claim, set: &str, values: &[i64]) -> Result<bool, Failure> {
        let sql = format!(
            "UPDATE lock SET {set} WHERE name = ?1 AND owner = ?2 AND client <> '' AND boot = ?3 AND expires > ?4"
        );
        let (name, owner, boot) = (claim.name().as_str(), claim.owner().to_string(), &self.boot.id);
        let mut parameters = params![name, owner, boot, self.now].to_vec();
        parameters.extend(values.iter().map(|value| value as &dyn ToSql));
        Ok(self.execute(&sql, &*parameters)? == 1)
    }

    /// Deletes the row of the claim. Tells whether it held the name until now.
    fn delete(&self, claim: &Claim) -> Result<bool, Failure> {
        let sql =
            "DELETE FROM lock WHERE name = ?1 AND owner = ?2 RETURNING client <> '' AND boot = ?3 AND expires > ?4";
        let (name, owner) = (claim.name().as_str(), claim.owner().to_string());
        let mut statement = self.tx.prepare_cached(sql)?;
        let held = statement.query_row((name, owner, &self.boot.id, self.now), |row| row.get(0));
        Ok(held.optional()? == Some(true))
    }

    /// Deletes the rows that count no more, every so many grants.
    fn sweep(&mut self) -> Result<(), Failure> {
        self.known.sweep_after -= 1;
        if self.known.sweep_after >= 0 {
            return Ok(());
        }
        let sql = format!("DELETE FROM lock WHERE {ENDS} <= ?2");
        self.execute(&sql, (&self.boot.id, self.now, wall_clock()))?;
        let waiters = "DELETE FROM waiter WHERE boot <> ?1 OR expires <= ?2";
        self.execute(waiters, (&self.boot.id, self.now))?;
        let rows: i64 = self.tx.query_row("SELECT count(*) FROM lock", [], |row| row.get(0))?;
        self.known.sweep_after = rows / SWEEP;
        Ok(())
    }

    fn execute(&self, sql: &str, parameters: impl Params) -> Result<usize, Failure> {
        Ok(self.tx.prepare_cached(sql)?.execute(parameters)?)
    }
}

fn parsed<T, E: std::error::Error + Send + Sync + 'static>(column: usize, value: Result<T, E>) -> rusqlite::Result<T> {
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
