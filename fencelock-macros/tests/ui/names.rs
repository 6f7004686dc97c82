#![allow(unused_variables)]

use fencelock_macros::locked;

// What the attribute writes refers to `::fencelock`. The compiler finds these mistakes.
extern crate self as fencelock;

pub struct Locks;
pub struct LockRequest;
pub struct LockGuard;
pub struct LockError;
pub struct SelfWithoutLocksArgument<'a, T>(pub &'a T);
pub trait Skip { fn skipped() -> Self; }

impl Locks {
    pub fn lock(&self, _name: String) -> LockRequest { LockRequest }
}

impl LockRequest {
    pub fn no_wait(self) -> Self { self }

    pub fn ttl(self, _ttl: std::time::Duration) -> Self { self }

    pub async fn with<T>(self, body: impl AsyncFnOnce(&LockGuard) -> T) -> Result<T, LockError> { Ok(body(&LockGuard).await) }
}

impl LockError {
    pub fn is_busy(&self) -> bool { true }
}

impl<T> std::ops::Deref for SelfWithoutLocksArgument<'_, T> {
    type Target = T;

    fn deref(&self) -> &T { self.0 }
}

#[locked("order/{id")]
async fn half_a_brace(locks: &Locks, id: u64) -> Result<(), LockError> { Ok(()) }

#[locked("order/id}")]
async fn the_other_half(locks: &Locks, id: u64) -> Result<(), LockError> { Ok(()) }

#[locked("order/{order}")]
async fn no_such_variable(locks: &Locks, id: u64) -> Result<(), LockError> { Ok(()) }

#[locked("order/{order}")]
async fn a_variable_that_does_not_display(locks: &Locks, order: Vec<u64>) -> Result<(), LockError> { Ok(()) }

#[locked("order")]
async fn an_error_that_a_lock_cannot_have(locks: &Locks) -> Result<(), std::fmt::Error> { Ok(()) }

#[locked("order")]
async fn no_result(locks: &Locks) -> u64 { 7 }

#[locked("order", busy = skip)]
async fn nothing_to_return_for_what_was_skipped(locks: &Locks) -> Result<u64, LockError> { Ok(7) }

#[locked("order", ttl = ttl)]
async fn no_duration(locks: &Locks, ttl: u64) -> Result<(), LockError> { Ok(()) }

pub struct Shop { client: Locks }

impl Shop {
    #[locked("order")]
    async fn no_field_locks(&self) -> Result<(), LockError> { Ok(()) }
}

fn main() {}
