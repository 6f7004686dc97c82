#![allow(unused_variables)]

use fencelock_macros::locked;

struct Locks;

#[locked("order")]
fn not_async(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order")]
async fn no_result(locks: &Locks) {}

#[locked("order")]
async fn unit(locks: &Locks) -> () {}

#[locked("order")]
async fn unnamed(locks: &Locks) -> Result<impl Sized, ()> { Ok(()) }

#[locked("order")]
async fn no_client(id: u64) -> Result<(), ()> { Ok(()) }

#[locked("order")]
struct NoFunction;

#[locked("order")]
impl NoFunction {}

fn main() {}
