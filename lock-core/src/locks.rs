//! What users hold: a client for locks.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::engine::Core;
use crate::guard::LockGuard;
use crate::request::LockRequest;
use crate::{
    Capabilities, Claim, DistributedLock, Holder, LockAllRequest, LockError, LockName, OwnerId, Released, ServerInfo,
    Stats,
};

/// A client for locks. Cheap to clone; all clones and scopes share one connection, one queue and one watchdog.
///
/// ```
/// use std::time::Duration;
/// use fencelock::{Locks, MemoryLock};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
/// let locks = Locks::new(MemoryLock::new());
/// let guard = locks.lock("stock/10000").wait_for(Duration::from_secs(5)).await?;
/// println!("write with token {}", guard.token());
/// guard.release().await?;
/// # Ok(()) }
/// ```
///
/// Nothing here needs the caller to be on a particular runtime: the work is done on a background thread (or where
/// [`Options::runtime`] says), and the futures only wait for it.
///
/// A client belongs to the process that made it. Connect after a `fork`: in the child its operations fail at once with
/// [`LockError::Configuration`], and dropping it touches nothing.
#[derive(Clone, Debug)]
pub struct Locks {
    pub(crate) core: Arc<Core>,
    scope: Option<Arc<str>>,
}

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
    /// What [`Locks::new`] uses.
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
    /// longest is a third of the ttl, and 100 ms on backends that are not [fair](Capabilities::fair). Each holder has a token of its own, from a
    /// block that came with the grant. The lock goes back to the server when that is used up, when its lease is not renewed in time, and when
    /// a request asks for another ttl or label. Never kept are locks of [`lead`](LockRequest::lead), with [`at_least`](LockRequest::at_least)
    /// or [`Renew::Never`](crate::Renew::Never), those whose [`owner`](LockGuard::owner) was asked for, and all where the server grants no blocks
    /// (Redlock).
    ///
    /// If the server takes a lock away that is kept, the next holder here may learn of it at its first renewal only, as any holder would. Its
    /// token is lower than those granted since, and a fence refuses it.
    ///
    /// [`Locks::holder`] shows a lock that is kept as held. To other clients it is a lock: a request for its name as a [semaphore](Locks::semaphore) is
    /// [`LockError::InvalidMode`] meanwhile. [`Locks::shutdown`], [`Locks::drain`] and the end of `main` release it, the last of
    /// them if the client works on the background thread. Dropping the client does not, before its time is over.
    pub fn linger(mut self, length: Duration) -> Self {
        self.linger = length;
        self
    }

    /// A client that only looks at locks: [`holder`](Locks::holder), [`list`](Locks::list) and
    /// [`server_info`](Locks::server_info) work, and what would take or release a lock is a
    /// [`LockError::Configuration`]. On SQLite it makes no file and writes to none, on Postgres it makes no schema, and it
    /// needs rights to read only: each backend's documentation lists them.
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// Whether the client only looks, as set with [`read_only`](Self::read_only). For whoever makes the backend as well.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The limit set with [`op_timeout`](Self::op_timeout). For whoever makes the backend as well.
    #[must_use]
    pub fn get_op_timeout(&self) -> Option<Duration> {
        self.op_timeout
    }

    /// The runtime set with [`runtime`](Self::runtime). For whoever makes the backend as well.
    #[must_use]
    pub fn get_runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }
}

impl Locks {
    /// The ttl of requests that set none.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(30);

    /// A client of that backend. One client per backend object: its queue is what keeps two tasks from claiming the same
    /// name through one session.
    pub fn new(backend: impl DistributedLock) -> Self {
        Self::with_options(backend, Options::new())
    }

    /// A client of that backend that behaves as `options` say.
    pub fn with_options(backend: impl DistributedLock, options: Options) -> Self {
        let core = Arc::new(Core::new(backend, options));
        if !core.linger.is_zero() {
            core.process.at_exit(Arc::downgrade(&core) as _);
        }
        Self { core, scope: None }
    }

    /// Asks for a lock. Set what matters on the request, then await it.
    ///
    /// A name that is not usable is an error when the request is awaited.
    pub fn lock(&self, name: impl AsRef<str>) -> LockRequest {
        LockRequest::new(self.clone(), self.full_name(name.as_ref()))
    }

