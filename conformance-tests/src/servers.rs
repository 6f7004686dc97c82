//! Servers to test against: started for the run, or named by the environment.
//!
//! ```no_run
//! # async fn example() -> Result<(), conformance_tests::servers::ServerError> {
//! use conformance_tests::servers::{Data, Kind, Server};
//!
//! let server = Server::start(&Kind::REDIS).await?;
//! println!("{server}"); // Redis 8.0.2 in a container of redis:8 at 127.0.0.1:17432
//! // ... connect to server.url() ...
//! server.restart(Data::Lost).await?;
//! # Ok(())
//! # }
//! ```
//!
//! A kind of server is looked for in this order, and its variables are named after it (`REDIS`, `VALKEY`, `REDIS70`,
//! `POSTGRES`, `ETCD`):
//!
//! 1. at the address in `FENCELOCK_TEST_REDIS_URL`. Nothing can be done to such a server;
//! 2. in a container, if an engine answers: the image is that in `FENCELOCK_TEST_REDIS_IMAGE`, or the official one;
//! 3. under chroot in the file system that `make images` unpacks where there is no engine, for root;
//! 4. as a program on the `PATH`, if it is of the version that is wanted.
//!
//! `FENCELOCK_TEST_SERVERS` may be `container`, `chroot` or `path`: then only that way is tried. If none is left, that is
//! an error that says what to install, never a test that is skipped.
//!
//! Servers listen on the loopback only, and nothing of them outlives the run: they end when they are dropped, on Ctrl-C,
//! and when the process is killed; containers that a killed process left are removed at the next start.

mod cluster;
mod container;
mod error;
mod etcd;
mod family;
mod kind;
mod machine;
mod postgres;
mod process;
mod redis;
mod redis_cluster;
mod run;
mod sentinel;
mod server;
mod way;

pub use cluster::{EtcdCluster, Peer};
pub use error::ServerError;
pub use kind::Kind;
pub use redis_cluster::RedisCluster;
pub use sentinel::RedisSentinels;
pub use server::{Data, Server};
