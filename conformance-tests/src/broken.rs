//! Backends with a bug, to show that the suite finds it.

mod bug;
mod fence;
mod harness;
mod shared;
mod signs;
mod waiting;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, FencingToken, Grant, Holder, Lease, LockError, LockName,
    Mode, Released, Renewal, Scope, ServerInfo, Stamp, Wait,
};

use tokio::runtime::Handle;

pub(crate) use bug::Bug;
pub(crate) use harness::BrokenHarness;
use shared::{Held, Shared, State};

/// A client with a bug around one that has none.
struct Broken {
    inner: Arc<dyn DistributedLock>,
    /// On which the client was to work.
    runtime: Option<Handle>,
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
        let mut state = self.shared.lock();
        let stand_in = |name: LockName| {
            let stand_in = Claim::new(name, claim.ttl());
            if claim.own_lease() {
                stand_in.with_own_lease()
            } else {
                stand_in
            }
        };
        match self.bug {
            Bug::OwnerPerClient => {
                let key = (self.number, claim.name().clone());
                state
                    .owners
                    .entry(key)
                    .or_insert_with(|| stand_in(claim.name().clone()))
                    .clone()
            }
            Bug::NamesAreFolded => {
                let folded = LockName::new(claim.name().as_str().trim().to_lowercase());
                let name = folded.unwrap_or_else(|_| claim.name().clone());
                state
                    .stand_ins
                    .entry(claim.owner())
                    .or_insert_with(|| stand_in(name))
                    .clone()
            }
            // Kept for far longer than it was asked for.
            Bug::TtlIsIgnored => endless(&mut state, claim),
            // As if it were renewed elsewhere.
            Bug::OutlivesItsRuntime if self.runtime.is_some() => endless(&mut state, claim),
            Bug::ExpiredPermitsStayTaken if matches!(claim.mode(), Mode::Permit { .. }) => endless(&mut state, claim),
            Bug::ReadersExcludeEachOther => claim.clone().with_mode(Mode::Exclusive),
            Bug::OnePermitTooMany => match claim.mode() {
                Mode::Permit { of } => claim.clone().with_mode(Mode::Permit { of: of + 1 }),
                _ => claim.clone(),
            },
            Bug::LateRequestIsHonoured if state.released.contains(&claim.owner()) => endless(&mut state, claim),
            _ => claim.clone(),
        }
    }

    /// What the backend answered, as the client gets to see it.
    fn answered(&self, claim: &Claim, attempt: Attempt) -> Result<Attempt, LockError> {
        let grant = match attempt {
            Attempt::Granted(grant) => grant,
            busy if self.is(Bug::BusyIsAnError) => {
                return Err(LockError::unavailable(
                    "acquire",
                    format!("the lock could not be taken: {busy:?}"),
                ));
            }
            busy => return Ok(busy),
        };
        if let Some(grant) = self.block(claim, &grant) {
            return Ok(Attempt::Granted(grant));
        }
        let token = self.token(claim, grant.token);
        let lease = self.lease(claim, &grant.lease);
        if claim.mode() == Mode::Shared {
            self.shared.lock().readers.push(claim.clone());
        }
        self.shared.lock().holders.insert(
            claim.name().clone(),
            Held {
                claim: claim.clone(),
                token,
                lease: lease.clone(),
            },
        );
        let untouched = token == grant.token && grant.claim == *claim && !self.is(Bug::LossIsNeverTold);
        if untouched && lease.deadline() == grant.lease.deadline() {
            return Ok(Attempt::Granted(grant));
        }
        Ok(Attempt::Granted(Grant::new(claim.clone(), token, lease)))
    }

    /// The grant with another block of tokens.
    fn block(&self, claim: &Claim, right: &Grant) -> Option<Grant> {
        let mut state = self.shared.lock();
        let (first, last) = match self.bug {
            Bug::BlockBeginsTooLow => {
                let last = right.token.get();
                (state.counters.insert(claim.name().clone(), last)?, last)
            }
            Bug::BlockIsNotCounted => {
                let first = state.count(claim.name());
                (first, first + u64::from(claim.tokens_wanted().get()) - 1)
            }
            _ => return None,
        };
        let mut grant = right.clone();
        grant.token = FencingToken::new(last).ok()?;
        Some(grant.with_first_token(FencingToken::new(first).ok()?))
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
            Bug::TokenRestartsAfterRelease | Bug::TokensAreLostWithTheStore => state.count(claim.name()),
            Bug::TokenFollowsACounterThatFell if state.set_back => state.count(claim.name()),
            Bug::ReadersShareAToken if claim.mode() == Mode::Shared => match state.holder(claim.name()) {
                Some(held) if held.claim.mode() == Mode::Shared => held.token.get(),
                _ => return right,
            },
            Bug::TokensAreRandom => fastrand::u64(1..1 << 53),
            Bug::TokenPerSession => self.drawn.fetch_add(1, Ordering::SeqCst) + 1,
            _ => return right,
        };
        let token = FencingToken::new(number).unwrap_or(right);
        state.tokens.insert(claim.owner(), token);
        token
    }

    fn lease(&self, claim: &Claim, right: &Lease) -> Lease {
        match self.bug {
            Bug::DeadlineFromALateReply | Bug::DeadlineFromTheReply => Lease::for_claim(claim, self.now()),
            Bug::ExpiredIsStillHeld => Lease::for_claim(claim, self.now() + claim.ttl()),
            Bug::DeadlineFromTheAcquireOnASharedLease => match right.id() {
                lock_core::LeaseId::Shared(id) => Lease::shared(Arc::clone(id), right.ttl(), self.now()),
                _ => right.clone(),
            },
            _ => right.clone(),
        }
    }

    /// A grant that the backend knows nothing of.
    fn made_up(&self, claim: &Claim) -> Attempt {
        let mut state = self.shared.lock();
        let last = state
            .holders
            .get(claim.name())
            .map_or(FencingToken::MAX.get() / 2, |held| held.token.get());
        let token = FencingToken::new(last + 1).unwrap_or(FencingToken::MAX);
        let lease = Lease::for_claim(claim, self.now());
        let held = Held {
            claim: claim.clone(),
            token,
            lease: lease.clone(),
        };
        state.holders.insert(claim.name().clone(), held);
        Attempt::Granted(Grant::new(claim.clone(), token, lease))
    }

    /// Whether the claim has reserved its name.
    fn has_reserved(&self, claim: &Claim) -> bool {
        let state = self.shared.lock();
        state
            .reserved
            .iter()
            .any(|(_, reserved)| reserved.owner() == claim.owner())
    }

    /// Whether the claim that was granted last holds the name in that mode, as far as the clients know.
    fn is_held_as(&self, name: &LockName, mode: Mode) -> bool {
        self.shared
            .lock()
            .holder(name)
            .is_some_and(|held| held.claim.mode() == mode)
    }

    /// Whether the claim holds its name, as far as the clients know.
    fn holds(&self, claim: &Claim) -> bool {
        self.shared
            .lock()
            .holder(claim.name())
            .is_some_and(|held| held.claim.owner() == claim.owner())
    }
}

