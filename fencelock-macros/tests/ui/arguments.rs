#![allow(unused_variables)]

use fencelock_macros::locked;

struct Locks;

struct Order { id: u64 }

#[locked()]
async fn no_name(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked(ttl = "3s")]
async fn no_name_but_an_option(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked(7)]
async fn a_number(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("")]
async fn an_empty_name(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("two\nlines")]
async fn two_lines(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order/{}", id)]
async fn a_value_beside_the_text(locks: &Locks, id: u64) -> Result<(), ()> { Ok(()) }

#[locked("order/{order.id}")]
async fn an_expression_in_the_text(locks: &Locks, order: Order) -> Result<(), ()> { Ok(()) }

#[locked("order", tll = "3s")]
async fn a_misspelt_option(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order", ttl = "3s", ttl = "4s")]
async fn an_option_twice(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order", ttl = "3 parsecs")]
async fn no_time(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order", ttl = 30)]
async fn a_time_without_unit(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order", ttl = "0s")]
async fn no_time_at_all(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order", wait_for = true)]
async fn no_limit(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order", max_hold = "0s")]
async fn no_hold_at_all(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order", busy = "skip")]
async fn a_word_as_text(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order", guard = self.guard)]
async fn a_guard_that_is_no_name(locks: &Locks) -> Result<(), ()> { Ok(()) }

#[locked("order" "another")]
async fn no_comma(locks: &Locks) -> Result<(), ()> { Ok(()) }

fn main() {}
