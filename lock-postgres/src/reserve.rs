//! Reservations: names that stay taken for a time, whatever becomes of the session that holds the lock.
//!
//! A reservation is a row of the table `reservation`. The sequence `reserved_until` is at no less than the end of each of them, and raised
//! for each. So while it is where a session has seen it once it was in the past, no key is reserved, and attempts need not look at the table.
//!
//! **Invariant.** A reservation is made by a statement of the session that holds the lock, after `reserved_until` was raised. So both are
//! there before the lock is free, and a session that has taken the lock since finds them: see [`Session::take`](crate::session::Session).
//!
//! **Invariant.** After the release of a claim no request makes a reservation for it. On the session of the lock, the release comes after
//! the request. If that session is lost, the request may still be on its way there: then another session leaves a row that says that the
//! claim was withdrawn, and the row stays for longer than the request counts.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Claim, Holder, LockError, OwnerId, Released, Renewal};

use crate::commands::{self, micros};
use crate::failure::Failure;
use crate::holdings::Turn;
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
        let Some(reserved_until) = session.reserved_until else {
            return Err(missing(&self.settings.schema).into());
        };
        let text = record::write(key, session.pid, &holding.holder());
        let namespace = self.settings.keys.mark();
        let row = commands::Row {
            key,
            owner,
            namespace: &namespace,
            holder: &text,
        };
        let now = self.clock.now();
        // Longer than the server counts: both messages have less time than the session.
        let longest = *length + 2 * session.ttl() + self.withdrawn_for();
        self.reservations.add(owner, now + longest, now);
        match session.reserve(reserved_until, &row, *length).await {
            Ok(()) => Ok(Renewal::Renewed),
            Err(failure) => {
                if failure.code().is_some() && !session.is_over() {
                    // The server has refused it, so nothing is to be withdrawn.
                    self.reservations.remove(owner);
                }
                Err(failure)
            }
        }
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
        if !self.reservations.contains(owner) {
            return Ok(());
        }
        let holding = turn.held().filter(|holding| holding.claim.owner() == owner);
        let withdrawn = match holding.map(|holding| Arc::clone(&*holding.session)) {
            Some(session) => match session.withdraw(key, &owner.to_string()).await {
                Err(_) if session.is_over() => self.withdraw_elsewhere(turn, key, owner).await,
                withdrawn => withdrawn,
            },
            None => self.withdraw_elsewhere(turn, key, owner).await,
        };
        if withdrawn.is_ok() {
            self.reservations.remove(owner);
        }
        withdrawn
    }

    /// The same without the session that had the lock.
    async fn withdraw_elsewhere(self: &Arc<Self>, turn: &mut Turn, key: i64, owner: OwnerId) -> Result<(), Failure> {
        let session = self.unhurried().await?;
        let namespace = self.settings.keys.mark();
        let withdrawn = session.withdraw_for(key, owner, &namespace, self.withdrawn_for()).await;
        if withdrawn.is_ok() && turn.held().is_none() {
            // Those who wait know how long it was reserved.
            session.pass_on(key).await;
        }
        self.spare(session);
        withdrawn
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
        let session = self.at_hand().await?;
        let reserved = session.reservations(&format!("key = {key}")).await;
        self.spare(session);
        Ok(reserved?.pop())
    }

    /// For how long a row says that a claim was withdrawn: twice as long as a request to reserve counts, by the same clock.
    fn withdrawn_for(&self) -> Duration {
        2 * self.settings.config.op_timeout
    }
}

impl Session {
    /// Makes the reservation of a lock that the session has.
    async fn reserve(&self, reserved_until: u32, row: &commands::Row<'_>, length: Duration) -> Result<(), Failure> {
        // The second message counts for that long.
        let limit = self.op_timeout;
        let raise = commands::raise_reserved_until(&self.proof, reserved_until, micros(length + limit));
        let rows = self.ask(&raise).await?;
        let Some(now) = rows.last() else {
            return Err(self.is_elsewhere());
        };
        let not_after = now.number::<i64>(0)? + micros(limit);
        let reserve = commands::reserve(
            &self.proof,
            &self.schema,
            reserved_until,
            row,
            micros(length),
            not_after,
        );
        if self.ask(&reserve).await?.last().is_some() {
            return Ok(());
        }
        self.beat().await?;
        let message = "the request came too late to the server, or its clock was set meanwhile";
        Err(LockError::unavailable("reservation", message.to_owned()).into())
    }

    async fn withdraw(&self, key: i64, owner: &str) -> Result<(), Failure> {
        let rows = self
            .ask(&commands::withdraw(&self.proof, &self.schema, key, owner))
            .await?;
        self.reached(rows.last())
    }

    async fn withdraw_for(&self, key: i64, owner: OwnerId, namespace: &str, length: Duration) -> Result<(), Failure> {
        let row = commands::Row {
            key,
            owner,
            namespace,
            holder: "",
        };
        let sql = commands::withdraw_for(&self.proof, &self.schema, &row, micros(length));
        let rows = self.ask(&sql).await?;
        self.reached(rows.last())
    }

    fn reached(&self, row: Option<&Row>) -> Result<(), Failure> {
        row.map(|_| ()).ok_or_else(|| self.is_elsewhere())
    }

    /// The reservations to be shown. None where the schema has none, or the role may not read them.
    pub(crate) async fn shown_reservations(&self, condition: &str) -> Result<Vec<Reserved>, Failure> {
        match self.reserved_until {
            Some(_) => self.reservations(condition).await,
            None => Ok(Vec::new()),
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

/// Why nothing can be reserved in a schema of an earlier version.
fn missing(schema: &crate::schema::Schema) -> LockError {
    LockError::configuration(format!(
        "the schema of fencelock is of an earlier version, without what at_least needs, and this role may not add it; have this run by \
         somebody who may, and then the grants that `fencelock schema postgres --role ROLE` prints:\n{}",
        schema.create_reservations()
    ))
}
