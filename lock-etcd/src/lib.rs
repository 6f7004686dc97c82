//! The etcd backend of fencelock: locks among everyone who reaches a cluster, on leases and transactions.
//!
//! ```no_run
//! # async fn example() -> Result<(), lock_core::LockError> {
//! use lock_core::Locks;
//! use lock_etcd::EtcdLock;
//!
//! let locks = Locks::new(EtcdLock::connect("etcd://etcd-1:2379,etcd-2:2379,etcd-3:2379").await?);
//! let guard = locks.lock("stock/10000").await?;
//! println!("token {}", guard.token());
//! guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! # To build it
//!
//! The crate `etcd-client` runs `protoc`, the compiler of Protocol Buffers, when it is built. Install it (Debian:
//! `apt-get install protobuf-compiler`; macOS: `brew install protobuf`), or set the environment variable `PROTOC` to where it
//! is. On Linux and macOS this crate brings one along; to use that, copy `tools/protoc` from fencelock's repository into
//! yours, and say so in `.cargo/config.toml`:
//!
//! ```toml
//! [env]
//! PROTOC = { value = "tools/protoc", relative = true }
//! ```
//!
//! # What is promised
//!
//! One holder at a time among all who use the same cluster and namespace. A lock is freed one ttl after the last sign of life of
//! its holder, and about half a second later at the most; each change of the leader gives it another ttl. Waiters are served in the order of arrival, one claim per
//! process at a time: a release wakes one waiter by a watch, however many there are, and no waiter polls.
//!
//! Tokens rise across release, expiry, elections, restarts, compaction, the replacement of members, the restore of an old
//! snapshot, a new cluster in the place of the old one, and a base that was lowered or deleted by hand. While the cluster keeps its state
//! and its base, no clock matters. If the state or the base is lost, then tokens can fall only if a clock was set back: if the base is ahead
//! of the clocks of the clients that connect next.
//!
//! # What to know
//!
//! - **A majority of members** must be there: without it nothing is granted, and what is held is lost at its deadline.
//! - **Leases are shared**: all locks of one client with the same ttl are kept by one lease. If it is revoked by hand, all of them are
//!   lost, which their holders learn at the next renewal.
//! - **A lock that is released by force**, or whose key is deleted by hand, is known to be lost at the next renewal, too.
//! - **A restore** brings back the locks of the snapshot. The holders of locks that were granted after it was taken learn of the loss at the next
//!   renewal, a third of a ttl later at the latest. Until then two may believe in the same lock, and only the fencing token
//!   protects the resource.
//! - **ttls** are rounded up to whole seconds, and are two seconds at the least, or one and a half times the `election-timeout` of
//!   etcd.
//! - **Reservations** ([`LockRequest::at_least`](lock_core::LockRequest::at_least)) outlive the holder and its client. Each change of the
//!   leader begins their time anew.
//! - **Proxies** for HTTP/2 or gRPC between a client and the members do not work; `etcd grpc-proxy` is refused. Proxies for TCP do.
//! - **A killed or stopped waiter** holds up those behind it until its lease ends, one ttl at the most.
//! - **Compaction** should be on (`--auto-compaction-retention` of etcd, which is off by default): the history grows with every
//!   write, and taking a name costs about a microsecond more for each client that took it since the last one, not for each time.
//! - **A full cluster** (NOSPACE) grants a lock only to who is in its queue already; what is held can be renewed and released.
//! - **Rights**: `docs/etcd.md` of the project lists the least that a role needs, and the protocol with all that can go
//!   wrong in it.
//!
//! The resource's side for data in etcd is in [`fence`].

pub mod fence;

mod address;
mod client;
mod commands;
mod config;
mod connection;
mod error;
mod inspect;
mod keys;
mod lease;
mod leases;
mod lock;
mod queue;
mod reconnect;
mod record;
mod registry;
mod release;
mod reservations;
mod server_check;
mod settings;
mod tokens;
mod wait;
mod watch;

pub use config::EtcdConfig;
/// The version of the client library that [`fence`] works with.
pub use etcd_client;
pub use lock::EtcdLock;
