//! What is asked of the server, and what it answers: one script each.

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;

use lock_core::{Attempt, Busy, Claim, FencingToken, Grant, Holder, Lease, LockName, Released, Renewal, Stamp};
use redis::{RedisError, Value};
use tokio::time::timeout;

use crate::failure::{self, Failure};
use crate::fields::Fields;
use crate::link::Link;
use crate::record;
use crate::scripts::{self, Setting, Source};
use crate::session::Session;

/// Stands for an owner where there is none.
pub(crate) const NOBODY: &str = "-";

/// What to do if another claim holds the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnBusy {
    /// Nothing.
    Fail,
    /// Wait in the queue.
    Queue,
}

impl OnBusy {
    fn word(self) -> &'static str {
        match self {
            Self::Fail => "0",
            Self::Queue => "1",
        }
    }
}

/// The answer to an acquire.
pub(crate) enum Answer {
    Granted(Grant),
    Busy(Waiting),
}

/// Minimum time between two requests of a claim that is not the first in line, if the claims before it have short ttls.
const SHORTEST_TURN: Duration = Duration::from_secs(1);

/// What an acquire came to.
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
enum Reply {
    Answer(Answer),
    /// The request took too long to arrive; nothing was done.
    Late,
    /// The lock is free, but so many waiters before this claim are gone that one script cannot remove them all.
    Again,
}

/// What is known while somebody else holds the lock.
pub(crate) struct Waiting {
    pub(crate) busy: Busy,
    /// How long the place in the queue is kept.
    pub(crate) life: Duration,
    /// Earliest time until the claim can be granted, if the server pushes nothing.
    pub(crate) turn: Duration,
}

impl Session {
    /// Asks for the lock.
    pub(crate) async fn ask_for(
        &self,
        link: &Arc<Link>,
        claim: &Claim,
        on_busy: OnBusy,
    ) -> Result<(Answer, Stamp), Failure> {
        let ttl = millis(claim.ttl());
        let info = record::info(claim);
        let mut late = 0;
        loop {
            let sent = self.clock().now();
            let answer = self
                .run(
                    &scripts::ACQUIRE,
                    link,
                    claim.name(),
                    &[
                        &claim.owner().to_string(),
                        &ttl.to_string(),
                        &(link.server_millis(sent) + ttl).to_string(),
                        &self.micros(sent).to_string(),
                        &self.client_at(link, claim.name()),
                        &info,
                        on_busy.word(),
                        &tokens_wanted(claim),
                    ],
                )
                .await?;
            match self.attempted(link, claim, sent, answer)? {
                Reply::Answer(answer) => return Ok((answer, sent)),
                // An idea of the server's clock that has become wrong is put right by the first answer.
                Reply::Late if late > 0 => {
                    let (round_trip, ttl) = (self.clock().now().since(sent), claim.ttl());
                    return Err(Failure::Late { round_trip, ttl });
                }
                Reply::Late => late += 1,
                // Each time the server has removed some.
                Reply::Again => {}
            }
        }
    }

    /// Keeps the place of the claim in the queue of a name whose slot is being moved to another node of a cluster, as long as both keys of
    /// the queue are at one node. Asking for the lock does the same, and needs all keys of the name.
    pub(crate) async fn keep_place_on(&self, link: &Arc<Link>, claim: &Claim) -> Result<(), Failure> {
        let (owner, ttl) = (claim.owner().to_string(), millis(claim.ttl()));
        let end = link.server_millis(self.clock().now()) + ttl;
        let arguments: [&str; 3] = [&owner, &ttl.to_string(), &end.to_string()];
        self.run(&scripts::KEEP_PLACE, link, claim.name(), &arguments)
            .await
            .map(drop)
    }

    /// Does `work` with the connection, and once more with another one if the connection ends under it or the server is no primary any more.
    /// The second argument says whether it has been done before and may have been carried out.
    pub(crate) async fn twice<T, F>(&self, work: impl Fn(Arc<Link>, bool) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        match work(self.link().await?, false).await {
            Err(failure) if failure.is_lost_connection() => work(self.next_link().await?, true).await,
            Err(failure) if failure.is_demotion() => work(self.next_link().await?, false).await,
            done => done,
        }
    }

