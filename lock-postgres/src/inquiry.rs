//! Asks the clients what they hold, and to give a lock up: the server has keys only.
//!
//! Each session listens to one channel, whose random name is in the schema: those who may read it there may ask. A request names
//! a channel for the answers. Each session that it is for answers in as many notifications as it takes, and the last one says so. So
//! the client that asks knows when all have answered, and waits for a bounded time for those that do not: a client may be stopped, or cut off.
//!
//! Nothing of this is on the way of a lock, and nothing is written to the disk.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, Weak};

use lock_core::{Holder, LossReason, OwnerId};
use tokio::runtime::Handle;
use tokio::time::{timeout, timeout_at};

use crate::failure::Failure;
use crate::notifications::Subscription;
use crate::record;
use crate::schema::{literal, quoted};
use crate::session::Session;
use crate::sessions::Sessions;

/// How long one notification is at most, in bytes. The server takes less than 8000.
const PAYLOAD: usize = 7000;

/// How many answers the asking client keeps until it reads them. One has some 50 locks.
const UNREAD: usize = 16_384;

/// What a client is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// What it holds.
    All,
    /// What it knows of that key.
    One(i64),
    /// To tell the holder of that key of its loss, and to release the lock.
    GiveUp(i64),
}

/// What clients answered.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// By session and key.
    pub(crate) told: HashMap<(i32, i64), Holder>,
    /// The sessions that were answered for.
    pub(crate) answered: HashSet<i32>,
}

/// One request, as it is notified: `VERB KEY NAMESPACE REPLY PID`. The key and the session are `*` for all.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    question: Question,
    mark: String,
    reply: String,
    pid: Option<i32>,
}

impl Request {
    fn write(&self) -> String {
        let (verb, key) = match self.question {
            Question::All => ("tell", "*".to_owned()),
            Question::One(key) => ("tell", key.to_string()),
            Question::GiveUp(key) => ("release", key.to_string()),
        };
        let pid = self.pid.map_or("*".to_owned(), |pid| pid.to_string());
        format!("{verb} {key} {} {} {pid}", self.mark, self.reply)
    }

    /// None: it is of another version, or nonsense.
    fn read(text: &str) -> Option<Self> {
        let words: Vec<_> = text.split(' ').collect();
        let [verb, key, mark, reply, pid] = *words.as_slice() else {
            return None;
        };
        let question = match (verb, key) {
            ("tell", "*") => Question::All,
            ("tell", key) => Question::One(key.parse().ok()?),
            ("release", key) => Question::GiveUp(key.parse().ok()?),
            _ => return None,
        };
        Some(Self {
            question,
            mark: mark.to_owned(),
            reply: reply.to_owned(),
            pid: pid.parse().ok(),
        })
    }
}

impl Answers {
    /// One answer: `more`, or `end PID`, and a line for each lock.
    fn read(&mut self, text: &str) {
        let (head, lines) = text.split_once('\n').unwrap_or((text, ""));
        let read = lines.lines().filter_map(record::read);
        self.told
            .extend(read.map(|(key, session, holder)| ((session, key), holder)));
        if let Some(pid) = head.strip_prefix("end ") {
            self.answered.extend(pid.parse::<i32>());
        }
    }
}

/// An answer in as many parts as it takes.
fn parts(lines: Vec<String>, pid: i32) -> Vec<String> {
    let mut parts = Vec::new();
    let mut part = "more".to_owned();
    for line in lines {
        if part.len() + line.len() > PAYLOAD {
            parts.push(std::mem::replace(&mut part, "more".to_owned()));
        }
        part = part + "\n" + &line;
    }
    parts.push(part);
    parts.push(format!("end {pid}"));
    parts
}

impl Sessions {
    /// Has the session listen to requests. Without it the client is merely silent when it is asked.
    pub(crate) async fn listen(self: &Arc<Self>, session: &Arc<Session>, runtime: &Handle) {
        let listening = async {
            let channel = self.channel(session).await?;
            let subscription = session.wire.subscribe(channel.as_str());
            session.ask(&format!("LISTEN {}", quoted(&channel))).await?;
            Ok::<_, Failure>(subscription)
        };
        match listening.await {
            Ok(subscription) => {
                let answering = answering(Arc::downgrade(self), Arc::downgrade(session), subscription);
                runtime.spawn(answering);
            }
            Err(failure) => {
                tracing::debug!(target: "fencelock", ?failure, "a session does not hear who asks for its locks")
            }
        }
    }

    /// The channel for requests.
    async fn channel(&self, session: &Session) -> Result<String, Failure> {
        let known = || self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = known().clone() {
            return Ok(channel);
        }
        let rows = session
            .ask(&format!("SELECT name FROM {}.channel", self.settings.schema.quoted()))
            .await?;
        let channel = rows.one()?.text(0)?.to_owned();
        *known() = Some(channel.clone());
        Ok(channel)
    }

