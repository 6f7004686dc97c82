//! The backend in memory: the whole contract for clients of one store in one process, and for tests.

mod store;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::oneshot;
use tokio::time;

use crate::{
    Attempt, Busy, Capabilities, Claim, Clock, DistributedLock, FencingToken, Holder, Lease, LockError, LockName,
    LossReason, Released, Renewal, Scope, ServerInfo, Wait,
};
use store::{Client, Store, Waiter};

/// Locks in memory, with queues, tokens and leases like those of a server.
///
/// [`expire`](Self::expire), [`steal`](Self::steal) and [`set_reachable`](Self::set_reachable) let a unit test see what its code does when a
/// lock is lost or the server is out of reach. Keep a [`client`](Self::client) of the store for that:
///
/// ```
/// use fencelock::{Locks, LossReason, MemoryLock};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
/// let memory = MemoryLock::new();
/// let locks = Locks::new(memory.client());
/// let guard = locks.lock("job").await?;
/// memory.steal(&"job".parse()?);
/// assert!(!guard.is_held());
/// assert_eq!(guard.lost().await, LossReason::NotHeld);
/// # Ok(()) }
/// ```
///
/// Leases end by the clock of the system, also in a test whose tokio time is paused: there, waits and renewals take no real time, so
/// a ttl does not pass. A clock that the test moves by hand makes it pass:
///
/// ```
/// use std::time::Duration;
/// use fencelock::{Clock, Locks, MemoryLock, Options};
/// use tokio::runtime::Handle;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
/// let (clock, hand) = Clock::manual();
/// let memory = MemoryLock::with_clock(clock);
/// let locks = Locks::with_options(memory.client(), Options::new().runtime(Handle::current()));
/// let guard = locks.lock("job").ttl(Duration::from_secs(10)).await?;
/// hand.advance(Duration::from_secs(11));
/// assert!(!guard.is_held());
/// # Ok(()) }
/// ```
pub struct MemoryLock {
    client: Arc<Client>,
}

impl Default for MemoryLock {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryLock {
    /// A client of a new, empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::with_clock(Clock::system())
    }

    /// A client of a new store that measures its leases with `clock`.
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        let store = Arc::new(Store {
            out_of_reach: AtomicBool::new(false),
            state: Mutex::default(),
            clock,
        });
        Self {
            client: Client::of(store, false),
        }
    }

    /// Another client of the same store, as another process would be of the same server.
    #[must_use]
    pub fn client(&self) -> Self {
        Self {
            client: Client::of(Arc::clone(&self.client.store), self.client.shares),
        }
    }

    /// A client of the same store whose locks of one ttl share one lease, as on servers with sessions.
    #[must_use]
    pub fn sharing_leases(&self) -> Self {
        Self {
            client: Client::of(Arc::clone(&self.client.store), true),
        }
    }

    /// Ends the lock as if its ttl were over. All its holders are told at once. False if it was not held.
    pub fn expire(&self, name: &LockName) -> bool {
        !self.client.store.free(name, LossReason::Expired).is_empty()
    }

    /// Gives the lock to a stranger, who keeps it for as long as its holder would have, in the same mode. All its holders are told at once.
    /// Returns the stranger's token; `None` if it was not held.
    pub fn steal(&self, name: &LockName) -> Option<FencingToken> {
        let mut state = self.client.store.lock();
        let robbed = state.take(name, |_| true);
        let first = &robbed.first()?.claim;
        let stranger = Claim::new(name.clone(), first.ttl())
            .with_label("a stranger")
            .with_mode(first.mode());
        let no_client = Client::of(Arc::clone(&self.client.store), false);
        let now = self.client.store.clock.now();
        let grant = state.grant(&no_client, &stranger, now);
        state.grant_next(name, now);
        drop(state);
        for entry in &robbed {
            entry.tell(LossReason::NotHeld);
        }
        Some(grant.token)
    }

    /// Makes every request of every client of the store fail with [`LockError::Unavailable`], as if the server were out of reach, until it is
    /// called with `true`. Waits that have begun go on.
    ///
    /// ```
    /// use fencelock::{LockError, Locks, MemoryLock};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
    /// let memory = MemoryLock::new();
    /// let locks = Locks::new(memory.client());
    /// memory.set_reachable(false);
    /// assert!(matches!(locks.try_lock("job").await, Err(LockError::Unavailable { .. })));
    /// memory.set_reachable(true);
    /// locks.lock("job").await?.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// A request that waits asks again until its wait is over, or for [`Options::op_timeout`](crate::Options::op_timeout): give one of a few
    /// milliseconds to tests whose time is real.
    pub fn set_reachable(&self, reachable: bool) {
        self.client.store.out_of_reach.store(!reachable, Ordering::SeqCst);
    }

    /// How many claims wait at the store, over all names.
    #[must_use]
    pub fn waiters(&self) -> usize {
        self.client.store.lock().queues.values().map(VecDeque::len).sum()
    }
}

