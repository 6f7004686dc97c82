//! What a session is used for: locks that it carries, waits that it shows, the lease that its locks share.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use lock_core::{Lease, Stamp};
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

use crate::session::{Session, lock};

/// How long a session that carries nothing is kept.
const LINGER: Duration = Duration::from_secs(60);

impl Session {
    /// The lease of a lock that was granted by a message sent then: that of the others, or else one that counts from it.
    pub(crate) fn share(self: &Arc<Self>, sent: Stamp) -> (Lease, Share) {
        let mut sharing = lock(&self.usage.sharing);
        sharing.0 += 1;
        let ttl = self.ttl();
        let kept = self
            .wire
            .lease()
            .filter(|lease| sharing.0 > 1 && lease.ttl() == ttl && lease.claim().is_none());
        let lease = kept.unwrap_or_else(|| {
            sharing.1 += 1;
            let lease = Lease::shared(format!("{} lease {}", self.id, sharing.1), ttl, sent);
            self.wire.keep(Some(lease.clone()));
            lease
        });
        (lease, Share(Arc::clone(self)))
    }

    /// Keeps the session in use until dropped.
    pub(crate) fn carry(self: &Arc<Self>) -> Carried {
        self.usage.carried.fetch_add(1, Ordering::AcqRel);
        Carried {
            session: Arc::clone(self),
            alone: false,
        }
    }

    /// The same, so that nothing else is carried meanwhile.
    pub(crate) fn carry_alone(self: &Arc<Self>) -> Carried {
        self.usage.alone.store(true, Ordering::Release);
        let mut carried = self.carry();
        carried.alone = true;
        carried
    }

    pub(crate) fn carries(&self) -> usize {
        self.usage.carried.load(Ordering::Acquire)
    }

    pub(crate) fn is_alone(&self) -> bool {
        self.usage.alone.load(Ordering::Acquire)
    }

    /// Whether nothing is carried, so that it can be used for anything.
    pub(crate) fn is_free(&self) -> bool {
        self.carries() == 0 && !self.is_alone()
    }

    /// From now on nothing is sent that is not about the one lock that it carries.
    pub(crate) fn fall_silent(&self) {
        self.usage.silent.store(true, Ordering::Release);
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.usage.silent.load(Ordering::Acquire)
    }

    /// One more wait is shown by it, or one less.
    pub(crate) fn waits(&self) -> usize {
        self.usage.waits.load(Ordering::Acquire)
    }

    pub(crate) fn add_wait(&self) {
        self.usage.waits.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn remove_wait(&self) {
        *lock(&self.usage.used) = self.clock.now();
        self.usage.waits.fetch_sub(1, Ordering::AcqRel);
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.usage.stale.load(Ordering::Acquire)
    }

    /// What is left on it of waits that have ended goes with it, as soon as it carries nothing.
    pub(crate) fn make_stale(&self) {
        self.usage.stale.store(true, Ordering::Release);
        self.end_if_stale();
    }

    fn end_if_stale(&self) {
        if self.is_stale() && self.carries() == 0 {
            self.wire.end();
        }
    }

    /// Starts what keeps an unused session for a while, and ends one whose lease is over.
    pub(crate) fn look_after(self: &Arc<Self>, runtime: &Handle) {
        let weak = Arc::downgrade(self);
        runtime.spawn(look_after(weak));
    }
}

/// One of the locks that share a lease.
pub(crate) struct Share(Arc<Session>);

impl Drop for Share {
    fn drop(&mut self) {
        let mut sharing = lock(&self.0.usage.sharing);
        sharing.0 -= 1;
        if sharing.0 == 0 {
            // Nobody renews it any more.
            self.0.wire.keep(None);
        }
    }
}

/// A session in use.
pub(crate) struct Carried {
    session: Arc<Session>,
    alone: bool,
}

impl Carried {
    /// Lets others use the session, too.
    pub(crate) fn with_others(mut self) -> Self {
        self.alone = false;
        self.session.usage.alone.store(false, Ordering::Release);
        self
    }
}

impl std::ops::Deref for Carried {
    type Target = Arc<Session>;

    fn deref(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        let session = &self.session;
        *lock(&session.usage.used) = session.clock.now();
        if self.alone {
            // Before anybody else finds it free.
            session.wire.keep(None);
            session.usage.silent.store(false, Ordering::Release);
            if session.is_stale() {
                session.wire.end();
            }
            session.usage.carried.fetch_sub(1, Ordering::AcqRel);
            session.usage.alone.store(false, Ordering::Release);
        } else {
            session.usage.carried.fetch_sub(1, Ordering::AcqRel);
        }
        // It may have become stale since the look.
        session.end_if_stale();
    }
}

async fn look_after(session: Weak<Session>) {
    loop {
        let Some(nap) = session.upgrade().map(|session| session.ttl() / 3) else {
            return;
        };
        sleep(nap).await;
        let Some(session) = session.upgrade() else { return };
        if session.is_over() {
            return;
        }
        // Whoever uses it renews it.
        if session.carries() > 0 {
            continue;
        }
        let used = *lock(&session.usage.used);
        let wanted = session.waits() > 0 || session.clock.now().since(used) < LINGER;
        let beaten = wanted && matches!(timeout(session.op_timeout, session.beat()).await, Ok(Ok(())));
        if !beaten && session.carries() == 0 {
            session.wire.end();
            return;
        }
    }
}
