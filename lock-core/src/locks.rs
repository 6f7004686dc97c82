//! The client.

use std::sync::{Arc, Weak};

use crate::call::catch_panic;
use crate::client::ClientInner;
use crate::process::AtExit;
use crate::{
    Capabilities, Claim, DistributedLock, Holder, InvalidName, LockError, LockName, Options, OwnerId, Released,
    ServerInfo, Stats,
};

type Backend = Arc<dyn DistributedLock>;

/// A client for locks. Clones are cheap and share everything: connections, queues and renewals.
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
/// The futures need no runtime: the work is done on a background thread, or on the runtime of [`Options::runtime`].
///
/// A client belongs to the process that made it. Connect after a `fork`: in the child its operations fail at once with
/// [`LockError::Configuration`], and dropping it touches nothing.
#[derive(Clone, Debug)]
pub struct Locks {
    pub(crate) core: Arc<ClientInner>,
    scope: Option<Arc<str>>,
}

impl Locks {
    /// Returns a client of that backend, with default options. A backend object must have one client, whose queue keeps two tasks from claiming
    /// one name through one session.
    pub fn new(backend: impl DistributedLock) -> Self {
        Self::with_options(backend, Options::new())
    }

    /// Returns a client of that backend with these options.
    pub fn with_options(backend: impl DistributedLock, options: Options) -> Self {
        let core = Arc::new(ClientInner::new(backend, options));
        if !core.names.linger.is_zero() {
            core.process.at_exit(Arc::downgrade(&core) as Weak<dyn AtExit>);
        }
        Self { core, scope: None }
    }

    /// Returns a view in which every name is prefixed with `scope` and a `/`. Scopes nest like folders: `a` in the view is the same lock as
    /// `scope/a` outside.
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

    /// Returns the first of the [`holders`](Self::holders): the only one unless the lock is [shared](crate::LockRequest::shared) or a
    /// [semaphore](Self::semaphore).
    ///
    /// # Errors
    ///
    /// As [`holders`](Self::holders).
    pub async fn holder(&self, name: impl AsRef<str>) -> Result<Option<Holder>, LockError> {
        Ok(self.holders(name).await?.into_iter().next())
    }

    /// Returns the present holders of the lock, as far as the server knows them. They may have changed by the time that the caller reads them.
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

    /// Returns the holders of all names that start with `prefix`, in the order of the names.
    ///
    /// The backend reads them in pages, each within [`Options::op_timeout`]; the call ends after the last page. Dropping the future ends it.
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

    /// Ends the lock of all its holders, and returns them; none if the lock was free. A holder learns it at its next renewal at the latest;
    /// until then only the fencing token protects the resource.
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
    /// For a supervisor that frees the lock of a process that has ended before its ttl is over; all that the lock protects must have ended,
    /// too. It also ends what the acquisition has [reserved](crate::LockRequest::at_least), except on Postgres. A guard that still exists
    /// learns it at its next renewal at the latest. On Postgres only the client that acquired the lock can release it in this way; the
    /// server frees the lock when that client's connection ends.
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

    /// Sends a request about that name.
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

    /// Returns the product and version of the server, and warnings about its settings.
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

    /// Ends the client with all its clones: requests end with [`LockError::Closed`], held locks are lost with
    /// [`LossReason::Shutdown`](crate::LossReason::Shutdown), and all of them are released before this returns. A second call waits for the
    /// same end. Dropping the future does not stop the shutdown.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if not all locks could be released; the server frees the rest when their ttl is over.
    /// [`LockError::Configuration`] if the runtime of [`Options::runtime`] has ended: nothing is left to release then, and what the backend
    /// keeps outside of that runtime ends with the last clone of the client.
    pub async fn shutdown(&self) -> Result<(), LockError> {
        self.core.shut_down().await
    }

    /// Waits until the guards and requests of this client that were dropped before the call are released. In a forked child it returns at once.
    ///
    /// A release that fails is retried until the ttl is over, or for as long as the request would have
    /// [reserved](crate::LockRequest::at_least) the name, and `drain` waits as long. `tokio::time::timeout` limits it.
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

    /// Returns the counters of the client.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core.stats.snapshot()
    }

    /// Returns what the backend can do.
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

    /// The holder with its name relative to this scope.
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
