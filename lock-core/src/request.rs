//! Requests for one lock.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire_options::{AcquireOptions, Renew, SHARES};
use crate::backend::RESERVATIONS;
use crate::claim::printable;
use crate::guard::{LockGuard, ReleaseOutcome};
use crate::locks::Locks;
use crate::process::block_on;
use crate::{Holder, InvalidName, LockError, LockName, Mode, Stamp};

/// A request for a lock: set what matters, then await it. Made by [`Locks::lock`].
///
/// Nothing is sent before it is awaited. The future is `Send` and `'static`. Dropping the future cancels the request, even if it has already
/// been sent.
#[must_use = "a lock request does nothing until it is awaited"]
#[derive(Clone, Debug)]
pub struct LockRequest {
    pub(crate) locks: Locks,
    name: Result<LockName, InvalidName>,
    options: AcquireOptions,
}

/// Gives a request that is made of a [`LockRequest`] its setters.
macro_rules! sets_as_a_lock_request {
    ($request:ident, $field:tt) => {
        sets_as_a_lock_request! {
            $request, $field,
            ttl(ttl: Duration),
            wait_for(limit: Duration),
            wait_forever(),
            no_wait(),
            label(label: impl Into<Arc<str>>),
            renew(renew: Renew),
            max_hold(limit: Duration),
        }
    };
    ($request:ident, $field:tt, $($name:ident($($value:ident: $type:ty)?)),+ $(,)?) => {
        impl $request {$(
            #[doc = concat!("As [`LockRequest::", stringify!($name), "`].")]
            pub fn $name(mut self $(, $value: $type)?) -> Self {
                self.$field = self.$field.$name($($value)?);
                self
            }
        )+}
    };
}
pub(crate) use sets_as_a_lock_request;

impl Locks {
    /// Returns a request for a lock. A name that is not usable is an error when the request is awaited.
    pub fn lock(&self, name: impl AsRef<str>) -> LockRequest {
        LockRequest::new(self.clone(), self.full_name(name.as_ref()))
    }

    /// Acquires the lock if it is free now, otherwise returns `None`. Does not wait for a holder, but waits for the response to a request
    /// for the same name that another task of this client has sent.
    ///
    /// Locks are not re-entrant: the name of a lock that is held is busy for its own holder too. Dropping the future cancels the request.
    ///
    /// # Errors
    ///
    /// As when awaiting [`lock`](Self::lock), except that busy is no error.
    pub async fn try_lock(&self, name: impl AsRef<str>) -> Result<Option<LockGuard>, LockError> {
        self.lock(name).attempt().await
    }
}

impl LockRequest {
    pub(crate) fn new(locks: Locks, name: Result<LockName, InvalidName>) -> Self {
        let options = AcquireOptions::new(locks.core.ttl);
        Self { locks, name, options }
    }

