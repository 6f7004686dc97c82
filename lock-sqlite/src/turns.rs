//! Keeps clients that only read apart from others of the same process that open the same file.
//!
//! POSIX locks belong to the process. A reader that closes a file which it has opened as immutable drops the locks that
//! SQLite has on it for others, and an index that a reader has opened first is read-only for those that come after it.
//! Both are over when the reader has closed its connection.

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, TryLockResult};

use crate::failure::Failure;
use crate::patience;

/// By the number of the file. Files that share one wait for each other for no reason, and not for long.
static TURNS: [RwLock<()>; 16] = [const { RwLock::new(()) }; 16];

/// Waits until no reader has the file open.
pub(crate) fn to_open(file: u64) -> Result<RwLockReadGuard<'static, ()>, Failure> {
    wait(|| turn_of(file).try_read())
}

/// Waits until no client is about to open the file.
pub(crate) fn to_read(file: u64) -> Result<RwLockWriteGuard<'static, ()>, Failure> {
    wait(|| turn_of(file).try_write())
}

fn turn_of(file: u64) -> &'static RwLock<()> {
    &TURNS[(file % TURNS.len() as u64) as usize]
}

fn wait<T>(mut attempt: impl FnMut() -> TryLockResult<T>) -> Result<T, Failure> {
    let mut tries = 0;
    loop {
        match attempt() {
            Ok(turn) => return Ok(turn),
            Err(TryLockError::Poisoned(turn)) => return Ok(turn.into_inner()),
            Err(TryLockError::WouldBlock) if patience::wait_for_the_other(tries) => tries += 1,
            Err(TryLockError::WouldBlock) => return Err(Failure::busy()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_reader_has_the_file_to_itself_and_clients_do_not() {
        const FILE: u64 = 7;
        // Files of other tests have the same turn.
        patience::until(Instant::now() + Duration::from_secs(60));
        let refused = |turn: fn() -> Option<Failure>| patience::without_waiting(turn).unwrap();
        let reading = to_read(FILE).unwrap();
        assert!(refused(|| to_open(FILE).err()).is_contention());
        assert!(refused(|| to_read(FILE).err()).is_contention());
        drop(reading);
        let one = to_open(FILE).unwrap();
        drop(to_open(FILE).unwrap());
        assert!(refused(|| to_read(FILE).err()).is_contention());
        drop(one);
        drop(to_read(FILE).unwrap());
    }
}
