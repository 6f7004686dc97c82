//! What is asked of a server, and what it answers.
//!
//! Each request is one script, which reads the server's clock and answers with it. The invariants:
//!
//! 1. A lock is written only after its token has been drawn and stored, by the same script.
//! 2. Nothing is written before every key that could be of another type has been read.
//! 3. A script that finds room for the oldest claim in the queue that can be told grants it the name, before anything else; so with the next one.
//!    The first one for which there is no room blocks those behind it.
//! 4. What a claim has on the server ends at the latest one ttl after its last acquire was *sent*, and one ttl after its last renewal *arrived*;
//!    one that arrives after half a ttl does nothing. Only a reservation lasts longer: while a name is reserved its key is stored, and only a
//!    release by its owner and a forced release end it or shorten its time.
//! 5. What the client believes in ends before that.
//!
//! An exclusive hold is the lock's key. Holds that do not exclude each other, shared ones or permits, are members of a sorted set, with their ends.
//! One that is over does not count, whenever it is removed. There is room
//!
//! - for an exclusive claim if there is no hold,
//! - for a shared one if there is no exclusive hold,
//! - for a permit if there are fewer holds than permits.
//!
//! A name has one kind while it is held, so those that wait for it are of that kind, too: permits of the same number, or anything else.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use lock_core::{
    Attempt, Busy, Claim, FencingToken, Grant, Holder, Lease, LockError, LockName, Mode, Released, Renewal, Stamp,
};
use redis::{FromRedisValue, RedisError, Value};
use tokio::time::timeout;

use crate::client::Client;
use crate::connection::Connection;
use crate::error::{self, Failure};
use crate::fields::Fields;
use crate::record;
use crate::scripts::{self, Script};

/// Stands for an owner where there is none.
pub(crate) const NO_OWNER: &str = "-";

/// Stands for any owner in a release.
const ANY_OWNER: &str = "*";

/// What to do if another claim holds the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnBusy {
    /// Nothing.
    Fail,
    /// Wait in the queue.
    Queue,
}

/// The answer to an acquire.
pub(crate) enum Answer {
    Granted(Grant),
    Busy(Waiting),
}

impl From<Answer> for Attempt {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Granted(grant) => Self::Granted(grant),
            Answer::Busy(waiting) => waiting.busy.into(),
        }
    }
}

/// What is known while another claim holds the lock.
pub(crate) struct Waiting {
    pub(crate) busy: Busy,
    /// How long the place in the queue is kept.
    pub(crate) life: Duration,
    /// Earliest time until the claim can be granted, if the server pushes nothing.
    pub(crate) turn: Duration,
}

/// Minimum time between two requests of a claim that is not the first in line, if the claims before it have short ttls.
const SHORTEST_TURN: Duration = Duration::from_secs(1);

/// How many keys of any kind the server looks through in one step.
const SCANNED: u32 = 1000;

/// How many locks are read in one step.
const READ: usize = 250;

