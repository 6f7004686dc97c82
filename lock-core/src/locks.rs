//! What users hold: a client for locks.

use std::sync::{Arc, Weak};

use crate::call::catch_panic;
use crate::client::ClientInner;
use crate::process::AtExit;
use crate::{
    Capabilities, Claim, DistributedLock, Holder, InvalidName, LockError, LockName, Options, OwnerId, Released,
    ServerInfo, Stats,
};

type Backend = Arc<dyn DistributedLock>;

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
    pub(crate) core: Arc<ClientInner>,
    scope: Option<Arc<str>>,
}

impl Locks {
    /// A client of that backend. One client per backend object: its queue is what keeps two tasks from claiming the same
    /// name through one session.
    pub fn new(backend: impl DistributedLock) -> Self {
        Self::with_options(backend, Options::new())
    }

    /// A client of that backend that behaves as `options` say.
    pub fn with_options(backend: impl DistributedLock, options: Options) -> Self {
        let core = Arc::new(ClientInner::new(backend, options));
        if !core.linger.is_zero() {
            core.process.at_exit(Arc::downgrade(&core) as Weak<dyn AtExit>);
        }
        Self { core, scope: None }
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

    /// Who holds the lock now, as far as the server can tell: the first one of [`holders`](Self::holders), and the only one unless the lock is
    /// [shared](crate::LockRequest::shared) or a [semaphore](Self::semaphore).
    ///
    /// # Errors
    ///
    /// As [`holders`](Self::holders).
    pub async fn holder(&self, name: impl AsRef<str>) -> Result<Option<Holder>, LockError> {
        Ok(self.holders(name).await?.into_iter().next())
    }

    /// All that hold the lock now, as far as the server can tell. By the time the caller reads it, the lock may have other holders.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where the backend cannot tell, [`LockError::Unavailable`] if it failed.
    pub async fn holders(&self, name: impl AsRef<str>) -> Result<Vec<Holder>, LockError> {
        let name = self.full_name(name.as_ref())?;
        let request = |backend: Backend, name| async move { backend.holders(&name).await };
        let holders = self.ask("holder", name, request).await?;
        Ok(self.all_seen_from_here(holders))
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
        // The backend limits each of its requests.
        let request = catch_panic("list", async move { backend.list(&prefix).await });
        let holders = self.core.run_for_caller("list", request).await??;
        Ok(self.all_seen_from_here(holders))
    }

    /// Takes the lock away from all that hold it, and returns them; none if the lock was free. A holder learns of it at its next renewal at
    /// the latest; until then only the fencing token protects the resource.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where that is not possible, [`LockError::Unavailable`] if the backend failed.
    pub async fn force_release(&self, name: impl AsRef<str>) -> Result<Vec<Holder>, LockError> {
        let name = self.full_name(name.as_ref())?;
        self.core.may_write().map_err(|error| error.of(&name))?;
        let request = |backend: Backend, name| async move { backend.force_release(&name).await };
        let victims = self.ask("force_release", name, request).await?;
        Ok(self.all_seen_from_here(victims))
    }

    /// Releases the lock if the acquisition `owner` holds it, as [`LockGuard::owner`](crate::LockGuard::owner) gives it. A later acquisition is not harmed.
    /// Returns whether `owner` held the lock until now.
    ///
    /// It is for a supervisor that outlives the process that holds the lock, and frees the lock before its ttl is over. Call it when
    /// that process has ended and so has all that the lock protects. It also ends what the acquisition has
    /// [reserved](crate::LockRequest::at_least), except on Postgres. A guard that is still there learns of the release at its next
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
        let claim = Claim::of(owner, name.clone(), self.core.ttl);
        let request = |backend: Backend, _| async move { backend.release(&claim, None).await };
        Ok(self.ask("release", name, request).await? == Released::Released)
    }

    /// Sends a request about the lock of that name.
    async fn ask<T, F>(
        &self,
        operation: &'static str,
        name: LockName,
        request: impl FnOnce(Backend, LockName) -> F,
    ) -> Result<T, LockError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, LockError>> + Send + 'static,
    {
        let request = request(Arc::clone(&self.core.backend), name.clone());
        let answer = self.core.call(operation, request).await;
        answer.map_err(|error| error.of(&name))
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

    /// Waits for the releases of this client and its clones that are under way: of dropped guards, and of requests that were dropped. The
    /// client goes on; what is released after the call is not waited for. In a forked child it returns at once.
    ///
    /// A release that fails is tried again until the ttl is over, or for as long as the request would have
    /// [reserved](crate::LockRequest::at_least) the name, and `drain` waits as long. To wait for less, put it into
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

    pub(crate) fn full_name(&self, name: &str) -> Result<LockName, InvalidName> {
        match &self.scope {
            None => LockName::new(name),
            Some(scope) => {
                LockName::new(scope)?;
                LockName::new(name)?;
                LockName::new(format!("{scope}/{name}"))
            }
        }
    }

    fn all_seen_from_here(&self, holders: Vec<Holder>) -> Vec<Holder> {
        holders.into_iter().map(|holder| self.seen_from_here(holder)).collect()
    }

    /// The holder with its name as this scope would spell it.
    pub(crate) fn seen_from_here(&self, mut holder: Holder) -> Holder {
        let inner = |name: &LockName| {
            let rest = name.as_str().strip_prefix(self.scope.as_deref()?)?;
            LockName::new(rest.strip_prefix('/')?).ok()
        };
        if let Some(inner) = holder.name.as_ref().and_then(inner) {
            holder.name = Some(inner);
        }
        holder
    }
}