    /// Sets how long the server keeps the lock after its last renewal. 30 s unless set here or in [`Options`](crate::Options). The client
    /// renews the lock at a third of the ttl, so a longer ttl only means that others wait longer after a crash.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = ttl;
        self
    }

    /// Limits the wait: for a lock that others hold, and for a server that does not respond.
    ///
    /// Failures that may pass, such as a server that is unreachable, starting or without a leader, are retried until the wait is over; then the
    /// request fails with [`LockError::Unavailable`]. Failures that need a person, such as wrong credentials, end the wait at once, except
    /// for credentials that are refused to a client that was connected before. The first response may take at least 1 s, or
    /// [`Options::op_timeout`](crate::Options::op_timeout) if that is less, to tell a slow server from a busy lock.
    pub fn wait_for(mut self, limit: Duration) -> Self {
        self.options.wait = Some(limit);
        self
    }

    /// Waits without a limit for a lock that others hold. The default.
    ///
    /// A server that has not responded within [`Options::op_timeout`](crate::Options::op_timeout) ends the request with
    /// [`LockError::Unavailable`]. After its first response the wait goes on through every failure that may pass.
    pub fn wait_forever(mut self) -> Self {
        self.options.wait = None;
        self
    }

    /// Does not wait for a holder: the request ends with the first response, which may take
    /// [`Options::op_timeout`](crate::Options::op_timeout), or with the first failure. A busy lock is [`LockError::TimedOut`]. See also
    /// [`Locks::try_lock`].
    pub fn no_wait(self) -> Self {
        self.wait_for(Duration::ZERO)
    }

    /// Sets a text that is shown with the holder, cut after [`Claim::MAX_LABEL`](crate::Claim::MAX_LABEL) bytes.
    pub fn label(mut self, label: impl Into<Arc<str>>) -> Self {
        self.options.label = Some(printable(&label.into()));
        self
    }

    /// Makes it a request for a shared lock: readers exclude writers, and not each other.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
    /// use fencelock::{Locks, MemoryLock};
    ///
    /// let locks = Locks::new(MemoryLock::new());
    /// let (one, other) = (locks.lock("report").shared().await?, locks.lock("report").shared().await?);
    /// assert!(locks.try_lock("report").await?.is_none());
    /// one.release().await?;
    /// other.release().await?;
    /// assert!(locks.try_lock("report").await?.is_some());
    /// # Ok(()) }
    /// ```
    ///
    /// Where the server has a queue, readers and writers are served in one order: a writer that waits keeps later readers out. Use the token
    /// with [`Fence::admit_shared`](crate::fence::Fence::admit_shared): a fence that does not know shared locks refuses a reader after a later one.
    ///
    /// A shared lock cannot become an exclusive one, as two readers would wait for each other: release it, lock, and read again.
    /// [`LockGuard::downgrade`] does the opposite.
    ///
    /// [`LockError::NotSupported`] where the backend has no [shared locks](crate::Capabilities::shared), and with [`at_least`](Self::at_least).
    pub fn shared(self) -> Self {
        self.mode(Mode::Shared)
    }

    /// Sets whether the lock is renewed while it is held.
    pub fn renew(mut self, renew: Renew) -> Self {
        self.options.renew = renew;
        self
    }

    /// Limits how long the lock is held after the grant, even if its holder is alive: it is lost then, with
    /// [`LossReason::MaxHold`](crate::LossReason::MaxHold). Zero is [`LockError::Configuration`].
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.options.max_hold = Some(limit);
        self
    }

    /// The longest time for [`at_least`](Self::at_least): 366 days.
    pub const MAX_AT_LEAST: Duration = Duration::from_secs(366 * 24 * 60 * 60);

    /// Reserves the name for that long after the grant, even if the guard is released or lost before, or the process ends. For jobs that a
    /// scheduler starts on many machines: a machine that is late does not start the job again. ShedLock calls it `lockAtLeastFor`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
    /// use std::time::Duration;
    /// use fencelock::{Locks, MemoryLock};
    ///
    /// let locks = Locks::new(MemoryLock::new());
    /// let guard = locks.lock("report").at_least(Duration::from_secs(60)).no_wait().await?;
    /// guard.release().await?;
    /// assert!(locks.try_lock("report").await?.is_none());
    /// # Ok(()) }
    /// ```
    ///
    /// The server measures the time from the grant; it costs one or two round trips more. Until it is over, the name is busy for every client,
    /// [`Locks::holder`] shows it as [reserved](crate::Holder::is_reserved) after the release, and [`Locks::force_release`] frees it. A
    /// request that is dropped or fails before it has returned the guard reserves nothing, unless its process ends at that moment, or its
    /// client is shut down while the server is out of reach.
    ///
    /// The documentation of each backend tells what a reservation survives. A time above [`MAX_AT_LEAST`](Self::MAX_AT_LEAST) is
    /// [`LockError::Configuration`]. [`LockError::NotSupported`] where the backend has no [reservations](crate::Capabilities::reservations).
    pub fn at_least(mut self, length: Duration) -> Self {
        self.options.at_least = Some(length).filter(|length| !length.is_zero());
        self
    }

    /// Blocks the thread until the lock is held or the request has failed, for code that is not asynchronous.
    ///
    /// ```
    /// # fn main() -> Result<(), fencelock::LockError> {
    /// let locks = fencelock::connect_lazy("memory:")?;
    /// let guard = locks.lock("report").acquire_blocking()?;
    /// println!("write with token {}", guard.token());
    /// guard.release_blocking()?;
    /// # Ok(()) }
    /// ```
    ///
    /// The lock is renewed on the [background thread](crate::background()). No other call of a client needs a runtime either: use any executor, as
    /// in `pollster::block_on(locks.holder("report"))`.
    ///
    /// # Errors
    ///
    /// As when awaiting the request; [`LockError::Unavailable`] if the system refuses to start the background thread.
    ///
    /// # Panics
    ///
    /// In a task of a tokio runtime, as tokio's own blocking methods do; nothing is sent then. Threads of `tokio::task::spawn_blocking` may
    /// call it.
    #[track_caller]
    pub fn acquire_blocking(self) -> Result<LockGuard, LockError> {
        block_on(self.into_future())?
    }

    /// Runs `body` under the lock and releases it afterwards. If the lock is lost, `body` is dropped at its next await.
    ///
    /// ```
    /// # async fn example(locks: fencelock::Locks) -> Result<(), fencelock::LockError> {
    /// let token = locks.lock("report").with(async |guard| guard.token()).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As when awaiting the request; [`LockError::Lost`] if the lock was lost before the body ended. A release that fails is no error: the
    /// server frees the lock when its ttl is over.
    pub async fn with<F, T>(self, body: F) -> Result<T, LockError>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        let guard = self.await?;
        let value = guard.run(body(&guard)).await?;
        match release_held(guard).await {
            Err(lost @ LockError::Lost { .. }) => Err(lost),
            // The server frees the lock when its ttl is over.
            Ok(()) | Err(_) => Ok(value),
        }
    }

    /// The same request for another lock, with what is left of a wait that began at `started`.
    pub(crate) fn for_name(&self, name: LockName, started: Stamp) -> Self {
        let mut request = self.clone().with_wait_since(started);
        request.name = Ok(name);
        request
    }

    /// The same request with what is left of a wait that began at `started`.
    pub(crate) fn with_wait_since(mut self, started: Stamp) -> Self {
        let now = self.locks.core.clock.now();
        self.options.wait = self.options.wait.map(|limit| (started + limit).since(now));
        self
    }

    pub(crate) fn waits(&self) -> bool {
        self.options.waits()
    }

    /// Whether a wait that began at `started` is over.
    pub(crate) fn is_over(&self, started: Stamp) -> bool {
        let end = self.options.wait.map(|limit| started + limit);
        end.is_some_and(|end| self.locks.core.clock.now() >= end)
    }

    pub(crate) fn mode(mut self, mode: Mode) -> Self {
        self.options.mode = mode;
        self
    }

    /// The same request for a lock that goes back to the server when it is released.
    pub(crate) fn without_linger(mut self) -> Self {
        self.options.may_linger = false;
        self
    }

    /// Waits between two attempts. Fails, with the name of the lock, as soon as the client is shut down.
    pub(crate) async fn pause(&self, pause: Duration) -> Result<(), LockError> {
        let name = self.name.as_ref().map_err(InvalidName::clone)?;
        let slept = self.locks.core.sleep(pause).await;
        slept.map_err(|error| error.of(name))
    }

    /// The lock, or `None` if another client holds it.
    pub(crate) async fn attempt(self) -> Result<Option<LockGuard>, LockError> {
        match self.no_wait().await {
            Ok(guard) => Ok(Some(guard)),
            Err(error) if error.is_busy() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Fails if the request is for a lock that several may hold, as one client is to lead.
    pub(crate) fn check_exclusive(&self) -> Result<(), LockError> {
        match &self.name {
            Ok(name) if self.options.mode != Mode::Exclusive => {
                Err(LockError::configuration("one leads at a time, so lead needs a lock that is not shared").of(name))
            }
            _ => Ok(()),
        }
    }

    /// Fails if a setting is not usable, or not supported by the backend.
    fn check(&self, name: &LockName) -> Result<(), LockError> {
        let (options, capabilities) = (&self.options, &self.locks.core.capabilities);
        let (ttl, min, max) = (options.ttl, capabilities.min_ttl, capabilities.max_ttl);
        let length = options.at_least.unwrap_or_default();
        Err(match options.mode {
            _ if ttl < min || ttl > max => {
                let name = name.clone();
                LockError::InvalidTtl { name, ttl, min, max }
            }
            _ if options.max_hold.is_some_and(|limit| limit.is_zero()) => LockError::configuration(
                "max_hold is zero, and the lock would be lost at once; give the longest time for which it may be held",
            ),
            Mode::Shared if !capabilities.shared => LockError::not_supported(SHARES),
            Mode::Permit { .. } if !capabilities.permits => {
                LockError::not_supported("locks with several permits (semaphore)")
            }
            Mode::Permit { of: 0 } => {
                LockError::configuration("a semaphore without permits admits no holder; give it one or more")
            }
            _ if length.is_zero() => return Ok(()),
            Mode::Shared | Mode::Permit { .. } => LockError::not_supported("at_least for a lock that is shared"),
            Mode::Exclusive if !capabilities.reservations => LockError::not_supported(RESERVATIONS),
            Mode::Exclusive if length > Self::MAX_AT_LEAST => {
                let longest = Self::MAX_AT_LEAST.as_secs() / (24 * 60 * 60);
                LockError::configuration(format!(
                    "at_least is {length:?}, and the longest possible is {longest} days"
                ))
            }
            Mode::Exclusive => return Ok(()),
        })
    }

    async fn acquire(self) -> Result<LockGuard, LockError> {
        let name = self.name.as_ref().map_err(InvalidName::clone)?;
        self.check(name).map_err(|error| error.of(name))?;
        let acquired = self.locks.core.acquire(name, &self.options).await;
        let guard = acquired.map_err(|mut error| {
            if let LockError::TimedOut { holder, .. } = &mut error {
                let seen = |holder: Box<Holder>| Box::new(self.locks.seen_from_here(*holder));
                *holder = holder.take().map(seen);
            }
            error.of(name)
        })?;
        if let Some(length) = self.options.at_least {
            // Boxed, as most requests have no such step.
            Box::pin(guard.reserve(length)).await?;
        }
        Ok(guard)
    }
}

/// Releases a lock. Also fails if it was lost before.
pub(crate) async fn release_held(guard: LockGuard) -> Result<(), LockError> {
    let (signal, name) = (guard.lost(), guard.name().clone());
    match guard.release().await? {
        ReleaseOutcome::Released => Ok(()),
        ReleaseOutcome::AlreadyLost => {
            let reason = signal.before_release();
            Err(LockError::Lost { name, reason })
        }
    }
}

impl IntoFuture for LockRequest {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.acquire())
    }
}