impl Client {
    /// Asks for the lock. Returns when the request that was answered was sent, too.
    pub(crate) async fn acquire_on(
        &self,
        connection: &Connection,
        claim: &Claim,
        on_busy: OnBusy,
    ) -> Result<(Answer, Stamp), Failure> {
        let (owner, ttl) = (&*claim.owner().to_string(), &*millis(claim.ttl()).to_string());
        let (client, info) = (&*self.client_at(connection), &*record::info(claim));
        let (waits, tokens) = (flag(on_busy == OnBusy::Queue), &*tokens_wanted(claim));
        let mode = &*record::mode(claim.mode());
        loop {
            let answer = self.until_not_late(connection, claim, claim.ttl(), |sent, stop| async move {
                let sent = &*self.micros(sent).to_string();
                let arguments = [owner, ttl, &*stop, sent, client, info, waits, tokens, mode];
                self.run(&scripts::ACQUIRE, connection, claim.name(), &arguments).await
            });
            let (word, mut answer, sent) = answer.await?;
            match &*word {
                // The lock is free, but so many waiters before this claim are gone that one script cannot remove them all.
                "again" => {}
                "granted" => {
                    let token = answer.field::<String>()?.parse().map_err(|_| Failure::Nonsense)?;
                    let life = Duration::from_millis(answer.number()?);
                    // A grant of what the claim holds already does not say.
                    let tokens = answer.field::<Option<u64>>()?.unwrap_or(1);
                    let grant = self.grant(claim, (token, tokens), sent, life);
                    return Ok((Answer::Granted(grant), sent));
                }
                "busy" => return Ok((Answer::Busy(waiting(claim, answer)?), sent)),
                "mode" => {
                    let found = record::read_mode(&answer.word()?);
                    return Err(LockError::invalid_mode(claim.name(), claim.mode(), found).into());
                }
                _ => return Err(Failure::Nonsense),
            }
        }
    }

    /// A grant of that many tokens, the highest of which is given, by the request that was sent at `sent`, which the server gave that much
    /// life.
    ///
    /// The lease counts from an earlier stamp if that is less than the ttl: what was given is what counts.
    pub(crate) fn grant(
        &self,
        claim: &Claim,
        (token, tokens): (FencingToken, u64),
        sent: Stamp,
        life: Duration,
    ) -> Grant {
        let lease = Lease::for_claim(claim, sent - claim.ttl().saturating_sub(life));
        let first = (token.get() + 1).saturating_sub(tokens);
        let first = FencingToken::new(first).unwrap_or(token);
        let grant = Grant::new(claim.clone(), token, lease).with_first_token(first);
        self.subscriptions().hold(&grant);
        grant
    }

    pub(crate) async fn renew_on(&self, connection: &Connection, claim: &Claim) -> Result<Renewal, Failure> {
        let ttl = claim.ttl();
        // Twice as long as the core waits for the answer.
        let is_alone = self.settings().node.is_none();
        // A lock that was lost must not come back by a request of this claim that arrives late. Nodes of several have tokens of their own.
        let token = self.subscriptions().token(claim.owner()).filter(|_| is_alone);
        let token = token.map(|token| token.to_string()).unwrap_or_default();
        let renewal = self.extend_on(connection, claim, ttl, ttl / 2, claim.at_least().is_some(), &token);
        let renewal = renewal.await?;
        connection.look_again();
        // One of several nodes does not decide that the claim is lost.
        if renewal == Renewal::NotHeld && is_alone {
            self.subscriptions().forget(claim.owner());
        }
        Ok(renewal)
    }

    /// Reserves the name for `length` from now on if the claim holds it by the grant with that token.
    pub(crate) async fn reserve_on(
        &self,
        connection: &Connection,
        claim: &Claim,
        token: FencingToken,
        length: Duration,
    ) -> Result<Renewal, Failure> {
        // The core does not wait for longer, and releases the claim then.
        let late = self.settings().op_timeout;
        self.extend_on(connection, claim, length, late, true, &token.to_string())
            .await
    }

    /// Makes what the claim holds end in `time`, or not before that if `only_longer`, unless the request takes longer than `late` to arrive.
    async fn extend_on(
        &self,
        connection: &Connection,
        claim: &Claim,
        time: Duration,
        late: Duration,
        only_longer: bool,
        token: &str,
    ) -> Result<Renewal, Failure> {
        let keys = &self.settings().keys;
        let (script, keys) = &match claim.mode() {
            Mode::Exclusive => (&scripts::RENEW, vec![keys.lock(claim.name())]),
            _ => (&scripts::RENEW_SHARE, keys.shares(claim.name()).to_vec()),
        };
        // The server takes no 0.
        let (owner, time) = (&*claim.owner().to_string(), &*millis(time).max(1).to_string());
        let extended = self.until_not_late(connection, claim, late, |_, stop| async move {
            let arguments = [owner, time, &*stop, flag(only_longer), token];
            self.run_on(script, connection, keys, &arguments).await
        });
        match &*extended.await?.0 {
            "renewed" => Ok(Renewal::Renewed),
            "lost" => Ok(Renewal::NotHeld),
            _ => Err(Failure::Nonsense),
        }
    }

