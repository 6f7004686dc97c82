//! Postgres servers of the tests, and what is between them and a client.

pub(crate) mod bouncer;
mod database;
mod locking;
mod process;
pub(crate) mod proxy;

pub(crate) use database::{Database, SESSIONS};
pub(crate) use locking::{HANG_LIMIT, claim, granted, in_time, is_busy, name, soon, until, waited, waiting};
pub(crate) use process::Server;
