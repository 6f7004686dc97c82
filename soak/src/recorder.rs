//! What a client tells of itself, and the backend that writes down what servers promise.

use std::collections::HashMap;
use std::io::{Write, stdout};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::oracle::{Event, Record};
use lock_core::{
    Attempt, Capabilities, Claim, Clock, DistributedLock, FencingToken, Lease, LeaseId, LockError, LockGuard, LockName,
    Released, Renewal, Wait,
};
use lock_etcd::EtcdConfig;
use lock_postgres::PostgresConfig;
use lock_redis::RedisConfig;
use lock_sqlite::SqliteConfig;
use serde::{Deserialize, Serialize};

/// The time since the origin of the clock that leases are measured with: the same for all processes since the boot.
pub(crate) fn since_boot() -> Duration {
    let now = Clock::system().now();
    // Saturates at the origin.
    now.since(now - Duration::MAX)
}

/// A line that a client prints, as JSON. It is shorter than a pipe takes in one piece, so that a kill leaves all of it or nothing.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Line {
    /// What a worker saw. The time is since the boot.
    Saw(Record),
    /// A worker writes to the register of that name, and waits for its number as the answer.
    Write(usize, LockName, FencingToken),
    /// An operation failed, for that reason.
    Failed(String),
    /// How far ahead the wall clock was when the client began, in seconds.
    Wall(i64),
}

pub(crate) fn print(line: &Line) {
    let text = serde_json::to_string(line).unwrap_or_default();
    let _ = stdout().write_all(format!("{text}\n").as_bytes());
}

/// What the workers of a client see, and what the server has promised of it. All times are read, and all lines printed, under one mutex: what a
/// look relies on has been told before.
#[derive(Debug, Default)]
pub(crate) struct Teller(Mutex<Promises>);

#[derive(Debug, Default)]
struct Promises {
    /// When the last acknowledged refresh of a lease was sent, and for how long it counts.
    leases: HashMap<String, (Duration, Duration)>,
    /// The tokens that came with a grant, and its lease.
    grants: HashMap<LockName, Vec<(RangeInclusive<FencingToken>, String)>>,
    /// What workers hold.
    held: Vec<(usize, LockName, FencingToken)>,
}

impl Promises {
    fn lease(&self, name: &LockName, token: FencingToken) -> Option<&String> {
        let grants = self.grants.get(name)?;
        let grant = grants.iter().rfind(|(tokens, _)| tokens.contains(&token))?;
        Some(&grant.1)
    }

    /// Tells what the server has promised of this token: nothing, if no server has granted it.
    fn tell(&self, at: Duration, actor: usize, name: &LockName, token: FencingToken) {
        let lease = self.lease(name, token).and_then(|lease| self.leases.get(lease));
        let (sent, ttl) = lease.copied().unwrap_or_default();
        let event = Event::Refreshed { token, sent, ttl };
        print(&Line::Saw(Record::new(at, actor, name.clone(), event)));
    }
}

