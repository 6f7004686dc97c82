//! Servers for the tests of this workspace: started for the run, or named by the environment.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use test_servers::{Data, Kind, Server};
//!
//! let server = Server::start(&Kind::REDIS).await?;
//! println!("{server}"); // Redis 8.0.2 in a container of redis:8 at 127.0.0.1:17432
//! // ... connect to server.url() ...
//! server.restart(Data::Lost).await?;
//! # Ok(())
//! # }
//! ```
//!
//! A server of a kind is looked for in this order. The variables are named after the kind (`REDIS`, `VALKEY`, `REDIS70`,
//! `POSTGRES`, `POSTGRES15`, `ETCD`):
//!
//! 1. at the address in `FENCELOCK_TEST_REDIS_URL`. Such a server can neither be stopped nor restarted;
//! 2. in a container, if an engine answers: of the image in `FENCELOCK_TEST_REDIS_IMAGE`, or of the official one;
//! 3. as a program on the `PATH`, if it has the version that is wanted.
//!
//! With `FENCELOCK_TEST_SERVERS` set to `container` or `path`, only that way is tried. If no way is left, the error says what to
//! install; no test is skipped.
//!
//! Servers listen on the loopback only. They end when they are dropped, on Ctrl-C, and when the process is killed; containers of
//! a killed process are removed when the next process starts one.

mod container;
mod etcd;
mod kind;
mod local_postgres;
mod machine;
mod pgbouncer;
mod postgres;
mod process;
mod redis;
mod redis_cluster;
mod run;
mod sentinel;
mod server;
mod wall_clock;

/// Why there is no server, or why something was not done to it.
pub use anyhow::Error as ServerError;
pub use etcd::{EtcdCluster, Peer};
pub use kind::Kind;
pub use local_postgres::LocalPostgres;
pub use machine::{Data, free_port};
pub use pgbouncer::PgBouncer;
pub use redis_cluster::RedisCluster;
pub use sentinel::{FakeSentinel, RedisSentinels};
pub use server::Server;