    /// Runs a script that does nothing if it takes longer than `late` to arrive, once more if the idea of the server's clock was wrong. `run` gets
    /// the stamp of the sending, and the server time in ms when it is late. Returns the first word of the answer, the fields behind the reading
    /// of the clock, and that stamp.
    pub(crate) async fn until_not_late<F>(
        &self,
        connection: &Connection,
        claim: &Claim,
        late: Duration,
        run: impl Fn(Stamp, String) -> F,
    ) -> Result<(String, Fields, Stamp), Failure>
    where
        F: Future<Output = Result<Fields, Failure>>,
    {
        let mut is_repeated = false;
        loop {
            let sent = self.clock().now();
            let stop = connection.server_millis(sent) + millis(late);
            let mut answer = run(sent, stop.to_string()).await?;
            let (word, time) = (answer.word()?, answer.number()?);
            if word != "late" {
                connection.learn(time, sent);
                return Ok((word, answer, sent));
            }
            connection.relearn(time, sent);
            if is_repeated {
                let (round_trip, ttl) = (self.clock().now().since(sent), claim.ttl());
                return Err(Failure::Late { round_trip, ttl });
            }
            is_repeated = true;
        }
    }

    /// Releases the claim, and leaves the name reserved for `keep` from now on.
    pub(crate) async fn release_on(
        &self,
        connection: &Connection,
        claim: &Claim,
        keep: Option<Duration>,
    ) -> Result<Released, Failure> {
        let (owner, sent) = (&*claim.owner().to_string(), self.clock().now());
        // The server takes no 0.
        let keep = &*keep.map_or(0, |rest| millis(rest).max(1)).to_string();
        let answer = self.until_not_late(connection, claim, self.settings().op_timeout, |_, stop| async move {
            let arguments = [owner, keep, &*stop];
            self.run(&scripts::RELEASE, connection, claim.name(), &arguments).await
        });
        let (word, mut answer, _) = answer.await?;
        if answer.number()? > 0 {
            self.serve(connection, claim.name(), sent).await;
        }
        match &*word {
            "released" => Ok(Released::Released),
            "lost" => Ok(Released::NotHeld),
            _ => Err(Failure::Nonsense),
        }
    }

    /// Gives the name to the next waiter, behind more waiters that are gone than one script removes.
    ///
    /// If this fails or takes longer than half of the time that is left of the request that was sent at `sent`, the next refresh of a waiter
    /// continues, so the caller's request succeeds.
    async fn serve(&self, connection: &Connection, name: &LockName, sent: Stamp) {
        let elapsed = self.clock().now().since(sent);
        let limit = self.settings().op_timeout.saturating_sub(elapsed) / 2;
        let serving = async {
            loop {
                let mut answer = self
                    .run(&scripts::RELEASE, connection, name, &[NO_OWNER, "0", "0"])
                    .await?;
                answer.skip();
                answer.skip();
                if answer.number()? == 0 {
                    return Ok::<_, Failure>(());
                }
            }
        };
        let why = match timeout(limit, serving).await {
            Ok(Ok(())) => return,
            Ok(Err(failure)) => failure.explain("serving the next waiter").to_string(),
            Err(_) => "no more time".to_owned(),
        };
        tracing::debug!(target: "fencelock", "the next refresh of a waiter for {name} serves it: {why}");
    }

