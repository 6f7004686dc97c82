//! The trait that a backend implements.

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time;

use crate::{
    Attempt, Capabilities, Claim, Clock, Holder, Lease, LockError, LockName, Released, Renewal, ServerInfo, Wait,
};

/// What a backend implements. Users hold [`Locks`](crate::Locks) and never call this.
///
/// [`capabilities`](Self::capabilities), [`try_acquire`](Self::try_acquire), [`renew`](Self::renew) and
/// [`release`](Self::release) are enough for a correct backend. Everything else is speed or inspection.
///
/// # Contract
///
/// - Every call is idempotent per [`Claim::owner`]: asking again for what is already held grants it again, with the
///   same token where the backend can know it, and with a full ttl.
/// - Every future may be dropped at any await. After an error or a drop the core calls `release(claim, None)`.
/// - Nothing of an abandoned claim outlives one ttl, even if its request reaches the server *after* that release.
/// - Every call ends within the backend's own [`op_timeout`](Capabilities::op_timeout), also on a connection that
///   swallows everything. Only [`acquire`](Self::acquire) may take longer, up to its deadline, once it has told that the name is
///   busy, and [`list`](Self::list), which has that time for each request.
/// - Every future is polled within the runtime of the client, also its first poll, which may happen in the task of a caller. It must not block
///   the thread.
/// - At most one claim per name is under way at a time from one client: the core sees to it, except for claims that share a name.
///
/// The conformance suite (`conformance-tests`) proves all of it.
#[async_trait]
pub trait DistributedLock: fmt::Debug + Send + Sync + 'static {
    /// What this backend can do. Cheap, and the same for as long as the client lives.
    fn capabilities(&self) -> Capabilities;

    /// Takes the name if it is free; never waits for a holder.
    ///
    /// # Errors
    ///
    /// If the backend failed; the outcome is then unknown and the core releases the claim.
    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError>;

    /// Keeps the lease for another full ttl, if it is still there and still the same. Never brings back a lease that has ended.
    ///
    /// # Errors
    ///
    /// If the backend failed; the core asks again until the lease's deadline.
    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError>;

    /// Releases the claim if its owner holds the name, and takes it out of any queue.
    ///
    /// `keep`, for a claim that was [reserved](Self::reserve) only, is what is left of its reservation by the clock of the client, and not zero: the
    /// name stays reserved for that long, or to the end of the reservation. `None` ends the reservation. If the claim does not hold the name, a
    /// reservation is not changed.
    ///
    /// # Errors
    ///
    /// If the backend failed; the core asks again until the lease must have ended at the server.
    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError>;

    /// Takes the name, and waits for it if another claim holds it, until `wait` is over. Busy then, with nothing of the claim left at the server; the
    /// core asks for another claim after that.
    ///
    /// `wait` is told as soon as the server has said that the name is held ([`Wait::busy`]). The core needs to know: callers that do not
    /// wait are answered with that, and from then on no limit but the deadline holds. Before, the core ends the call after
    /// [`op_timeout`](Capabilities::op_timeout). It calls again after a failure that may pass.
    ///
    /// The provided one polls with [`try_acquire`](Self::try_acquire), with jitter, 5 to 250 ms apart. A server that queues can put the
    /// claim into its queue with the first request.
    ///
    /// # Errors
    ///
    /// If the backend failed; the core asks again or releases the claim.
    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        poll(self, claim, wait).await
    }

    /// Makes a reservation: if the claim holds the name, no other claim is granted it before `length` has passed from now on, even if the
    /// claim is not renewed any more, its process ends, or it is [released](Self::release) before. For claims with
    /// [`Claim::at_least`] only. [`Renewal::NotHeld`], and nothing is changed, if the claim does not hold the name.
    ///
    /// - It is called once for a claim. Renewals never shorten a reservation.
    /// - [`release`](Self::release) without `keep` ends it: the core calls that for a claim that never became a guard.
    /// - [`force_release`](Self::force_release) ends it.
    /// - [`holders`](Self::holders) and [`list`](Self::list) show the name for as long as it is reserved.
    /// - A request that reaches the server after the release of its claim changes nothing.
    /// - A claim that waits is granted the name soon after the reservation has ended, as after the end of a lease.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where the server cannot, or if the backend failed; the core then releases the claim.
    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let _ = (claim, length);
        Err(LockError::not_supported(RESERVATIONS))
    }

    /// Who holds the name now: one holder, or several that share it.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where the server cannot tell, or if the backend failed.
    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let _ = name;
        Err(LockError::not_supported("asking who holds a lock"))
    }

    /// Everything that is held under names that start with `prefix`, in the order of their names.
    ///
    /// The core sets no limit for the whole call: each request of it must end within the backend's
    /// [`op_timeout`](Capabilities::op_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where the server cannot tell, or if the backend failed.
    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        let _ = prefix;
        Err(LockError::not_supported("listing locks"))
    }

    /// Takes the name away from all that hold it, and says who they were.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where that is not possible, or if the backend failed.
    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let _ = name;
        Err(LockError::not_supported("releasing a lock by force"))
    }

    /// The product and version of the server, and its settings that put locks at risk. `fencelock check` prints them. Settings that the backend
    /// refuses to work with are errors at connect, and no warnings.
    ///
    /// # Errors
    ///
    /// [`LockError::NotSupported`] where that cannot be told, or if the backend failed.
    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        Err(LockError::not_supported("asking about the server"))
    }

    /// Ends what the client keeps on the server: leases and sessions do not outlive it.
    ///
    /// # Errors
    ///
    /// If the backend failed.
    async fn close(&self) -> Result<(), LockError> {
        Ok(())
    }

    /// The clock that the backend reads its send times from.
    fn clock(&self) -> Clock {
        Clock::system()
    }
}