impl Teller {
    fn promises(&self) -> MutexGuard<'_, Promises> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tell(&self, actor: usize, name: &LockName, event: Event) {
        let mut promises = self.promises();
        if let Event::Released(token) = event {
            promises.held.retain(|held| *held != (actor, name.clone(), token));
        }
        print(&Line::Saw(Record::new(since_boot(), actor, name.clone(), event)));
    }

    /// Looks whether the guard holds its lock, and tells it. The time is that before the look.
    pub(crate) fn look(&self, actor: usize, guard: &LockGuard, is_new: bool) -> bool {
        let mut promises = self.promises();
        let (at, name, token) = (since_boot(), guard.name(), guard.token());
        let (is_held, held) = (guard.is_held(), (actor, name.clone(), token));
        let event = match (is_held, is_new) {
            (true, true) => {
                promises.tell(at, actor, name, token);
                promises.held.push(held);
                Event::Ok(token)
            }
            (true, false) => Event::Held(token),
            // What was granted too late was never held.
            (false, true) => Event::Unknown,
            (false, false) => {
                promises.held.retain(|other| *other != held);
                Event::Lost(token)
            }
        };
        print(&Line::Saw(Record::new(at, actor, name.clone(), event)));
        is_held
    }

    fn granted(&self, attempt: &Attempt) {
        let Attempt::Granted(grant) = attempt else { return };
        let (key, promise) = (key(&grant.lease), (since_boot(), grant.lease.ttl()));
        let mut promises = self.promises();
        let kept = promises.leases.entry(key.clone()).or_insert(promise);
        if grant.lease.claim().is_some() {
            // On a lease that other locks share, a grant adds nothing to what the last refresh promised.
            *kept = promise;
        }
        let tokens = grant.first_token()..=grant.token;
        let grants = promises.grants.entry(grant.claim.name().clone()).or_default();
        grants.push((tokens, key));
    }

    /// Tells of a refresh of these leases that was sent at that time.
    fn refreshed(&self, sent: Duration, is_meant: impl Fn(&str) -> bool) {
        let mut promises = self.promises();
        for (_, promise) in promises.leases.iter_mut().filter(|(key, _)| is_meant(key)) {
            promise.0 = promise.0.max(sent);
        }
        let at = since_boot();
        for (actor, name, token) in &promises.held {
            if promises.lease(name, *token).is_some_and(|lease| is_meant(lease)) {
                promises.tell(at, *actor, name, *token);
            }
        }
    }
}

const SHARED: &str = "shared ";

fn key(lease: &Lease) -> String {
    match lease.id() {
        LeaseId::Claim(claim) => claim.owner().to_string(),
        other => format!("{SHARED}{other:?}"),
    }
}

/// A backend that tells what its server acknowledged.
#[derive(Debug)]
pub(crate) struct Recorder {
    inner: Arc<dyn DistributedLock>,
    teller: Arc<Teller>,
    /// The planted bug: renewals are answered without asking the server.
    plant: bool,
    /// Whether an acquisition may renew, before anything else, the lease that locks share.
    acquisitions_renew: bool,
}

impl Recorder {
    pub(crate) fn new(url: &str, teller: Arc<Teller>, plant: bool) -> Result<Self, LockError> {
        Ok(Self {
            inner: backend(url)?,
            teller,
            plant,
            acquisitions_renew: url.starts_with("etcd"),
        })
    }

    async fn acquiring(&self, call: impl Future<Output = Result<Attempt, LockError>>) -> Result<Attempt, LockError> {
        if self.acquisitions_renew {
            self.teller.refreshed(since_boot(), |lease| lease.starts_with(SHARED));
        }
        let attempt = call.await?;
        self.teller.granted(&attempt);
        Ok(attempt)
    }
}

#[async_trait]
impl DistributedLock for Recorder {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        self.acquiring(self.inner.try_acquire(claim)).await
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        self.acquiring(self.inner.acquire(claim, wait)).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        if self.plant {
            return Ok(Renewal::Renewed);
        }
        let sent = since_boot();
        let renewal = self.inner.renew(lease).await?;
        if renewal == Renewal::Renewed {
            let key = key(lease);
            self.teller.refreshed(sent, |lease| lease == key);
        }
        Ok(renewal)
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.inner.release(claim, keep).await
    }

    async fn close(&self) -> Result<(), LockError> {
        self.inner.close().await
    }

    fn clock(&self) -> Clock {
        self.inner.clock()
    }
}

/// The backend of an address. It connects when it is used: a server may be down when a client begins.
fn backend(url: &str) -> Result<Arc<dyn DistributedLock>, LockError> {
    Ok(match url.split(':').next().unwrap_or_default() {
        "sqlite" => Arc::new(SqliteConfig::from_url(url)?.connect_lazy()?),
        "postgres" | "postgresql" => Arc::new(PostgresConfig::from_url(url)?.connect_lazy()?),
        "etcd" | "etcds" => Arc::new(EtcdConfig::from_url(url)?.connect_lazy()?),
        _ => Arc::new(RedisConfig::from_url(url)?.connect_lazy()?),
    })
}
