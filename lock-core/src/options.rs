//! Options of a client.

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

    /// Does all work on that runtime instead of the background thread, which saves a switch of threads per call. If the runtime is blocked,
    /// renewals are late. If it ends, the client ends with it: locks are lost with
    /// [`LossReason::RuntimeEnded`](crate::LossReason::RuntimeEnded), or [`Revoked`](crate::LossReason::Revoked) where a lock ends with its
    /// connection (Postgres), and requests fail with [`LockError::Configuration`]. A forked child needs a runtime of its own.
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Keeps a lock that is released without a waiter in this client for the next task of this client that requests it: neither the release nor
    /// the next acquisition needs a request to the server. For names that one process uses again and again. Zero by default.
    ///
    /// Other clients wait longer by at most this time, counted from the first release without a waiter. It is at most a third of the ttl, and
    /// 100 ms on backends that are not [fair](crate::Capabilities::fair). Each holder has its own token, from a block that came with the grant.
    /// The lock is released at the server when the block is used up, when its lease is not renewed in time, and when a request has another
    /// ttl or label. Never kept are locks of [`lead`](crate::LockRequest::lead), with [`at_least`](crate::LockRequest::at_least) or
    /// [`Renew::Never`](crate::Renew::Never), those whose [`owner`](crate::LockGuard::owner) was read, and all where the server grants no
    /// blocks (Redlock).
    ///
    /// If the server frees a lock that is kept, the next holder may learn it at its first renewal only. Its token is lower than those granted
    /// since, and a fence refuses it.
    ///
    /// For other clients a lock that is kept is held. [`Locks::shutdown`](crate::Locks::shutdown), [`Locks::drain`](crate::Locks::drain) and
    /// the end of `main` release it, the last of them if the client works on the background thread. Dropping the client does not, before its
    /// time is over.
    pub fn linger(mut self, length: Duration) -> Self {
        self.linger = length;
        self
    }

    /// Makes a client that only reads: [`holder`](crate::Locks::holder), [`list`](crate::Locks::list) and
    /// [`server_info`](crate::Locks::server_info) work, and acquiring or releasing a lock is a [`LockError::Configuration`]. It needs only
    /// rights to read, which each backend's documentation lists, and creates no file (SQLite) and no schema (Postgres).
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
