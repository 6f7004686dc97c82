//! Backends with a bug, to show that the suite finds it.

mod bug;
mod fence;
mod shared;
mod waiting;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, FencingToken, Grant, Holder, Lease, LockError, LockName,
    Mode, Released, Renewal, Scope, ServerInfo, Stamp, Wait,
};

use crate::harness::Resource;
pub(crate) use bug::Bug;
use fence::BrokenFence;
use shared::Shared;

/// A bug in all clients of one case.
pub(crate) struct Breakage {
    bug: Bug,
    shared: Arc<Shared>,
    clients: AtomicUsize,
}

impl Breakage {
    pub(crate) fn new(bug: Bug) -> Self {
        Self {
            bug,
            shared: Arc::default(),
            clients: AtomicUsize::new(0),
        }
    }

    /// The client with the bug.
    pub(crate) fn of(&self, inner: Arc<dyn DistributedLock>) -> Arc<dyn DistributedLock> {
        Arc::new(Broken {
            inner,
            bug: self.bug,
            shared: Arc::clone(&self.shared),
            number: self.clients.fetch_add(1, Ordering::Relaxed),
            drawn: AtomicU64::new(0),
        })
    }

    /// What takes the place of the resource, if the bug is there.
    pub(crate) fn resource(&self) -> Option<Arc<dyn Resource>> {
        let is_here = [
            Bug::FenceAdmitsWithoutAMark,
            Bug::FenceForgetsReaders,
            Bug::FenceTakesWhatDiffers,
        ];
        is_here
            .contains(&self.bug)
            .then(|| Arc::new(BrokenFence::new(self.bug)) as _)
    }

    /// Whether some of those that wait are not in line at the server.
    pub(crate) fn hides_the_line(&self) -> bool {
        self.bug != Bug::Nothing
    }

    /// How many wait for the name, as far as the clients know.
    pub(crate) fn in_line(&self, name: &LockName) -> usize {
        self.shared.lock().in_line.get(name).copied().unwrap_or_default()
    }
}

/// A client with a bug around one that has none.
struct Broken {
    inner: Arc<dyn DistributedLock>,
    bug: Bug,
    shared: Arc<Shared>,
    number: usize,
    /// Tokens that this client has drawn by itself.
    drawn: AtomicU64,
}

impl Broken {
    fn is(&self, bug: Bug) -> bool {
        self.bug == bug
    }

    fn now(&self) -> Stamp {
        self.clock().now()
    }

    /// The claim as the backend gets to see it.
    fn sent(&self, claim: &Claim) -> Claim {
        /// A ttl that no case outlasts.
        const ENDLESS: Duration = Duration::from_secs(600);
        let mut state = self.shared.lock();
        let stand_in = |name: LockName| match (Claim::new(name, claim.ttl()), claim.own_lease()) {
            (stand_in, true) => stand_in.with_own_lease(),
            (stand_in, false) => stand_in,
        };
        match self.bug {
            Bug::OwnerPerClient => {
                let owners = state.owners.entry((self.number, claim.name().clone()));
                owners.or_insert_with(|| stand_in(claim.name().clone())).clone()
            }
            Bug::NamesAreFolded => {
                let folded = LockName::new(claim.name().as_str().trim().to_lowercase());
                let name = folded.unwrap_or_else(|_| claim.name().clone());
                let stand_ins = state.stand_ins.entry(claim.owner());
                stand_ins.or_insert_with(|| stand_in(name)).clone()
            }
            Bug::LateRequestIsHonoured if state.released.contains(&claim.owner()) => {
                let endless = || Claim::new(claim.name().clone(), ENDLESS).with_own_lease();
                state.stand_ins.entry(claim.owner()).or_insert_with(endless).clone()
            }
            Bug::OnePermitTooMany => match claim.mode() {
                Mode::Permit { of } => claim.clone().with_mode(Mode::Permit { of: of + 1 }),
                _ => claim.clone(),
            },
            _ => claim.clone(),
        }
    }

