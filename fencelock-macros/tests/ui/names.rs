#![allow(unused_variables)]

use fencelock_macros::locked;

// What the attribute writes refers to `::fencelock`. `format!` finds these mistakes.
extern crate self as fencelock;

pub struct Locks;
pub struct LockRequest;
pub struct LockGuard;

impl Locks {
    pub fn lock(&self, _name: String) -> LockRequest { LockRequest }
}

impl LockRequest {
    pub fn no_wait(self) -> Self { self }

    pub async fn with<T>(self, body: impl AsyncFnOnce(&LockGuard) -> T) -> Result<T, ()> { Ok(body(&LockGuard).await) }
}

#[locked("order/{id")]
async fn half_a_brace(locks: &Locks, id: u64) -> Result<(), ()> { Ok(()) }

#[locked("order/id}")]
async fn the_other_half(locks: &Locks, id: u64) -> Result<(), ()> { Ok(()) }

#[locked("order/{order}")]
async fn no_such_variable(locks: &Locks, id: u64) -> Result<(), ()> { Ok(()) }

fn main() {}
