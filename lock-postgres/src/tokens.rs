//! Which tokens may be handed out.
//!
//! **Invariants.** A token is handed out only if it is above all that this client has seen before its statement was sent: what
//! it was granted, and what the sequence had come to when its sessions began. And only if it is at most a ceiling that was
//! durable in the same run of the server. A ceiling is raised by a session that holds no lock, since the commit may have to
//! wait for a standby without limit, and the locks of a session that waits there cannot be taken from it. It is raised ahead
//! of need, so normally nobody waits for that.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lock_core::{Busy, FencingToken, LockError, Stamp};
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

use crate::commands::millis;
use crate::counter::{self, CHUNK};
use crate::failure::Failure;
use crate::session::{Draw, Session};
use crate::sessions::Sessions;
use crate::unfinished::Unfinished;

/// How long it takes until a ceiling is raised ahead of need again, after that has failed.
const PAUSE: Duration = Duration::from_secs(1);

/// Tokens that may be handed out, up to the last one, and when the message that they were drawn by was sent.
pub(crate) struct Drawn {
    pub(crate) first: FencingToken,
    pub(crate) token: FencingToken,
    pub(crate) sent: Stamp,
}

impl Sessions {
    /// Takes the lock if it is free and not reserved.
    pub(crate) async fn try_lock(
        self: &Arc<Self>,
        session: &Arc<Session>,
        key: i64,
        label: Option<&str>,
        wanted: NonZeroU32,
    ) -> Result<Result<Drawn, Busy>, Failure> {
        let before = self.seen.load(Ordering::Acquire);
        let draw = match session.try_lock(key, label, wanted).await? {
            Ok(draw) => draw,
            Err(busy) => return Ok(Err(busy)),
        };
        match self.sure_of(session, draw, before).await {
            Ok(drawn) => Ok(Ok(drawn)),
            Err(failure) => Err(session.undo(key, failure).await),
        }
    }

    /// Draws a token.
    pub(crate) async fn draw(self: &Arc<Self>, session: &Arc<Session>) -> Result<Drawn, Failure> {
        let before = self.seen.load(Ordering::Acquire);
        let draw = session.draw().await?;
        self.sure_of(session, draw, before).await
    }

    /// `before` had been seen when the message was sent.
    async fn sure_of(self: &Arc<Self>, session: &Arc<Session>, draw: Draw, before: u64) -> Result<Drawn, Failure> {
        let Draw {
            first,
            last,
            sent,
            ceiling,
        } = draw;
        if first <= before {
            // Somebody set the sequence back under our feet. The next session puts it right.
            tracing::error!(target: "fencelock", token = first,
                seen = before,
                "the sequence of fencing tokens went back; starting a new session"
            );
            session.wire.end();
            return Err(Failure::Ended);
        }
        if last > ceiling {
            self.raise_ceiling(session, last).await?;
            // It must have lived through that: after a crash of the server the ceiling would be that of other tokens.
            session.beat().await?;
            if last > session.ceiling() {
                return Err(counter::exhausted().into());
            }
        } else if last.saturating_add(CHUNK / 2) > ceiling {
            self.raise_ceiling_ahead(last);
        }
        let fit = |token| FencingToken::new(token).map_err(|_| counter::exhausted());
        let (first, token) = (fit(first)?, fit(last)?);
        self.saw(token.get());
        Ok(Drawn { first, token, sent })
    }

    /// Makes a ceiling above that token durable, for a session that has drawn it.
    async fn raise_ceiling(self: &Arc<Self>, session: &Arc<Session>, token: u64) -> Result<(), Failure> {
        let mut turn = Arc::clone(&self.raising).lock_owned().await;
        if token <= session.ceiling() {
            return Ok(());
        }
        self.raise_in(&mut turn, token).await
    }

    /// The same in the background, for those who come next.
    fn raise_ceiling_ahead(self: &Arc<Self>, token: u64) {
        let Ok(mut turn) = Arc::clone(&self.raising).try_lock_owned() else {
            return;
        };
        if turn.is_some_and(|not_before| self.clock.now() < not_before) {
            return;
        }
        let sessions = Arc::clone(self);
        tokio::spawn(async move {
            if let Err(failure) = sessions.raise_in(&mut turn, token).await {
                let error = failure.explain("raising the ceiling of fencing tokens");
                tracing::warn!(target: "fencelock", error = format_args!("{error:#}"), "no higher ceiling of fencing tokens so far");
            }
        });
    }

    async fn raise_in(self: &Arc<Self>, turn: &mut OwnedMutexGuard<Option<Stamp>>, token: u64) -> Result<(), Failure> {
        let limit = self.settings.config.op_timeout / 2;
        let raised = timeout(limit, self.raise_by_another(token, limit)).await;
        let raised = raised.unwrap_or_else(|_| Err(unconfirmed(limit).into()));
        **turn = raised.is_err().then(|| self.clock.now() + PAUSE);
        raised
    }

    async fn raise_by_another(self: &Arc<Self>, token: u64, limit: Duration) -> Result<(), Failure> {
        // It carries nothing, and is ended if nothing is heard of it.
        let raiser = self.raiser().await?;
        // Those that are open before it is raised: if they are open afterwards it is the same run of the server.
        let all = self.pool.all();
        let sql = counter::raise_ceiling(&self.settings.schema, token);
        let patience = millis(limit / 2);
        let raising = Unfinished::on(&raiser);
        let raised = raiser.ask(&format!("SET LOCAL lock_timeout = {patience}; {sql}")).await;
        raising.done();
        let ceiling = match raised {
            Ok(rows) => rows.one()?.number(0)?,
            Err(failure) => {
                let stuck = failure.is_limit();
                self.spare(raiser);
                return Err(if stuck { locked(limit).into() } else { failure });
            }
        };
        for session in all {
            session.may_draw_up_to(ceiling);
        }
        self.spare(raiser);
        Ok(())
    }
}

/// Nobody knows whether the ceiling is durable.
pub(crate) fn unconfirmed(limit: Duration) -> LockError {
    LockError::unavailable(
        "raising the ceiling of fencing tokens",
        format!(
            "the server did not confirm it within {limit:?}; if commits wait for a synchronous standby that is away, bring \
             it back, or change synchronous_standby_names"
        ),
    )
}

/// Somebody else is at it, and does not come to an end.
pub(crate) fn locked(limit: Duration) -> LockError {
    LockError::unavailable(
        "raising the ceiling of fencing tokens",
        format!(
            "another session kept the table \"counter\" of fencelock's schema locked for {limit:?}; if that session waits for a \
             synchronous standby that is away, bring it back, or change synchronous_standby_names; if not, end it (pg_locks \
             shows it)"
        ),
    )
}
