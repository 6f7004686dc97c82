//! The way from a client to its backend: writes down what passes, and can be bad weather.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, Holder, Lease, LockError, LockName, Released, Renewal,
    ServerInfo, Stamp, Wait,
};
use tokio::sync::watch;

use crate::harness::Harness;
use crate::history::History;
use crate::oracle::Log;

/// What happens to the calls of one client from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Weather {
    /// Calls pass.
    Fair,
    /// Calls fail at once, as when nobody listens.
    Refused,
    /// Calls arrive when the weather has changed, if anyone still waits for them then.
    Silent,
    /// Calls arrive and are done; they are answered when the weather has changed.
    Deaf,
    /// Calls are done at once, and answered that much later.
    Slow(Duration),
    /// Renewals of this name do not arrive and are not answered; everything else passes.
    OneNameSilent(LockName),
}

/// One client of the backend, as the suite uses it.
pub(crate) struct Link {
    inner: Arc<dyn DistributedLock>,
    number: usize,
    history: Arc<History>,
    log: Option<Arc<Log>>,
    /// Whether a lease counts from the call that granted it.
    is_sent_once: bool,
    /// Whether an acquisition may renew the leases that locks share.
    acquisitions_renew: bool,
    shared_leases: Mutex<Vec<Lease>>,
    weather: watch::Sender<Weather>,
    failing_renewals: AtomicUsize,
    counts: Arc<Counts>,
}

/// How often each call was made.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) try_acquire: AtomicUsize,
    pub(crate) acquire: AtomicUsize,
    pub(crate) renew: AtomicUsize,
    pub(crate) release: AtomicUsize,
}

impl Counts {
    /// How often anything was asked of the backend that takes or keeps a lock.
    pub(crate) fn requests(&self) -> usize {
        [&self.try_acquire, &self.acquire, &self.renew, &self.release]
            .into_iter()
            .map(|count| count.load(Ordering::SeqCst))
            .sum()
    }

    /// How often it was waited at the backend.
    pub(crate) fn waits(&self) -> usize {
        self.acquire.load(Ordering::SeqCst)
    }

    pub(crate) fn renewals(&self) -> usize {
        self.renew.load(Ordering::SeqCst)
    }
}

impl Link {
    pub(crate) fn new(inner: Arc<dyn DistributedLock>, number: usize, history: Arc<History>) -> Self {
        Self {
            inner,
            number,
            history,
            log: None,
            is_sent_once: true,
            acquisitions_renew: false,
            shared_leases: Mutex::default(),
            weather: watch::Sender::new(Weather::Fair),
            failing_renewals: AtomicUsize::new(0),
            counts: Arc::default(),
        }
    }

    /// Writes to the oracle's log too which refreshes the backend acknowledged.
    pub(crate) fn with_log(mut self, log: Arc<Log>, harness: &dyn Harness) -> Self {
        self.log = Some(log);
        self.is_sent_once = harness.leases_count_from_the_call();
        self.acquisitions_renew = harness.acquisitions_renew();
        self
    }

    pub(crate) fn set(&self, weather: Weather) {
        self.history
            .note(format!("client {}: weather {weather:?}", self.number));
        self.weather.send_replace(weather);
    }