    /// What the backend answered, as the client gets to see it.
    fn answered(&self, claim: &Claim, attempt: Attempt) -> Result<Attempt, LockError> {
        let grant = match attempt {
            Attempt::Granted(grant) => grant,
            busy if self.is(Bug::BusyIsAnError) => {
                let reason = format!("the lock could not be taken: {busy:?}");
                return Err(LockError::unavailable("acquire", reason));
            }
            busy => return Ok(busy),
        };
        if self.is(Bug::BlockIsNotCounted) {
            let first = self.shared.lock().count(claim.name());
            let last = first + u64::from(claim.tokens_wanted().get()) - 1;
            if let (Ok(first), Ok(last)) = (FencingToken::new(first), FencingToken::new(last)) {
                let grant = Grant::new(claim.clone(), last, grant.lease);
                return Ok(Attempt::Granted(grant.with_first_token(first)));
            }
        }
        let token = self.token(claim, grant.token);
        let lease = self.lease(claim, &grant.lease);
        let held = (claim.clone(), token);
        self.shared.lock().holders.insert(claim.name().clone(), held);
        let is_as_it_was = token == grant.token && grant.claim == *claim;
        if is_as_it_was && lease.deadline() == grant.lease.deadline() {
            return Ok(Attempt::Granted(grant));
        }
        Ok(Attempt::Granted(Grant::new(claim.clone(), token, lease)))
    }

    fn token(&self, claim: &Claim, right: FencingToken) -> FencingToken {
        let mut state = self.shared.lock();
        if let Some(token) = state.tokens.get(&claim.owner()) {
            return *token;
        }
        let number = match self.bug {
            Bug::TokenIsKeptByForce => match state.forced.remove(claim.name()) {
                Some(token) => token.get(),
                None => return right,
            },
            Bug::TokenRestartsAfterRelease => state.count(claim.name()),
            Bug::TokensAreRandom => fastrand::u64(1..1 << 53),
            Bug::TokenPerSession => self.drawn.fetch_add(1, Ordering::SeqCst) + 1,
            _ => return right,
        };
        let token = FencingToken::new(number).unwrap_or(right);
        state.tokens.insert(claim.owner(), token);
        token
    }

    fn lease(&self, claim: &Claim, right: &Lease) -> Lease {
        match (self.bug, right.id()) {
            #[cfg(feature = "faults")]
            (Bug::DeadlineFromALateReply, _) => Lease::for_claim(claim, self.now()),
            // One that the backend does not know, and so cannot end by itself.
            (Bug::LossIsNeverTold, lock_core::LeaseId::Claim(_)) => Lease::for_claim(claim, self.now()),
            (Bug::ExpiredIsStillHeld, _) => Lease::for_claim(claim, self.now() + claim.ttl()),
            (Bug::DeadlineFromTheAcquireOnASharedLease, lock_core::LeaseId::Shared(id)) => {
                Lease::shared(Arc::clone(id), right.ttl(), self.now())
            }
            _ => right.clone(),
        }
    }

    /// A grant that the backend knows nothing of.
    fn made_up(&self, claim: &Claim) -> Attempt {
        let mut state = self.shared.lock();
        let last = state.holders.get(claim.name());
        let last = last.map_or(FencingToken::MAX.get() / 2, |(_, token)| token.get());
        let token = FencingToken::new(last + 1).unwrap_or(FencingToken::MAX);
        state.holders.insert(claim.name().clone(), (claim.clone(), token));
        let lease = Lease::for_claim(claim, self.now());
        Attempt::Granted(Grant::new(claim.clone(), token, lease))
    }

    /// Whether the claim that was granted last holds the name in that mode, as far as the clients know.
    fn is_held_as(&self, name: &LockName, mode: Mode) -> bool {
        self.shared.lock().holder(name).is_some_and(|held| held.mode() == mode)
    }

    /// Whether the claim holds its name, as far as the clients know.
    fn holds(&self, claim: &Claim) -> bool {
        let state = self.shared.lock();
        state
            .holder(claim.name())
            .is_some_and(|held| held.owner() == claim.owner())
    }
}