    async fn next_link(&self) -> Result<Arc<Link>, Failure> {
        self.link().await.map_err(Failure::maybe_sent)
    }

    /// Asks for the lock without waiting for it.
    pub(crate) async fn try_for(&self, claim: &Claim) -> Result<Answer, Failure> {
        self.twice(|link, lost| async move {
            // If a first request was carried out, the same owner gets the same token.
            let (answer, _) = self.ask_for(&link, claim, OnBusy::Fail).await?;
            if lost && matches!(answer, Answer::Busy(_)) {
                // It may be carried out yet.
                self.release_on(&link, claim, None).await?;
            }
            Ok(answer)
        })
        .await
    }

    pub(crate) async fn renew_on(&self, link: &Arc<Link>, claim: &Claim) -> Result<Renewal, Failure> {
        let (owner, ttl) = (claim.owner().to_string(), millis(claim.ttl()));
        let mut round_trip = Duration::ZERO;
        for _ in 0..2 {
            let sent = self.clock().now();
            // Twice as long as the core waits for the answer.
            let stop = link.server_millis(sent) + ttl / 2;
            let reserved = if claim.at_least().is_some() { "1" } else { "0" };
            let arguments: [&str; 4] = [&owner, &ttl.to_string(), &stop.to_string(), reserved];
            let mut answer = self.run(&scripts::RENEW, link, claim.name(), &arguments).await?;
            round_trip = self.clock().now().since(sent);
            let (word, time) = (answer.word()?, answer.number()?);
            if word == "late" {
                link.relearn(time, sent);
                continue;
            }
            link.learn(time, sent);
            return match &*word {
                "renewed" => Ok(Renewal::Renewed),
                "lost" => {
                    // One of several nodes does not decide that.
                    if self.settings().node.is_none() {
                        self.listeners().forget(claim.owner());
                    }
                    if answer.number()? > 0 {
                        // The core waits for a quarter of the ttl.
                        self.serve(link, claim.name(), claim.ttl() / 8).await;
                    }
                    Ok(Renewal::NotHeld)
                }
                _ => Err(Failure::Nonsense),
            };
        }
        let ttl = claim.ttl();
        Err(Failure::Late { round_trip, ttl })
    }

    /// Releases the claim, and leaves the name reserved for `keep` from now on.
    pub(crate) async fn release_on(
        &self,
        link: &Arc<Link>,
        claim: &Claim,
        keep: Option<Duration>,
    ) -> Result<Released, Failure> {
        if let Some(rest) = keep {
            return self.release_reserved_on(link, claim, rest).await;
        }
        let sent = self.clock().now();
        let owner = claim.owner().to_string();
        self.listeners().forget(claim.owner());
        let mut answer = self.run(&scripts::RELEASE, link, claim.name(), &[&owner]).await?;
        let released = answer.released()?;
        link.learn(answer.number()?, sent);
        if answer.number()? > 0 {
            self.serve(link, claim.name(), self.left_of_request(sent)).await;
        }
        Ok(released)
    }

    /// Whether a release has ended the hold with that token. If the answer to an earlier request was lost and the name is not held now,
    /// that request may have ended it, or the server has lost it: the counter of the name tells, unless there was another grant since.
    pub(crate) async fn settle(
        &self,
        link: &Arc<Link>,
        claim: &Claim,
        token: Option<FencingToken>,
        released: Released,
        lost: bool,
    ) -> Result<Released, Failure> {
        let (true, Released::NotHeld, Some(token)) = (lost, released, token) else {
            return Ok(released);
        };
        let [_, counter, ..] = self.settings().keys.of(claim.name());
        let answer = link.ask(redis::cmd("GET").arg(counter)).await?;
        let counter: Option<u64> = redis::from_redis_value(answer).map_err(|_| Failure::Nonsense)?;
        match counter.unwrap_or_default().cmp(&token.get()) {
            Ordering::Equal => Ok(Released::Released),
            Ordering::Less => Ok(Released::NotHeld),
            Ordering::Greater => Err(Failure::Broken),
        }
    }

