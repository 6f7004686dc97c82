//! What the suite needs to know of the backend in memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use conformance_tests::{Fault, Harness, Injection, Namespace};
use lock_core::{DistributedLock, LockError, LockName, MemoryLock};

/// A store per namespace.
pub(crate) struct MemoryHarness {
    name: &'static str,
    skips: &'static str,
    client: fn(&MemoryLock) -> MemoryLock,
    stores: Mutex<HashMap<String, MemoryLock>>,
}

impl MemoryHarness {
    /// Each lock has a lease of its own.
    pub(crate) fn separate_leases() -> Self {
        Self::new("memory", include_str!("skips/memory.txt"), MemoryLock::client)
    }

    /// A client has one lease for many locks, as servers with sessions have them.
    pub(crate) fn shared_leases() -> Self {
        let skips = include_str!("skips/memory-shared-leases.txt");
        Self::new("memory, shared leases", skips, MemoryLock::sharing_leases)
    }

    fn new(name: &'static str, skips: &'static str, client: fn(&MemoryLock) -> MemoryLock) -> Self {
        Self {
            name,
            skips,
            client,
            stores: Mutex::default(),
        }
    }

    fn store(&self, namespace: &Namespace) -> MemoryLock {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        stores.entry(namespace.name().to_owned()).or_default().client()
    }
}

#[async_trait]
impl Harness for MemoryHarness {
    fn name(&self) -> &str {
        self.name
    }

    fn known_skips(&self) -> Option<&str> {
        Some(self.skips)
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        Ok(Arc::new((self.client)(&self.store(namespace))))
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let store = self.store(namespace);
        let mut left: Vec<_> = store
            .list("")
            .await?
            .iter()
            .map(|h| format!("{:?} held by {h}", h.name))
            .collect();
        left.extend((0..store.waiters()).map(|_| "a waiter".to_owned()));
        Ok(Some(left))
    }

    async fn in_line(&self, namespace: &Namespace, _: &LockName) -> Result<Option<usize>, LockError> {
        // Nobody waits for two names of one namespace at a time.
        Ok(Some(self.store(namespace).waiters()))
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        let store = self.store(namespace);
        match fault {
            Fault::Expire(name) => store.expire(name),
            Fault::Steal(name) => store.steal(name).is_some(),
            _ => return Ok(Injection::NotPossible),
        };
        Ok(Injection::Done)
    }

    fn connects_without_runtime(&self) -> bool {
        true
    }
}