    pub(crate) async fn force_release_on(
        &self,
        connection: &Connection,
        name: &LockName,
    ) -> Result<Vec<Holder>, Failure> {
        let sent = self.clock().now();
        let mut answer = self
            .run(&scripts::RELEASE, connection, name, &[ANY_OWNER, "0", "0"])
            .await?;
        let word = answer.word()?;
        answer.skip();
        if answer.number()? > 0 {
            self.serve(connection, name, sent).await;
        }
        if !matches!(&*word, "free" | "released") {
            return Err(Failure::Nonsense);
        }
        let mut ended = Vec::new();
        while answer.has_more() {
            let remaining = answer.time()?;
            ended.push(record::holder(name, &answer.word()?, remaining));
        }
        Ok(ended)
    }

    /// Returns who holds each of those names. It is an error of that name alone if its key is of another type, or not here.
    pub(crate) async fn holders_on(
        &self,
        connection: &Connection,
        names: &[LockName],
    ) -> Result<Vec<Result<Vec<Holder>, Failure>>, Failure> {
        let keys = &self.settings().keys;
        let mut questions = vec![redis::cmd("TIME")];
        for name in names {
            let (lock, [holders, records]) = (&keys.lock(name), &keys.shares(name));
            questions.extend([
                redis::cmd("GET").arg(lock).clone(),
                redis::cmd("PTTL").arg(lock).clone(),
                redis::cmd("ZRANGE")
                    .arg(holders)
                    .arg("0")
                    .arg("-1")
                    .arg("WITHSCORES")
                    .clone(),
                redis::cmd("HGETALL").arg(records).clone(),
            ]);
        }
        let mut answers = connection.request_all(&questions).await?.into_iter();
        let now: (u64, u64) = read(answers.next())?;
        let now = now.0 * 1000 + now.1 / 1000;
        let holders = |name| {
            // All are read in any case: those of the next name come after them.
            let [value, left, ends, records] = std::array::from_fn(|_| answers.next());
            let alone = holding_alone(name, value, left);
            let shared = sharing(name, now, ends, records);
            match (alone, shared) {
                (Ok(alone), Ok(shared)) => Ok(alone.into_iter().chain(shared).collect()),
                // While its slot is moved, a node says of a key that it does not have where else it may be.
                (Ok(Some(alone)), Err(failure)) if !failure.is_denied() => Ok(vec![alone]),
                (Err(failure), Ok(shared)) if !shared.is_empty() && !failure.is_denied() => Ok(shared),
                (Err(Failure::Redis(error)), _) | (_, Err(Failure::Redis(error))) if !error::is_wrong_type(&error) => {
                    Err(error.into())
                }
                _ => Err(Failure::Foreign(keys.lock(name))),
            }
        };
        Ok(names.iter().map(holders).collect())
    }

    /// Adds the locks of one page whose names start as in `pattern`, and returns where the next page begins.
    pub(crate) async fn list_page_on(
        &self,
        connection: &Connection,
        pattern: &str,
        cursor: &str,
        holders: &mut BTreeMap<LockName, Result<Vec<Holder>, Failure>>,
    ) -> Result<String, Failure> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCANNED);
        let mut page = Fields::read(connection.request(&scan).await?)?;
        let next = page.word()?;
        let keys = page.field::<Vec<Vec<u8>>>()?;
        let names = keys.iter().filter_map(|key| self.settings().keys.name(key));
        // A scan comes by a name twice that has two keys, and perhaps others, and while a slot is moved, two nodes have names in it.
        let names: BTreeSet<_> = names.filter(|name| !matches!(holders.get(name), Some(Ok(_)))).collect();
        let names = Vec::from_iter(names);
        for names in names.chunks(READ) {
            let found = self.holders_on(connection, names).await?;
            let found = names.iter().cloned().zip(found);
            holders.extend(found.filter(|(_, found)| !matches!(found, Ok(found) if found.is_empty())));
        }
        Ok(next)
    }

    async fn run(
        &self,
        script: &Script,
        connection: &Connection,
        name: &LockName,
        arguments: &[&str],
    ) -> Result<Fields, Failure> {
        let mut keys = self.settings().keys.of(name).to_vec();
        let mut arguments = arguments.to_vec();
        if self.settings().is_cluster() {
            keys.push(self.settings().keys.never(name));
            arguments.push(connection.run_id());
        }
        self.run_on(script, connection, &keys, &arguments).await
    }

    /// Runs a script on those keys, after the arguments that are the same for all scripts.
    pub(crate) async fn run_on(
        &self,
        script: &Script,
        connection: &Connection,
        keys: &[String],
        arguments: &[&str],
    ) -> Result<Fields, Failure> {
        let retention = self.settings().counter_retention.as_millis().to_string();
        let arguments = [&[self.channels(), &retention], arguments].concat();
        answered(script.run(connection, keys, &arguments).await, keys)
    }
}