/// The operation, in the words of [`LockError::NotSupported`].
pub(crate) const RESERVATIONS: &str = "keeping the name of a released lock taken (at_least)";

const FIRST_POLL: Duration = Duration::from_millis(5);
const LAST_POLL: Duration = Duration::from_millis(250);

async fn poll<L: DistributedLock + ?Sized>(lock: &L, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
    let clock = lock.clock();
    let op_timeout = lock.capabilities().op_timeout;
    let mut pause = FIRST_POLL;
    loop {
        let busy = match time::timeout(op_timeout, lock.try_acquire(claim)).await {
            Ok(Ok(Attempt::Busy(busy))) => busy,
            Ok(done) => return done,
            Err(_) => return Err(LockError::no_answer("acquire", op_timeout)),
        };
        wait.busy(&busy);
        let now = clock.now();
        if wait.is_over(now) {
            return Ok(busy.into());
        }
        let jitter = pause.mul_f64(0.5 + fastrand::f64());
        let next = jitter.min(busy.retry_after.unwrap_or(jitter).max(FIRST_POLL));
        let left = wait.deadline().map(|deadline| deadline.since(now));
        time::sleep(left.map_or(next, |left| next.min(left))).await;
        pause = (pause * 3 / 2).min(LAST_POLL);
    }
}

/// A pointer to a backend is one, as `Arc<dyn DistributedLock>`.
// It forwards the provided methods too, or a backend behind a pointer would fall back to polling.
#[async_trait]
impl<P> DistributedLock for P
where
    P: Deref<Target: DistributedLock> + fmt::Debug + Send + Sync + 'static,
{
    fn capabilities(&self) -> Capabilities {
        self.deref().capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.deref().try_acquire(claim).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.deref().renew(lease).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.deref().release(claim, keep).await
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        self.deref().acquire(claim, wait).await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        self.deref().reserve(claim, length).await
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.deref().holders(name).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.deref().list(prefix).await
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.deref().force_release(name).await
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        self.deref().server_info().await
    }

    async fn close(&self) -> Result<(), LockError> {
        self.deref().close().await
    }

    fn clock(&self) -> Clock {
        self.deref().clock()
    }
}
