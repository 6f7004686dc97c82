//! Fences: resources that refuse stale holders.
//!
//! A lock alone cannot protect a resource. A holder may be stopped between its last check of the lock and its write, for longer than any ttl;
//! only the resource can refuse that write. The rule is the same everywhere:
//!
//! - refuse a token lower than the highest seen (the *mark*),
//! - accept an equal or higher one: a holder writes many times,
//! - raise the mark to it.
//!
//! With [shared](crate::LockRequest::shared) locks there are two marks: the highest token of writers, and that of readers. A writer is refused below
//! either mark, a reader only below that of the writers: readers do not refuse each other.
//!
//! A holder that reads before it writes is admitted *before the read*. Otherwise an older holder can write between the two, and its update is
//! lost.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::FencingToken;

/// Error of a write that was refused because a later holder has been admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stale fencing token {offered} for {resource}: a later holder was here with {mark}; stop, and lock again")]
#[non_exhaustive]
pub struct StaleToken {
    /// The name of the resource.
    pub resource: String,
    /// The token that came with the write.
    pub offered: FencingToken,
    /// The highest token seen.
    pub mark: FencingToken,
}

impl StaleToken {
    /// A refusal of `offered` by a resource that has seen `mark`. For resources of your own.
    #[must_use]
    pub fn new(resource: impl Into<String>, offered: FencingToken, mark: FencingToken) -> Self {
        Self {
            resource: resource.into(),
            offered,
            mark,
        }
    }
}

/// A value in memory that only the latest holder can change. The check and the write are one step, under a mutex.
///
/// ```
/// use fencelock::{FencingToken, fence::Fence};
///
/// let stock = Fence::new("stock/10000", 100);
/// let (first, second) = (FencingToken::new(7)?, FencingToken::new(8)?);
///
/// stock.write(first, |left| *left -= 1)?;
/// stock.write(second, |left| *left -= 1)?;
/// let refused = stock.write(first, |left| *left -= 1).unwrap_err();
/// assert_eq!(refused.mark, second);
/// assert_eq!(*stock.read(), 98);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Fence<T> {
    resource: String,
    state: Mutex<State<T>>,
}

struct State<T> {
    mark: Option<FencingToken>,
    shared_mark: Option<FencingToken>,
    value: T,
}

impl<T> Fence<T> {
    /// Protects `value`. `resource` names it in errors.
    pub fn new(resource: impl Into<String>, value: T) -> Self {
        Self {
            resource: resource.into(),
            state: Mutex::new(State {
                mark: None,
                shared_mark: None,
                value,
            }),
        }
    }

    /// Raises the mark to `token`, so that no older holder can write any more. Call it before reading what a later [`write`](Self::write)
    /// depends on.
    ///
    /// # Errors
    ///
    /// [`StaleToken`] if a higher token has been seen.
    pub fn admit(&self, token: FencingToken) -> Result<(), StaleToken> {
        self.write(token, |_| ())
    }

    /// Admits a holder of a shared lock: raises the mark of readers, so that no older holder can write any more. Call it before reading.
    ///
    /// # Errors
    ///
    /// [`StaleToken`] if a holder with a higher token has written or been [admitted](Self::admit).
    pub fn admit_shared(&self, token: FencingToken) -> Result<(), StaleToken> {
        let mut state = self.lock();
        if let Some(mark) = state.mark.filter(|mark| token < *mark) {
            return Err(StaleToken::new(&self.resource, token, mark));
        }
        state.shared_mark = state.shared_mark.max(Some(token));
        Ok(())
    }

    /// Changes the value if `token` is not stale. If `change` panics, the mark stays raised.
    ///
    /// # Errors
    ///
    /// [`StaleToken`] if a higher token has been seen; `change` is not called then.
    pub fn write<R>(&self, token: FencingToken, change: impl FnOnce(&mut T) -> R) -> Result<R, StaleToken> {
        let mut state = self.lock();
        match state.mark.max(state.shared_mark) {
            Some(mark) if token < mark => Err(StaleToken::new(&self.resource, token, mark)),
            _ => {
                state.mark = Some(token);
                Ok(change(&mut state.value))
            }
        }
    }

    /// Reads the value. The result holds the mutex: drop it before another call on the same thread.
    pub fn read(&self) -> impl std::ops::Deref<Target = T> + '_ {
        Reading(self.lock())
    }

    /// Returns the highest token of a writer so far.
    pub fn mark(&self) -> Option<FencingToken> {
        self.lock().mark
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // A panic in a caller's closure leaves the mark raised and the value as that caller left it, as any `&mut` would.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Reading<'a, T>(MutexGuard<'a, State<T>>);

impl<T> std::ops::Deref for Reading<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T> fmt::Debug for Fence<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The caller may print the fence while it holds the value.
        let mark = self.state.try_lock().ok().map(|state| state.mark);
        f.debug_struct("Fence")
            .field("resource", &self.resource)
            .field("mark", &mark.flatten())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(value: u64) -> FencingToken {
        FencingToken::new(value).unwrap()
    }

    #[test]
    fn the_mark_stays_raised_when_a_write_panics() {
        let fence = Fence::new("r", 0);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = fence.write(token(4), |_| panic!("in the middle"));
        }));
        assert!(panicked.is_err());
        assert!(fence.admit(token(3)).is_err());
    }
}