    /// Gives the name to the next waiter, behind more waiters that are gone than one script removes.
    ///
    /// If this fails or takes longer than `limit`, the next refresh of a waiter continues, so the caller's request succeeds.
    async fn serve(&self, link: &Arc<Link>, name: &LockName, limit: Duration) {
        let serving = async {
            loop {
                let mut answer = self.run(&scripts::RELEASE, link, name, &[NOBODY]).await?;
                answer.skip();
                answer.skip();
                if answer.number()? == 0 {
                    return Ok::<_, Failure>(());
                }
            }
        };
        match timeout(limit, serving).await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => {
                let error = failure.explain("serving the next waiter");
                tracing::debug!(target: "fencelock", "the next refresh of a waiter for {name} serves it: {error}");
            }
            Err(_) => {
                tracing::debug!(target: "fencelock", "the next refresh of a waiter for {name} serves it: no more time")
            }
        }
    }

    /// Half of the time that is left of a request that was sent at `sent`.
    fn left_of_request(&self, sent: Stamp) -> Duration {
        let elapsed = self.clock().now().since(sent);
        self.settings().op_timeout.saturating_sub(elapsed) / 2
    }

    pub(crate) async fn force_release_on(&self, link: &Arc<Link>, name: &LockName) -> Result<Option<Holder>, Failure> {
        let sent = self.clock().now();
        let mut answer = self.run(&scripts::FORCE_RELEASE, link, name, &[NOBODY]).await?;
        let word = answer.word()?;
        answer.skip();
        if answer.number()? > 0 {
            self.serve(link, name, self.left_of_request(sent)).await;
        }
        match &*word {
            "free" => Ok(None),
            "released" => {
                let remaining = answer.time()?;
                Ok(Some(record::holder(name, &answer.word()?, remaining)))
            }
            _ => Err(Failure::Nonsense),
        }
    }

    /// What an acquire was answered.
    fn attempted(&self, link: &Link, claim: &Claim, sent: Stamp, mut answer: Fields) -> Result<Reply, Failure> {
        let word = answer.word()?;
        let time = answer.number()?;
        if word == "late" {
            link.relearn(time, sent);
            return Ok(Reply::Late);
        }
        link.learn(time, sent);
        match &*word {
            "again" => Ok(Reply::Again),
            "granted" => {
                let token = answer.field::<String>()?.parse().map_err(|_| Failure::Nonsense)?;
                let life = Duration::from_millis(answer.number()?);
                // A grant of what the claim holds already does not say.
                let tokens = answer.field::<Option<u64>>()?.unwrap_or(1);
                let grant = self.grant(claim, (token, tokens), sent, life);
                Ok(Reply::Answer(Answer::Granted(grant)))
            }
            "busy" => {
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
                Ok(Reply::Answer(Answer::Busy(Waiting { busy, life, turn })))
            }
            _ => Err(Failure::Nonsense),
        }
    }

    /// The answer as the core wants it.
    pub(crate) async fn attempt(&self, answer: Answer) -> Result<Attempt, Failure> {
        match answer {
            Answer::Granted(grant) => Ok(Attempt::Granted(self.replicated(grant).await?)),
            Answer::Busy(waiting) => Ok(waiting.busy.into()),
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
        self.granted(&grant);
        grant
    }

    pub(crate) async fn run(
        &self,
        script: &Source,
        link: &Arc<Link>,
        name: &LockName,
        arguments: &[&str],
    ) -> Result<Fields, Failure> {
        let mut keys = self.settings().keys.of(name).to_vec();
        let retention = self.settings().counter_retention.as_millis().to_string();
        let channels = self.channels(name);
        let mut arguments = [&[&*channels, &retention], arguments].concat();
        let setting = self.setting();
        if let Setting::Cluster { .. } = setting {
            keys.push(self.settings().keys.never(name));
            arguments.push(link.run_id());
        }
        answered(script.run(link, setting, &keys, &arguments).await, &keys)
    }
}

/// The fields of a script's answer.
pub(crate) fn answered(answer: Result<Value, RedisError>, keys: &[String]) -> Result<Fields, Failure> {
    // The server does not say which key it was.
    let answer = answer.map_err(|error| match failure::is_wrong_type(&error) {
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

/// The server counts in milliseconds; never less than what was asked for.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
