//! Distributed locks with fencing tokens. Change the backend by changing a URL; the code stays the same.
//!
//! ```
//! use std::time::Duration;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
//! # #[cfg(feature = "memory")] {
//! let locks = fencelock::connect("memory:").await?;
//! let guard = locks.lock("stock/10000").wait_for(Duration::from_secs(5)).await?;
//! // Send the token with every write: the resource refuses one that is lower than the highest it has seen.
//! println!("held until released, token {}", guard.token());
//! guard.release().await?;
//! # }
//! # Ok(()) }
//! ```
//!
//! A lock is kept by a *lease*, which the server ends if nothing is heard of the holder for a *ttl*. [`Locks`] renews the
//! lease on a thread of its own while the [`LockGuard`] lives, and the guard tells when it is lost. A holder that was
//! suspended may still believe in a lock that has passed to somebody else. What protects the resource then is the
//! [`FencingToken`], higher for every grant of a name, and a resource that refuses lower ones: see [`fence`].
//!
//! # Addresses
//!
//! [`connect`], [`connect_with`], [`connect_lazy`], [`connect_lazy_with`] and [`from_env`] take an address and give [`Locks`].
//!
//! | address | feature | who is excluded |
//! |---|---|---|
//! | `etcd://HOST`, `etcd://USER:PASSWORD@HOST:PORT,HOST:PORT` | `etcd` | all who connect to the same etcd cluster |
//! | `etcds://HOST` | `etcd` | the same, by TLS |
//! | `memory:` | `memory` | whoever uses the same [`Locks`] or a clone of it |
//! | `memory:NAME` | `memory` | whoever in this process connects to the same name |
//! | `postgres://HOST/DATABASE`, `postgresql://USER:PASSWORD@HOST:PORT,HOST:PORT/DATABASE` | `postgres` | all who connect to the same Postgres database |
//! | `redis://HOST`, `redis://USER:PASSWORD@HOST:PORT/DATABASE` | `redis` | all who connect to the same Redis or Valkey server and database |
//! | `rediss://HOST` | `redis` | the same, by TLS |
//! | `redis+unix:SOCKET` | `redis` | the same, by a socket of this machine |
//! | `redis+sentinel://HOST,HOST,HOST/SERVICE`, `rediss+sentinel://USER:PASSWORD@HOST:26379,HOST/SERVICE/DATABASE` (TLS) | `redis` | all who connect to the primary that these sentinels know under that name |
//! | `redis+cluster://HOST,HOST`, `rediss+cluster://HOST` (TLS) | `redis` | all who use the same Redis Cluster, of which one node that answers is enough |
//! | `redlock://HOST,HOST,HOST`, `redlocks://HOST,HOST,HOST` (TLS) | `redis` | all who use the same 3, 5 or 7 independent Redis or Valkey servers |
//! | `sqlite:PATH` | `sqlite` | the processes of this machine that connect to the same file |
//!
//! | part | meaning |
//! |---|---|
//! | `NAME` | any text without `?`, `#` and control characters, taken as it is. The store lives as long as the process; a forked child has stores of its own |
//! | `PATH` | the database file, relative or absolute, also as `sqlite:///PATH`; made if it does not exist, in a directory that does, on a local file system. `?`, `#` and `%` are written as `%3F`, `%23` and `%25` |
//! | `USER`, `PASSWORD` | what is special in addresses is written as `%` and two digits; `:PASSWORD@` alone means the default user |
//! | `SOCKET` | the path from the root; its user, password and database are the parameters `user`, `password` and `db` |
//! | `?namespace=fencelock` | etcd, Redis: what the keys begin with; Postgres: what they are made of. Locks in different ones have nothing to do with each other |
//! | `?ca=FILE` | etcd, Redis by TLS: trusts the authorities in that PEM file instead of the system's |
//! | `?cert=FILE&key=FILE` | etcd by TLS: shows the certificate in the one PEM file, with the private key in the other |
//! | `?sslmode=prefer`, `?sslrootcert=FILE` and what else libpq knows | Postgres: see [`postgres::PostgresConfig::from_url`](https://docs.rs/lock-postgres/latest/lock_postgres/struct.PostgresConfig.html#method.from_url) |
//! | `?schema=fencelock` | Postgres: where the counter of tokens lives |
//! | `?pool_mode=session` | Postgres: there is a pooler before the server, and it gives each client a session of its own |
//! | `?sentinel_user=USER`, `sentinel_password` | Redis with sentinels: those of the sentinels; `USER:PASSWORD@` are those of the servers |
//! | `?max_ttl=1m` | Redlock: the longest ttl of a lock, the same for all clients; for so long a server that has lost its data grants nothing |
//! | `?node2.user=USER`, `node2.password`, `node2.db`, `node2.ca` | Redlock: of the second server alone |
//! | `?counter_retention=10m` | Redis: for how long after its last use the server keeps a name's counter of tokens |
//! | `?mode=ro` | SQLite: only looks at locks, as with [`Options::read_only`]: makes no file and changes none |
//! | `?op_timeout=5s` | etcd, Postgres, Redis, SQLite: how long one request may take; [`Options::op_timeout`] comes first |
//! | `?allow_unsafe_configuration=true` | etcd, Postgres, Redis, SQLite: warn where a server or a place for the file would be refused as unsafe |
//!
//! # After a fork
//!
//! A client, its clones and its guards belong to the process that made them. A child made by `fork` connects a client of its own; the
//! parent goes on holding its locks, and is not disturbed. What a child finds of its parent's client touches nothing, not even when it is
//! dropped:
//!
//! | in the child | outcome, at once |
//! |---|---|
//! | an inherited client: a lock, `holder`, `list`, `shutdown` and the other requests | [`LockError::Configuration`], which says to connect anew |
//! | an inherited guard: `is_held()`, `remaining()` | false, zero |
//! | an inherited guard: `lost()`; `run`, `renew_now()`, `release()` | [`LossReason::Forked`]; [`LockError::Lost`] with that reason |
//! | an inherited request that is polled | as of an inherited client |
//! | a new client | as everywhere, with a background thread of its own. A store `memory:NAME` is a new one. SQLite is refused if the parent had a file open at the fork: see [`sqlite`](https://docs.rs/lock-sqlite) |
//!
//! Connect after the fork where you can: a child keeps the parent's sockets open until it ends or starts another program (`exec`). If
//! the parent is killed before that, the server frees its locks when their ttl is over, not when the parent's connection ends.
//!
//! Runtimes of tokio do not go through a fork, whoever uses them. In the child make a new runtime. Do not run an inherited one, as it takes
//! events away from the parent, and do not drop it, as that can wait for threads that are not there: pass it to [`std::mem::forget`].
//! A fork in the very moment in which another thread starts a thread, or the first runtime, can leave the standard library or tokio locked
//! in the child: then a request of a new client fails after 5 s. A child that begins a pid namespace, and has the same identifier there as
//! its parent in its own, is taken for its parent.
//!
//! # Logs
//!
//! Events go to [`tracing`](https://docs.rs/tracing), with the target `fencelock` for every crate: `RUST_LOG=fencelock=debug` shows what is
//! acquired, released and lost, and `fencelock=trace` the renewals as well. A lost lock is a warning.
//!
//! # Errors
//!
//! An address that this build cannot serve is a [`LockError::Configuration`] that names the feature to turn on. Errors
//! never repeat an address, as it may hold a password.
//!
//! # Features
//!
//! `memory` (on by default), `etcd`, `postgres`, `redis` and `sqlite` turn on a backend each, `full` all of them. `tls` (on by default) is for
//! `etcds:` and `rediss:` addresses, and for what encrypts in Postgres' `sslmode`; it does nothing without these backends.
//! `sqlite` is not on by default, as it takes a C compiler. It goes with other users of SQLite in the program, such as sqlx and diesel: cargo takes the
//! `rusqlite` between 0.32 and 0.43 that links the same `libsqlite3-sys`. `bundled` (on by default) compiles SQLite from the source that comes
//! along; without it, and if no other crate turns it on, the SQLite of the system is linked, which must be 3.37.0 or later (3.44.0 with `rusqlite` 0.41 or later). With `etcd`, the crate `etcd-client` is built, which takes `protoc`, the
//! compiler of Protocol Buffers: install it (Debian: `apt-get install protobuf-compiler`; macOS: `brew install protobuf`), set
//! `PROTOC` to where it is, or do as the crate documentation of `lock-etcd` says. `macros` adds the attribute [`#[locked]`](macro@locked), `tower` the layer in the module `tower`, which runs HTTP requests under locks. `serde` adds `Serialize` and `Deserialize` to names, tokens, owners, holders
//! and counters.
//!
//! # The usual forms
//!
//! A body that runs under the lock and is cancelled if the lock is lost, in a task of its own:
//!
//! ```
//! # async fn example(locks: fencelock::Locks) {
//! let name = String::from("report");
//! let task = tokio::spawn(async move { locks.lock(name).with(async |guard| guard.token()).await });
//! # let _ = task; }
//! ```
//!
//! In a method of a trait with async methods:
//!
//! ```
//! use async_trait::async_trait;
//! use fencelock::{LockError, Locks};
//!
//! #[async_trait]
//! trait Shop {
//!     async fn sell(&self, article: &str) -> Result<u64, LockError>;
//! }
//!
//! struct Till(Locks);
//!
//! #[async_trait]
//! impl Shop for Till {
//!     async fn sell(&self, article: &str) -> Result<u64, LockError> {
//!         let _shop = self.0.lock("open").await?;
//!         self.0.lock(article).with(async |guard| guard.token().get()).await
//!     }
//! }
//! ```
//!
//! Raced against something else, or given up after a while. A request that is dropped leaves nothing behind:
//!
//! ```
//! use std::time::Duration;
//! use tokio::time::{sleep, timeout};
//!
//! # async fn example(locks: fencelock::Locks) -> Result<(), Box<dyn std::error::Error>> {
//! tokio::select! {
//!     guard = locks.lock("door") => println!("got it: {}", guard?.token()),
//!     () = sleep(Duration::from_secs(1)) => println!("went elsewhere"),
//! }
//! let guard = timeout(Duration::from_secs(1), locks.lock("door")).await??;
//! # drop(guard);
//! # Ok(()) }
//! ```
//!
//! Several locks at once, all or none; and a body that runs on one of many hosts for as long as that one leads:
//!
//! ```
//! # async fn serve(token: fencelock::FencingToken) {}
//! # async fn example(locks: fencelock::Locks) -> Result<(), fencelock::LockError> {
//! let accounts = locks.lock_all(["account/2", "account/1"]).await?;
//! accounts.release().await?;
//!
//! locks.lock("leader").lead(|term| async move { serve(term.token()).await }).await?;
//! # Ok(()) }
//! ```
//!
//! A long body that looks after its lock itself:
//!
//! ```
//! # async fn next_step() {}
//! # async fn example(locks: fencelock::Locks) -> Result<(), fencelock::LockError> {
//! let guard = locks.lock("nightly").await?;
//! while guard.is_held() {
//!     tokio::select! {
//!         reason = guard.lost() => eprintln!("lost: {reason}"),
//!         () = next_step() => {}
//!     }
//! }
//! # Ok(()) }
//! ```

