//! All sessions of a client.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use lock_core::{Clock, LockError, Outages, Stamp};
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::failure::Failure;
use crate::holdings::{Holdings, Reservations};
use crate::pool::Pool;
use crate::settings::Settings;

/// All sessions of a client, and what they hold.
pub(crate) struct Sessions {
    pub(crate) settings: Settings,
    pub(crate) clock: Clock,
    pub(crate) holdings: Holdings,
    /// The highest token that this client has seen.
    pub(crate) seen: AtomicU64,
    pub(crate) pool: Pool,
    /// Whether a primary was found at the address.
    pub(crate) found_primary: AtomicBool,
    /// The turn to raise the ceiling of tokens.
    pub(crate) raising: Arc<AsyncMutex<()>>,
    /// The locks that were let go of for those who wait elsewhere, and until when those come first.
    pub(crate) gave_way: Mutex<HashMap<i64, Stamp>>,
    /// Each claim that waits has a share in it.
    pub(crate) waiting: Arc<()>,
    pub(crate) outages: Outages,
    /// The channel on which clients are asked what they hold, once it is known.
    pub(crate) channel: Mutex<Option<String>>,
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
            found_primary: AtomicBool::new(false),
            raising: Arc::default(),
            gave_way: Mutex::default(),
            waiting: Arc::default(),
            outages: Outages::default(),
            channel: Mutex::default(),
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
        let limit = self.settings.config.op_timeout;
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
        let done = self.settings.executor.run(operation, work).await?;
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
        if self.settings.config.read_only {
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