    /// The lock if it is free now, otherwise `None`. Does not wait for a holder, but does wait for the answer of a
    /// request for the same name that another task of this client has under way.
    ///
    /// Locks are not re-entrant: the name of a lock that is held is busy for its own holder too. Dropping the future
    /// takes the request back.
    ///
    /// # Errors
    ///
    /// As when awaiting [`lock`](Self::lock), except that busy is no error.
    pub async fn try_lock(&self, name: impl AsRef<str>) -> Result<Option<LockGuard>, LockError> {
        self.lock(name).attempt().await
    }

    /// Asks for the locks of all `names` at once: all or none. Set what matters on the request, then await it.
    ///
    /// They are acquired one after the other, in an order that all clients share, so that requests with names in common never wait for
    /// each other in a circle. Holding a lock of one request while awaiting another gives that up. A name that is given twice counts
    /// once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
    /// use fencelock::{Locks, MemoryLock};
    ///
    /// let locks = Locks::new(MemoryLock::new());
    /// let accounts = locks.lock_all(["account/2", "account/1"]).await?;
    /// assert!(locks.try_lock("account/1").await?.is_none());
    /// println!("write to account 2 with token {:?}", accounts.token("account/2"));
    /// accounts.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As when awaiting [`lock`](Self::lock), about the first name that could not be locked; [`LockError::Lost`] if one of them was lost while
    /// the next one was waited for. None is held then.
    ///
    /// # Cancellation
    ///
    /// Dropping the future releases what it has so far, in the background.
    pub fn lock_all<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> LockAllRequest {
        let names = names.into_iter().map(|name| self.full_name(name.as_ref())).collect();
        LockAllRequest::new(self.clone(), names)
    }

    /// A view in which every name has `scope` and a `/` in front. Scopes nest like folders: `a` within it is the same
    /// lock as `scope/a` outside.
    #[must_use]
    pub fn scoped(&self, scope: impl AsRef<str>) -> Self {
        let scope = match &self.scope {
            Some(outer) => format!("{outer}/{}", scope.as_ref()),
            None => scope.as_ref().to_owned(),
        };
        Self {
            core: Arc::clone(&self.core),
            scope: Some(scope.into()),
        }
    }

    /// Who holds the lock now, as far as the server can tell. By the time you read it, it may be somebody else.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where the backend cannot tell, [`LockError::Unavailable`] if it failed.
    pub async fn holder(&self, name: impl AsRef<str>) -> Result<Option<Holder>, LockError> {
        let name = self.full_name(name.as_ref())?;
        let backend = Arc::clone(&self.core.backend);
        let holder = self
            .core
            .call("holder", {
                let name = name.clone();
                async move { backend.holder(&name).await }
            })
            .await
            .map_err(|error| error.of(&name))?;
        Ok(holder.map(|holder| self.seen_from_here(holder)))
    }

    /// Everything that is held under names that start with `prefix`, in the order of their names.
    ///
    /// The backend reads it in pages. Each page must be answered within [`Options::op_timeout`]; the call takes as long as
    /// there are pages. Dropping the future ends it.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where the backend cannot tell, [`LockError::Unavailable`] if it failed, [`LockError::Closed`] if the
    /// client was shut down before the end.
    pub async fn list(&self, prefix: impl AsRef<str>) -> Result<Vec<Holder>, LockError> {
        let prefix = match &self.scope {
            Some(scope) => format!("{}/{}", LockName::new(scope)?, prefix.as_ref()),
            None => prefix.as_ref().to_owned(),
        };
        let backend = Arc::clone(&self.core.backend);
        let holders = self
            .core
            .call_in_pages("list", async move { backend.list(&prefix).await })
            .await?;
        Ok(holders.into_iter().map(|holder| self.seen_from_here(holder)).collect())
    }

    /// Takes the lock away from whoever holds it, and says who that was. The holder learns of it at its next renewal at
    /// the latest; until then only the fencing token protects the resource.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where that is not possible, [`LockError::Unavailable`] if the backend failed.
    pub async fn force_release(&self, name: impl AsRef<str>) -> Result<Option<Holder>, LockError> {
        let name = self.full_name(name.as_ref())?;
        self.core.may_write().map_err(|error| error.of(&name))?;
        let backend = Arc::clone(&self.core.backend);
        let victim = self
            .core
            .call("force_release", {
                let name = name.clone();
                async move { backend.force_release(&name).await }
            })
            .await
            .map_err(|error| error.of(&name))?;
        Ok(victim.map(|holder| self.seen_from_here(holder)))
    }

