//! The Redis backend of fencelock: locks among everyone who reaches a server, with waiters served in order by a push.
//!
//! ```no_run
//! # async fn example() -> Result<(), lock_core::LockError> {
//! use lock_core::Locks;
//! use lock_redis::RedisLock;
//!
//! let locks = Locks::new(RedisLock::connect("redis://localhost").await?);
//! let guard = locks.lock("stock/10000").await?;
//! println!("token {}", guard.token());
//! guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! # What is promised
//!
//! One holder at a time among all who use the same server, database number and namespace. A lock is freed one ttl after the
//! last sign of life of its holder. Whoever waits is served in the order of arrival, one claim per process at a time, by
//! a push: a release costs no more however many wait, and nobody polls. A waiter that was killed is passed over.
//!
//! Tokens rise across everything: release, expiry, `FLUSHALL`, a restart without data, the promotion of a replica that
//! lacks the last writes. They are taken from a counter that never falls below the server's clock, so only a clock that
//! was set back in the same outage that lost the counter can make them fall.
//!
//! # What to know
//!
//! - **The server can forget locks**: with `FLUSHALL`, in a restart without persistence, in a failover. Their holders learn it
//!   at their next renewal, a third of a ttl later at the latest. Until then two may believe in the same lock, and only the
//!   fencing token protects the resource.
//! - **Two primaries**: if a replica is promoted while the old primary stays up, holders on the old one are never told, and its
//!   later tokens may be higher than those of the new one. `min-replicas-to-write` and `min-replicas-max-lag` on the servers make such a
//!   primary renew nothing.
//! - **Sentinels** tell the address of the primary: `redis+sentinel://HOST,HOST/SERVICE`. Clients move over as soon as they name another one.
//! - **A Redis Cluster** is at `redis+cluster://HOST,HOST`. While the slot of a name is moved to another node, its
//!   lock can be renewed, and nothing else.
//! - **The server's clock** measures leases, as it does for all keys of Redis. Set forward by minutes, it ends leases early.
//! - **Replication** is asynchronous: a replica that is promoted may lack the last grants.
//! - **Eviction** would take locks and counters away: a server with a memory limit and an eviction policy is refused.
//! - **A stopped waiter** (SIGSTOP, or a connection that the network forgot) still counts as a receiver for two thirds of its
//!   ttl. If the lock is granted to it in that time it stays so until one ttl after its last sign of life.
//! - **A full server** grants nothing new; what is held can be renewed, released and handed on.
//! - **Reservations** (`at_least`) are the time to live of the lock's key: they survive what the key survives, and end by the server's
//!   clock.
//! - **Rights**: `docs/redis.md` of the project lists the least that a user of the server needs, and the protocol with all
//!   that can go wrong in it.
//!
//! The resource's side for data in Redis is in [`fence`].

pub mod fence;

mod address;
mod client;
mod cluster;
mod commands;
mod config;
mod connection;
mod error;
mod fields;
mod keys;
mod lock;
mod login;
mod reconnect;
mod record;
mod redlock;
mod router;
mod scripts;
mod sentinel;
mod server_check;
mod server_time;
mod settings;
mod subscriptions;
mod transport;
mod wait;

pub use config::RedisConfig;
pub use lock::RedisLock;
/// The version of the client library that [`fence`] and [`RedisConfig::from_client`] work with.
pub use redis;
pub use redlock::{RedlockConfig, RedlockLock};
