//! What the code that `#[locked]` writes refers to.

use std::ops::Deref;

/// The value that [`#[locked(.., busy = skip)]`](macro@crate::locked) returns within `Ok` when the lock is busy.
pub trait Skip {
    /// The value that says that nothing was done.
    fn skipped() -> Self;
}

impl Skip for () {
    fn skipped() -> Self {}
}

impl<T> Skip for Option<T> {
    fn skipped() -> Self {
        None
    }
}

/// `self` of a method without the argument `locks`, for access to its field `locks`. If there is no such field, the compiler names this type.
#[doc(hidden)]
#[derive(Debug)]
pub struct SelfWithoutLocksArgument<'a, T: ?Sized>(pub &'a T);

impl<T: ?Sized> Deref for SelfWithoutLocksArgument<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}