/// What the answer "busy" says behind the reading of the clock.
fn waiting(claim: &Claim, mut answer: Fields) -> Result<Waiting, Failure> {
    let lease = answer.time()?;
    let holder = record::holder(claim.name(), &answer.word()?, lease);
    let life = Duration::from_millis(answer.number()?);
    let ahead = answer.time()?.unwrap_or_default();
    let lease = lease.unwrap_or(claim.ttl());
    let busy = Busy::default().with_retry_after(lease).with_holder(holder);
    // If the first in line has ended without a release, only the request of another waiter removes it.
    let turn = match ahead {
        Duration::ZERO => lease,
        ahead => lease.max(ahead).max(SHORTEST_TURN),
    };
    Ok(Waiting { busy, life, turn })
}

/// The exclusive holder, by the answers to GET and PTTL.
fn holding_alone(name: &LockName, value: Option<Value>, left: Option<Value>) -> Result<Option<Holder>, Failure> {
    let value: Option<String> = read(value)?;
    let left: i64 = read(left)?;
    let left = u64::try_from(left).ok().map(Duration::from_millis);
    Ok(value.map(|value| record::holder(name, &value, left)))
}

/// The other holders at `now` (ms), by the answers to ZRANGE and HGETALL.
fn sharing(name: &LockName, now: u64, ends: Option<Value>, records: Option<Value>) -> Result<Vec<Holder>, Failure> {
    let ends: Vec<(String, f64)> = read(ends)?;
    let records: HashMap<String, String> = read(records)?;
    let holder = |(owner, end): (String, f64)| {
        // A number of milliseconds is exact.
        let left = Duration::from_millis((end as u64).checked_sub(now).filter(|left| *left > 0)?);
        Some(record::holder(name, records.get(&owner)?, Some(left)))
    };
    Ok(ends.into_iter().filter_map(holder).collect())
}

/// The answer to one of several commands.
fn read<T: FromRedisValue>(answer: Option<Value>) -> Result<T, Failure> {
    let answer = answer.ok_or(Failure::Nonsense)?.extract_error()?;
    redis::from_redis_value(answer).map_err(|_| Failure::Nonsense)
}

/// The fields of a script's answer.
fn answered(answer: Result<Value, RedisError>, keys: &[String]) -> Result<Fields, Failure> {
    // The server does not say which key it was.
    let answer = answer.map_err(|error| match error::is_wrong_type(&error) {
        true => Failure::Foreign(format!("one of {}", keys.join(", "))),
        false => error.into(),
    });
    Fields::read(answer?)
}

/// How many tokens a request asks for. Each stands for a microsecond before the grant. A replica that is promoted may lack the last tokens
/// of the old primary, so a block must not reach back to before the failover.
fn tokens_wanted(claim: &Claim) -> String {
    const MOST: u32 = 64;
    claim.tokens_wanted().get().min(MOST).to_string()
}

pub(crate) fn flag(is_set: bool) -> &'static str {
    if is_set { "1" } else { "0" }
}

/// The server counts in milliseconds; never less than what was asked for.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
