//! What is asked of the server, and what it answers: one script each.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{
    Attempt, Busy, Claim, FencingToken, Grant, HandOver, Holder, Lease, LockName, Released, Renewal, Stamp,
};
use redis::{FromRedisValue, Value};
use tokio::time::timeout;

use crate::failure::{self, Failure};
use crate::link::Link;
use crate::scripts;
use crate::session::Session;
use crate::{record, scripts::Source};

/// Stands for an owner where there is none.
pub(crate) const NOBODY: &str = "-";

/// What to do if another claim holds the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnBusy {
    /// Nothing.
    Fail,
    /// Wait in the queue.
    Queue,
    /// Also if this claim holds it: of several nodes, one that too few others go with. Waits in the queue, and gives the node to the
    /// earliest waiter, which may be this one.
    Yield,
}

impl OnBusy {
    fn word(self) -> &'static str {
        match self {
            Self::Fail => "0",
            Self::Queue => "1",
            Self::Yield => "2",
        }
    }
}

/// The answer to an acquire.
pub(crate) enum Answer {
    Granted(Grant),
    Busy(Waiting),
}

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
    /// How long the holder's lease has to go.
    pub(crate) lease: Duration,
    /// How long the place in the queue is kept.
    pub(crate) life: Duration,
    pub(crate) first: bool,
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
                    &scripts::ACQUIRE.get(),
                    link,
                    claim.name(),
                    &[
                        &claim.owner().to_string(),
                        &ttl.to_string(),
                        &(link.server_millis(sent) + ttl).to_string(),
                        &self.micros(sent).to_string(),
                        self.client(),
                        &info,
                        on_busy.word(),
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

    /// Asks for the lock without waiting for it; once more if the connection ends under the request.
    pub(crate) async fn try_for(&self, claim: &Claim) -> Result<Answer, Failure> {
        let asked = self.ask_for(&self.link().await?, claim, OnBusy::Fail).await;
        if !asked.as_ref().is_err_and(Failure::is_lost_connection) {
            return Ok(asked?.0);
        }
        // If the first request was carried out, the same owner gets the same token.
        let link = self.link().await?;
        let (answer, _) = self.ask_for(&link, claim, OnBusy::Fail).await?;
        if let Answer::Busy(_) = answer {
            // The first request may have been carried out after the second.
            self.release_on(&link, claim).await?;
        }
        Ok(answer)
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
            let mut answer = self.run(&scripts::RENEW.get(), link, claim.name(), &arguments).await?;
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
                    self.listeners().forget(claim.owner());
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

    /// Renews the lease of the claim. It counts only if as many replicas have it as are wanted: a server that was replaced
    /// while it stays up has none any more.
    pub(crate) async fn renew(&self, claim: &Claim) -> Result<Renewal, Failure> {
        let Some(line) = self.replicas() else {
            let link = self.link().await?;
            let renewal = self.renew_on(&link, claim).await?;
            link.look_again();
            return Ok(renewal);
        };
        let link = line.link().await?;
        // The core waits for a quarter of the ttl.
        let patience = (self.settings().op_timeout / 2).min(claim.ttl() / 8);
        let renewal = self.renew_replicated(&link, claim, patience).await?;
        link.look_again();
        Ok(renewal)
    }

    /// Waits until as many replicas as are wanted have the grant; one that too few have is given back.
    ///
    /// What is waited for is a renewal of its own: a grant may have been written by the release of another client, and the
    /// server waits only for what came over the same connection.
    pub(crate) async fn replicated(&self, grant: Grant) -> Result<Grant, Failure> {
        let Some(line) = self.replicas() else { return Ok(grant) };
        let link = line.link().await?;
        let patience = self.settings().op_timeout / 2;
        match self.renew_replicated(&link, &grant.claim, patience).await {
            Ok(Renewal::Renewed) => Ok(grant),
            Ok(_) => {
                let wanted = self.settings().min_replicas;
                Err(Failure::TooFew { reached: 0, wanted })
            }
            Err(failure @ Failure::TooFew { .. }) => {
                self.release_on(&self.link().await?, &grant.claim).await?;
                Err(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Renews, and waits for the replicas that are wanted; an error if too few have the renewal within `patience`.
    async fn renew_replicated(&self, link: &Arc<Link>, claim: &Claim, patience: Duration) -> Result<Renewal, Failure> {
        let renewal = self.renew_on(link, claim).await?;
        if renewal == Renewal::Renewed {
            self.until_replicated(link, patience).await?;
        }
        Ok(renewal)
    }

    /// Waits until the replicas that are wanted have what this connection wrote; an error if too few have it within `patience`.
    pub(crate) async fn until_replicated(&self, link: &Arc<Link>, patience: Duration) -> Result<(), Failure> {
        let wanted = self.settings().min_replicas;
        // 0 would wait for ever.
        let wait = redis::cmd("WAIT").arg(wanted).arg(millis(patience).max(1)).clone();
        let reached = redis::from_redis_value(link.ask(&wait).await?).map_err(|_| Failure::Nonsense)?;
        if reached < wanted {
            return Err(Failure::TooFew { reached, wanted });
        }
        Ok(())
    }

    pub(crate) async fn release_on(&self, link: &Arc<Link>, claim: &Claim) -> Result<Released, Failure> {
        self.release_until(link, claim, None).await
    }

    /// The same. A node of several servers does nothing if the request arrives later than `limit` from now.
    pub(crate) async fn release_until(
        &self,
        link: &Arc<Link>,
        claim: &Claim,
        limit: Option<Duration>,
    ) -> Result<Released, Failure> {
        let sent = self.clock().now();
        let owner = claim.owner().to_string();
        self.listeners().forget(claim.owner());
        let stop = limit.map_or(String::new(), |limit| {
            (link.server_millis(sent) + millis(limit)).to_string()
        });
        let arguments = [&*owner, &*stop];
        let mut answer = self
            .run(&scripts::RELEASE.get(), link, claim.name(), &arguments)
            .await?;
        let released = answer.released()?;
        link.learn(answer.number()?, sent);
        if answer.number()? > 0 {
            self.serve(link, claim.name(), self.left_of_request(sent)).await;
        }
        Ok(released)
    }

    /// Raises a node that has granted the claim with the token `presented` to `token`. False if it does not hold that grant any more.
    pub(crate) async fn confirm_on(
        &self,
        link: &Arc<Link>,
        claim: &Claim,
        presented: FencingToken,
        token: FencingToken,
    ) -> Result<bool, Failure> {
        let arguments = [claim.owner().to_string(), presented.to_string(), token.to_string()];
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let sent = self.clock().now();
        let answer = self.run(&scripts::CONFIRM.get(), link, claim.name(), &arguments).await;
        let mut answer = answer?;
        let word = answer.word()?;
        link.learn(answer.number()?, sent);
        match &*word {
            "confirmed" => Ok(true),
            "lost" => Ok(false),
            _ => Err(Failure::Nonsense),
        }
    }

    /// Gives the name to the next waiter, behind more waiters that are gone than one script removes.
    ///
    /// If this fails or takes longer than `limit`, the next refresh of a waiter continues, so the caller's request succeeds.
    async fn serve(&self, link: &Arc<Link>, name: &LockName, limit: Duration) {
        let serving = async {
            loop {
                let mut answer = self.run(&scripts::RELEASE.get(), link, name, &[NOBODY, ""]).await?;
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

    pub(crate) async fn hand_over_on(&self, link: &Arc<Link>, from: &Claim, to: &Claim) -> Result<HandOver, Failure> {
        if from.name() != to.name() {
            let released = self.release_on(link, from).await?;
            let (answer, _) = self.ask_for(link, to, OnBusy::Fail).await?;
            return Ok(HandOver::new(released, self.attempt(answer).await?));
        }
        let sent = self.clock().now();
        let ttl = millis(to.ttl());
        self.listeners().forget(from.owner());
        let mut answer = self
            .run(
                &scripts::HAND_OVER.get(),
                link,
                from.name(),
                &[
                    &from.owner().to_string(),
                    &to.owner().to_string(),
                    &ttl.to_string(),
                    &(link.server_millis(sent) + ttl).to_string(),
                    self.client(),
                    &record::info(to),
                ],
            )
            .await?;
        let released = answer.released()?;
        let answer = match self.attempted(link, to, sent, answer)? {
            Reply::Answer(answer) => answer,
            Reply::Late | Reply::Again => self.ask_for(link, to, OnBusy::Fail).await?.0,
        };
        Ok(HandOver::new(released, self.attempt(answer).await?))
    }

    pub(crate) async fn force_release_on(&self, link: &Arc<Link>, name: &LockName) -> Result<Option<Holder>, Failure> {
        let sent = self.clock().now();
        let mut answer = self.run(&scripts::FORCE_RELEASE.get(), link, name, &[NOBODY]).await?;
        let word = answer.word()?;
        answer.skip();
        if answer.number()? > 0 {
            self.serve(link, name, self.left_of_request(sent)).await;
        }
        match &*word {
            "free" => Ok(None),
            "released" => {
                let remaining = answer.lease()?;
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
        self.node().inspect(|node| node.answered(word == "young"));
        match &*word {
            "young" => Err(Failure::Young(Duration::from_millis(answer.number()?))),
            "differs" => Err(answer.difference()?),
            "again" => Ok(Reply::Again),
            "granted" => {
                let token = answer.field::<String>()?.parse().map_err(|_| Failure::Nonsense)?;
                let life = Duration::from_millis(answer.number()?);
                Ok(Reply::Answer(Answer::Granted(self.grant(claim, token, sent, life))))
            }
            "busy" => {
                let lease = answer.lease()?;
                let holder = record::holder(claim.name(), &answer.word()?, lease);
                let life = Duration::from_millis(answer.number()?);
                let first = answer.number()? == 1;
                let lease = lease.unwrap_or(claim.ttl());
                let busy = Busy::default().with_retry_after(lease).with_holder(holder);
                Ok(Reply::Answer(Answer::Busy(Waiting {
                    busy,
                    lease,
                    life,
                    first,
                })))
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

    /// A grant by the request that was sent at `sent`, which the server gave that much life.
    ///
    /// The lease counts from an earlier stamp if that is less than the ttl: what was given is what counts.
    pub(crate) fn grant(&self, claim: &Claim, token: FencingToken, sent: Stamp, life: Duration) -> Grant {
        let lease = Lease::for_claim(claim, sent - claim.ttl().saturating_sub(life));
        let grant = Grant::new(claim.clone(), token, lease);
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
        let mut arguments = [&[self.channels(), &retention], arguments].concat();
        let answer = match self.node() {
            None => script.run(link, false, &keys, &arguments).await,
            Some(node) => {
                keys.push(self.settings().keys.born());
                let of_node = node.arguments(link, arguments[2]);
                arguments.extend(of_node.iter().map(String::as_str));
                script.run(link, true, &keys, &arguments).await
            }
        };
        // The server does not say which it was.
        let answer = answer.map_err(|error| match failure::is_wrong_type(&error) {
            true => Failure::Foreign(format!("one of {}", keys.join(", "))),
            false => error.into(),
        });
        Fields::read(answer?)
    }
}

/// The server counts in milliseconds; never less than what was asked for.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// The fields of an answer, one after the other.
pub(crate) struct Fields(std::vec::IntoIter<Value>);

impl Fields {
    pub(crate) fn read(value: Value) -> Result<Self, Failure> {
        match value {
            Value::Array(fields) => Ok(Self(fields.into_iter())),
            _ => Err(Failure::Nonsense),
        }
    }

    pub(crate) fn field<T: FromRedisValue>(&mut self) -> Result<T, Failure> {
        let value = self.0.next().unwrap_or(Value::Nil);
        redis::from_redis_value(value).map_err(|_| Failure::Nonsense)
    }

    pub(crate) fn word(&mut self) -> Result<String, Failure> {
        self.field()
    }

    pub(crate) fn number(&mut self) -> Result<u64, Failure> {
        self.field()
    }

    fn skip(&mut self) {
        self.0.next();
    }

    /// What is left of a lease; `None` for a key that has no end.
    pub(crate) fn lease(&mut self) -> Result<Option<Duration>, Failure> {
        let millis: i64 = self.field()?;
        Ok(u64::try_from(millis).ok().map(Duration::from_millis))
    }

    /// How the clients before this one know the nodes.
    pub(crate) fn difference(&mut self) -> Result<Failure, Failure> {
        let (nodes, max_ttl) = (self.number()?, Duration::from_millis(self.number()?));
        Ok(Failure::Differs { nodes, max_ttl })
    }

    fn released(&mut self) -> Result<Released, Failure> {
        match &*self.word()? {
            "released" => Ok(Released::Released),
            "lost" => Ok(Released::NotHeld),
            _ => Err(Failure::Nonsense),
        }
    }
}
