//! A backend of one's own, written against the public API alone, and the suite run on it.
//!
//! Three methods and `capabilities` are all that a correct backend needs; waiting, renewing, cleaning up and the rest
//! come from `lock-core`. This one keeps its locks in a map, for the tasks of one process.

use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use conformance_tests::{Harness, Namespace};
use lock_core::{
    Attempt, Busy, Capabilities, Claim, DistributedLock, FencingToken, Grant, Lease, LockError, LockName, OwnerId,
    Released, Renewal, Scope, Stamp,
};

/// The backend.
#[derive(Clone, Debug, Default)]
struct MapLock(Arc<Mutex<Store>>);

#[derive(Debug, Default)]
struct Store {
    held: HashMap<LockName, (OwnerId, FencingToken, Stamp)>,
    last_token: u64,
}

impl MapLock {
    /// The store as it is now: without that lock if its time is over.
    fn store(&self, name: &LockName, now: Stamp) -> MutexGuard<'_, Store> {
        let mut store = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        store.held.retain(|held, (_, _, until)| held != name || now < *until);
        store
    }
}

#[async_trait]
impl DistributedLock for MapLock {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Process)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let now = self.clock().now();
        let mut store = self.store(claim.name(), now);
        let token = match store.held.get(claim.name()) {
            Some((owner, token, _)) if *owner == claim.owner() => *token,
            Some((_, _, until)) => return Ok(Busy::default().with_retry_after(until.since(now)).into()),
            None => {
                // Never below the clock, so that a new store outranks every older one.
                let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                store.last_token = (store.last_token + 1).max(clock.as_micros() as u64);
                FencingToken::new(store.last_token).map_err(|e| LockError::failed("acquire", e))?
            }
        };
        let held = (claim.owner(), token, now + claim.ttl());
        store.held.insert(claim.name().clone(), held);
        let lease = Lease::for_claim(claim, now);
        Ok(Attempt::Granted(Grant::new(claim.clone(), token, lease)))
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        let (now, claim) = (self.clock().now(), lease.claim().ok_or(LockError::closed())?);
        match self.store(claim.name(), now).held.get_mut(claim.name()) {
            Some((owner, _, until)) if *owner == claim.owner() => *until = now + lease.ttl(),
            _ => return Ok(Renewal::NotHeld),
        }
        Ok(Renewal::Renewed)
    }

    async fn release(&self, claim: &Claim, _: Option<Duration>) -> Result<Released, LockError> {
        let mut store = self.store(claim.name(), self.clock().now());
        match store.held.get(claim.name()) {
            Some((owner, ..)) if *owner == claim.owner() => store.held.remove(claim.name()),
            _ => return Ok(Released::NotHeld),
        };
        Ok(Released::Released)
    }
}

/// What the suite needs to know of it.
#[derive(Default)]
struct MapHarness(Mutex<HashMap<String, MapLock>>);

#[async_trait]
impl Harness for MapHarness {
    fn name(&self) -> &str {
        "a map"
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        let mut stores = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::new(stores.entry(namespace.name().to_owned()).or_default().clone()))
    }
}

fn main() -> ExitCode {
    conformance_tests::run(MapHarness::default())
}
