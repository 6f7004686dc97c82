//! Tests that take longer, or need a cluster.

mod again;
mod bad_input;
mod cluster;
mod faults;
mod figures;
mod held;
mod late;
mod many;
mod reservations;
mod tokens;
