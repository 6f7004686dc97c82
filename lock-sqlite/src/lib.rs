//! The embedded SQLite backend of fencelock: locks among the processes of one machine, without a server.
//!
//! ```
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("locks.db");
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! use lock_core::Locks;
//! use lock_sqlite::SqliteLock;
//!
//! let locks = Locks::new(SqliteLock::open(&path).await?);
//! let guard = locks.lock("stock/10000").await?;
//! println!("token {}", guard.token());
//! guard.release().await?;
//! # Ok::<(), lock_core::LockError>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is promised
//!
//! Every process that opens the same file under the same kernel, in whatever container, takes part. A lock is freed within
//! its ttl when its holder's process is killed, stopped or hangs as a whole, at once after a reboot, and never by a step of the
//! wall clock. A task that hangs keeps its lock, which a thread of its own renews: `max_hold` ends it.
//! Killing any process at any moment harms nothing. Tokens rise whatever happens to the processes, the system, the power
//! or the wall clock; should the file itself be lost or replaced by an older copy, they rise as long as the wall clock
//! was not set back.
//!
//! # What to know
//!
//! - **Where the file may lie.** On a local file system, in a directory that all its users may write to. Network and FUSE
//!   file systems that are known by their type are refused: another kernel has another boot, and would free locks that are
//!   held here. In containers mount the whole directory, since `-wal` and `-shm` files lie beside the database. Only on
//!   Linux can this be checked.
//! - **Several users** share a file through a common group. Give them the directory (`chgrp locks DIR; chmod 2770 DIR`)
//!   and make the file before the first client starts: `touch DIR/locks.db; chmod 660 DIR/locks.db`. The `-wal`, `-shm`
//!   and `.…-wake` files take their mode from it, whatever the umask. A file that a client makes has mode 600, or 660 if the umask
//!   admits the group. Do not let users read it who may not write to it: a user who can open the `-shm` file can lock bytes in it, and so
//!   hold up every request until the locks that are held have ended.
//! - **Containers.** A file in a container's own layer (overlayfs) excludes the processes of that container only, also if other
//!   containers of the same image have a file at the same path. Clients and `fencelock check` warn of it. A mount that is private
//!   to a container, such as a tmpfs, has the same effect and is not noticed.
//! - **Looking at locks** takes the right to read alone: see [`SqliteConfig::read_only`]. Such a client makes no file and changes
//!   none.
//! - **A process stopped inside a transaction** (by SIGSTOP or a debugger) blocks
//!   every name in the file until it goes on or is killed. Others get [`Unavailable`](lock_core::LockError::Unavailable)
//!   after their [`op_timeout`](SqliteConfig::op_timeout) and recover by themselves, [`try_lock`](lock_core::Locks::try_lock) and
//!   `no_wait` after 5 s at most. A process stopped anywhere else blocks no other client. Most transactions last microseconds; one per connect and one per 1 024 tokens wait for the disk, and
//!   others wait with them for that long.
//! - **Removing or replacing the file while it is in use** loses the locks in it. Every operation checks that the path
//!   still leads to the open file, and while something is held a client looks once a second: its guards then say that the lock is lost, a
//!   request fails once, and the next one opens what is there. In between a holder may believe in its lock while
//!   another has it; the fencing token tells them apart. The same goes for the `-wal` and `-shm` files.
//! - **Copying over the file while it is in use** (rather than replacing it) changes SQLite's data under its feet, and may
//!   damage it. A client notices it only when it draws a token, or opens the file, and finds the counter below a token
//!   that it has seen itself, so locks may be held twice and tokens repeated. Restore with all users stopped, and
//!   remove the `-wal` and `-shm` files.
//! - **A virtual machine that is set back to a snapshot while clients run** sets back their memory with the file: they
//!   repeat tokens, and nothing inside the machine can tell. Restart them after such a restore; a new client starts no
//!   lower than the wall clock.
//! - **SQLite 3.37.0 or later** is needed, but not 3.51.0 or 3.51.1. With the feature `bundled` (on by default) it is compiled from the source that comes with
//!   `libsqlite3-sys`; without it the SQLite of the system is linked. Any `rusqlite` from 0.32 to 0.43 will do, so that cargo can take
//!   the one that goes with the other users of SQLite in the program:
//!   [docs/sqlite.md](https://github.com/fencelock/fencelock/blob/main/docs/sqlite.md) has a table.
//! - **Do not open the file by other means inside of the same process**, such as copying it with [`std::fs::copy`]: closing
//!   it would drop the locks of SQLite, as POSIX has it. `sqlite3 locks.db` in another process is fine.
//! - **After a fork** a child can connect only if its parent had no client of this backend open at the fork: SQLite takes over what it
//!   believed in the parent, and not its locks. Otherwise the child gets [`Configuration`](lock_core::LockError::Configuration) at once.
//!   Connect after the fork, [shut down](lock_core::Locks::shutdown) before it, or start a new program in the child.
//! - **A full disk**: what finds no room fails with [`Unavailable`](lock_core::LockError::Unavailable), and no new client
//!   can connect. Requests of open clients go on in the space that the file and its log have already, as far as that goes.
//! - **Waiters** of different processes are served in no particular order, but a claim that was passed by 32 others goes next, and new readers
//!   wait behind a writer that waits. They notice a release mostly within 15 ms. On Linux they are woken through a named pipe beside the
//!   database (`.locks.db-wake`), and look by themselves 3 to 8 times a second.
//! - **Systems other than Linux** offer no boot clock with a boot id. There leases follow the wall clock.
//!
//! The resource's side for SQLite is in [`fence`].

#[cfg(not(unix))]
compile_error!("lock-sqlite needs a Unix system: it tells files apart by device and inode");

pub mod fence;

mod admission;
mod boot_clock;
mod client;
mod commands;
mod config;
mod connection;
mod counter;
mod database;
mod error;
mod file_identity;
mod read_only;
mod schema;
mod wait;
mod worker;

use std::path::PathBuf;
use std::sync::Arc;

use lock_core::LockError;

pub use config::SqliteConfig;
/// The version of rusqlite that [`fence`] works with: the one that cargo has chosen for the program.
pub use rusqlite;

use client::Client;

/// Locks in an SQLite file.
///
/// Every client has one connection and one thread that works it; clones share them. Dropping the last clone closes the file in the background
/// and leaves what it held to expire; [`close`](lock_core::DistributedLock::close) releases it.
#[derive(Clone, Debug)]
pub struct SqliteLock {
    client: Arc<Client>,
}

impl SqliteLock {
    /// Opens the file, or makes it, with the settings of [`SqliteConfig::new`].
    ///
    /// # Errors
    ///
    /// As [`SqliteConfig::connect`].
    pub async fn open(path: impl Into<PathBuf>) -> Result<Self, LockError> {
        SqliteConfig::new(path).connect().await
    }
}
