//! Reservations: names that stay taken for a time, whatever becomes of the session that holds the lock.
//!
//! A reservation is a row of the table `reservation`. The sequence `reserved_until` is at no less than the end of each of them, and raised
//! for each. So while it is where a session has seen it once it was in the past, no key is reserved, and attempts need not look at the table.
//!
//! **Invariant.** A reservation is made by a statement of the session that holds the lock, after `reserved_until` was raised. So both are
//! there before the lock is free, and a session that has taken the lock since finds them: see [`Session::take`](crate::session::Session).
//!
//! **Invariant.** After the release of a claim no request makes a reservation for it. On the session of the lock, the release comes after
//! the request. If that session is lost, the request may still be on its way there: so the server ends that session first.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Claim, Holder, LockError, OwnerId, Released, Renewal};

use crate::commands::{self, micros};
use crate::failure::Failure;
use crate::holdings::{Backend, Turn};
use crate::record;
use crate::rows::Row;
use crate::session::Session;
use crate::sessions::Sessions;

/// A reservation that is not over.
pub(crate) struct Reserved {
    pub(crate) key: i64,
    /// The owner, as the table has it.
    pub(crate) owner: String,
    /// The session that had the lock.
    pub(crate) session: Option<i32>,
    /// Its claim; `remaining` is what is left of the reservation.
    pub(crate) holder: Holder,
}

impl Sessions {
    pub(crate) async fn reserve(self: &Arc<Self>, claim: &Claim, length: &Duration) -> Result<Renewal, Failure> {
        let key = self.settings.keys.of(claim.name());
        let mut turn = self.holdings.turn(key).await;
        let owner = claim.owner();
        let Some(holding) = turn.held().filter(|holding| holding.claim.owner() == owner) else {
            return Ok(Renewal::NotHeld);
        };
        let session = Arc::clone(&*holding.session);
        let text = record::write(key, holding);
        let row = commands::Row {
            key,
            owner,
            namespace: &self.settings.keys.mark(),
            holder: &text,
        };
        let now = self.clock.now();
        // Longer than the server counts: the message has less time than the session.
        self.reservations
            .add(owner, &session, now + *length + 2 * session.ttl(), now);
        session.reserve(&row, *length).await?;
        Ok(Renewal::Renewed)
    }

    /// Unlocks, and leaves the reservation as it is.
    pub(crate) async fn release_reserved(self: &Arc<Self>, claim: &Claim) -> Result<Released, Failure> {
        let key = self.settings.keys.of(claim.name());
        let mut turn = self.holdings.turn(key).await;
        let released = self.unlock_in(&mut turn, key, claim).await?;
        self.reservations.remove(claim.owner());
        Ok(released)
    }

    /// Ends the reservation that the claim may have.
    pub(crate) async fn withdraw(self: &Arc<Self>, turn: &mut Turn, key: i64, owner: OwnerId) -> Result<(), Failure> {
        let Some(backend) = self.reservations.backend_of(owner) else {
            return Ok(());
        };
        let holding = turn.held().filter(|holding| holding.claim.owner() == owner);
        if let Some(session) = holding.map(|holding| Arc::clone(&*holding.session)) {
            match session.withdraw(key, &owner.to_string()).await {
                Ok(()) => {
                    self.reservations.remove(owner);
                    return Ok(());
                }
                Err(_) if session.is_over() => {}
                failed => return failed,
            }
        }
        let session = self.unhurried().await?;
        let withdrawn = self.withdraw_on(&session, turn, key, owner, &backend).await;
        self.spare(session);
        withdrawn
    }

    /// The same without the session that had the lock.
    async fn withdraw_on(
        &self,
        session: &Session,
        turn: &mut Turn,
        key: i64,
        owner: OwnerId,
        backend: &Backend,
    ) -> Result<(), Failure> {
        let end = commands::end_backend(backend.pid, backend.started, self.settings.config.op_timeout / 4);
        if let Some(ended) = session.ask(&end).await?.last()
            && !ended.truth(0)?
        {
            let message = "the session that made the reservation does not end";
            return Err(LockError::unavailable("release", message).into());
        }
        session.withdraw(key, &owner.to_string()).await?;
        self.reservations.remove(owner);
        if turn.held().is_none() {
            // Those who wait know how long it was reserved.
            session.pass_on(key).await;
        }
        Ok(())
    }

    /// Ends the reservation of that owner, whose claim is not of this client or was lost.
    pub(crate) async fn end_reservation(self: &Arc<Self>, reserved: &Reserved) -> Result<(), Failure> {
        let mut turn = self.holdings.turn(reserved.key).await;
        let session = self.unhurried().await?;
        let ended = session.withdraw(reserved.key, &reserved.owner).await;
        if ended.is_ok() && turn.held().is_none() {
            session.pass_on(reserved.key).await;
        }
        self.spare(session);
        ended
    }

    /// The reservation of a key, for a transaction that has just locked it in a schema that has reservations.
    pub(crate) async fn reservation_at_lock(self: &Arc<Self>, key: i64) -> Result<Option<Reserved>, Failure> {
        let session = self.unhurried().await?;
        let reserved = session.reservations(&format!("key = {key}")).await;
        self.spare(session);
        Ok(reserved?.pop())
    }
}

impl Session {
    /// Makes the reservation of a lock that the session has, and carries alone.
    async fn reserve(&self, row: &commands::Row<'_>, length: Duration) -> Result<(), Failure> {
        let sql = commands::reserve(&self.proof, &self.schema, self.reserved_until, row, micros(length));
        let reserved = self.ask(&sql).await;
        if reserved.is_err() {
            self.wire.end();
        }
        reserved.map(drop)
    }

    async fn withdraw(&self, key: i64, owner: &str) -> Result<(), Failure> {
        let sql = commands::withdraw(&self.proof, &self.schema, key, owner);
        self.ask(&sql).await.map(drop)
    }

    /// The reservations to be shown: none to a role that may not read them.
    pub(crate) async fn shown_reservations(&self, condition: &str) -> Result<Vec<Reserved>, Failure> {
        match self.sees_reservations {
            true => self.reservations(condition).await,
            false => Ok(Vec::new()),
        }
    }

    /// The reservations that are not over and meet the condition of SQL.
    async fn reservations(&self, condition: &str) -> Result<Vec<Reserved>, Failure> {
        let rows = self.ask(&commands::reservations(&self.schema, condition)).await?;
        let read = |row: &Row| {
            let key = row.number(0)?;
            let (session, holder) = record::read_reserved(key, row.text(3)?, row.number(2)?);
            Ok(Reserved {
                key,
                owner: row.text(1)?.to_owned(),
                session,
                holder,
            })
        };
        rows.iter().map(read).collect()
    }
}
