//! The task of a client that renews leases, and ends the holds that were lost.
//!
//! Renewals that fail are tried again until the deadline of the lease. They run beside each other, so that a slow one delays no other.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::broadcast;
use tokio::time;

use crate::call::catch_panic;
use crate::client::ClientInner;
use crate::held::Held;
use crate::process::Serial;
use crate::{Lease, LockError, LossReason, Renewal};

impl ClientInner {
    /// Starts the task that watches what is held, if it does not run.
    ///
    /// # Errors
    ///
    /// If the runtime of the client has ended, or the system refuses to start the background thread.
    pub(crate) fn begin_watching(self: &Arc<Self>) -> Result<(), LockError> {
        let runtime = self.executor.handle()?;
        let is_running = &self.watchdog.is_running;
        if !is_running.swap(true, Ordering::SeqCst) {
            // Neither keeps the client alive nor is waited for by a shutdown.
            runtime.spawn(watch(
                Watching(Arc::downgrade(self)),
                self.process.revocations.subscribe(),
            ));
        }
        // A runtime that has ended drops the task at once.
        match is_running.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(self.executor.dropped("acquire")),
        }
    }

    /// Starts to watch a hold, in the place of another one.
    pub(crate) fn watch(self: &Arc<Self>, held: &Arc<Held>, instead_of: Option<&Held>) {
        self.watchdog.watch(held, instead_of);
        // If the task has ended meanwhile, the new one is dropped and ends the hold.
        if let Err(error) = self.begin_watching() {
            tracing::error!(target: "fencelock", error = format_args!("{error:#}"), "locks are not renewed");
        }
    }

    fn spawn_renewal(self: &Arc<Self>, lease: Lease) {
        let core = Arc::clone(self);
        let work = async move {
            // It may have been released before this task ran.
            if !core.watchdog.watches(&lease) {
                return;
            }
            let sent = core.clock.now();
            match core.renew(&lease).await {
                Ok(()) => core.watchdog.renewed(&lease, sent),
                Err(error) => {
                    tracing::warn!(target: "fencelock", lease = %lease.id(), error = format_args!("{error:#}"), "renewal failed; trying again");
                    core.watchdog.due(&lease, core.clock.now() + retry_pause(lease.ttl()));
                }
            }
        };
        if let Err(error) = self.spawn(work) {
            tracing::error!(target: "fencelock", error = format_args!("{error:#}"), "a lease could not be renewed");
        }
    }

    /// One renewal. Ok also when the server refused, which ends the lease.
    pub(crate) async fn renew(&self, lease: &Lease) -> Result<(), LockError> {
        let limit = self.op_timeout.min(lease.ttl() / 4);
        let sent = self.clock.now();
        let renewal = catch_panic("renewal", async { self.backend.renew(lease).await });
        let answer = time::timeout(limit, renewal).await;
        let answer = answer.unwrap_or_else(|_| Err(unanswered(limit, lease.ttl())));
        match answer {
            Ok(Renewal::Renewed) => {
                self.stats.renewed.add();
                lease.refreshed(sent, self.clock.now());
                tracing::trace!(target: "fencelock", lease = %lease.id(), "renewed");
                Ok(())
            }
            Ok(Renewal::NotHeld) => {
                lease.revoker().revoke(LossReason::NotHeld);
                Ok(())
            }
            Err(error) => {
                self.stats.renewal_errors.add();
                Err(error)
            }
        }
    }
}

/// A renewal was not answered within `limit`.
fn unanswered(limit: Duration, ttl: Duration) -> LockError {
    if limit < ttl / 4 {
        return LockError::no_answer("renewal", limit);
    }
    LockError::unavailable(
        "renewal",
        format!(
            "no answer within {limit:?}, a quarter of the ttl of {ttl:?}; if round trips to the server take that long, raise \
             the ttl"
        ),
    )
}

fn retry_pause(ttl: Duration) -> Duration {
    (ttl / 20).clamp(Duration::from_millis(10), Duration::from_secs(1))
}

async fn watch(watching: Watching, mut revocations: broadcast::Receiver<Serial>) {
    // Everything may have been: before this task was told of it, or if more was than it could be told.
    let mut revoked = Some(None);
    loop {
        let Some(core) = watching.0.upgrade() else { return };
        let now = core.clock.now();
        let mut found = core.watchdog.look(now);
        if let Some(serial) = revoked.take() {
            let holds = core.watchdog.holds(serial);
            found.ended.extend(holds.into_iter().filter(|held| held.is_revoked()));
        }
        for lease in found.to_renew {
            core.spawn_renewal(lease);
        }
        for held in found.ended {
            if held.has_ended() {
                let unkept = core
                    .names
                    .change(&held.key, |name| name.unkeep(|| core.names.releasing(), now));
                unkept.flatten().into_iter().for_each(ClientInner::unkept);
                continue;
            }
            match held.lost(now) {
                Some(reason) => drop(held.let_go(reason, None)),
                // Renewed at the last moment.
                None => core.watchdog.due(held.lease(), now),
            }
        }
        let nap = found
            .next_look
            .map_or(Duration::MAX, |look| look.since(core.clock.now()));
        let wake = Arc::clone(&core.watchdog.wake);
        drop(core);
        tokio::select! {
            () = wake.notified() => {}
            serial = revocations.recv() => revoked = Some(serial.ok()),
            () = time::sleep(nap) => {}
        }
    }
}

/// Ends all holds when the runtime of the task ends.
struct Watching(Weak<ClientInner>);

impl Drop for Watching {
    fn drop(&mut self) {
        let Some(core) = self.0.upgrade() else { return };
        core.watchdog.is_running.store(false, Ordering::SeqCst);
        for held in core.watchdog.holds(None) {
            held.let_go(LossReason::RuntimeEnded, None);
        }
        drop(core.end_lingering());
    }
}
