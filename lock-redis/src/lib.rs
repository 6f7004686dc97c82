//! The Redis backend of fencelock: locks among the clients of a server, with waiters served in order by a message.
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
//! # Guarantees
//!
//! One holder at a time among all clients of the same servers, database number and namespace, or several that share the lock, or as many as a
//! semaphore has permits. The server frees a lock one ttl after its last renewal. Waiters are served in the order of arrival, one claim per process at a time, by one message: the cost of a release does not depend
//! on how many wait, and no waiter polls. A waiter that was killed is skipped.
//!
//! Tokens rise across a release, an expiry, `FLUSHALL`, a restart without data, and the promotion of a replica that lacks the last writes.
//! They come from a counter that is never below the server's clock. So they fall only if that clock is set back in the same outage that lost
//! the counter.
//!
//! # Limits
//!
//! - **The server can lose locks**: by `FLUSHALL`, a restart without persistence, or a failover. The holder learns of it at its next renewal, a
//!   third of a ttl later at the latest. Until then two clients can hold one name, and only the fencing token protects the resource.
//! - **Two primaries**: if a replica is promoted while the old primary stays up, holders on the old one do not learn of it, and its
//!   later tokens may be higher than those of the new one. `min-replicas-to-write` and `min-replicas-max-lag` on the servers make such a
//!   primary renew nothing.
//! - **Replication** is asynchronous: a replica that is promoted may lack the last grants.
//! - **A Redis Cluster**: while the slot of a name is moved to another node, its lock can only be renewed.
//! - **The server's clock** measures leases. Set forward by minutes, it ends leases early.
//! - **Eviction** would remove locks and counters: a server with a memory limit and an eviction policy is refused.
//! - **A stopped waiter** (SIGSTOP, or a connection that the network forgot) is skipped after two thirds of its ttl. If it is granted the lock
//!   before, that grant ends one ttl after its last request.
//! - **A full server** grants nothing new; locks that are held can be renewed, released and handed over.
//! - **Reservations** (`at_least`) are the time to live of the lock's key, and end by the server's clock.
//! - **Rights**: `docs/redis.md` of the project lists the least that a user of the server needs, and what happens in each failure.
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
mod keys;
mod lock;
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