    /// The next `times` renewals fail without reaching the server.
    pub(crate) fn fail_renewals(&self, times: usize) {
        self.failing_renewals.store(times, Ordering::SeqCst);
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// One attempt that leaves no trace in the history, for whoever polls.
    pub(crate) async fn try_quietly(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.inner.try_acquire(claim).await
    }

    fn weather(&self) -> Weather {
        self.weather.borrow().clone()
    }

    fn note(&self, event: impl fmt::Display) {
        self.history.note(format!("client {}: {event}", self.number));
    }

    /// Ends when the weather has changed, or with an error when a request has no more time.
    async fn clears_up(&self, bad: &Weather, operation: &'static str) -> Result<(), LockError> {
        let limit = self.inner.capabilities().op_timeout;
        let mut weather = self.weather.subscribe();
        let cleared = tokio::time::timeout(limit, weather.wait_for(|now| now != bad)).await;
        cleared.map(drop).map_err(|_| LockError::no_answer(operation, limit))
    }

    async fn pass<T, F>(&self, operation: &'static str, what: String, call: F) -> Result<T, LockError>
    where
        T: Shown,
        F: Future<Output = Result<T, LockError>>,
    {
        let weather = self.weather();
        let answer = match weather {
            Weather::Fair | Weather::OneNameSilent(_) => call.await,
            Weather::Refused => Err(LockError::unavailable(operation, "connection refused")),
            Weather::Silent => match self.clears_up(&weather, operation).await {
                Ok(()) => call.await,
                Err(error) => Err(error),
            },
            Weather::Deaf => match call.await {
                Ok(done) => {
                    self.note(format_args!(
                        "{operation} {what}: done ({}), not answered",
                        done.shown()
                    ));
                    self.clears_up(&weather, operation).await.map(|()| done)
                }
                Err(error) => Err(error),
            },
            Weather::Slow(delay) => {
                let answer = call.await;
                tokio::time::sleep(delay).await;
                answer
            }
        };
        match &answer {
            Ok(done) => self.note(format_args!("{operation} {what}: {}", done.shown())),
            Err(error) => self.note(format_args!("{operation} {what}: error: {error}")),
        }
        answer
    }

    /// The call, with the time at which it set out: not before the weather lets it.
    async fn stamped<T>(&self, call: impl Future<Output = Result<T, LockError>>) -> Result<(Stamp, T), LockError> {
        let sent = self.clock().now();
        Ok((sent, call.await?))
    }

    /// The call of an acquisition, with the time at which it set out.
    async fn acquiring<T>(&self, call: impl Future<Output = Result<T, LockError>>) -> Result<(Stamp, T), LockError> {
        let sent = self.clock().now();
        if let (Some(log), true) = (&self.log, self.acquisitions_renew) {
            for lease in self.shared_leases().iter() {
                log.refreshed(lease, sent);
            }
        }
        Ok((sent, call.await?))
    }

    fn shared_leases(&self) -> MutexGuard<'_, Vec<Lease>> {
        self.shared_leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the log of a grant, which was asked for at `sent`, or later where only the backend knows when: the log takes the latest
    /// that it can be.
    fn granted(&self, attempt: &Attempt, sent: Option<Stamp>) {
        if let (Some(log), Attempt::Granted(grant)) = (&self.log, attempt) {
            let mut shared = self.shared_leases();
            if grant.lease.claim().is_none() && shared.iter().all(|known| known.id() != grant.lease.id()) {
                shared.push(grant.lease.clone());
            }
            drop(shared);
            let sent = sent.filter(|_| self.is_sent_once);
            log.granted(grant, sent.unwrap_or_else(|| self.clock().now()));
        }
    }
}

#[async_trait]
impl DistributedLock for Link {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.counts.try_acquire.fetch_add(1, Ordering::SeqCst);
        let call = self.acquiring(self.inner.try_acquire(claim));
        let (sent, attempt) = self.pass("try_acquire", claim.shown(), call).await?;
        self.granted(&attempt, Some(sent));
        Ok(attempt)
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.counts.renew.fetch_add(1, Ordering::SeqCst);
        let what = lease.claim().map_or_else(|| "a shared lease".to_owned(), Shown::shown);
        let fails = |n: usize| n.checked_sub(1);
        if self
            .failing_renewals
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, fails)
            .is_ok()
        {
            self.note(format_args!("renew {what}: made to fail"));
            return Err(LockError::unavailable("renew", "made to fail by the suite"));
        }
        let weather = self.weather();
        if let (Weather::OneNameSilent(name), Some(claim)) = (&weather, lease.claim())
            && claim.name() == name
        {
            self.clears_up(&weather, "renew").await?;
        }
        let call = self.stamped(self.inner.renew(lease));
        let (sent, renewal) = self.pass("renew", what, call).await?;
        if let (Some(log), Renewal::Renewed) = (&self.log, renewal) {
            log.refreshed(lease, sent);
        }
        Ok(renewal)
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.counts.release.fetch_add(1, Ordering::SeqCst);
        self.pass("release", claim.shown(), self.inner.release(claim, keep))
            .await
    }

    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        if self.weather() != Weather::Fair {
            // Bad weather is for one request at a time.
            match self.try_acquire(claim).await? {
                Attempt::Busy(found) => wait.busy(&found),
                granted => return Ok(granted),
            }
            if wait.is_over(self.clock().now()) {
                return self.try_acquire(claim).await;
            }
            self.counts.acquire.fetch_add(1, Ordering::SeqCst);
            self.note(format_args!("acquire {} begins", claim.shown()));
            let call = self.acquiring(self.inner.acquire(claim, wait));
            let (_, attempt) = self.pass("acquire", claim.shown(), call).await?;
            self.granted(&attempt, None);
            return Ok(attempt);
        }
        self.counts.try_acquire.fetch_add(1, Ordering::SeqCst);
        let (counts, waits) = (Arc::clone(&self.counts), Arc::new(AtomicBool::new(false)));
        let (waiting, history) = (Arc::clone(&waits), Arc::clone(&self.history));
        let words = format!("client {}: busy, {} waits", self.number, claim.shown());
        let observed = Wait::until(wait.deadline()).on_busy(move |found| {
            counts.acquire.fetch_add(1, Ordering::SeqCst);
            waiting.store(true, Ordering::SeqCst);
            history.note(words);
            wait.busy(&found);
        });
        let call = self.acquiring(self.inner.acquire(claim, observed));
        let (sent, attempt) = self.pass("acquire", claim.shown(), call).await?;
        // The time of its request is not known after a wait.
        let waited = waits.load(Ordering::SeqCst);
        self.granted(&attempt, Some(sent).filter(|_| !waited));
        Ok(attempt)
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        self.pass("reserve", claim.shown(), self.inner.reserve(claim, length))
            .await
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.pass("holders", name.to_string(), self.inner.holders(name)).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.pass("list", prefix.to_owned(), self.inner.list(prefix)).await
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.pass("force_release", name.to_string(), self.inner.force_release(name))
            .await
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        self.inner.server_info().await
    }

    async fn close(&self) -> Result<(), LockError> {
        self.note("close");
        self.inner.close().await
    }

    fn clock(&self) -> Clock {
        self.inner.clock()
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("number", &self.number)
            .field("weather", &self.weather())
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

/// As one line of a history shows it.
trait Shown {
    fn shown(&self) -> String;
}

impl Shown for Claim {
    fn shown(&self) -> String {
        let owner = self.owner().to_string();
        let name: String = self.name().as_str().chars().take(40).collect();
        format!("{name:?} as {}", &owner[..8])
    }
}

impl<T: Shown> Shown for (Stamp, T) {
    fn shown(&self) -> String {
        self.1.shown()
    }
}

impl Shown for Attempt {
    fn shown(&self) -> String {
        match self {
            Self::Granted(grant) => format!("granted, token {}", grant.token),
            Self::Busy(_) => "busy".to_owned(),
            other => format!("{other:?}"),
        }
    }
}

impl Shown for Renewal {
    fn shown(&self) -> String {
        format!("{self:?}")
    }
}

impl Shown for Released {
    fn shown(&self) -> String {
        format!("{self:?}")
    }
}

impl Shown for Option<Holder> {
    fn shown(&self) -> String {
        self.as_ref().map_or_else(|| "nobody".to_owned(), Holder::to_string)
    }
}

impl Shown for Vec<Holder> {
    fn shown(&self) -> String {
        format!("{} held", self.len())
    }
}
