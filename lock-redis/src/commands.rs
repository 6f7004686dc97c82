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

use lock_core::{Busy, Claim, FencingToken, Grant, Holder, Lease, LockError, LockName, Mode, Released, Renewal, Stamp};
use redis::Value;
use tokio::time::timeout;

use crate::connection::{Connection, read};
use crate::error::{self, Failure};
use crate::record;
use crate::scripts::{self, Fields, Script};
use crate::settings::Settings;

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

/// How many tokens one request asks for at most. Each stands for a microsecond before the grant. A replica that is promoted may lack the last
/// tokens of the old primary, so a block must not reach back to before the failover.
const MOST_TOKENS: u32 = 64;

impl Settings {
    /// Asks for the lock. Returns when the request that was answered was sent, too.
    pub(crate) async fn acquire(
        &self,
        connection: &Connection,
        claim: &Claim,
        on_busy: OnBusy,
    ) -> Result<(Answer, Stamp), Failure> {
        let (owner, ttl) = (&*claim.owner().to_string(), &*millis(claim.ttl()).to_string());
        let (client, info) = (&*self.client_at(connection.server().run_id()), &*record::info(claim));
        let (waits, mode) = (flag(on_busy == OnBusy::Queue), &*record::mode(claim.mode()));
        let tokens = &*claim.tokens_wanted().get().min(MOST_TOKENS).to_string();
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
                    let token = answer.word()?.parse().map_err(|_| Failure::Nonsense)?;
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
    pub(crate) fn grant(
        &self,
        claim: &Claim,
        (token, tokens): (FencingToken, u64),
        sent: Stamp,
        life: Duration,
    ) -> Grant {
        let first = FencingToken::new((token.get() + 1).saturating_sub(tokens));
        let grant = Grant::new(claim.clone(), token, lease(claim, sent, life)).with_first_token(first.unwrap_or(token));
        self.subscriptions.hold(&grant);
        grant
    }

    pub(crate) async fn renew(&self, connection: &Connection, claim: &Claim) -> Result<Renewal, Failure> {
        let (ttl, is_alone) = (claim.ttl(), self.node.is_none());
        // A lock that was lost must not come back by a request of this claim that arrives late. Nodes of several have tokens of their own.
        let token = self.subscriptions.token(claim.owner()).filter(|_| is_alone);
        let token = token.map(|token| token.to_string()).unwrap_or_default();
        // Half of the ttl is twice as long as the core waits for the answer.
        let renewal = self.extend(connection, claim, ttl, ttl / 2, claim.at_least().is_some(), &token);
        let renewal = renewal.await?;
        connection.look_again();
        // One of several nodes does not decide that the claim is lost.
        if renewal == Renewal::NotHeld && is_alone {
            self.subscriptions.forget(claim.owner());
        }
        Ok(renewal)
    }

    /// Reserves the name for `length` from now on if the claim holds it by the grant with that token.
    pub(crate) async fn reserve(
        &self,
        connection: &Connection,
        claim: &Claim,
        token: FencingToken,
        length: Duration,
    ) -> Result<Renewal, Failure> {
        // The core does not wait for longer, and releases the claim then.
        let (late, token) = (self.config.op_timeout, token.to_string());
        self.extend(connection, claim, length, late, true, &token).await
    }

    /// Makes what the claim holds end in `time`, or not before that if `only_longer`, unless the request takes longer than `late` to arrive.
    async fn extend(
        &self,
        connection: &Connection,
        claim: &Claim,
        time: Duration,
        late: Duration,
        only_longer: bool,
        token: &str,
    ) -> Result<Renewal, Failure> {
        let (script, keys) = &match claim.mode() {
            Mode::Exclusive => (&scripts::RENEW, vec![self.keys.lock(claim.name())]),
            _ => (&scripts::RENEW_SHARE, self.keys.shares(claim.name()).to_vec()),
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
            let sent = self.clock.now();
            let stop = connection.time().latest(sent) / 1000 + millis(late);
            let mut answer = run(sent, stop.to_string()).await?;
            let (word, time) = (answer.word()?, answer.number()?);
            connection.learn(time, sent, word == "late");
            if word != "late" {
                return Ok((word, answer, sent));
            }
            if is_repeated {
                let (round_trip, ttl) = (self.clock.now().since(sent), claim.ttl());
                return Err(Failure::Told(format!(
                    "a round trip to Redis took {round_trip:.1?}, which is too long for a ttl of {ttl:?}; raise the ttl if this goes on"
                )));
            }
            is_repeated = true;
        }
    }

    /// Releases the claim, and leaves the name reserved for `keep` from now on.
    pub(crate) async fn release(
        &self,
        connection: &Connection,
        claim: &Claim,
        keep: Option<Duration>,
    ) -> Result<Released, Failure> {
        let (owner, sent) = (&*claim.owner().to_string(), self.clock.now());
        // The server takes no 0.
        let keep = &*keep.map_or(0, |rest| millis(rest).max(1)).to_string();
        let answer = self.until_not_late(connection, claim, self.config.op_timeout, |_, stop| async move {
            let arguments = [owner, keep, &*stop];
            self.run(&scripts::RELEASE, connection, claim.name(), &arguments).await
        });
        let (word, mut answer, _) = answer.await?;
        let more = answer.number()?;
        self.serve(connection, claim.name(), sent, more).await;
        match &*word {
            "released" => Ok(Released::Released),
            "lost" => Ok(Released::NotHeld),
            _ => Err(Failure::Nonsense),
        }
    }

    /// Ends the hold of every owner, and returns who they were.
    pub(crate) async fn force_release(&self, connection: &Connection, name: &LockName) -> Result<Vec<Holder>, Failure> {
        let sent = self.clock.now();
        let mut answer = self.run(&scripts::RELEASE, connection, name, &["*", "0", "0"]).await?;
        let (word, _, more) = (answer.word()?, answer.number()?, answer.number()?);
        self.serve(connection, name, sent, more).await;
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

    /// Gives the name to the next waiter if there is `more` to do: behind more waiters that are gone than one script removes.
    ///
    /// If this fails or takes longer than half of the time that is left of the request that was sent at `sent`, the next refresh of a waiter
    /// continues, so the caller's request succeeds.
    async fn serve(&self, connection: &Connection, name: &LockName, sent: Stamp, mut more: u64) {
        let elapsed = self.clock.now().since(sent);
        let limit = self.config.op_timeout.saturating_sub(elapsed) / 2;
        let serving = async {
            while more > 0 {
                let mut answer = self.run(&scripts::RELEASE, connection, name, &["-", "0", "0"]).await?;
                more = (answer.word()?, answer.number()?, answer.number()?).2;
            }
            Ok::<_, Failure>(())
        };
        let why = match timeout(limit, serving).await {
            Ok(Ok(())) => return,
            Ok(Err(failure)) => failure.explain("serving the next waiter").to_string(),
            Err(_) => "no more time".to_owned(),
        };
        tracing::debug!(target: "fencelock", "the next refresh of a waiter for {name} serves it: {why}");
    }

    /// Returns who holds each of those names. It is an error of that name alone if its key is of another type, or not here.
    pub(crate) async fn holders(
        &self,
        connection: &Connection,
        names: &[LockName],
    ) -> Result<Vec<Result<Vec<Holder>, Failure>>, Failure> {
        let mut questions = vec![redis::cmd("TIME")];
        let mut ask = |command: &str, key: &str, arguments: &[&str]| {
            questions.push(redis::cmd(command).arg(key).arg(arguments).clone());
        };
        for name in names {
            let (lock, [holders, records]) = (&self.keys.lock(name), &self.keys.shares(name));
            ask("GET", lock, &[]);
            ask("PTTL", lock, &[]);
            ask("ZRANGE", holders, &["0", "-1", "WITHSCORES"]);
            ask("HGETALL", records, &[]);
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
                _ => Err(Failure::Foreign(self.keys.lock(name))),
            }
        };
        Ok(names.iter().map(holders).collect())
    }

    /// Adds the locks of one page whose names start with `prefix`, and returns where the next page begins.
    pub(crate) async fn list_page(
        &self,
        connection: &Connection,
        prefix: &str,
        cursor: &str,
        holders: &mut BTreeMap<LockName, Result<Vec<Holder>, Failure>>,
    ) -> Result<String, Failure> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(self.keys.pattern(prefix));
        let page = connection.request(scan.arg("COUNT").arg(SCANNED)).await?;
        let (next, keys): (String, Vec<Vec<u8>>) = read(Some(page))?;
        let names = keys.iter().filter_map(|key| self.keys.name(key));
        // A scan comes by a name twice that has two keys, and perhaps others, and while a slot is moved, two nodes have names in it.
        let names: BTreeSet<_> = names.filter(|name| !matches!(holders.get(name), Some(Ok(_)))).collect();
        for names in Vec::from_iter(names).chunks(READ) {
            let found = self.holders(connection, names).await?;
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
        let mut keys = self.keys.of(name).to_vec();
        let mut arguments = arguments.to_vec();
        if self.is_cluster() {
            keys.push(self.keys.never(name));
            arguments.push(connection.server().run_id());
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
        let (channels, retention) = (
            self.keys.channels(),
            self.config.counter_retention.as_millis().to_string(),
        );
        let arguments = [&[&*channels, &retention], arguments].concat();
        let answer = script.run(connection, keys, &arguments).await;
        // The server does not say which key it was.
        Fields::read(answer.map_err(|error| match error::is_wrong_type(&error) {
            true => Failure::Foreign(format!("one of {}", keys.join(", "))),
            false => error.into(),
        })?)
    }
}

/// The lease by a request that was sent at `sent`, and that the server gave that much life.
///
/// It counts from an earlier stamp if that is less than the ttl: what was given is what counts.
pub(crate) fn lease(claim: &Claim, sent: Stamp, life: Duration) -> Lease {
    Lease::for_claim(claim, sent - claim.ttl().saturating_sub(life))
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

pub(crate) fn flag(is_set: bool) -> &'static str {
    if is_set { "1" } else { "0" }
}

/// The server counts in milliseconds; never less than what was asked for.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
