//! A backend over a real server, NATS JetStream, as somebody outside of this project would write it: against the public
//! API alone, and the suite run on it. `docs/writing-a-backend.md` walks through it.
//!
//! A lock is a record in a key-value bucket. Every step looks at it, decides, and writes it *if its revision is still the
//! one that was seen*: of two who decide at once the server refuses one, who then looks again.

#[path = "nats/connection.rs"]
mod connection;
#[path = "nats/harness.rs"]
mod harness;
#[path = "nats/server.rs"]
mod server;

use std::process::ExitCode;
use std::str;
use std::time::Duration;

use async_nats::jetstream::kv::UpdateErrorKind;
use async_nats::{Error, Subscriber};
use async_trait::async_trait;
use futures_util::StreamExt as _;
use lock_core::{
    Attempt, Busy, Capabilities, Claim, DistributedLock, FencingToken, Grant, Lease, LockError, LockName, OwnerId,
    Released, Renewal, Scope, Stamp,
};
use tokio::time::{sleep, timeout};

use connection::Connection;

/// The key that is written by whoever asks what time it is at the server. Those of locks are hexadecimal.
const CLOCK: &str = "clock";
/// How long at the most a waiter lets others go first, after it has lost a race.
const LOTS: Duration = Duration::from_millis(30);

/// A client: the locks in one bucket.
#[derive(Debug)]
struct NatsLock(Connection);

/// What is stored: the holder, if there is one, its ttl in nanoseconds, and the token of the last grant.
type Record = (Option<OwnerId>, u64, u64);

/// How a name stands at the server.
struct Standing {
    /// Whose lease is not over.
    holder: Option<OwnerId>,
    left: Duration,
    /// That of the last grant.
    token: u64,
    /// That of the next grant.
    next: u64,
    /// Changes with every write; 0 if there is no record.
    revision: u64,
}

/// What a claim wants.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Take,
    Keep,
    LetGo,
}

impl NatsLock {
    /// The server's clock, in nanoseconds: its timestamp of what was sent just now.
    async fn now(&self) -> Result<u64, Error> {
        self.0.bucket.put(CLOCK, "".into()).await?;
        let clock = self.0.bucket.entry(CLOCK).await?.ok_or("the clock was deleted")?;
        Ok(clock.created.unix_timestamp_nanos().try_into()?)
    }

    /// Judges, alone in this file, whether a lease is over: it runs from the server's timestamp of the record to the
    /// server's time now. Nobody need have watched it, and no client's clock counts.
    async fn look(&self, key: &str) -> Result<Standing, Error> {
        let entry = async { Ok(self.0.bucket.entry(key).await?) };
        let (now, entry) = tokio::try_join!(self.now(), entry)?;
        let record = entry.as_ref().and_then(|entry| parse(&entry.value));
        let (holder, ttl, token) = record.unwrap_or_default();
        let written = entry.as_ref().map_or(0, |entry| entry.created.unix_timestamp_nanos());
        let left = ttl.saturating_sub(now.saturating_sub(written.try_into()?));
        Ok(Standing {
            holder: holder.filter(|_| left > 0),
            left: Duration::from_nanos(left),
            token,
            // While there is a record no order rests on the clock; if it was lost, or is older, the clock has gone on.
            next: (token + 1).max(now / 1000),
            revision: entry.map_or(0, |entry| entry.revision),
        })
    }

    /// The claim's token, and when the write was sent. Or, if it may not do this, how long the holder has left.
    async fn step(&self, claim: &Claim, step: Step) -> Result<Result<(FencingToken, Stamp), Duration>, Error> {
        let (key, ttl) = (key(claim.name()), claim.ttl().as_nanos().try_into()?);
        loop {
            let seen = self.look(&key).await?;
            let token = match seen.holder {
                // Also if it asked before and did not hear the answer.
                Some(holder) if holder == claim.owner() => seen.token,
                None if step == Step::Take => seen.next,
                _ => return Ok(Err(seen.left)),
            };
            let holder = (step != Step::LetGo).then(|| claim.owner());
            let (record, sent) = (text((holder, ttl, token)), self.clock().now());
            match self.0.bucket.update(&key, record.into(), seen.revision).await {
                Ok(_) => return Ok(Ok((FencingToken::new(token)?, sent))),
                Err(error) if error.kind() == UpdateErrorKind::WrongLastRevision => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[async_trait]
impl DistributedLock for NatsLock {
    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities::new(Scope::Server).with_op_timeout(self.0.op_timeout);
        // Long enough for whoever draws lots.
        capabilities.with_give_way(2 * LOTS)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        Ok(match self.0.ask("acquire", self.step(claim, Step::Take)).await? {
            Ok((token, sent)) => Attempt::Granted(Grant::new(claim.clone(), token, Lease::for_claim(claim, sent))),
            Err(left) => Busy::default().with_retry_after(left).into(),
        })
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        let claim = lease.claim().ok_or(LockError::closed())?;
        let kept = self.0.ask("renew", self.step(claim, Step::Keep)).await?;
        Ok(kept.map_or(Renewal::NotHeld, |_| Renewal::Renewed))
    }

    async fn release(&self, claim: &Claim) -> Result<Released, LockError> {
        let freed = self.0.ask("release", self.step(claim, Step::LetGo)).await?;
        Ok(freed.map_or(Released::NotHeld, |_| Released::Released))
    }

    /// Is told of every change by a push. Looks by itself when the holder's time is over, when the connection ends, over
    /// which a push may be lost, and now and then, should nothing come over it any more.
    async fn acquire(&self, claim: &Claim, deadline: Option<Stamp>) -> Result<Attempt, LockError> {
        // Before the first look, or a release right after that would be missed.
        let mut changes = self.0.changes(&key(claim.name())).await?;
        let mut lots = Duration::ZERO;
        loop {
            let end = self.0.end();
            let busy = match self.try_acquire(claim).await? {
                Attempt::Busy(busy) => busy,
                granted => return Ok(granted),
            };
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.since(self.clock().now()));
            if left.is_zero() {
                return Ok(busy.into());
            }
            let pause = busy.retry_after.unwrap_or(left).min(left).min(self.0.op_timeout);
            tokio::select! {
                () = released(&mut changes, lots.mul_f64(fastrand::f64())) => {}
                () = end => {}
                () = sleep(pause) => {}
            }
            lots = LOTS;
        }
    }
}

/// Waits for a release after which nobody takes the name for that time: of many who wait, most need not even try.
async fn released(changes: &mut Subscriber, time: Duration) {
    let mut is_free = false;
    while let Ok(Some(change)) = timeout(if is_free { time } else { Duration::MAX }, changes.next()).await {
        is_free = parse(&change.payload).is_none_or(|(holder, ..)| holder.is_none());
    }
}

fn parse(record: &[u8]) -> Option<Record> {
    let mut fields = str::from_utf8(record).ok()?.split(' ');
    let holder = fields.next()?.parse().ok();
    Some((holder, fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

fn text((holder, ttl, token): Record) -> String {
    let holder = holder.map(|holder| holder.to_string()).unwrap_or_default();
    format!("{holder} {ttl} {token}")
}

fn key(name: &LockName) -> String {
    name.as_str().bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn main() -> ExitCode {
    conformance_tests::run(harness::NatsHarness::default())
}
