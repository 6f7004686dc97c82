//! Looking who holds what, and taking it away.

use std::sync::Arc;

use lock_core::{BackendVersion, Holder, LockError, LockName};

use crate::failure::Failure;
use crate::keys::shown;
use crate::rows::{Row, Rows};
use crate::sessions::Sessions;

/// The locks of one key, of its 64 bits, in this database. The server shows the halves apart.
const LOCKS: &str = "SELECT l.pid, a.application_name, \
    (SELECT count(*) FROM pg_locks o WHERE o.pid = l.pid AND o.locktype = 'advisory' AND o.granted), \
    l.classid::bigint << 32 | l.objid::bigint \
    FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted AND l.mode = 'ExclusiveLock' \
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())";

impl Sessions {
    /// Who holds the name: the session that has its key, and the claim if it is one of this client.
    pub(crate) async fn holder(self: &Arc<Self>, name: &LockName) -> Result<Option<Holder>, Failure> {
        let found = self.find(name).await?;
        Ok(found.map(|(_, _, holder)| holder))
    }

    /// Asks in a session that carries no lock, or in any if the server has no room for another.
    async fn inquire(self: &Arc<Self>, sql: &str) -> Result<Rows, Failure> {
        let session = match self.any().await {
            Ok(session) => session,
            Err(failure) => match self.witness().filter(|_| failure.is_about_room()) {
                Some(session) => return session.ask(sql).await,
                None => return Err(failure),
            },
        };
        let rows = session.ask(sql).await;
        self.spare(session);
        rows
    }

    async fn find(self: &Arc<Self>, name: &LockName) -> Result<Option<(i32, u64, Holder)>, Failure> {
        let key = self.settings.keys.of(name);
        let (high, low) = (key as u64 >> 32, key as u64 & 0xffff_ffff);
        let rows = self
            .inquire(&format!("{LOCKS} AND l.classid = {high} AND l.objid = {low}"))
            .await?;
        let Some(row) = rows.last() else { return Ok(None) };
        let (pid, locks) = (row.number(0)?, row.number(2)?);
        let mut holder = of_session(row)?;
        holder.name = Some(name.clone());
        let mut turn = self.holdings.turn(key).await;
        if let Some(holding) = turn.held().filter(|holding| holding.session.pid == pid) {
            holder = holding.holder();
            holder.key = Some(shown(key));
        }
        Ok(Some((pid, locks, holder)))
    }

    /// Every lock of this namespace. The server has keys only: names are known of what this client holds.
    pub(crate) async fn list(self: &Arc<Self>, prefix: &str) -> Result<Vec<Holder>, Failure> {
        let mark = format!("fencelock {} ", self.settings.keys.mark());
        let mut holders = Vec::new();
        for row in self.inquire(LOCKS).await?.iter() {
            if !row.get(1)?.unwrap_or_default().starts_with(&mark) {
                continue;
            }
            let mut holder = of_session(row)?;
            let (pid, key): (i32, i64) = (row.number(0)?, row.number(3)?);
            if self.by_pid(pid) {
                let mut turn = self.holdings.turn(key).await;
                if let Some(holding) = turn.held() {
                    holder = holding.holder();
                    holder.key = Some(shown(key));
                }
            }
            if holder
                .name
                .as_ref()
                .is_none_or(|name| name.as_str().starts_with(prefix))
            {
                holders.push(holder);
            }
        }
        holders.sort_by(|a, b| (&a.name, &a.key).cmp(&(&b.name, &b.key)));
        Ok(holders)
    }

    /// Ends the session that holds the name, with all that it holds.
    pub(crate) async fn force_release(self: &Arc<Self>, name: &LockName) -> Result<Option<Holder>, Failure> {
        let Some((pid, locks, holder)) = self.find(name).await? else {
            return Ok(None);
        };
        tracing::warn!(%name, %holder, locks, "ending the session that holds the lock, and with it all of its locks");
        let session = self.any().await?;
        let patience = crate::session::millis(self.settings.op_timeout / 4);
        let ended = session
            .ask(&format!("SELECT pg_terminate_backend({pid}, {patience})"))
            .await;
        // It may have been the one that asked.
        let ended = match ended {
            Err(_) if session.is_over() => true,
            ended => ended?.one()?.truth(0)?,
        };
        self.spare(session);
        // Should it have gone by itself, that is as good.
        if !ended && self.find(name).await?.is_some_and(|(now, ..)| now == pid) {
            return Err(LockError::Unavailable {
                operation: "forced release",
                message: "the session that holds the lock did not end in time; try again".to_owned(),
                source: None,
            }
            .into());
        }
        Ok(Some(holder))
    }

    pub(crate) async fn version(self: &Arc<Self>) -> Result<BackendVersion, Failure> {
        if let Some(session) = self.witness() {
            return Ok(session.version.clone());
        }
        let session = self.any().await?;
        let version = session.version.clone();
        self.spare(session);
        Ok(version)
    }
}

/// What a session tells of itself: `fencelock MARK PID HOST LABEL`.
fn of_session(row: &Row) -> Result<Holder, Failure> {
    let mut holder = Holder::new();
    holder.key = Some(shown(row.number(3)?));
    let name = row.get(1)?.unwrap_or_default();
    let mut words = name.splitn(5, ' ');
    match words.next() {
        Some("fencelock") => {
            words.next();
            holder.pid = words.next().and_then(|pid| pid.parse().ok());
            holder.host = words.next().map(str::to_owned);
            // It is the label of one lock.
            let alone = row.number::<u64>(2)? == 1;
            holder.label = words.next().filter(|_| alone).map(str::to_owned);
        }
        // A program that locks in a transaction of its own.
        _ => holder.label = Some(format!("session {} {name}", row.text(0)?).trim_end().to_owned()),
    }
    Ok(holder)
}
