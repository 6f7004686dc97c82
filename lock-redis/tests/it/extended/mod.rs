//! Several servers, their clocks, many clients, and what takes time.

mod clock;
mod cluster;
mod growth;
mod redlock;
mod replicas;
mod sentinel;
