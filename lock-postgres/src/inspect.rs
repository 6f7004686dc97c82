//! Looking who holds what, and taking it away.

use std::collections::HashMap;
use std::sync::Arc;

use lock_core::{Holder, LockError, LockName, ServerInfo};
use tokio_postgres::error::SqlState;

use crate::commands::RESERVING;
use crate::counter::RAISING;
use crate::failure::Failure;
use crate::inquiry::{Answers, Question};
use crate::keys::shown;
use crate::reserve::Reserved;
use crate::rows::{Row, Rows};
use crate::schema::{MAKING, literal};
use crate::session::Session;
use crate::sessions::Sessions;

/// What keeps keys of 64 bits in this database, but for those that sessions take turns by: the server shows their halves
/// apart. A prepared transaction has no session; it is found by the lock that it has on its own number, under the same
/// virtual number.
const LOCKS: &str = "SELECT l.pid, a.application_name, l.classid::bigint << 32 | l.objid::bigint, l.mode, p.gid, \
    (SELECT count(*) FROM pg_locks o WHERE {one} AND o.pid = l.pid AND o.locktype = 'advisory' AND o.objsubid = 1 AND o.granted \
     AND o.classid::bigint << 32 | o.objid::bigint NOT IN ({turns})) \
    FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid) \
    LEFT JOIN pg_locks x ON l.pid IS NULL AND x.pid IS NULL AND x.locktype = 'transactionid' AND x.mode = 'ExclusiveLock' \
    AND x.virtualtransaction = l.virtualtransaction LEFT JOIN pg_prepared_xacts p ON p.transaction = x.transactionid \
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted \
    AND l.classid::bigint << 32 | l.objid::bigint NOT IN ({turns}) \
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// All keys. How many of them a session has can be counted, which costs the server less.
fn all_locks() -> String {
    locks("false")
}

fn locks(one: &str) -> String {
    LOCKS
        .replace("{one}", one)
        .replace("{turns}", &format!("{MAKING}, {RAISING}, {RESERVING}"))
}

/// Those of one key. One of several that share it is as good as another.
fn locks_of(key: i64) -> String {
    let (high, low) = (key as u64 >> 32, key as u64 & 0xffff_ffff);
    format!(
        "{} AND l.classid = {high} AND l.objid = {low} ORDER BY l.pid DESC",
        locks("true")
    )
}

/// What keeps one key.
struct Keeper {
    /// None: a prepared transaction.
    pid: Option<i32>,
    /// How many locks the session has.
    locks: u64,
    /// The name of the prepared transaction.
    prepared: Option<String>,
    /// Whether its client has answered.
    answered: bool,
    /// Whether its client has told what it knows of the lock, or, if it was to give it up, that it has released it.
    told: bool,
    holder: Holder,
}

/// The locks, what their clients have answered, and the reservations, which were read before.
struct Looked {
    rows: Rows,
    answers: Answers,
    reserved: Vec<Reserved>,
}

impl Keeper {
    /// What the row says of a session that has so many locks, and what its client has answered.
    fn new(row: &Row, locks: u64, answers: &mut Answers) -> Result<Self, Failure> {
        let (pid, key) = (pid_of(row)?, row.number(2)?);
        let told = pid.and_then(|pid| answers.told.remove(&(pid, key)));
        Ok(Self {
            pid,
            locks,
            prepared: row.get(4)?.map(str::to_owned),
            answered: pid.is_some_and(|pid| answers.answered.contains(&pid)),
            told: told.is_some(),
            holder: match told {
                Some(told) => told,
                None => of_session(row, locks == 1)?,
            },
        })
    }
}

impl Sessions {
    /// Who holds the name: what its client says of it, or else its session.
    pub(crate) async fn holder(self: &Arc<Self>, name: &LockName) -> Result<Option<Holder>, Failure> {
        let key = self.settings.keys.of(name);
        let (keeper, reserved) = self.find(name, Question::One(key)).await?;
        let mut holder = seen(reserved, keeper);
        holder.iter_mut().for_each(|holder| holder.name = Some(name.clone()));
        Ok(holder)
    }