pub mod backend;

mod address;
mod connect;
#[cfg(feature = "memory")]
mod memory;
#[cfg(feature = "macros")]
mod skip;
#[cfg(feature = "tower")]
pub mod tower;

/// Runs an async function under a lock, and releases it afterwards.
///
/// ```
/// use fencelock::{LockError, Locks};
///
/// #[fencelock::locked("order/{order_id}", wait_for = "2s", guard = guard)]
/// async fn ship(locks: &Locks, order_id: u64) -> Result<u64, LockError> {
///     // Send the token with every write.
///     Ok(guard.token().get())
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
/// # #[cfg(feature = "memory")] {
/// # let locks = fencelock::connect("memory:").await?;
/// # assert!(ship(&locks, 7).await? < ship(&locks, 7).await?);
/// # let held = locks.lock("order/7").await?;
/// # assert!(locks.holder("order/7").await?.is_some());
/// # }
/// # Ok(()) }
/// ```
///
/// The function returns a `Result` whose error is `From<LockError>`. It is `async`, or it ends in an `async` block and returns its future:
///
/// ```
/// use std::pin::Pin;
/// use fencelock::{LockError, Locks};
///
/// struct Shop { locks: Locks }
///
/// impl Shop {
///     #[fencelock::locked(format!("order/{}", order.0))]
///     fn ship(&self, order: (u64, u32)) -> Pin<Box<dyn Future<Output = Result<u32, LockError>> + Send + '_>> {
///         // What stands before the block runs without the lock.
///         Box::pin(async move { Ok(order.1) })
///     }
/// }
/// ```
///
/// The methods that the crate `async_trait` writes have this form. In an `impl` block or a trait, put `#[locked]` on the method, not on the block.
///
/// The function does what [`LockRequest::with`] does: the body is cancelled, at its next await, when the lock is lost, and the function
/// returns [`LockError::Lost`] then. A failed release is no error. A body that panics releases the lock. Dropping the function's future
/// cancels the body and releases the lock.
///
/// | argument | meaning | default |
/// |---|---|---|
/// | first | the name: a text as of `format!`, with variables in braces as in `{id}` or `{id:08}`; or an expression that displays, such as `format!("order/{}", order.id)` | required |
/// | `ttl = "30s"` | see [`LockRequest::ttl`]; a text, or an expression of the type `Duration` | the client's |
/// | `wait_for = "2s"` | see [`LockRequest::wait_for`]; a text, an expression of the type `Duration`, or `forever` | no wait |
/// | `max_hold = "1m"` | see [`LockRequest::max_hold`]; a text, or an expression of the type `Duration` | none |
/// | `at_least = "55m"` | see [`LockRequest::at_least`]; a text, or an expression of the type `Duration` | none |
/// | `busy = skip` | returns `Ok(())` or `Ok(None)` (see [`Skip`]) when the lock is busy: for jobs that run on one of many hosts | `error` |
/// | `guard = IDENT` | what the body calls its `&LockGuard` | |
/// | `label = EXPR` | see [`LockRequest::label`] | none |
/// | `locks = EXPR` | the client ([`Locks`]), such as `self.client` | the argument `locks`, or the field: if the compiler finds "no field `locks`", give `locks = EXPR` |
///
/// The expressions are evaluated before the body, and may use what it moves. The lock of a name is not re-entrant: a function that calls
/// itself or another one under the same name finds it busy. The code that the attribute writes names the crate `::fencelock`, so the
/// dependency must not be renamed.
///
/// ```
/// use std::time::Duration;
/// use fencelock::{LockError, Locks};
///
/// struct Shop { locks: Locks, hold: Duration }
///
/// impl Shop {
///     /// Runs on one of the hosts; the others return at once.
///     #[fencelock::locked("nightly report", ttl = self.hold, busy = skip)]
///     async fn report(&self) -> Result<Option<String>, LockError> {
///         Ok(Some("written".to_owned()))
///     }
/// }
/// ```
#[cfg(feature = "macros")]
pub use fencelock_macros::locked;