#[async_trait]
impl DistributedLock for MemoryLock {
    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities::new(Scope::Process)
            .with_ttl_range(Duration::from_millis(20), Duration::from_secs(365 * 24 * 60 * 60))
            .with_fairness()
            .with_inspection()
            .with_reservations()
            .with_shared()
            .with_permits();
        if self.client.shares {
            capabilities.with_shared_leases()
        } else {
            capabilities
        }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.client.store.reach("acquire")?;
        let now = self.clock().now();
        self.client.store.lock().try_acquire(&self.client, claim, now)
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.client.store.reach("renewal")?;
        let now = self.clock().now();
        Ok(self.client.store.lock().renew(lease, now))
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.client.store.reach("release")?;
        let now = self.clock().now();
        let keep = keep.map(|rest| now + rest);
        Ok(self.client.store.lock().release(claim, keep, now))
    }

    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        self.client.store.reach("acquire")?;
        let clock = self.clock();
        let (found, mut granted) = {
            let mut state = self.client.store.lock();
            let found = match state.try_acquire(&self.client, claim, clock.now())? {
                Attempt::Busy(busy) if wait.is_over(clock.now()) => return Ok(busy.into()),
                Attempt::Busy(busy) => busy,
                granted => return Ok(granted),
            };
            let (reply, granted) = oneshot::channel();
            let waiter = Waiter {
                claim: claim.clone(),
                client: Arc::clone(&self.client),
                reply,
            };
            state.queues.entry(claim.name().clone()).or_default().push_back(waiter);
            (found, granted)
        };
        let place = Place {
            store: &self.client.store,
            claim,
        };
        wait.busy(&found);
        loop {
            let remaining = {
                let mut state = place.store.lock();
                let now = clock.now();
                state.settle(claim.name(), now);
                // The one that ends first makes room.
                let first = state.holds(claim.name()).iter().min_by_key(|entry| state.until(entry));
                let holder = first.map_or_else(Holder::new, |entry| state.holder(entry, now));
                // Left under the same mutex: nothing can be granted to a wait that is over.
                if wait.is_over(now) && state.leave_queue(claim) {
                    // Those behind it may go together with those that hold.
                    state.grant_next(claim.name(), now);
                    return Ok(Busy::default().with_holder(holder).into());
                }
                holder.remaining
            };
            // There is no event when a lease runs out: look again then.
            let mut nap = remaining.unwrap_or_default().max(Duration::from_millis(1));
            if let Some(deadline) = wait.deadline() {
                nap = nap.min(deadline.since(clock.now()));
            }
            tokio::select! {
                biased;
                grant = &mut granted => {
                    let gone = |_| LockError::unavailable("acquire", "the place in the queue is gone");
                    return grant.map(Attempt::Granted).map_err(gone);
                }
                () = time::sleep(nap) => {}
            }
        }
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        self.client.store.reach("reservation")?;
        let now = self.clock().now();
        Ok(self.client.store.lock().reserve(claim, now + length, now))
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.client.store.reach("asking who holds a lock")?;
        let now = self.clock().now();
        let mut state = self.client.store.lock();
        state.settle(name, now);
        Ok(state.holders(name, now))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.client.store.reach("listing locks")?;
        let now = self.clock().now();
        let state = self.client.store.lock();
        let named = state.locks.iter().filter(|(name, _)| name.as_str().starts_with(prefix));
        let held = named.flat_map(|(_, entries)| entries);
        let held = held.filter(|entry| state.until(entry).is_some_and(|until| until > now));
        Ok(held.map(|entry| state.holder(entry, now)).collect())
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.client.store.reach("forced release")?;
        Ok(self.client.store.free(name, LossReason::NotHeld))
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        Ok(ServerInfo::new("memory", env!("CARGO_PKG_VERSION")))
    }

    async fn close(&self) -> Result<(), LockError> {
        let now = self.clock().now();
        let mut state = self.client.store.lock();
        let ended = state.end(self.client.serial, now);
        state.sessions.retain(|session| session.client != self.client.serial);
        drop(state);
        for revoker in ended {
            revoker.revoke(LossReason::Revoked);
        }
        Ok(())
    }

    fn clock(&self) -> Clock {
        self.client.store.clock.clone()
    }
}

/// A place in the store's queue; dropping it leaves the queue.
struct Place<'a> {
    store: &'a Store,
    claim: &'a Claim,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.store.lock();
        state.leave_queue(self.claim);
        state.grant_next(self.claim.name(), self.store.clock.now());
    }
}

impl fmt::Debug for MemoryLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.client.store.lock();
        f.debug_struct("MemoryLock")
            .field("held", &state.locks.len())
            .finish_non_exhaustive()
    }
}