/// The same claim with a ttl that no case outlasts.
fn endless(state: &mut State, claim: &Claim) -> Claim {
    const ENDLESS: Duration = Duration::from_secs(600);
    let endless = || {
        Claim::new(claim.name().clone(), ENDLESS)
            .with_own_lease()
            .with_mode(claim.mode())
    };
    state.stand_ins.entry(claim.owner()).or_insert_with(endless).clone()
}

#[async_trait]
impl DistributedLock for Broken {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        // A child process would have no bug.
        capabilities.scope = Scope::Process;
        match self.bug {
            Bug::TtlOfZeroIsAccepted => capabilities.with_ttl_range(Duration::ZERO, Duration::MAX),
            Bug::QueueIsOutOfOrder => capabilities.with_fairness(),
            _ => capabilities,
        }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        match self.bug {
            Bug::AcquireTwiceIsBusy if self.holds(claim) => return Ok(Attempt::busy()),
            Bug::AskingAgainKeepsTheOldTtl if self.holds(claim) => {
                let token = self.shared.lock().holder(claim.name()).map(|held| held.token);
                let token = token.unwrap_or(FencingToken::MAX);
                return Ok(Attempt::Granted(Grant::new(
                    claim.clone(),
                    token,
                    Lease::for_claim(claim, self.now()),
                )));
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
        let mut attempt = self.inner.try_acquire(&self.sent(claim)).await;
        while self.is(Bug::CallsHaveNoLimit) && attempt.is_err() {
            attempt = self.inner.try_acquire(&self.sent(claim)).await;
        }
        if self.is(Bug::AnotherKindIsBusy) && matches!(attempt, Err(LockError::InvalidMode { .. })) {
            return Ok(Attempt::busy());
        }
        let attempt = attempt.map_err(|error| match error {
            LockError::Configuration { message, .. } if self.is(Bug::RefusalMayPass) => {
                LockError::unavailable("acquire", message)
            }
            error => error,
        })?;
        // Every other client is slow, so that a quick one can see what the slow one believes.
        if self.is(Bug::DeadlineFromTheReply) && self.number % 2 == 1 {
            tokio::time::sleep(claim.ttl() / 4).await;
        }
        self.answered(claim, attempt)
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        if self.is(Bug::RenewalShortensAReservation) {
            let reserved: Vec<_> = self.shared.lock().reserved.drain(..).collect();
            for (_, claim) in reserved {
                // The same lock, without what was reserved.
                self.inner.release(&claim, None).await?;
                let bare = Claim::new(claim.name().clone(), claim.ttl()).with_own_lease();
                self.inner.try_acquire(&bare).await?;
            }
            return Ok(Renewal::Renewed);
        }
        let renewal = self.inner.renew(lease).await?;
        let Some(claim) = lease.claim() else { return Ok(renewal) };
        match (self.bug, renewal) {
            (Bug::RenewalResurrects, Renewal::NotHeld) => match self.inner.try_acquire(claim).await? {
                Attempt::Granted(_) => Ok(Renewal::Renewed),
                _ => Ok(Renewal::NotHeld),
            },
            (Bug::RenewalLengthensTheSuccessor, Renewal::NotHeld) => {
                let successor = self.shared.lock().holder(claim.name()).map(|held| held.lease.clone());
                if let Some(successor) = successor {
                    let sent = self.now();
                    if self.inner.renew(&successor).await? == Renewal::Renewed {
                        // Some backends let go by themselves of what nobody takes note of.
                        successor.refreshed(sent, self.now());
                    }
                }
                Ok(Renewal::NotHeld)
            }
            (Bug::LossIsNeverTold, Renewal::NotHeld) => Err(LockError::unavailable("renew", "nothing was renewed")),
            (Bug::RenewalDrawsAToken, Renewal::Renewed) => {
                let mut state = self.shared.lock();
                let token = state.holder(claim.name()).map_or(1, |held| held.token.get()) + 1;
                state
                    .tokens
                    .insert(claim.owner(), FencingToken::new(token).unwrap_or(FencingToken::MAX));
                Ok(renewal)
            }
            _ => Ok(renewal),
        }
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        if let Some(rest) = keep {
            let keep = Some(rest).filter(|_| !self.is(Bug::ReservationIsIgnored));
            return self.inner.release(claim, keep).await;
        }
        let holder = self.shared.lock().holder(claim.name()).map(|held| held.claim.clone());
        {
            let mut state = self.shared.lock();
            state.released.insert(claim.owner());
            if self.is(Bug::TokenRestartsAfterRelease) {
                state.counters.remove(claim.name());
            }
            if state.abandoned.contains(&claim.owner()) {
                return Ok(Released::NotHeld);
            }
        }
        let released = match (self.bug, holder) {
            (Bug::ReservationOutlivesItsClaim, _) if self.has_reserved(claim) => {
                self.inner.release(claim, Some(claim.ttl())).await?
            }
            (Bug::ReleaseDoesNothing, _) => return Ok(Released::Released),
            (Bug::ReleaseOfOneReaderEndsAll, _) if claim.mode() == Mode::Shared => {
                let all: Vec<_> = self.shared.lock().readers.drain(..).collect();
                for reader in all.iter().filter(|reader| reader.name() == claim.name()) {
                    self.inner.release(reader, None).await?;
                }
                Released::Released
            }
            (Bug::ReleaseWithoutOwnerCheck, Some(holder)) => self.inner.release(&holder, None).await?,
            _ => self.inner.release(&self.sent(claim), None).await?,
        };
        if self.holds(claim) {
            self.shared.lock().holders.remove(claim.name());
        }
        Ok(if self.is(Bug::ReleaseAlwaysSaysReleased) {
            Released::Released
        } else {
            released
        })
    }

    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        let found = match self.try_acquire(claim).await? {
            Attempt::Busy(found) => found,
            granted => return Ok(granted),
        };
        if !self.is(Bug::BusyIsNotTold) {
            wait.busy(&found);
        }
        self.wait(claim, wait.deadline()).await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let reserved = self.inner.reserve(claim, length).await?;
        match (self.bug, reserved) {
            (Bug::ReservationWithoutOwnerCheck, Renewal::NotHeld) => {
                let stand_in = Claim::new(claim.name().clone(), claim.ttl()).with_at_least(length);
                if let Attempt::Granted(_) = self.inner.try_acquire(&stand_in).await? {
                    self.inner.reserve(&stand_in, length).await?;
                    self.inner.release(&stand_in, Some(length)).await?;
                }
            }
            (_, Renewal::Renewed) => self.shared.lock().reserved.push((self.number, claim.clone())),
            _ => {}
        }
        Ok(reserved)
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.forwards("asking who holds a lock")?;
        let hidden = |holder: &Holder| self.is(Bug::ReservationIsHidden) && holder.is_reserved;
        let mut found = self.inner.holders(name).await?;
        found.retain(|holder| !hidden(holder));
        if self.is(Bug::HolderIsRemembered) {
            return Ok(self
                .shared
                .lock()
                .remembered
                .entry(name.clone())
                .or_insert(found)
                .clone());
        }
        Ok(found)
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.forwards("listing locks")?;
        match self.bug {
            Bug::ListIgnoresItsPrefix => self.inner.list("").await,
            Bug::ListShowsOneHolder => {
                let mut holders = self.inner.list(prefix).await?;
                holders.dedup_by(|one, other| one.name == other.name);
                Ok(holders)
            }
            Bug::ListLeavesOutNames => {
                let mut holders = self.inner.list(prefix).await?;
                for holder in &mut holders {
                    holder.name = None;
                }
                Ok(holders)
            }
            _ => self.inner.list(prefix).await,
        }
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.forwards("releasing a lock by force")?;
        if self.is(Bug::ForceTakesAll) {
            let all = self.inner.list("").await?.into_iter().filter_map(|holder| holder.name);
            for other in all.filter(|other| other != name) {
                self.inner.force_release(&other).await?;
            }
        }
        if self.is(Bug::TokenIsKeptByForce) {
            let mut state = self.shared.lock();
            if let Some(token) = state.holder(name).map(|held| held.token) {
                state.forced.insert(name.clone(), token);
            }
        }
        self.inner.force_release(name).await
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        self.inner.server_info().await
    }

    async fn close(&self) -> Result<(), LockError> {
        if self.is(Bug::ReservationEndsWithItsClient) {
            let reserved = self.shared.lock().reserved.clone();
            for (_, claim) in reserved.iter().filter(|(client, _)| *client == self.number) {
                self.inner.force_release(claim.name()).await?;
            }
        }
        self.inner.close().await
    }

    fn clock(&self) -> Clock {
        self.inner.clock()
    }
}

impl Broken {
    fn forwards(&self, operation: &'static str) -> Result<(), LockError> {
        if self.is(Bug::ProvidedMethodsAreNotForwarded) {
            return Err(LockError::not_supported(operation));
        }
        Ok(())
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
