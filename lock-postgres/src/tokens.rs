//! Which tokens may be handed out.
//!
//! **Invariants.** A token is handed out only if it is above all that this client has seen before its statement was sent: what
//! it was granted, and what the sequence had come to when its sessions began. And only if it is at most a ceiling that was
//! durable in the same run of the server. A ceiling is raised by a session that holds no lock, since the commit waits for the disk. It is
//! raised ahead of need, so normally no request waits for that.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lock_core::{Busy, FencingToken, LockError, Stamp};

use crate::counter::{self, CHUNK};
use crate::failure::Failure;
use crate::session::{Draw, Session};
use crate::sessions::Sessions;

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
            // The sequence was set back by hand. The next session puts it right; what this one carries stays.
            tracing::error!(target: "fencelock", token = first,
                seen = before,
                "the sequence of fencing tokens went back; starting a new session"
            );
            session.take_no_more();
            return Err(Failure::Ended);
        }
        if last > ceiling {
            let _turn = self.raising.lock().await;
            if last > session.ceiling() {
                self.raise_ceiling(last).await?;
            }
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

    /// Makes a ceiling above that token durable, in the background, for those who come next.
    fn raise_ceiling_ahead(self: &Arc<Self>, token: u64) {
        let Ok(turn) = Arc::clone(&self.raising).try_lock_owned() else {
            return;
        };
        let sessions = Arc::clone(self);
        tokio::spawn(async move {
            let _turn = turn;
            if let Err(failure) = sessions.raise_ceiling(token).await {
                tracing::debug!(target: "fencelock", ?failure, "no higher ceiling of fencing tokens so far");
            }
        });
    }

    async fn raise_ceiling(self: &Arc<Self>, token: u64) -> Result<(), Failure> {
        // It carries nothing, and is ended if nothing is heard of it.
        let raiser = self.any().await?;
        // Those that are open before it is raised: if they are open afterwards it is the same run of the server.
        let all = self.pool.all();
        let raised = raiser.ask(&counter::raise_ceiling(&self.settings.schema, token)).await;
        self.spare(raiser);
        let raised = raised.map_err(|failure| match failure.is_limit() {
            true => locked(self.settings.config.op_timeout / 4).into(),
            false => failure,
        });
        let ceiling = raised?.one()?.number(0)?;
        for session in all {
            session.may_draw_up_to(ceiling);
        }
        Ok(())
    }
}

/// Another session is at it, and does not come to an end.
pub(crate) fn locked(limit: Duration) -> LockError {
    LockError::unavailable(
        "raising the ceiling of fencing tokens",
        format!(
            "another session kept the table \"counter\" of fencelock's schema locked for {limit:?}; pg_locks shows it; end it"
        ),
    )
}
