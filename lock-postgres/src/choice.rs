//! Which session a request gets.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lock_core::Lease;

use crate::carried::Carried;
use crate::failure::Failure;
use crate::pool::{FULL, MOST};
use crate::session::Session;
use crate::sessions::Sessions;
use crate::ttl_class::class_of;

/// How many sessions that carry nothing are kept for what comes next.
const SPARES: usize = 2;

/// The ttl of a session that carries no lock.
const PLAIN_TTL: Duration = Duration::from_secs(30);

impl Sessions {
    /// A session for one more lock of that ttl.
    pub(crate) async fn shared(self: &Arc<Self>, ttl: Duration) -> Result<Carried, Failure> {
        let class = class_of(ttl);
        if let Some(session) = self.pool.shared(class, FULL) {
            return Ok(session);
        }
        let opening = self.pool.opening(class);
        let _opening = opening.lock().await;
        if let Some(session) = self.pool.shared(class, FULL) {
            return Ok(session);
        }
        if let Some(session) = self.free(class).await {
            return Ok(session.with_others());
        }
        let least_busy = || self.pool.shared(class, usize::MAX);
        if self.pool.count(class) >= MOST
            && let Some(session) = least_busy()
        {
            return Ok(session);
        }
        // Boxed, as it is large and rare: whatever may open a session would be as large.
        match Box::pin(self.open(class)).await {
            Ok(session) => Ok(session.with_others()),
            Err(failure) if failure.is_about_room() => least_busy().ok_or(failure),
            Err(failure) => Err(failure),
        }
    }

    /// A session for a single claim.
    pub(crate) async fn own(self: &Arc<Self>, ttl: Duration) -> Result<Carried, Failure> {
        match self.free(ttl).await {
            Some(session) => Ok(session),
            None => Box::pin(self.open(ttl)).await,
        }
    }

    /// A session that is there and carries nothing, with the limits of that ttl.
    async fn free(&self, ttl: Duration) -> Option<Carried> {
        let session = self.pool.free(ttl)?;
        if session.ttl() != ttl {
            session.set_ttl(ttl).await.ok()?;
        }
        Some(session)
    }

    /// A session for a question that takes no lock. It carries nothing else meanwhile.
    pub(crate) async fn any(self: &Arc<Self>) -> Result<Carried, Failure> {
        match self.pool.idle() {
            Some(session) => Ok(session),
            None => Box::pin(self.open(PLAIN_TTL)).await,
        }
    }

    /// A session that carries no lock, for what takes long, such as a wait for the disk; beside locks only if the server has no room for
    /// another.
    pub(crate) async fn unhurried(self: &Arc<Self>) -> Result<Carried, Failure> {
        match self.any().await {
            Ok(session) => Ok(session),
            Err(failure) => self.pool.beside(|_| failure.is_about_room()).ok_or(failure),
        }
    }

    /// Takes back a session that carries nothing any more.
    pub(crate) fn spare(&self, session: Carried) {
        let over = session.is_over();
        // One that can take no more locks may still carry some.
        if session.carries() <= 1 && !session.is_useful() {
            session.wire.end();
        }
        drop(session);
        if over {
            // What ended it may have ended the other ones, unnoticed so far.
            self.pool.end_free(0);
        } else {
            self.pool.end_free(SPARES);
        }
    }

    /// A session that can show a wait, beside whatever else it does: one that is there already, or else one for that ttl.
    pub(crate) async fn ear(self: &Arc<Self>, ttl: Duration) -> Result<Arc<Session>, Failure> {
        let there = |session: &Session| session.is_useful() && !session.is_silent() && !session.is_stale();
        let found = self.pool.find(|session| there(session) && session.waits() > 0);
        match found.or_else(|| self.pool.find(there)) {
            Some(session) => Ok(session),
            None => Ok(Arc::clone(&*self.shared(ttl).await?)),
        }
    }

    /// The session that keeps that shared lease now.
    pub(crate) fn by_lease(&self, lease: &Lease) -> Option<Arc<Session>> {
        self.pool
            .find(|session| session.wire.lease().is_some_and(|kept| kept.id() == lease.id()))
    }

    /// Some session that is alive.
    pub(crate) fn witness(&self) -> Option<Arc<Session>> {
        self.pool.find(|session| !session.is_over())
    }

    /// The highest token that this client has seen.
    pub(crate) fn saw(&self, token: u64) {
        self.seen.fetch_max(token, Ordering::AcqRel);
    }
}
