//! All sessions of a client.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lock_core::{Clock, Executor, LockError, Outages, Stamp};
use lock_transport::Secret;
#[cfg(feature = "tls")]
use lock_transport::TlsFiles;
use tokio::runtime::Handle;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::config::Tls;
use crate::failure::Failure;
use crate::holdings::Holdings;
use crate::inquiry::Inquiries;
use crate::keys::Keys;
use crate::pool::Pool;
use crate::reserve::Reservations;
use crate::room::Room;
use crate::schema::Schema;
use crate::to_its_end::ToItsEnd;
use crate::tokens::NotBefore;

/// What the client was configured with.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) server: tokio_postgres::Config,
    /// In place of the one in `server`.
    pub(crate) password: Option<Secret>,
    pub(crate) tls: Tls,
    #[cfg(feature = "tls")]
    pub(crate) tls_files: TlsFiles,
    /// Whether what the system trusts counts, and not the file in the home directory.
    #[cfg(feature = "tls")]
    pub(crate) system_roots: bool,
    pub(crate) keys: Keys,
    pub(crate) schema: Schema,
    pub(crate) op_timeout: Duration,
    pub(crate) allow_unsafe: bool,
    /// Whether a pooler is said to give each client a session of its own.
    pub(crate) session_pooler: bool,
    /// Whether nothing is written: no schema is made, and the counter stays as it is.
    pub(crate) read_only: bool,
    pub(crate) executor: Executor,
}

impl Settings {
    /// What sessions are called on the server. It cuts after 63 bytes, and shows other letters than those of ASCII as `?`.
    pub(crate) fn application_name(&self) -> String {
        let host = host();
        let host: String = host.chars().filter(|c| c.is_ascii_graphic()).take(24).collect();
        let host = if host.is_empty() { "?" } else { &host };
        format!("fencelock {} {} {host}", self.keys.mark(), std::process::id())
    }
}

/// All sessions of a client, and what they hold.
pub(crate) struct Sessions {
    pub(crate) settings: Settings,
    pub(crate) clock: Clock,
    pub(crate) holdings: Holdings,
    /// The highest token that this client has seen.
    pub(crate) seen: AtomicU64,
    pub(crate) pool: Pool,
    pub(crate) room: Room,
    /// Whether a primary was found at the address.
    pub(crate) found_primary: AtomicBool,
    /// Held by whoever raises the ceiling of tokens.
    pub(crate) raising: Arc<AsyncMutex<NotBefore>>,
    /// The locks that were let go of for those who wait elsewhere, and until when those come first.
    pub(crate) gave_way: Mutex<HashMap<i64, Stamp>>,
    /// How many claims wait.
    pub(crate) waiting: AtomicUsize,
    pub(crate) outages: Outages,
    pub(crate) inquiries: Inquiries,
    pub(crate) reservations: Reservations,
    closed: CancellationToken,
}

impl Sessions {
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            settings,
            clock: Clock::system(),
            holdings: Holdings::default(),
            seen: AtomicU64::new(0),
            pool: Pool::default(),
            room: Room::default(),
            found_primary: AtomicBool::new(false),
            raising: Arc::default(),
            gave_way: Mutex::default(),
            waiting: AtomicUsize::new(0),
            outages: Outages::default(),
            inquiries: Inquiries::default(),
            reservations: Reservations::default(),
            closed: CancellationToken::new(),
        }
    }

    /// Does `work` to its end: a caller who goes away leaves nothing half done. What is said of it is said within the time
    /// for one operation; the work itself ends at the latest with its session.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<T, LockError> {
        let limit = self.settings.op_timeout;
        match timeout(limit, self.unlimited(operation, work)).await {
            Ok(done) => done,
            Err(_) => Err(LockError::no_answer(operation, limit)),
        }
    }

    /// The same for work that takes as long as it takes.
    pub(crate) async fn unlimited<T: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<T, LockError> {
        if self.closed.is_cancelled() {
            return Err(LockError::closed());
        }
        let executor = &self.settings.executor;
        // Elsewhere it might not be polled for long, and keep others waiting meanwhile.
        let done = if executor.is_current() {
            ToItsEnd::new(work, Handle::current()).await
        } else {
            executor.run(operation, work).await?
        };
        done.map_err(|failure| failure.explain(operation))
    }

    /// Connects, so that whatever is wrong shows now.
    pub(crate) async fn warm_up(self: &Arc<Self>) -> Result<(), LockError> {
        let sessions = Arc::clone(self);
        self.run("connecting", async move {
            let session = sessions.any().await?;
            sessions.spare(session);
            Ok(())
        })
        .await
    }

    /// Fails if the client only looks at locks.
    pub(crate) fn may_write(&self) -> Result<(), LockError> {
        if self.settings.read_only {
            return Err(LockError::configuration(
                "this client was made read-only, and can only tell what is held; make one without PostgresConfig::read_only to take, \
                 renew or release locks",
            ));
        }
        Ok(())
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Ends when the client is closed.
    pub(crate) async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Ends all sessions, and so lets go of everything.
    pub(crate) fn close(&self) {
        self.closed.cancel();
        self.pool.end_all();
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// The name of this machine.
pub(crate) fn host() -> String {
    lock_core::Holder::of(&anyone()).host.unwrap_or_default()
}

/// A claim of nobody in particular, for what all claims of this process have in common.
fn anyone() -> lock_core::Claim {
    #[expect(clippy::expect_used, reason = "the name is a usable one")]
    let name = lock_core::LockName::new("anything").expect("a usable name");
    lock_core::Claim::new(name, Duration::from_secs(30))
}