#[async_trait]
impl DistributedLock for Broken {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        // A child process would have no bug.
        capabilities.scope = Scope::Process;
        if self.is(Bug::QueueIsOutOfOrder) {
            return capabilities.with_fairness();
        }
        capabilities
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        match self.bug {
            Bug::AskingAgainKeepsTheOldTtl if self.holds(claim) => {
                let held = self.shared.lock().holders.get(claim.name()).cloned();
                let token = held.map_or(FencingToken::MAX, |(_, token)| token);
                let lease = Lease::for_claim(claim, self.now());
                return Ok(Attempt::Granted(Grant::new(claim.clone(), token, lease)));
            }
            Bug::AWriterIsGrantedBesideReaders
                if claim.mode() == Mode::Exclusive && self.is_held_as(claim.name(), Mode::Shared) =>
            {
                return Ok(self.made_up(claim));
            }
            Bug::DowngradeReleasesFirst
                if claim.mode() == Mode::Shared
                    && self.holds(claim)
                    && self.is_held_as(claim.name(), Mode::Exclusive) =>
            {
                self.inner.release(claim, None).await?;
                // Time for those that poll.
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            Bug::TokenPerAttempt => {
                let mut state = self.shared.lock();
                if !state.tokens.contains_key(&claim.owner()) {
                    let token = FencingToken::new(state.count(claim.name())).unwrap_or(FencingToken::MAX);
                    state.tokens.insert(claim.owner(), token);
                }
            }
            _ => {}
        }
        let attempt = self.inner.try_acquire(&self.sent(claim)).await?;
        self.answered(claim, attempt)
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        let renewal = self.inner.renew(lease).await?;
        match (self.bug, renewal, lease.claim()) {
            (Bug::RenewalResurrects, Renewal::NotHeld, Some(claim)) => match self.inner.try_acquire(claim).await? {
                Attempt::Granted(_) => Ok(Renewal::Renewed),
                _ => Ok(Renewal::NotHeld),
            },
            (Bug::LossIsNeverTold, Renewal::NotHeld, Some(_)) => {
                Err(LockError::unavailable("renew", "nothing was renewed"))
            }
            _ => Ok(renewal),
        }
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        if keep.is_some() {
            let keep = keep.filter(|_| !self.is(Bug::ReservationIsIgnored));
            return self.inner.release(claim, keep).await;
        }
        let holder = {
            let mut state = self.shared.lock();
            state.released.insert(claim.owner());
            if self.is(Bug::TokenRestartsAfterRelease) {
                state.counters.remove(claim.name());
            }
            if state.abandoned.contains(&claim.owner()) {
                return Ok(Released::NotHeld);
            }
            state.holder(claim.name()).cloned()
        };
        let released = match (self.bug, holder) {
            (Bug::ReleaseDoesNothing, _) => return Ok(Released::Released),
            (Bug::ReleaseWithoutOwnerCheck, Some(holder)) => self.inner.release(&holder, None).await?,
            _ => self.inner.release(&self.sent(claim), None).await?,
        };
        if self.holds(claim) {
            self.shared.lock().holders.remove(claim.name());
        }
        Ok(released)
    }

    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        match self.try_acquire(claim).await? {
            Attempt::Busy(found) => wait.busy(&found),
            granted => return Ok(granted),
        }
        self.wait(claim, wait.deadline()).await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        self.inner.reserve(claim, length).await
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.inner.holders(name).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.inner.list(prefix).await
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        if self.is(Bug::TokenIsKeptByForce) {
            let mut state = self.shared.lock();
            if let Some((_, token)) = state.holders.get(name).cloned() {
                state.forced.insert(name.clone(), token);
            }
        }
        self.inner.force_release(name).await
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        self.inner.server_info().await
    }

    async fn close(&self) -> Result<(), LockError> {
        self.inner.close().await
    }

    fn clock(&self) -> Clock {
        self.inner.clock()
    }
}

impl fmt::Debug for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Broken")
            .field("bug", &self.bug)
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}
