//! Waiting for a lock, without a statement under way.
//!
//! A client shows that it waits by shared locks in the other space of keys, on a session that it has anyway, and then tries
//! to take the lock. A release that finds somebody wakes one of them by `NOTIFY`. Nobody is notified when a session ends with
//! its locks, and a wake-up may go to a client that has just ended: so all who wait look by themselves now and then.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Waker};
use std::time::Duration;

use lock_core::{Attempt, Busy, Claim, LockError, Outage, Stamp, Wait};
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::commands::SLOTS;
use crate::failure::Failure;
use crate::notifications::Subscription;
use crate::session::Session;
use crate::sessions::Sessions;

/// How long it takes until the first look without a wake-up.
const FIRST_LOOK: Duration = Duration::from_millis(50);

/// How far apart looks are at most: a lock whose holder was killed is taken that much later.
const LOOKS: Duration = Duration::from_millis(500);

/// How many looks a second a client makes at most, whatever it waits for.
const LOOKS_A_SECOND: u32 = 200;

/// How far apart looks are at most at a name that is reserved: it is not free before its time, unless that is ended by force, which
/// notifies.
const RESERVED_LOOKS: Duration = Duration::from_secs(5);

/// Those who wait for the end of a reservation do not look all at once.
const SPREAD: Duration = Duration::from_millis(10);

/// How far apart they are at most while the server has no connection left: each of them tries to connect.
const DISTANT_LOOKS: Duration = Duration::from_secs(5);

impl Sessions {
    /// Waits until the claim is granted, `wait` is over, or it is unwanted. Ends with a failure that may pass if the server has not said
    /// busy in the time for one operation.
    pub(crate) async fn wait(
        self: &Arc<Self>,
        claim: &Claim,
        mut wait: Wait,
        unwanted: &CancellationToken,
    ) -> Result<Attempt, Failure> {
        let key = self.settings.keys.of(claim.name());
        let _waiting = Arc::clone(&self.waiting);
        let mut shown: Option<Shown> = None;
        let mut pause = FIRST_LOOK;
        let mut failed = false;
        // What to say at the end, if the last look came to nothing.
        let mut last: Option<LockError> = None;
        let mut found: Busy;
        let mut outage: Option<Outage> = None;
        let mut was_busy = false;
        let first_answer_by = self.clock.now() + self.settings.config.op_timeout * 4 / 5;
        loop {
            if shown.as_ref().is_some_and(Shown::is_over) {
                shown = None;
            }
            // A server that says nothing ends the wait: the caller decides what comes next.
            let until = self.clock.now() + self.settings.config.op_timeout;
            let mut woken = shown.as_mut().is_some_and(|shown| shown.woken);
            let (sessions, wanted, stop) = (Arc::clone(self), claim.clone(), unwanted.clone());
            let looked = self.in_time(until, async move { sessions.try_acquire(&wanted, &stop).await });
            found = Busy::default();
            let mut no_room = false;
            match looked.await {
                Ok(granted @ Attempt::Granted(_)) => {
                    // The wake-up has served its purpose, and so have those that come with it.
                    shown.as_mut().into_iter().for_each(|shown| shown.granted = true);
                    outage.into_iter().for_each(Outage::end);
                    return Ok(granted);
                }
                Ok(attempt) => {
                    (woken, failed, last) = (false, false, None);
                    if let Attempt::Busy(busy) = attempt {
                        wait.busy(&busy);
                        (was_busy, found) = (true, busy);
                    }
                    outage.take().into_iter().for_each(Outage::end);
                }
                Err(failure) if failure.is_about_room() || failure.may_pass() => {
                    no_room = failure.is_about_room();
                    // A look that was cancelled, or that others kept waiting: the next one may not be.
                    let is_limit = failure.is_limit();
                    let error = failure.explain("acquire");
                    // Until the server has said busy, the caller is told by the error.
                    if was_busy && !is_limit && outage.is_none() {
                        outage = Some(self.outages.begin(&error));
                    }
                    last = Some(error);
                }
                // One session may have ended unnoticed, with all others.
                Err(failure @ Failure::Ended) if failed => return Err(failure),
                Err(Failure::Ended) => failed = true,
                Err(failure) => return Err(failure),
            }
            if self.ends(&wait, unwanted) {
                return last.map_or_else(|| Ok(found.into()), |error| Err(error.into()));
            }
            match &mut shown {
                Some(shown) => shown.woken = woken,
                None if no_room => {}
                None => match self.show(claim, key).await {
                    Ok(now) => {
                        shown = Some(now);
                        // It may have been released before.
                        continue;
                    }
                    Err(failure) => tracing::debug!(target: "fencelock", ?failure, "a wait cannot be shown to others"),
                },
            }
            let most = if no_room {
                DISTANT_LOOKS
            } else {
                self.longest_pause(claim.ttl())
            };
            pause = pause.min(most);
            let mut nap = pause.mul_f64(0.5 + fastrand::f64());
            match found.retry_after {
                Some(rest) => {
                    nap = rest.min(RESERVED_LOOKS.max(nap)) + SPREAD.mul_f64(fastrand::f64());
                    pause = FIRST_LOOK;
                }
                None => pause = pause * 3 / 2,
            }
            let now = self.clock.now();
            if !was_busy && now + nap >= first_answer_by {
                return last.map_or_else(|| Ok(found.into()), |error| Err(error.into()));
            }
            // The wait may be put off meanwhile.
            let nap = wait.deadline().map_or(nap, |deadline| nap.min(deadline.since(now)));
            tokio::select! {
                () = unwanted.cancelled() => return Ok(Attempt::busy()),
                () = self.closed() => return Err(LockError::closed().into()),
                () = woken_up(&mut shown) => {}
                () = sleep(nap) => {}
            }
            if self.ends(&wait, unwanted) {
                return last.map_or_else(|| Ok(found.into()), |error| Err(error.into()));
            }
        }
    }

