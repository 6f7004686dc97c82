// What the attribute writes, met by types that do not fit.
extern crate self as fencelock;

use fencelock_macros::locked;

pub struct LockError;

impl LockError {
    pub fn is_busy(&self) -> bool {
        true
    }
}

pub struct LockGuard;

pub struct LockRequest;

impl LockRequest {
    pub fn no_wait(self) -> Self {
        self
    }

    pub fn ttl(self, _: std::time::Duration) -> Self {
        self
    }

    pub async fn with<T>(self, body: impl AsyncFnOnce(&LockGuard) -> T) -> Result<T, LockError> {
        Ok(body(&LockGuard).await)
    }
}

pub struct Locks;

impl Locks {
    pub fn lock(&self, _: impl AsRef<str>) -> LockRequest {
        LockRequest
    }
}

pub trait Skip {
    fn skipped() -> Self;
}

#[locked("order")]
async fn an_error_that_is_not_made_of_a_lock_error(locks: &Locks) -> Result<(), std::fmt::Error> {
    Ok(())
}

#[locked("order")]
async fn no_result(locks: &Locks) -> u64 {
    7
}

#[locked("order", busy = skip)]
async fn nothing_to_skip_to(locks: &Locks) -> Result<u64, LockError> {
    Ok(7)
}

#[locked("order/{order}")]
async fn a_name_that_does_not_display(locks: &Locks, order: Locks) -> Result<(), LockError> {
    Ok(())
}

#[locked("order/{missing}")]
async fn a_value_that_is_not_there(locks: &Locks) -> Result<(), LockError> {
    Ok(())
}

#[locked("order", ttl = duration)]
async fn a_ttl_of_another_type(locks: &Locks, duration: u64) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