pub use connect::{ENV, connect, connect_lazy, connect_lazy_with, connect_with, from_env};
#[cfg(feature = "memory")]
pub use lock_core::MemoryLock;
pub use lock_core::{
    BackendVersion, Capabilities, Clock, FencingToken, Holder, InvalidToken, LockAllRequest, LockError, LockGuard,
    LockGuards, LockName, LockRequest, Locks, LossReason, LossSignal, ManualClock, Observation, Options, OwnerId,
    ParseOwnerIdError, ReleaseOutcome, Renew, Retry, Scope, Source, Stats, Term, fence,
};
#[cfg(feature = "etcd")]
pub use lock_etcd as etcd;
#[cfg(feature = "etcd")]
pub use lock_etcd::EtcdLock;
#[cfg(feature = "postgres")]
pub use lock_postgres as postgres;
#[cfg(feature = "postgres")]
pub use lock_postgres::PostgresLock;
#[cfg(feature = "redis")]
pub use lock_redis as redis;
#[cfg(feature = "redis")]
pub use lock_redis::{ClusterLock, RedisLock, RedlockLock};
#[cfg(feature = "sqlite")]
pub use lock_sqlite as sqlite;
#[cfg(feature = "sqlite")]
pub use lock_sqlite::SqliteLock;
#[cfg(feature = "macros")]
pub use skip::{SelfWithoutLocksArgument, Skip};

// Compiles and runs what the README shows.
#[cfg(all(doctest, feature = "memory", feature = "sqlite"))]
#[doc = include_str!("../../README.md")]
struct Readme;

// The same for the cookbook.
#[cfg(all(doctest, feature = "macros", feature = "memory", feature = "tower"))]
#[doc = include_str!("../../docs/cookbook.md")]
struct Cookbook;
