//! All integration tests of `fencelock`, as one program. Each module is compiled if its features are on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on has failed"
)]

#[cfg(all(feature = "memory", feature = "sqlite"))]
mod connect;
#[cfg(all(feature = "memory", feature = "macros"))]
mod macros;
#[cfg(all(feature = "memory", feature = "tower"))]
mod tower;
