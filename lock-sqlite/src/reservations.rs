//! Names that stay taken for a time, whatever becomes of their holder.
//!
//! The row of a lock carries its reservation. `reserved` is the end by the boot clock, `reserved_wall` the same by the wall clock in
//! microseconds of Unix time; both are 0 without one.
//!
//! **Invariant.** `expires` of a row is never less than its `reserved`, so whatever asks whether a name is taken need not know of
//! reservations. A row without a `client` has been released: its owner can neither renew it nor be granted it again.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lock_core::{Claim, Released, Renewal};
use rusqlite::Connection;

use crate::boot::{Boot, after};
use crate::failure::Failure;
use crate::store::{Store, Wanted};

impl Store {
    /// Reserves the name if the claim holds it. Waits for the disk: a reservation outlives the loss of power.
    pub(crate) fn reserve(&mut self, claim: &Claim, length: Duration, wanted: Wanted<'_>) -> Result<Renewal, Failure> {
        let reserved = self.write_durably(wanted, |tx| {
            set(
                tx,
                "UPDATE lock SET expires = max(expires, ?1), reserved = ?1, reserved_wall = ?2 \
                 WHERE name = ?3 AND owner = ?4 AND client <> '' AND boot = ?5 AND expires > ?6",
                claim,
                length,
                tx.boot(),
                tx.now(),
            )
        })?;
        Ok(if reserved { Renewal::Renewed } else { Renewal::NotHeld })
    }

    /// Releases the claim and leaves its name reserved for `rest`.
    pub(crate) fn release_reserved(&mut self, claim: &Claim, rest: Duration) -> Result<Released, Failure> {
        let released = self.write(&|| true, |tx| {
            set(
                tx,
                "UPDATE lock SET client = '', expires = ?1, reserved = ?1, reserved_wall = ?2 \
                 WHERE name = ?3 AND owner = ?4 AND client <> '' AND boot = ?5 AND expires > ?6",
                claim,
                rest,
                tx.boot(),
                tx.now(),
            )
        })?;
        if released {
            // It may end sooner than the lease would have.
            self.wake_others();
        }
        Ok(if released {
            Released::Released
        } else {
            Released::NotHeld
        })
    }
}

/// Runs a statement that sets the end of a reservation. True if it found the claim.
fn set(conn: &Connection, sql: &str, claim: &Claim, length: Duration, boot: &Boot, now: i64) -> Result<bool, Failure> {
    let wall = wall_clock().saturating_add(i64::try_from(length.as_micros()).unwrap_or(i64::MAX));
    let rows = conn.prepare_cached(sql)?.execute((
        after(now, length),
        wall,
        claim.name().as_str(),
        claim.owner().to_string(),
        boot.id(),
        now,
    ))?;
    Ok(rows == 1)
}

/// Takes over the reservations of an earlier boot, whose clock has ended: what is left of them by the wall clock, and no more than their
/// whole length if that was set back.
pub(crate) fn take_over(conn: &Connection, boot: &Boot) -> Result<(), Failure> {
    conn.execute(
        "UPDATE lock SET boot = ?1, client = '', expires = ?2 + left * 1000, reserved = ?2 + left * 1000 \
         FROM (SELECT name AS reserved_name, min(reserved_wall - ?3, reserved_wall - acquired_at) AS left FROM lock) \
         WHERE name = reserved_name AND boot <> ?1 AND left > 0",
        (boot.id(), boot.now(), wall_clock()),
    )?;
    Ok(())
}

/// Microseconds of Unix time.
fn wall_clock() -> i64 {
    let micros = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros());
    i64::try_from(micros).unwrap_or(i64::MAX)
}
