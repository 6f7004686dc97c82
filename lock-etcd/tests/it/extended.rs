//! Tests that take longer, or need a cluster.

mod cluster;
mod faults;
mod figures;
mod held;
mod many;