    /// What that comes to until then. It goes on by itself after that, and is undone if it comes to something.
    async fn in_time<T: Send + 'static>(
        &self,
        until: Stamp,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<T, Failure> {
        let limit = until.since(self.clock.now());
        match timeout(limit, self.settings.executor.run("acquire", work)).await {
            Ok(done) => done?,
            Err(_) => Err(LockError::no_answer("acquire", self.settings.config.op_timeout).into()),
        }
    }

    async fn show(self: &Arc<Self>, claim: &Claim, key: i64) -> Result<Shown, Failure> {
        let until = self.clock.now() + self.settings.config.op_timeout;
        let (sessions, ttl) = (Arc::clone(self), claim.ttl());
        self.in_time(until, async move { Shown::new(&sessions, ttl, key).await })
            .await
    }

    /// Passes on a wake-up that nobody has made use of. In turn with whatever else is done about the lock: it is taken for that.
    async fn pass_on(&self, session: &Arc<Session>, key: i64) {
        let mut turn = self.holdings.turn(key).await;
        if turn.held().is_none()
            && let Some(session) = self.pool.beside(|other| Arc::ptr_eq(other, session))
        {
            session.pass_on(key).await;
        }
    }

    fn longest_pause(&self, ttl: Duration) -> Duration {
        let waiting = u32::try_from(Arc::strong_count(&self.waiting)).unwrap_or(u32::MAX);
        let crowd = (Duration::from_secs(1) / LOOKS_A_SECOND).saturating_mul(waiting);
        (ttl / 4).min(LOOKS).max(crowd)
    }

    fn ends(&self, wait: &Wait, unwanted: &CancellationToken) -> bool {
        wait.is_over(self.clock.now()) || unwanted.is_cancelled() || self.is_closed()
    }
}

/// Ends when the wait is notified, or when the session that shows it has ended.
async fn woken_up(shown: &mut Option<Shown>) {
    match shown {
        Some(shown) => {
            let notified = shown.subscription.next().await.is_some();
            shown.woken = notified;
            if !notified {
                shown.session.wire.end();
            }
        }
        None => std::future::pending().await,
    }
}

/// A wait that others can see, and by which it is woken. Taken back on drop.
struct Shown {
    sessions: Weak<Sessions>,
    session: Arc<Session>,
    key: i64,
    slot: u32,
    subscription: Subscription,
    /// Whether it was woken, and has not looked since.
    woken: bool,
    /// Whether the wait came to a grant, so that wake-ups are not passed on: the release will wake the next one.
    granted: bool,
    runtime: Handle,
}

impl Shown {
    async fn new(sessions: &Arc<Sessions>, ttl: Duration, key: i64) -> Result<Self, Failure> {
        let runtime = Handle::current();
        let session = sessions.ear(ttl).await?;
        session.add_wait();
        let slot = fastrand::u32(..SLOTS);
        match session.begin_wait(key, slot).await {
            Ok(subscription) => Ok(Self {
                sessions: Arc::downgrade(sessions),
                session,
                key,
                slot,
                subscription,
                woken: false,
                granted: false,
                runtime,
            }),
            Err(failure) => {
                // What came of it is not known.
                session.make_stale();
                session.remove_wait();
                Err(failure)
            }
        }
    }

    fn is_over(&self) -> bool {
        self.session.is_over() || self.session.is_silent()
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        let session = Arc::clone(&self.session);
        if session.is_over() {
            session.remove_wait();
            return;
        }
        if session.is_silent() {
            // A message would keep the lock that it carries.
            session.make_stale();
            session.remove_wait();
            return;
        }
        let (key, slot) = (self.key, self.slot);
        let pass_on = !self.granted && (self.woken || self.subscription.has_more());
        let sessions = self.sessions.clone();
        let leaving = async move {
            session.end_wait(key, slot).await;
            if pass_on && let Some(sessions) = sessions.upgrade() {
                sessions.pass_on(&session, key).await;
            }
            session.remove_wait();
        };
        now_or_later(Box::pin(leaving), &self.runtime);
    }
}

/// Sends what there is to be sent at once, and lets the runtime see to the rest.
fn now_or_later(mut work: Pin<Box<dyn Future<Output = ()> + Send>>, runtime: &Handle) {
    let _entered = runtime.enter();
    let mut context = Context::from_waker(Waker::noop());
    if work.as_mut().poll(&mut context).is_pending() {
        runtime.spawn(work);
    }
}
