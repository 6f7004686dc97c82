//! The harness of a backend with a bug.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use async_trait::async_trait;
use lock_core::{DistributedLock, LockError, LockName};
use tokio::runtime::Handle;

use super::fence::BrokenFence;
use super::shared::Shared;
use super::{Broken, Bug};
use crate::harness::{Fault, Harness, Injection, Namespace, Resource};

/// A harness whose clients all have the bug. For one namespace.
pub(crate) struct BrokenHarness {
    inner: Arc<dyn Harness>,
    bug: Bug,
    shared: Arc<Shared>,
    clients: AtomicUsize,
}

impl BrokenHarness {
    pub(crate) fn new(inner: Arc<dyn Harness>, bug: Bug) -> Self {
        Self {
            inner,
            bug,
            shared: Arc::default(),
            clients: AtomicUsize::new(0),
        }
    }

    fn broken(&self, inner: Arc<dyn DistributedLock>) -> Arc<dyn DistributedLock> {
        Arc::new(Broken {
            inner,
            bug: self.bug,
            shared: Arc::clone(&self.shared),
            number: self.clients.fetch_add(1, Ordering::Relaxed),
            drawn: AtomicU64::new(0),
        })
    }
}

#[async_trait]
impl Harness for BrokenHarness {
    fn name(&self) -> &str {
        self.inner.name()
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        Ok(self.broken(self.inner.client(namespace).await?))
    }

    async fn address(&self, namespace: &Namespace) -> Result<Option<String>, LockError> {
        self.inner.address(namespace).await
    }

    async fn client_at(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        Ok(self.broken(self.inner.client_at(namespace, address).await?))
    }

    async fn client_on(&self, namespace: &Namespace, runtime: Handle) -> Result<Arc<dyn DistributedLock>, LockError> {
        Ok(self.broken(self.inner.client_on(namespace, runtime).await?))
    }

    fn committing_request(&self) -> &[u8] {
        self.inner.committing_request()
    }

    fn is_reply(&self, bytes: &[u8]) -> bool {
        self.inner.is_reply(bytes)
    }

    /// With a bug, as far as the clients know: some keep the server from knowing. Without one, who waits by its own account may
    /// not have come to the server yet.
    async fn in_line(&self, namespace: &Namespace, name: &LockName) -> Result<Option<usize>, LockError> {
        if self.bug == Bug::Nothing
            && let Some(seen) = self.inner.in_line(namespace, name).await?
        {
            return Ok(Some(seen));
        }
        Ok(Some(self.shared.lock().in_line.get(name).copied().unwrap_or_default()))
    }

    async fn over(&self, namespace: &Namespace) {
        self.inner.over(namespace).await;
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        self.inner.leftovers(namespace).await
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        self.inner.inject(namespace, fault).await
    }

    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        match self.bug {
            Bug::FenceAdmitsWithoutAMark | Bug::FenceForgetsReaders | Bug::FenceTakesWhatDiffers => {
                Ok(Some(Arc::new(BrokenFence::new(self.bug))))
            }
            _ => self.inner.resource(namespace, resource).await,
        }
    }

    fn leases_are_connections(&self) -> bool {
        self.inner.leases_are_connections()
    }

    fn leases_count_from_the_call(&self) -> bool {
        self.inner.leases_count_from_the_call()
    }

    fn acquisitions_renew(&self) -> bool {
        self.inner.acquisitions_renew()
    }

    fn connects_without_runtime(&self) -> bool {
        self.inner.connects_without_runtime()
    }
}