    /// Every lock of this namespace, as the clients tell it that hold them. One whose client does not answer has its key and
    /// its session, and is of no prefix.
    pub(crate) async fn list(self: &Arc<Self>, prefix: &str) -> Result<Vec<Holder>, Failure> {
        let Looked {
            rows,
            mut answers,
            reserved,
        } = self.inquire(&all_locks(), Some(Question::All)).await?;
        let mut reserved: HashMap<_, _> = reserved.into_iter().map(|reserved| (reserved.key, reserved)).collect();
        let ours: Vec<_> = rows.iter().filter(|row| self.is_ours(row)).collect();
        let mut carried = HashMap::<i32, u64>::new();
        for row in &ours {
            *carried.entry(row.number(0)?).or_default() += 1;
        }
        let mut holders = Vec::new();
        for row in ours {
            let locks = carried.get(&row.number(0)?).copied().unwrap_or_default();
            let keeper = Keeper::new(row, locks, &mut answers)?;
            holders.extend(seen(reserved.remove(&row.number(2)?), Some(keeper)));
        }
        holders.extend(reserved.into_values().filter_map(|reserved| seen(Some(reserved), None)));
        holders.retain(|holder| match &holder.name {
            Some(name) => name.as_str().starts_with(prefix),
            None => prefix.is_empty(),
        });
        holders.sort_by(|a, b| (&a.name, &a.key).cmp(&(&b.name, &b.key)));
        Ok(holders)
    }

    /// Ends the hold and the reservation of the name.
    pub(crate) async fn force_release(self: &Arc<Self>, name: &LockName) -> Result<Option<Holder>, Failure> {
        let key = self.settings.keys.of(name);
        let (keeper, reserved) = self.find(name, Question::GiveUp(key)).await?;
        // While the name is reserved, only that session can hold it: another one has it locked for the time of an attempt.
        let session = reserved.as_ref().and_then(|reserved| reserved.session);
        let keeper = keeper.filter(|keeper| keeper.told || session.is_none() || keeper.pid == session);
        let forced = match keeper {
            Some(keeper) => Some(self.force_keeper(name, keeper).await?),
            None => None,
        };
        // Of the owner that was found before: the reservation of the next holder stays.
        let Some(reserved) = reserved else { return Ok(forced) };
        self.end_reservation(&reserved).await?;
        if forced.as_ref().is_some_and(|forced| forced.owner.is_some()) {
            return Ok(forced);
        }
        let mut holder = reserved.holder;
        holder.name = Some(name.clone());
        holder.is_reserved = forced.is_none();
        holder.also_released = forced.and_then(|forced| forced.also_released);
        Ok(Some(holder))
    }

    /// Sees to it that the one that was asked to give the lock up has it no more. If its client does not answer, ends the session, with
    /// all that it holds.
    async fn force_keeper(self: &Arc<Self>, name: &LockName, keeper: Keeper) -> Result<Holder, Failure> {
        if keeper.told {
            return Ok(keeper.holder);
        }
        if keeper.answered {
            // It may have been released by itself; or its client was busy with it, and is not any more.
            if !self.is_kept_by(name, keeper.pid).await? {
                return Ok(keeper.holder);
            }
            let question = Question::GiveUp(self.settings.keys.of(name));
            match self.find(name, question).await?.0 {
                Some(again) if again.told => return Ok(again.holder),
                _ if !self.is_kept_by(name, keeper.pid).await? => return Ok(keeper.holder),
                _ => {}
            }
        }
        self.end_keeper(name, keeper).await
    }

