//! Several servers, their clocks, many clients, and what takes time.

mod clock;
mod cluster;
mod connection;
mod contract;
mod failover;
mod growth;
mod redlock;
mod replicas;
mod sentinel;
mod sentinel_setup;
mod tokens;
