//! Where fencing tokens come from.
//!
//! **Invariant.** Every token ever handed out is at most the ceiling that was on the disk *before* it was handed out.
//!
//! Lock operations do not wait for the disk (`synchronous = NORMAL`), so a power loss can take back the last of them, and the counter with them.
//! The ceiling is raised in a transaction that waits for the disk (`synchronous = FULL`), and tokens are drawn up to it and no further. Every client
//! starts above the ceiling that it finds, so above everything that was ever handed out, whatever was lost and whatever the wall clock says. It
//! also starts no lower than the wall clock in microseconds: tokens go on rising when the file is removed, replaced by an older copy, or when
//! the locks move to another backend.

use std::num::NonZeroU32;

use lock_core::FencingToken;
use rusqlite::Connection;

use crate::boot_clock;
use crate::error::Failure;

/// How many tokens one wait for the disk is good for. A client uses up one chunk at least, so it is small: counters must grow slower than
/// microseconds pass, or the clock would not outrun a lost one.
const CHUNK: u64 = 1 << 10;

/// How many tokens one grant gets at most. Larger blocks would use up a chunk within a few grants.
const BLOCK: u32 = 16;

/// The last token that was drawn, and the ceiling. Fails if the last token is below `seen`, which was drawn before: the file was set back.
fn read(tx: &Connection, seen: u64) -> Result<(i64, i64), Failure> {
    let mut statement = tx.prepare_cached("SELECT token, ceiling FROM counter")?;
    let (token, ceiling): (i64, i64) = statement.query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    match u64::try_from(token).unwrap_or(0) < seen {
        true => Err(Failure::set_back()),
        false => Ok((token, ceiling)),
    }
}

/// Fails if the counter is below a token that was drawn from it.
pub(crate) fn check(tx: &Connection, seen: u64) -> Result<(), Failure> {
    read(tx, seen).map(drop)
}

/// Raises the ceiling, in a transaction that waits for the disk, and starts above the old one, the wall clock and `seen`. Returns the start: every
/// token drawn from now on is higher.
pub(crate) fn raise(tx: &Connection, seen: u64) -> Result<u64, Failure> {
    let (token, ceiling) = read(tx, 0)?;
    let old = u64::try_from(token.max(ceiling)).unwrap_or(0);
    let start = old.max(seen).max(wall_clock());
    if start >= FencingToken::MAX.get() {
        return Err(Failure::configuration(
            "the counter of fencing tokens has reached its end, 2^53; use a new file, and reset the marks that the resources keep",
        ));
    }
    let ceiling = (start + CHUNK).min(FencingToken::MAX.get());
    let set = "UPDATE counter SET token = ?1, ceiling = ?2";
    tx.execute(set, [start as i64, ceiling as i64])?;
    Ok(start)
}

/// The first and the last of the next tokens, in the transaction of the grant; `None` if the ceiling must be raised first.
///
/// More than one only as far as the wall clock has passed them: a counter that is lost starts at the clock, so above them.
pub(crate) fn draw(
    tx: &Connection,
    seen: u64,
    wanted: NonZeroU32,
) -> Result<Option<(FencingToken, FencingToken)>, Failure> {
    let (token, ceiling) = read(tx, seen)?;
    if token >= ceiling {
        return Ok(None);
    }
    let block = token.saturating_add(wanted.get().min(BLOCK).into());
    let last = block.min(ceiling).min(wall_clock() as i64).max(token + 1);
    tx.prepare_cached("UPDATE counter SET token = ?1")?.execute([last])?;
    // Another program may have written nonsense into the file; a raise puts it right, or says why it cannot.
    let tokens = [token + 1, last].map(|token| FencingToken::try_from(token).ok());
    Ok(tokens[0].zip(tokens[1]))
}

/// Microseconds of Unix time; nothing if the clock is set to where tokens do not reach.
fn wall_clock() -> u64 {
    let now = u64::try_from(boot_clock::wall_clock()).unwrap_or(0);
    if now < FencingToken::MAX.get() { now } else { 0 }
}
