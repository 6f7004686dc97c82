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

/// What does not fit is an error of the compiler. An error that a lock's cannot be converted to:
///
/// ```compile_fail,E0277
/// #[fencelock::locked("order")]
/// async fn ship(locks: &fencelock::Locks) -> Result<(), std::fmt::Error> {
///     Ok(())
/// }
/// ```
///
/// A function that returns no `Result`:
///
/// ```compile_fail,E0308
/// #[fencelock::locked("order")]
/// async fn ship(locks: &fencelock::Locks) -> u64 {
///     7
/// }
/// ```
///
/// Nothing to return for what was skipped:
///
/// ```compile_fail,E0277
/// #[fencelock::locked("order", busy = skip)]
/// async fn ship(locks: &fencelock::Locks) -> Result<u64, fencelock::LockError> {
///     Ok(7)
/// }
/// ```
///
/// A value in the name that does not display, and one that is not there:
///
/// ```compile_fail,E0277
/// #[fencelock::locked("order/{order}")]
/// async fn ship(locks: &fencelock::Locks, order: Vec<u64>) -> Result<(), fencelock::LockError> {
///     Ok(())
/// }
/// ```
///
/// ```compile_fail,E0425
/// #[fencelock::locked("order/{order}")]
/// async fn ship(locks: &fencelock::Locks) -> Result<(), fencelock::LockError> {
///     Ok(())
/// }
/// ```
///
/// A method of a type without a field `locks`, which needs `locks = EXPR`:
///
/// ```compile_fail,E0609
/// struct Shop { client: fencelock::Locks }
///
/// impl Shop {
///     #[fencelock::locked("order")]
///     async fn ship(&self) -> Result<(), fencelock::LockError> {
///         Ok(())
///     }
/// }
/// ```
///
/// A ttl of another type:
///
/// ```compile_fail,E0308
/// #[fencelock::locked("order", ttl = ttl)]
/// async fn ship(locks: &fencelock::Locks, ttl: u64) -> Result<(), fencelock::LockError> {
///     Ok(())
/// }
/// ```
#[cfg(doctest)]
struct Misuse;
