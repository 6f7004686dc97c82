//! The backend in memory, for one process and for tests.

mod store;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time;

use crate::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, FencingToken, Holder, Lease, LockError, LockName, LossReason,
    Released, Renewal, Scope, ServerInfo, Stamp, Wait,
};
use store::{Client, State, Store};

/// Backend in memory, with queues, tokens and leases like those of a server.
///
/// With [`expire`](Self::expire), [`steal`](Self::steal) and [`set_reachable`](Self::set_reachable) a unit test takes a lock away or makes the
/// server unreachable. Keep a [`client`](Self::client) of the store for that:
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
/// Leases end by the clock of the system, also in a test whose tokio time is paused: there, waits and renewals take no real time, and
/// a ttl never passes. A manual clock makes it pass:
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
#[must_use]
pub struct MemoryLock {
    store: Arc<Store>,
    client: Client,
}

impl Default for MemoryLock {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryLock {
    /// A client of a new, empty store.
    pub fn new() -> Self {
        Self::with_clock(Clock::system())
    }

    /// A client of a new store that measures its leases with `clock`.
    pub fn with_clock(clock: Clock) -> Self {
        Self {
            store: Arc::new(Store::new(clock)),
            client: Client::new(false),
        }
    }

    /// Another client of the same store, as of another process.
    pub fn client(&self) -> Self {
        self.client_that(self.client.shares_leases)
    }

    /// A client of the same store whose locks of one ttl share one lease, as on servers with sessions.
    pub fn sharing_leases(&self) -> Self {
        self.client_that(true)
    }

    fn client_that(&self, shares_leases: bool) -> Self {
        Self {
            store: Arc::clone(&self.store),
            client: Client::new(shares_leases),
        }
    }

    /// Ends the lock as if its ttl were over. Its holders learn it at once. Returns false if it was not held.
    pub fn expire(&self, name: &LockName) -> bool {
        let ended = self.store.with(|state, now| state.free(name, LossReason::Expired, now));
        !ended.is_empty()
    }

    /// Gives the lock to another owner, for the ttl and in the mode of its holder. Its holders learn it at once. Returns the token of the new
    /// owner; `None` if the lock was not held.
    pub fn steal(&self, name: &LockName) -> Option<FencingToken> {
        self.store.with(|state, now| state.steal(name, now))
    }

    /// With `false`, makes all requests of all clients of the store fail with [`LockError::Unavailable`], until it is called with `true`. Waits
    /// that have begun go on.
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
    /// A request that waits is retried until its wait is over, or for [`Options::op_timeout`](crate::Options::op_timeout): set one of a few
    /// milliseconds in tests with real time.
    pub fn set_reachable(&self, reachable: bool) {
        self.store.is_out_of_reach.store(!reachable, Ordering::SeqCst);
    }

    /// How many claims wait at the store, over all names.
    #[must_use]
    pub fn waiters(&self) -> usize {
        self.store.with(|state, _| state.waiters())
    }

    /// Does the work of a request, unless a test has made the store unreachable.
    fn request<T>(&self, operation: &'static str, work: impl FnOnce(&mut State, Stamp) -> T) -> Result<T, LockError> {
        if self.store.is_out_of_reach.load(Ordering::SeqCst) {
            let message = "the store is out of reach: MemoryLock::set_reachable";
            return Err(LockError::unavailable(operation, message).unsent());
        }
        Ok(self.store.with(work))
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
        if self.client.shares_leases {
            capabilities.with_shared_leases()
        } else {
            capabilities
        }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.request("acquire", |state, now| state.try_acquire(self.client, claim, now))?
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.request("renewal", |state, now| state.renew(lease, now))
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.request("release", |state, now| {
            state.release(claim, keep.map(|rest| now + rest), now)
        })
    }

    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        let (attempt, granted) = self.request("acquire", |state, now| {
            let attempt = state.try_acquire(self.client, claim, now)?;
            let waits = matches!(attempt, Attempt::Busy(_)) && !wait.is_over(now);
            let granted = waits.then(|| state.enter_queue(self.client, claim));
            Ok::<_, LockError>((attempt, granted))
        })??;
        let (Attempt::Busy(mut busy), Some(mut granted)) = (attempt.clone(), granted) else {
            return Ok(attempt);
        };
        let _place = Place {
            store: &self.store,
            claim,
        };
        wait.busy(&busy);
        loop {
            // There is no event when a lease runs out: look again then.
            let mut nap = busy.retry_after.unwrap_or_default().max(Duration::from_millis(1));
            if let Some(deadline) = wait.deadline() {
                nap = nap.min(deadline.since(self.store.clock.now()));
            }
            tokio::select! {
                biased;
                grant = &mut granted => {
                    let gone = |_| LockError::unavailable("acquire", "the place in the queue is gone");
                    return grant.map(Attempt::Granted).map_err(gone);
                }
                () = time::sleep(nap) => {}
            }
            // Under one mutex: nothing can be granted to a wait that is over.
            let (found, is_over) = self.store.with(|state, now| {
                let found = state.busy(claim.name(), now);
                (found, wait.is_over(now) && state.leave_queue(claim, now))
            });
            busy = found;
            if is_over {
                return Ok(busy.into());
            }
        }
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        self.request("reservation", |state, now| state.reserve(claim, now + length, now))
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.request("asking who holds a lock", |state, now| state.holders(name, now))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.request("listing locks", |state, now| state.list(prefix, now))
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.request("forced release", |state, now| {
            state.free(name, LossReason::NotHeld, now)
        })
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        Ok(ServerInfo::new("memory", env!("CARGO_PKG_VERSION")))
    }

    async fn close(&self) -> Result<(), LockError> {
        self.store.with(|state, now| state.close(self.client, now));
        Ok(())
    }

    fn clock(&self) -> Clock {
        self.store.clock.clone()
    }
}

/// A place in the store's queue; dropping it leaves the queue.
struct Place<'a> {
    store: &'a Store,
    claim: &'a Claim,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.store.with(|state, now| state.leave_queue(self.claim, now));
    }
}

impl fmt::Debug for MemoryLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLock").finish_non_exhaustive()
    }
}