    /// Whether that session still has the lock. Only the server is asked: while a client is, the lock may be released.
    async fn is_kept_by(self: &Arc<Self>, name: &LockName, pid: Option<i32>) -> Result<bool, Failure> {
        let looked = self.inquire(&locks_of(self.settings.keys.of(name)), None).await?;
        for row in looked.rows.iter() {
            if pid_of(row)? == pid {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Ends the session that has the lock, and with it all of its locks.
    async fn end_keeper(self: &Arc<Self>, name: &LockName, keeper: Keeper) -> Result<Holder, Failure> {
        let Keeper { locks, mut holder, .. } = keeper;
        let Some(pid) = keeper.pid else {
            return Err(prepared(keeper.prepared.as_deref()).into());
        };
        tracing::warn!(target: "fencelock", %name, %holder, locks, "ending the session that holds the lock, and with it all of its locks");
        let session = self.any().await?;
        let patience = crate::commands::millis(self.settings.config.op_timeout / 4);
        let ended = session
            .ask(&format!("SELECT pg_terminate_backend({pid}, {patience})"))
            .await;
        let over = session.is_over();
        self.spare(session);
        let ended = match ended {
            // The answer is lost, or it was the session that asked.
            Err(_) if over => false,
            Err(failure) if failure.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                return Err(may_not_end(failure));
            }
            ended => ended?.one()?.truth(0)?,
        };
        // Should it have gone by itself, that is as good.
        if !ended && self.is_kept_by(name, Some(pid)).await? {
            return Err(LockError::unavailable(
                "forced release",
                "the session that holds the lock did not end in time; try again".to_owned(),
            )
            .into());
        }
        holder.also_released = Some(locks.saturating_sub(1));
        Ok(holder)
    }

    /// What keeps the name, and its reservation.
    async fn find(
        self: &Arc<Self>,
        name: &LockName,
        question: Question,
    ) -> Result<(Option<Keeper>, Option<Reserved>), Failure> {
        let locks = locks_of(self.settings.keys.of(name));
        let mut looked = self.inquire(&locks, Some(question)).await?;
        let row = looked.rows.last();
        let keeper = row.map(|row| Keeper::new(row, row.number(5)?, &mut looked.answers));
        let mut keeper = keeper.transpose()?;
        keeper
            .iter_mut()
            .for_each(|keeper| keeper.holder.name = Some(name.clone()));
        Ok((keeper, looked.reserved.pop()))
    }

    /// Looks for locks, and asks the clients that have them if there is a question; in a session that carries no lock, or in any
    /// if the server has no room for another.
    async fn inquire(self: &Arc<Self>, locks: &str, question: Option<Question>) -> Result<Looked, Failure> {
        let session = self.unhurried().await?;
        let looked = self.inquire_in(&session, locks, question).await;
        self.spare(session);
        looked
    }

    async fn inquire_in(&self, session: &Session, locks: &str, question: Option<Question>) -> Result<Looked, Failure> {
        let reserved = match question {
            None => Vec::new(),
            Some(Question::All) => {
                let namespace = literal(&self.settings.keys.mark());
                session.shown_reservations(&format!("namespace = {namespace}")).await?
            }
            Some(Question::One(key) | Question::GiveUp(key)) => {
                session.shown_reservations(&format!("key = {key}")).await?
            }
        };
        let rows = session.ask(locks).await?;
        let Some(question) = question else {
            return Ok(Looked {
                rows,
                answers: Answers::default(),
                reserved,
            });
        };
        let mut pids = Vec::new();
        for row in rows.iter().filter(|row| self.is_ours(row)) {
            pids.push(row.number(0)?);
        }
        pids.sort_unstable();
        pids.dedup();
        let answers = match self.ask_clients(session, question, &pids).await {
            Ok(answers) => answers,
            // Keys are better than nothing.
            Err(failure) if !session.is_over() => {
                tracing::debug!(target: "fencelock", ?failure, "clients cannot be asked what they hold");
                Answers::default()
            }
            Err(failure) => return Err(failure),
        };
        // Some of what there was may have been released meanwhile.
        let again = question == Question::All && !pids.is_empty();
        let rows = if again { session.ask(locks).await? } else { rows };
        Ok(Looked {
            rows,
            answers,
            reserved,
        })
    }

    /// Whether the lock is one of a session of this namespace.
    fn is_ours(&self, row: &Row) -> bool {
        let mark = format!("fencelock {} ", self.settings.keys.mark());
        row.get(1).is_ok_and(|name| name.unwrap_or_default().starts_with(&mark))
    }

    pub(crate) async fn version(self: &Arc<Self>) -> Result<ServerInfo, Failure> {
        if let Some(session) = self.witness() {
            return Ok(session.version.clone());
        }
        let session = self.any().await?;
        let version = session.version.clone();
        self.spare(session);
        Ok(version)
    }
}

/// What is shown of a key that is reserved, held or both. An attempt locks a reserved key for a moment, and its client does not tell that
/// it holds it.
fn seen(reserved: Option<Reserved>, held: Option<Keeper>) -> Option<Holder> {
    let Some(reserved) = reserved else {
        return held.map(|held| held.holder);
    };
    match held {
        Some(Keeper {
            told: true, mut holder, ..
        }) => {
            if holder.owner.is_some_and(|owner| owner.to_string() == reserved.owner) {
                holder.remaining = holder.remaining.max(reserved.holder.remaining);
            }
            Some(holder)
        }
        held => {
            let mut holder = reserved.holder;
            holder.is_reserved = held.is_none_or(|held| held.answered);
            Some(holder)
        }
    }
}

/// The session that has the lock. None: a prepared transaction.
fn pid_of(row: &Row) -> Result<Option<i32>, Failure> {
    row.get(0)?.map(|_| row.number(0)).transpose()
}

/// Why a session is not ended: the grants of the schema do not cover sessions of other roles.
fn may_not_end(failure: Failure) -> Failure {
    let error = LockError::configuration(
        "the client that holds the lock does not answer, and this role may not end its session; \
         GRANT pg_signal_backend TO this role (a superuser's session only a superuser may end), or do it as the holder's role",
    );
    match failure {
        Failure::Postgres(denied) => error.with_source(denied).into(),
        _ => error.into(),
    }
}

/// Why a prepared transaction is not ended: it has no session, and what it has done is somebody's to decide on.
fn prepared(gid: Option<&str>) -> LockError {
    let which = match gid {
        Some(gid) => {
            let gid = format!("'{}'", gid.replace('\'', "''"));
            format!("COMMIT PREPARED {gid} or ROLLBACK PREPARED {gid}")
        }
        None => "COMMIT PREPARED or ROLLBACK PREPARED with its name, from pg_prepared_xacts".to_owned(),
    };
    LockError::configuration(format!(
        "the lock is kept by a prepared transaction, which outlives its session; end it by {which}"
    ))
}

/// What a session tells of itself: `fencelock MARK PID HOST LABEL`. The label is that of one lock, if it has no other.
fn of_session(row: &Row, alone: bool) -> Result<Holder, Failure> {
    let mut holder = Holder::new();
    holder.key = Some(shown(row.number(2)?));
    let name = row.get(1)?.unwrap_or_default();
    let mut words = name.splitn(5, ' ');
    match words.next() {
        Some("fencelock") => {
            words.next();
            holder.pid = words.next().and_then(|pid| pid.parse().ok());
            holder.host = words.next().map(str::to_owned);
            holder.label = words.next().filter(|_| alone).map(str::to_owned);
        }
        _ if row.get(0)?.is_none() => {
            let gid = row.get(4)?.unwrap_or("of an unknown name");
            holder.label = Some(format!("prepared transaction {gid}"));
        }
        // A program that locks in a transaction of its own, or alongside others.
        _ => {
            let label = format!("session {} {name}", row.text(0)?).trim_end().to_owned();
            let shared = row.text(3)? == "ShareLock";
            holder.label = Some(if shared { label + " (shared lock)" } else { label });
        }
    }
    Ok(holder)
}