    /// Releases the lock if the acquisition `owner` holds it, as [`LockGuard::owner`] gives it. A later acquisition is not harmed.
    /// Returns whether `owner` held the lock until now.
    ///
    /// It is for a supervisor that outlives the process that holds the lock, and frees the lock before its ttl is over. Call it when
    /// that process has ended and so has all that the lock protects. It also ends what the acquisition has
    /// [reserved](LockRequest::at_least), except on Postgres. A guard that is still there learns of the release at its next
    /// renewal at the latest. On Postgres only the client that acquired the lock can release it in this way, and the server frees the
    /// lock as soon as that client's connection ends.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if the backend failed.
    ///
    /// # Cancellation
    ///
    /// Dropping the future does not stop a request that was sent.
    pub async fn release_owned(&self, name: impl AsRef<str>, owner: OwnerId) -> Result<bool, LockError> {
        let name = self.full_name(name.as_ref())?;
        self.core.may_write().map_err(|error| error.of(&name))?;
        let claim = Claim::new(name.clone(), self.core.ttl).with_owner(owner);
        let backend = Arc::clone(&self.core.backend);
        let released = self
            .core
            .call("release", async move { backend.release(&claim, None).await })
            .await
            .map_err(|error| error.of(&name))?;
        Ok(released == Released::Released)
    }

    /// The product and version of the server, and its settings that put locks at risk.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where the backend cannot tell, [`LockError::Unavailable`] if it failed.
    pub async fn server_info(&self) -> Result<ServerInfo, LockError> {
        let backend = Arc::clone(&self.core.backend);
        self.core
            .call("asking about the server", async move { backend.server_info().await })
            .await
    }

    /// Ends the client, for all its clones: requests under way end with [`LockError::Closed`], held locks are lost with
    /// [`LossReason::Shutdown`](crate::LossReason::Shutdown), and everything is released on the server before this returns. Calling it again
    /// waits for the same end. Dropping the future does not stop it.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if not everything could be released; the server frees the rest when its ttl is over.
    /// [`LockError::Configuration`] if the runtime given in [`Options::runtime`] has ended: nothing is left to release then, and what the backend keeps
    /// outside of that runtime ends with the last clone of the client.
    pub async fn shutdown(&self) -> Result<(), LockError> {
        self.core.shut_down().await
    }

    /// Waits until no release of this client or its clones is under way: of dropped guards, and of requests that were dropped. The
    /// client goes on; what is released meanwhile is waited for, too. In a forked child it returns at once.
    ///
    /// A release that fails is tried again until the ttl is over, or for as long as the request would have
    /// [reserved](LockRequest::at_least) the name, and `drain` waits as long. To wait for less, put it into
    /// `tokio::time::timeout`.
    ///
    /// A program that returns from `main` or calls [`std::process::exit`] waits for releases by itself, for at most half a second.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
    /// use fencelock::{Locks, MemoryLock};
    ///
    /// let locks = Locks::new(MemoryLock::new());
    /// drop(locks.lock("stock/10000").await?);
    /// locks.drain().await;
    /// assert!(locks.holder("stock/10000").await?.is_none());
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancellation
    ///
    /// Dropping the future stops no release.
    pub async fn drain(&self) {
        self.core.drain().await;
    }

    /// What the client has done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core.stats.snapshot()
    }

    /// What the backend can do.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.core.capabilities.clone()
    }

    pub(crate) fn full_name(&self, name: &str) -> Result<LockName, LockError> {
        match &self.scope {
            None => LockName::new(name),
            Some(scope) => {
                LockName::new(scope)?;
                LockName::new(name)?;
                LockName::new(format!("{scope}/{name}"))
            }
        }
    }

    /// The holder with its name as this scope would spell it.
    pub(crate) fn seen_from_here(&self, mut holder: Holder) -> Holder {
        if let (Some(scope), Some(name)) = (&self.scope, &holder.name) {
            let inner = name
                .as_str()
                .strip_prefix(&**scope)
                .and_then(|rest| rest.strip_prefix('/'));
            if let Some(Ok(inner)) = inner.map(LockName::new) {
                holder.name = Some(inner);
            }
        }
        holder
    }
}
