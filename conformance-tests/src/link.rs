//! The way from a client to its backend: writes down what passes, and can fail.

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultMode {
    /// Calls pass.
    None,
    /// Calls arrive when the mode has changed, if their callers still wait for them then.
    Silent,
    /// Calls arrive and are done; they are answered when the mode has changed.
    RepliesLost,
    /// Renewals fail without reaching the server; other calls pass.
    RenewalsFail,
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
    mode: watch::Sender<FaultMode>,
    counts: Arc<Counts>,
}

/// How often each call was made.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    acquire: AtomicUsize,
    renew: AtomicUsize,
}

impl Counts {
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
            mode: watch::Sender::new(FaultMode::None),
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

    pub(crate) fn set(&self, mode: FaultMode) {
        self.note(format_args!("fault mode {mode:?}"));
        self.mode.send_replace(mode);
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// One attempt that leaves no trace in the history, for whoever polls.
    pub(crate) async fn try_quietly(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.inner.try_acquire(claim).await
    }

    fn mode(&self) -> FaultMode {
        *self.mode.borrow()
    }

    fn note(&self, event: impl fmt::Display) {
        self.history.note(format!("client {}: {event}", self.number));
    }

    /// Ends when the mode has changed, or with an error when a request has no more time.
    async fn changed(&self, mode: FaultMode, operation: &'static str) -> Result<(), LockError> {
        let limit = self.inner.capabilities().op_timeout;
        let mut now = self.mode.subscribe();
        let changed = tokio::time::timeout(limit, now.wait_for(|now| *now != mode)).await;
        changed.map(drop).map_err(|_| LockError::no_answer(operation, limit))
    }

    async fn pass<T, F>(&self, operation: &'static str, what: String, call: F) -> Result<T, LockError>
    where
        T: Shown,
        F: Future<Output = Result<T, LockError>>,
    {
        let mode = self.mode();
        let answer = match mode {
            FaultMode::None | FaultMode::RenewalsFail => call.await,
            FaultMode::Silent => match self.changed(mode, operation).await {
                Ok(()) => call.await,
                Err(error) => Err(error),
            },
            FaultMode::RepliesLost => match call.await {
                Ok(done) => {
                    self.note(format_args!(
                        "{operation} {what}: done ({}), not answered",
                        done.shown()
                    ));
                    self.changed(mode, operation).await.map(|()| done)
                }
                Err(error) => Err(error),
            },
        };
        match &answer {
            Ok(done) => self.note(format_args!("{operation} {what}: {}", done.shown())),
            Err(error) => self.note(format_args!("{operation} {what}: error: {error}")),
        }
        answer
    }

    /// The call of an acquisition, with the time at which it set out: not before the mode lets it.
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
        let call = self.acquiring(self.inner.try_acquire(claim));
        let (sent, attempt) = self.pass("try_acquire", claim.shown(), call).await?;
        self.granted(&attempt, Some(sent));
        Ok(attempt)
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        self.counts.renew.fetch_add(1, Ordering::SeqCst);
        let what = lease.claim().map_or_else(|| "a shared lease".to_owned(), Shown::shown);
        if self.mode() == FaultMode::RenewalsFail {
            self.note(format_args!("renew {what}: made to fail"));
            return Err(LockError::unavailable("renew", "made to fail by the suite"));
        }
        let call = async {
            let sent = self.clock().now();
            Ok((sent, self.inner.renew(lease).await?))
        };
        let (sent, renewal) = self.pass("renew", what, call).await?;
        if let (Some(log), Renewal::Renewed) = (&self.log, renewal) {
            log.refreshed(lease, sent);
        }
        Ok(renewal)
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.pass("release", claim.shown(), self.inner.release(claim, keep))
            .await
    }

    async fn acquire(&self, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
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
            .field("mode", &self.mode())
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

impl Shown for Vec<Holder> {
    fn shown(&self) -> String {
        format!("{} held", self.len())
    }
}
