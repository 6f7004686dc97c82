//! What is asked of the server, and what it answers: one script each.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use lock_core::{
    Attempt, Busy, Claim, FencingToken, Grant, HandOver, Holder, Lease, LockName, Released, Renewal, Stamp,
};
use redis::{FromRedisValue, Value};

use crate::failure::Failure;
use crate::link::Link;
use crate::scripts;
use crate::session::Session;
use crate::{record, scripts::Source};

/// The answer to an acquire.
pub(crate) enum Answer {
    Granted(Grant),
    Busy(Waiting),
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
    /// Asks for the lock; with `wait` the claim is in the queue if it is busy.
    pub(crate) async fn ask_for(
        &self,
        link: &Arc<Link>,
        claim: &Claim,
        wait: bool,
    ) -> Result<(Answer, Stamp), Failure> {
        let ttl = millis(claim.ttl());
        let info = record::info(claim);
        // An idea of the server's clock that has become wrong is put right by the first answer.
        for _ in 0..2 {
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
                        self.client(),
                        &info,
                        if wait { "1" } else { "0" },
                    ],
                )
                .await?;
            if let Some(answer) = self.attempted(link, claim, sent, answer)? {
                return Ok((answer, sent));
            }
        }
        Err(Failure::Late)
    }

    pub(crate) async fn renew_on(&self, link: &Arc<Link>, claim: &Claim) -> Result<Renewal, Failure> {
        let (owner, ttl) = (claim.owner().to_string(), millis(claim.ttl()));
        for _ in 0..2 {
            let sent = self.clock().now();
            // Twice as long as the core waits for the answer.
            let stop = link.server_millis(sent) + ttl / 2;
            let arguments: [&str; 3] = [&owner, &ttl.to_string(), &stop.to_string()];
            let mut answer = self.run(&scripts::RENEW, link, claim.name(), &arguments).await?;
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
                    Ok(Renewal::NotHeld)
                }
                _ => Err(Failure::Nonsense),
            };
        }
        Err(Failure::Late)
    }

    /// Waits until as many replicas as are wanted have the grant; one that too few have is given back.
    ///
    /// What is waited for is a renewal of its own: a grant may have been written by the release of another client, and the
    /// server waits only for what came over the same connection.
    pub(crate) async fn replicated(&self, grant: Grant) -> Result<Grant, Failure> {
        let Some(line) = self.replicas() else { return Ok(grant) };
        let wanted = self.settings().min_replicas;
        let link = line.link().await?;
        if self.renew_on(&link, &grant.claim).await? == Renewal::NotHeld {
            return Err(Failure::TooFew { reached: 0, wanted });
        }
        let patience = millis(self.settings().op_timeout / 2);
        let wait = redis::cmd("WAIT").arg(wanted).arg(patience).clone();
        let reached = redis::from_redis_value(link.ask(&wait).await?).map_err(|_| Failure::Nonsense)?;
        if reached >= wanted {
            return Ok(grant);
        }
        self.release_on(&self.link().await?, &grant.claim).await?;
        Err(Failure::TooFew { reached, wanted })
    }

    pub(crate) async fn release_on(&self, link: &Arc<Link>, claim: &Claim) -> Result<Released, Failure> {
        let sent = self.clock().now();
        let owner = claim.owner().to_string();
        self.listeners().forget(claim.owner());
        let mut answer = self.run(&scripts::RELEASE, link, claim.name(), &[&owner]).await?;
        let released = answer.released()?;
        link.learn(answer.number()?, sent);
        Ok(released)
    }

    pub(crate) async fn hand_over_on(&self, link: &Arc<Link>, from: &Claim, to: &Claim) -> Result<HandOver, Failure> {
        let sent = self.clock().now();
        let ttl = millis(to.ttl());
        self.listeners().forget(from.owner());
        let mut answer = self
            .run(
                &scripts::HAND_OVER,
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
            Some(answer) => answer,
            None => self.ask_for(link, to, false).await?.0,
        };
        Ok(HandOver::new(released, self.attempt(answer).await?))
    }

    pub(crate) async fn force_release_on(&self, link: &Arc<Link>, name: &LockName) -> Result<Option<Holder>, Failure> {
        let mut answer = self.run(&scripts::FORCE_RELEASE, link, name, &["-"]).await?;
        match &*answer.word()? {
            "free" => Ok(None),
            "released" => {
                answer.skip();
                let remaining = answer.lease()?;
                Ok(Some(record::holder(name, &answer.word()?, remaining)))
            }
            _ => Err(Failure::Nonsense),
        }
    }

    pub(crate) async fn holder_on(&self, link: &Arc<Link>, name: &LockName) -> Result<Option<Holder>, Failure> {
        let key = [self.settings().keys.lock(name)];
        let mut answer = Fields::read(scripts::HOLDER.run(link, &key, &[]).await?)?;
        let value: Option<String> = answer.field()?;
        let remaining = answer.lease()?;
        Ok(value.map(|value| record::holder(name, &value, remaining)))
    }

    /// Everything that is held under names that start with `prefix`.
    pub(crate) async fn list_on(&self, link: &Arc<Link>, prefix: &str) -> Result<Vec<Holder>, Failure> {
        let keys = &self.settings().keys;
        let mut holders = BTreeMap::new();
        let mut cursor = "0".to_owned();
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(&cursor)
                .arg("MATCH")
                .arg(keys.pattern(prefix))
                .arg("COUNT")
                .arg(1000);
            let mut page = Fields::read(link.ask(&scan).await?)?;
            cursor = page.word()?;
            for key in page.field::<Vec<Vec<u8>>>()? {
                // A scan may come by a key twice.
                if let Some(name) = keys.name(&key).filter(|name| !holders.contains_key(name))
                    && let Some(holder) = self.holder_on(link, &name).await?
                {
                    holders.insert(name, holder);
                }
            }
            if cursor == "0" {
                return Ok(holders.into_values().collect());
            }
        }
    }

    /// What an acquire was answered; `None` if it came too late.
    fn attempted(
        &self,
        link: &Link,
        claim: &Claim,
        sent: Stamp,
        mut answer: Fields,
    ) -> Result<Option<Answer>, Failure> {
        let word = answer.word()?;
        let time = answer.number()?;
        if word == "late" {
            link.relearn(time, sent);
            return Ok(None);
        }
        link.learn(time, sent);
        match &*word {
            "granted" => {
                let token = answer.field::<String>()?.parse().map_err(|_| Failure::Nonsense)?;
                let life = Duration::from_millis(answer.number()?);
                Ok(Some(Answer::Granted(self.grant(claim, token, sent, life))))
            }
            "busy" => {
                let lease = answer.lease()?;
                let holder = record::holder(claim.name(), &answer.word()?, lease);
                let life = Duration::from_millis(answer.number()?);
                let first = answer.number()? == 1;
                let lease = lease.unwrap_or(claim.ttl());
                let busy = Busy::default().with_retry_after(lease).with_holder(holder);
                Ok(Some(Answer::Busy(Waiting {
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

    async fn run(
        &self,
        script: &Source,
        link: &Arc<Link>,
        name: &LockName,
        arguments: &[&str],
    ) -> Result<Fields, Failure> {
        let keys = self.settings().keys.of(name);
        let arguments = [&[self.channels()], arguments].concat();
        Fields::read(script.run(link, &keys, &arguments).await?)
    }
}

/// The server counts in milliseconds; never less than what was asked for.
fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// The fields of an answer, one after the other.
struct Fields(std::vec::IntoIter<Value>);

impl Fields {
    fn read(value: Value) -> Result<Self, Failure> {
        match value {
            Value::Array(fields) => Ok(Self(fields.into_iter())),
            _ => Err(Failure::Nonsense),
        }
    }

    fn field<T: FromRedisValue>(&mut self) -> Result<T, Failure> {
        let value = self.0.next().unwrap_or(Value::Nil);
        redis::from_redis_value(value).map_err(|_| Failure::Nonsense)
    }

    fn word(&mut self) -> Result<String, Failure> {
        self.field()
    }

    fn number(&mut self) -> Result<u64, Failure> {
        self.field()
    }

    fn skip(&mut self) {
        self.0.next();
    }

    /// What is left of a lease; `None` for a key that has no end.
    fn lease(&mut self) -> Result<Option<Duration>, Failure> {
        let millis: i64 = self.field()?;
        Ok(u64::try_from(millis).ok().map(Duration::from_millis))
    }

    fn released(&mut self) -> Result<Released, Failure> {
        match &*self.word()? {
            "released" => Ok(Released::Released),
            "lost" => Ok(Released::NotHeld),
            _ => Err(Failure::Nonsense),
        }
    }
}
