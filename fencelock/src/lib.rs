//! Distributed locks with a fencing token on every grant. A URL and a feature flag choose the backend; the code stays the same.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! #[tokio::main]
//! async fn main() -> Result<(), fencelock::LockError> {
//!     let locks = fencelock::connect("sqlite:locks.db").await?;
//!     let guard = locks.lock("stock/10000").wait_for(Duration::from_secs(5)).await?;
//!     println!("write with token {}", guard.token()); // fencelock renews the lease while the guard lives
//!     guard.release().await?;
//!     Ok(())
//! }
//! ```
//!
//! The server keeps a lock by a *lease*, which ends if it is not renewed within its *ttl*. [`Locks`] renews the lease on a thread of its own
//! while the [`LockGuard`] lives, and the guard reports its loss. Dropping the guard releases the lock, so bind it to a name:
//! `let _ = locks.lock("a").await?` releases at once. The renewal does not depend on the task that holds the guard: a task that hangs keeps
//! its lock, unless [`max_hold`](LockRequest::max_hold) limits the time.
//!
//! The system can suspend a process between its last check of the lock and its write, for longer than any ttl. Therefore each grant has a
//! [`FencingToken`] that is higher than all earlier ones of its name. Send it with each write, and let the resource refuse lower ones:
//! [`fence`] has fences for the usual resources.
//!
//! The guide is in the repository: [documentation by task](https://github.com/fencelock/fencelock/blob/main/docs/README.md),
//! [choosing a backend](https://github.com/fencelock/fencelock/blob/main/docs/choosing-a-backend.md),
//! [guarantees and their conditions](https://github.com/fencelock/fencelock/blob/main/docs/guarantees.md),
//! [troubleshooting](https://github.com/fencelock/fencelock/blob/main/docs/troubleshooting.md).
//!
//! # Addresses
//!
//! [`connect`], [`connect_with`], [`connect_lazy`], [`connect_lazy_with`] and [`from_env`] take an address and return [`Locks`].
//!
//! | address | feature | which clients exclude each other |
//! |---|---|---|
//! | `etcd://HOST`, `etcd://USER:PASSWORD@HOST:PORT,HOST:PORT`; with TLS `etcds://HOST` | `etcd` | those of the same etcd cluster |
//! | `memory:` | `memory` | the same [`Locks`] and its clones: each call makes a store of its own |
//! | `memory:NAME` | `memory` | those in this process that use the same `NAME` |
//! | `postgres://HOST/DATABASE`, `postgresql://USER:PASSWORD@HOST:PORT,HOST:PORT/DATABASE` | `postgres` | those of the same Postgres database |
//! | `redis://HOST`, `redis://USER:PASSWORD@HOST:PORT/DATABASE`; with TLS `rediss://HOST` | `redis` | those of the same Redis or Valkey server and database |
//! | `redis+unix:SOCKET` | `redis` | the same, through a Unix socket |
//! | `redis+sentinel://HOST,HOST,HOST/SERVICE`, `redis+sentinel://USER:PASSWORD@HOST:26379,HOST/SERVICE/DATABASE`; with TLS `rediss+sentinel://` | `redis` | those of the primary that the Sentinels know as `SERVICE` |
//! | `redis+cluster://HOST,HOST`; with TLS `rediss+cluster://` | `redis` | those of the same Redis Cluster; one node that answers is enough |
//! | `redlock://HOST,HOST,HOST`; with TLS `redlocks://` | `redis` | those of the same 3, 5 or 7 independent Redis or Valkey servers |
//! | `sqlite:PATH` | `sqlite` | the processes of this machine that use the same file |
//!
//! `valkey` and `valkeys` mean the same as `redis` and `rediss`, also before `+unix`, `+sentinel` and `+cluster`.
//!
//! | part | meaning |
//! |---|---|
//! | `NAME` | any text without `?`, `#` and control characters, without escapes. The store lives as long as the process; a forked child has stores of its own |
//! | `PATH` | the database file, relative or absolute, also as `sqlite:///PATH`; created if it does not exist, in a directory that exists, on a local file system. Write `?`, `#` and `%` as `%3F`, `%23` and `%25` |
//! | `USER`, `PASSWORD` | write special characters as `%` and two hexadecimal digits; `:PASSWORD@` alone is for the default user |
//! | `SOCKET` | the absolute path; user, password and database are the parameters `user`, `password` and `db` |
//! | `?namespace=fencelock` | etcd, Redis: prefix of the keys; Postgres: part of the keys. Locks in different namespaces are independent |
//! | `?ca=FILE` | etcd, Postgres, Redis with TLS: trusts the certificates in that PEM file instead of the system's |
//! | `?cert=FILE`, `?key=FILE` | etcd, Postgres, Redis with TLS: the client's certificate and its private key, as PEM files |
//! | `?pin=sha256:FINGERPRINT` | etcd, Postgres, Redis with TLS: the server's certificate has that fingerprint, as `openssl x509 -fingerprint -sha256` prints it |
//! | `?password_file=FILE` | etcd, Postgres, Redis: a file with the password, read at each connect |
//! | `?sslmode=prefer`, `?sslrootcert=FILE` and others of libpq | Postgres: see [`postgres::PostgresConfig::from_url`](https://docs.rs/lock-postgres/latest/lock_postgres/struct.PostgresConfig.html#method.from_url) |
//! | `?schema=fencelock` | Postgres: the schema of the token counter |
//! | `?pool_mode=session` | Postgres: a pooler before the server gives each client a session of its own |
//! | `?sentinel_user=USER`, `?sentinel_password=PASSWORD`, `?sentinel_password_file=FILE` | Redis Sentinel: credentials for the Sentinels; `USER:PASSWORD@` are those for the servers |
//! | `?counter_retention=10m` | Redis: how long after its last use the server keeps a name's token counter |
//! | `?max_ttl=1m` | Redlock: the longest ttl of a lock, the same for all clients; a server that has lost its data grants nothing for this time |
//! | `?node2.user=USER`, `?node2.password=PASSWORD`, `?node2.db=NUMBER`, `?node2.ca=FILE` | Redlock: for the second server only |
//! | `?mode=ro` | SQLite: only shows locks, as with [`Options::read_only`]; creates no file and changes none |
//! | `?op_timeout=5s` | etcd, Postgres, Redis, SQLite: the limit for one request; [`Options::op_timeout`] overrides it |
//! | `?allow_unsafe_configuration=true` | etcd, Postgres, Redis, SQLite: an unsafe server or file system is a warning instead of an error |
//!
//! # After a fork
//!
//! **Connect after the fork.** A client, its clones and its guards belong to the process that made them, which keeps its locks. In a child
//! made by `fork`
//!
//! - requests of an inherited client or guard fail at once with [`LockError::Configuration`]; one that was under way, and `lost()`, never complete;
//! - `is_held()` and `remaining()` of an inherited guard are valid until the copied lease is over, as nothing renews it;
//! - dropping an inherited client or guard changes nothing for the parent;
//! - a new client works, with a background thread of its own. A store `memory:NAME` is a new one. SQLite is refused if the parent had a file
//!   open at the fork: see [`sqlite`](https://docs.rs/lock-sqlite).
//!
//! A child keeps the parent's sockets open until it ends or starts another program (`exec`). If the parent is killed before that, the
//! server frees its locks when their ttl is over, not when the parent's connection ends. A tokio runtime does not survive a fork: create a
//! new one in the child, and pass the inherited one to [`std::mem::forget`].
//!
//! # Logs
//!
//! Events go to [`tracing`](https://docs.rs/tracing), with the target `fencelock` for every crate: `RUST_LOG=fencelock=debug` shows
//! acquisitions, releases and losses, and `fencelock=trace` the renewals as well. A lost lock is a warning.
//!
//! # Errors
//!
//! Every request returns [`LockError`]. [`LockError::is_retryable`] is true if the same request can succeed later without a change of the
//! configuration. An address that this build cannot serve is a [`LockError::Configuration`] that names the missing feature. Errors
//! never contain an address, as it may hold a password.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `memory` | yes | the backend in memory |
//! | `etcd` | | the backend on etcd. Building it needs `protoc`, the compiler of Protocol Buffers (Debian: `apt-get install protobuf-compiler`; macOS: `brew install protobuf`), or the variable `PROTOC` with its path |
//! | `postgres` | | the backend on Postgres |
//! | `redis` | | the backends on Redis and Valkey |
//! | `sqlite` | | the backend in a SQLite file. It needs a C compiler. It shares `libsqlite3-sys` with other users of SQLite in the program, such as sqlx and diesel: cargo chooses a `rusqlite` from 0.32 to 0.43 that fits |
//! | `bundled` | yes | with `sqlite`: SQLite is built from source. Without it, and if no other crate turns it on, the system's SQLite is linked, which must be 3.37.0 or later (3.44.0 with `rusqlite` 0.41 or later) |
//! | `full` | | all backends |
//! | `tls` | yes | encrypted addresses of etcd, Postgres and Redis |
//! | `macros` | | the attribute [`#[locked]`](macro@locked) |
//! | `tower` | | the layer in the module `tower`, which runs HTTP requests under locks |
//! | `serde` | | `Serialize` and `Deserialize` for names, tokens, owners, holders and counters |
//!
//! To use: Rust 1.89 or later and, for `sqlite`, a Unix system. The clock counts suspended time and notices reboots on Linux only.
//!
//! # Tasks and time limits
//!
//! A request that is dropped leaves nothing behind, so it can be raced against a timer. A body that runs [`with`](LockRequest::with) the lock is
//! cancelled if the lock is lost:
//!
//! ```
//! # async fn example(locks: fencelock::Locks) -> Result<(), Box<dyn std::error::Error>> {
//! let limit = std::time::Duration::from_secs(1);
//! let guard = tokio::time::timeout(limit, locks.lock("door")).await??;
//! let report = tokio::spawn(async move { locks.lock("report").with(async |guard| guard.token()).await });
//! # drop((guard, report));
//! # Ok(()) }
//! ```

pub mod backend;

mod address;
mod connect;
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
#[cfg(feature = "macros")]
pub use fencelock_macros::locked;

pub use connect::{ENV, connect, connect_lazy, connect_lazy_with, connect_with, from_env};
#[cfg(feature = "memory")]
pub use lock_core::MemoryLock;
pub use lock_core::{
    Capabilities, Clock, ErrorInfo, FencingToken, Holder, InvalidName, InvalidToken, Leadership, LockAllRequest,
    LockError, LockGuard, LockGuards, LockName, LockRequest, Locks, LossReason, LossSignal, ManualClock, Mode,
    Observation, Options, OwnerId, ParseOwnerIdError, Permit, ReleaseOutcome, Renew, Scope, SemaphoreRequest,
    ServerInfo, Source, Stats, Term, fence,
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
pub use lock_redis::RedisLock;
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
