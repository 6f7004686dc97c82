//! Scheduled jobs that run on one of many machines.

use std::time::Duration;

use crate::{LockError, LockGuard, Locks};

impl Locks {
    /// Runs `body` under the lock. Returns `None` at once if another client runs it, or has begun to less than nine tenths of `period` ago.
    ///
    /// For a job that schedulers such as cron start once per `period` on several machines. If the starts on the machines differ by less than a
    /// tenth of `period`, the job runs once per `period`, on the first machine.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
    /// use std::time::Duration;
    /// use fencelock::{Locks, MemoryLock};
    ///
    /// let locks = Locks::new(MemoryLock::new());
    /// let hour = Duration::from_secs(3600);
    /// let first = locks.run_once_per("report", hour, async |guard| guard.token()).await?;
    /// let second = locks.run_once_per("report", hour, async |guard| guard.token()).await?;
    /// assert!(first.is_some() && second.is_none());
    /// # Ok(()) }
    /// ```
    ///
    /// On etcd times are rounded up to whole seconds and end up to half a second late, so a period below 30 s skips runs; and a change of etcd's
    /// leader begins the time anew, so a change after the first tenth of a period skips the next run.
    ///
    /// It is short for [`no_wait`](crate::LockRequest::no_wait), [`at_least`](crate::LockRequest::at_least) with nine tenths of `period`, and
    /// [`with`](crate::LockRequest::with). A run that fails is not repeated within the period. A run that takes longer than the period keeps
    /// the name, and the starts meanwhile are skipped.
    ///
    /// # Errors
    ///
    /// As [`with`](crate::LockRequest::with), except that busy is no error.
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `body`; the name stays taken.
    pub async fn run_once_per<F, T>(
        &self,
        name: impl AsRef<str>,
        period: Duration,
        body: F,
    ) -> Result<Option<T>, LockError>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        let request = self.lock(name).no_wait().at_least(period / 10 * 9);
        match request.with(body).await {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_busy() => Ok(None),
            Err(error) => Err(error),
        }
    }
}
