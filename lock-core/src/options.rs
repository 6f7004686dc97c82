//! How a client behaves.

use std::time::Duration;

use tokio::runtime::Handle;

use crate::LockError;

/// How a client behaves unless a request says otherwise.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Options {
    pub(crate) ttl: Option<Duration>,
    pub(crate) op_timeout: Option<Duration>,
    pub(crate) runtime: Option<Handle>,
    pub(crate) read_only: bool,
    pub(crate) linger: Duration,
}

impl Options {
    /// The ttl of requests that set none.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(30);

    /// What [`Locks::new`](crate::Locks::new) uses.
    pub fn new() -> Self {
        Self::default()
    }

    /// The ttl of requests that set none; 30 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// The longest limit for one request. Longer ones count as this one: they could not be added to a clock.
    pub const MAX_OP_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

    /// `limit` for one request as clients and backends use it: at most [`MAX_OP_TIMEOUT`](Self::MAX_OP_TIMEOUT).
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if it is zero, as no request could be answered in time.
    pub fn usable_op_timeout(limit: Duration) -> Result<Duration, LockError> {
        if limit.is_zero() {
            return Err(LockError::configuration(
                "op_timeout is zero, so that no request could be answered in time; give more, such as 5s",
            ));
        }
        Ok(limit.min(Self::MAX_OP_TIMEOUT))
    }

    /// How long one request to the server may take before it counts as failed; the backend's own limit by default.
    /// Renewals use at most a quarter of their ttl. At most a day; with zero every request is a
    /// [`LockError::Configuration`].
    pub fn op_timeout(mut self, limit: Duration) -> Self {
        self.op_timeout = Some(limit);
        self
    }

    /// Runs everything on that runtime instead of the background thread. Saves a switch of threads per call. If the
    /// runtime is blocked, renewals are late. If it ends, the client ends with it: locks are lost with
    /// [`LossReason::RuntimeEnded`](crate::LossReason::RuntimeEnded), or [`Revoked`](crate::LossReason::Revoked) where a lock ends with its
    /// connection (Postgres), and requests fail with [`LockError::Configuration`].
    ///
    /// In a forked child it must be a runtime of the child: an inherited one has no threads there.
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Keeps a lock that is released, and that no task of this client waits for, for the next task of this client that asks for it. Neither
    /// needs a request then. For names that one process uses again and again. Zero by default: every lock goes back to the server.
    ///
    /// Waiters of other clients wait for that much longer, at most: it counts from the first release after which no task here waits. The
    /// longest is a third of the ttl, and 100 ms on backends that are not [fair](crate::Capabilities::fair). Each holder has a token of its own, from a
    /// block that came with the grant. The lock goes back to the server when that is used up, when its lease is not renewed in time, and when
    /// a request asks for another ttl or label. Never kept are locks of [`lead`](crate::LockRequest::lead), with [`at_least`](crate::LockRequest::at_least)
    /// or [`Renew::Never`](crate::Renew::Never), those whose [`owner`](crate::LockGuard::owner) was asked for, and all where the server grants no blocks
    /// (Redlock).
    ///
    /// If the server takes a lock away that is kept, the next holder here may learn of it at its first renewal only, as any holder would. Its
    /// token is lower than those granted since, and a fence refuses it.
    ///
    /// [`Locks::holder`](crate::Locks::holder) shows a lock that is kept as held. To other clients it is a lock: a request for its name as a [semaphore](crate::Locks::semaphore) is
    /// [`LockError::InvalidMode`] meanwhile. [`Locks::shutdown`](crate::Locks::shutdown), [`Locks::drain`](crate::Locks::drain) and the end of `main` release it, the last of
    /// them if the client works on the background thread. Dropping the client does not, before its time is over.
    pub fn linger(mut self, length: Duration) -> Self {
        self.linger = length;
        self
    }

    /// A client that only looks at locks: [`holder`](crate::Locks::holder), [`list`](crate::Locks::list) and
    /// [`server_info`](crate::Locks::server_info) work, and what would take or release a lock is a
    /// [`LockError::Configuration`]. On SQLite it makes no file and writes to none, on Postgres it makes no schema, and it
    /// needs rights to read only: each backend's documentation lists them.
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// Whether the client only looks, as set with [`read_only`](Self::read_only). Backends read it, too.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The limit set with [`op_timeout`](Self::op_timeout). Backends read it, too.
    #[must_use]
    pub fn get_op_timeout(&self) -> Option<Duration> {
        self.op_timeout
    }

    /// The runtime set with [`runtime`](Self::runtime). Backends read it, too.
    #[must_use]
    pub fn get_runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }
}
