//! What a function returns that did not run.

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