    /// Asks the clients of those sessions, and waits until all have answered, or for as long as a third of the time for one
    /// request without an answer.
    pub(crate) async fn ask_clients(
        &self,
        session: &Session,
        question: Question,
        pids: &[i32],
    ) -> Result<Answers, Failure> {
        let mut answers = Answers::default();
        if pids.is_empty() {
            return Ok(answers);
        }
        let channel = self.channel(session).await?;
        let reply = format!("fencelock_{}", OwnerId::random());
        let mut subscription = session.wire.subscribe_to(reply.as_str(), UNREAD);
        let request = Request {
            question,
            mark: self.settings.keys.mark(),
            reply: reply.clone(),
            pid: pids.first().copied().filter(|_| pids.len() == 1),
        };
        let request = notify(&channel, &request.write());
        session
            .ask(&format!("LISTEN {}; SELECT {request}", quoted(&reply)))
            .await?;
        let patience = self.settings.config.op_timeout / 3;
        let end = tokio::time::Instant::now() + self.settings.config.op_timeout * 2 / 3;
        while !pids.iter().all(|pid| answers.answered.contains(pid)) {
            let until = end.min(tokio::time::Instant::now() + patience);
            match timeout_at(until, subscription.next()).await {
                Ok(Some(notification)) => answers.read(notification.payload()),
                Ok(None) | Err(_) => break,
            }
        }
        session.ask(&format!("UNLISTEN {}", quoted(&reply))).await?;
        Ok(answers)
    }

    /// What this client holds by that session; for [`Question::GiveUp`], what it has released.
    async fn tell(self: &Arc<Self>, question: Question, session: i32) -> Vec<String> {
        let limit = self.settings.config.op_timeout / 6;
        let told = match question {
            Question::All => return self.holdings.of(session),
            Question::One(key) => {
                let turn = timeout(limit, self.holdings.turn(key)).await;
                turn.ok()
                    .and_then(|mut turn| Some(record::write(key, turn.held_by(session)?)))
            }
            Question::GiveUp(key) => {
                let sessions = Arc::clone(self);
                let giving = async move { sessions.give_up(key, session).await };
                // What has begun goes on by itself.
                let given = timeout(limit, self.settings.executor.run("forced release", giving)).await;
                given.ok().and_then(Result::ok).flatten()
            }
        };
        told.into_iter().collect()
    }

    /// Tells the holder of its loss, and then releases the lock.
    async fn give_up(self: &Arc<Self>, key: i64, session: i32) -> Option<String> {
        let mut turn = self.holdings.turn(key).await;
        let holding = turn.held_by(session)?;
        let (told, claim) = (record::write(key, holding), holding.claim.clone());
        tracing::warn!(target: "fencelock", name = %claim.name(), "the lock is taken away by force");
        holding.granted.revoker().revoke(LossReason::NotHeld);
        match self.release_in(&mut turn, key, &claim).await {
            Ok(_) => Some(told),
            Err(failure) => {
                tracing::warn!(target: "fencelock", ?failure, name = %claim.name(), "the lock was to be released by force and could not be");
                None
            }
        }
    }
}

fn notify(channel: &str, payload: &str) -> String {
    format!("pg_notify({}, {})", literal(channel), literal(payload))
}

/// Boxed, as an answer may have to open a session, which listens too.
fn answering(
    sessions: Weak<Sessions>,
    session: Weak<Session>,
    subscription: Subscription,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(answer_all(sessions, session, subscription))
}

async fn answer_all(sessions: Weak<Sessions>, session: Weak<Session>, mut subscription: Subscription) {
    while let Some(notification) = subscription.next().await {
        let Some(request) = Request::read(notification.payload()) else {
            continue;
        };
        let (Some(sessions), Some(session)) = (sessions.upgrade(), session.upgrade()) else {
            return;
        };
        if let Err(failure) = answer(&sessions, &session, request).await {
            tracing::debug!(target: "fencelock", ?failure, "a request for locks was not answered");
        }
    }
}

async fn answer(sessions: &Arc<Sessions>, session: &Arc<Session>, request: Request) -> Result<(), Failure> {
    if request.mark != sessions.settings.keys.mark() || request.pid.is_some_and(|pid| pid != session.pid) {
        return Ok(());
    }
    let lines = parts(sessions.tell(request.question, session.pid).await, session.pid);
    // A statement would keep a lock alive that is not to be renewed.
    if session.is_silent() {
        let other = sessions.any().await?;
        let told = send(&other, &request.reply, &lines).await;
        sessions.spare(other);
        return told;
    }
    send(session, &request.reply, &lines).await
}

async fn send(session: &Session, reply: &str, parts: &[String]) -> Result<(), Failure> {
    for parts in parts.chunks(8) {
        let parts: Vec<_> = parts.iter().map(|part| notify(reply, part)).collect();
        session.ask(&format!("SELECT {}", parts.join(", "))).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_are_written() {
        for (question, pid) in [
            (Question::All, None),
            (Question::One(-7), Some(7)),
            (Question::GiveUp(i64::MAX), None),
        ] {
            let request = Request {
                question,
                mark: "0a1b2c3d".to_owned(),
                reply: "fencelock_x-y".to_owned(),
                pid,
            };
            assert_eq!(Request::read(&request.write()), Some(request));
        }
        for nonsense in ["", "tell", "tell x m r 1", "steal 1 m r 1", "tell 1 m"] {
            assert_eq!(Request::read(nonsense), None, "{nonsense}");
        }
    }
}
