//! Faults between a client and its server, for any protocol over TCP.
//!
//! A [`Proxy`] stands in the same process, on the loopback, and works on a thread of its own: a test that blocks its
//! runtime does not hold it up.
//!
//! ```no_run
//! # async fn example() -> std::io::Result<()> {
//! use std::time::Duration;
//! use conformance_tests::faults::{Direction, Proxy, Then, Traffic};
//!
//! let proxy = Proxy::start("127.0.0.1:6379").await?;
//! // ... connect a client to proxy.address() ...
//! proxy.set(Direction::ToClient, Traffic::Delayed(Duration::from_millis(200)));
//! proxy.set(Direction::Both, Traffic::Lost); // no byte, no FIN, no RST
//! proxy.heal();
//!
//! let held = proxy.hold(b"EVALSHA");
//! // ... ask, give up, clean up ...
//! held.caught().await;
//! held.deliver(); // late
//!
//! let reply = proxy.swallow_reply(b"EVALSHA", Then::Cut);
//! // ... ask ...
//! reply.sprung().await; // the server has done it, and nobody knows
//! # Ok(())
//! # }
//! ```

mod connection;
mod proxy;
mod trap;
#[cfg(unix)]
mod wall_clock;

pub use proxy::{Counts, Direction, Proxy, Traffic};
pub use trap::{Held, Then, Trap};
#[cfg(unix)]
pub use wall_clock::WallClock;
