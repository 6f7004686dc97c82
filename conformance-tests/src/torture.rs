//! Processes that share a few locks while faults come and go, and a history of it for the [oracle](crate::oracle).
//!
//! Every client is a process of its own, with a TCP proxy of its own on the way to the server where there is one. It asks
//! for random names, waits, gives up, holds, looks, writes to a register that refuses stale tokens, lets go. Meanwhile
//! clients are stopped, killed, cut off and slowed down, and their wall clocks step, by a plan that follows from a seed. In
//! the end all faults are healed and every name has to be free again.
//!
//! The program that calls [`run`] starts its clients: mostly itself once more, which then calls [`client`]. Whoever has
//! started the server too adds faults of the server with [`Server`].

mod clock;
mod field;
mod figures;
mod plan;
mod process;
mod route;
mod task;
mod wall;

use std::future::Future;
use std::io;
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{LockError, LockName, Locks};

use crate::oracle::{Event, History, Record};

pub use figures::{Belief, End, Figures, HandOvers, beliefs};
pub use route::Route;
pub use task::{client, is_client};
pub use wall::Missing;
pub(crate) use wall::{WallClock, WallClocks};

use field::Field;
use plan::{Plan, Planned, What};
use process::Client;

/// What is to be tried.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// How many processes there are.
    pub clients: usize,
    /// How many tasks of each client take locks, side by side: what one lets go goes to the next one without a request then.
    pub tasks: usize,
    /// How many locks they share.
    pub names: usize,
    /// For how long faults are injected.
    pub time: Duration,
    /// For how long a lock outlives its holder.
    pub ttl: Duration,
    /// For how long the server has no fault after one, so that clients do something else than wait for it. A group of servers that
    /// is there while a minority is not needs no such time.
    pub server_rest: Duration,
    /// What is injected into clients.
    pub faults: Vec<Fault>,
    /// Where the plan of the faults and the choices of the clients come from.
    pub seed: u64,
}

impl Config {
    /// The usual size: 8 clients with a task each, 4 names, a minute, a ttl of 2 s, 8 s between faults of the server, every fault that needs no other
    /// program, a random seed.
    #[must_use]
    pub fn new() -> Self {
        Self {
            clients: 8,
            tasks: 1,
            names: 4,
            time: Duration::from_secs(60),
            ttl: Duration::from_secs(2),
            server_rest: Duration::from_secs(8),
            faults: vec![Fault::Pause, Fault::Kill, Fault::Partition, Fault::Latency],
            seed: fastrand::u64(..1 << 32),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::new()
    }
}

/// What can happen to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Its process is stopped for up to two ttl.
    Pause,
    /// Its process is killed, and another one takes its place.
    Kill,
    /// What it sends, what it is answered, or both, arrives late or never; or its connections are reset and refused.
    Partition,
    /// Everything takes longer, by up to half a ttl each way.
    Latency,
    /// Its wall clock steps forward or back, by two seconds to an hour, and back to the true time later; sometimes it is
    /// killed with it, so that another process begins at the wrong time. The clock that leases are measured with stays
    /// right. Needs libfaketime: see [`can_happen_here`](Self::can_happen_here).
    Clock,
}

impl Fault {
    /// Whether it happens on the way to a server, and so needs a [`Route`] to one.
    #[must_use]
    pub fn needs_route(self) -> bool {
        matches!(self, Self::Partition | Self::Latency)
    }

    /// Whether this machine has what it takes. Runs the program `faketime` for that, if it is about a
    /// [`Clock`](Self::Clock).
    ///
    /// # Errors
    ///
    /// [`Missing`], which says what to install. [`run`] says the same.
    pub fn can_happen_here(self) -> Result<(), Missing> {
        match self {
            Self::Clock => wall::library().map(drop),
            _ => Ok(()),
        }
    }
}

/// The server's own faults, for whoever has started it.
#[async_trait]
pub trait Server: Send + Sync {
    /// What can be done to it: a word for people, and whether two may believe because of it.
    fn faults(&self) -> Vec<(&'static str, bool)>;

    /// Does the first part of that fault: pauses, kills, cuts off.
    ///
    /// # Errors
    ///
    /// Whatever goes wrong ends the run.
    async fn begin(&self, fault: &str) -> io::Result<()>;

    /// Undoes it: continues, starts again. Returns when clients can connect.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin).
    async fn end(&self, fault: &str) -> io::Result<()>;
}

/// Who takes part, besides the clients.
pub struct Place<'a> {
    /// A client that no fault happens to.
    pub locks: &'a Locks,
    /// How a client comes to the server, if through proxies.
    pub route: Option<&'a Route>,
    /// The program of a client, which calls [`client`]. It is given an address if there is a route.
    pub program: &'a dyn Fn(Option<&str>) -> Command,
    /// The server, if it was started for this.
    pub server: Option<&'a dyn Server>,
}

impl std::fmt::Debug for Place<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Place")
            .field("route", &self.route)
            .finish_non_exhaustive()
    }
}

/// How far a run is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Progress {
    /// Since the start.
    pub time: Duration,
    /// Locks that were granted so far.
    pub grants: usize,
    /// Faults so far.
    pub faults: usize,
    /// Stale writes that were refused so far.
    pub refused: usize,
    /// What is under way.
    pub now: Vec<String>,
}

/// Why there is no history.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// Not even a client without faults gets a lock.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A fault cannot be injected on this machine.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// Processes, proxies or the server could not be handled.
    #[error("the run could not go on: {0}")]
    System(#[from] io::Error),
    /// Nothing can be said about locks that nobody got.
    #[error("no client got a lock in all that time; one was told: {0}")]
    Idle(String),
}

/// How long the first lock is waited for.
const FIRST_LIMIT: Duration = Duration::from_secs(60);

/// Between two reports of the progress.
const TURN: Duration = Duration::from_millis(200);

/// Runs the clients and the faults, until the time is over or `stop` is, and gives the history.
///
/// # Errors
///
/// [`Failure`], if there is no history to judge. The clients have ended then, too.
///
/// # Cancellation
///
/// Dropping the future kills the clients.
pub async fn run(
    config: &Config,
    place: &Place<'_>,
    stop: impl Future<Output = ()>,
    mut progress: impl FnMut(&Progress),
) -> Result<History, Failure> {
    // A run of its own, beside others on the same server.
    let prefix = format!("torture/{:08x}", fastrand::u32(..));
    let names: Result<Vec<_>, _> = (0..config.names)
        .map(|i| LockName::new(format!("{prefix}/{i}")))
        .collect();
    let names = names.map_err(LockError::from)?;
    // Whether locks can be had at all, before any client is started. Nodes that are new grant nothing for a while.
    let first = place.locks.lock(format!("{prefix}/try")).ttl(config.ttl);
    first.wait_for(FIRST_LIMIT).await?.release().await?;

    let wall_clocks = match config.faults.contains(&Fault::Clock) {
        true => Some(WallClocks::new()?),
        false => None,
    };
    let field = Arc::new(Field::new(&names));
    let mut clients = Vec::new();
    for number in 0..config.clients {
        let wall_clock = wall_clocks
            .as_ref()
            .map(|clocks| clocks.of_client(number))
            .transpose()?;
        clients.push(Client::start(number, &prefix, config, place, wall_clock, &field).await?);
    }
    let plan = Plan::new(config, &place.server.map(Server::faults).unwrap_or_default());
    let mut storm = Storm {
        field: &field,
        clients,
        server: place.server,
        under_way: Vec::new(),
    };
    let passed = storm.pass(&plan, config.time, pin!(stop), &mut progress).await;
    // Also after a failure: nothing may stay behind.
    let healed = storm.heal().await;
    storm.clients.iter().for_each(Client::tell_end);
    let until = tokio::time::Instant::now() + config.ttl + Duration::from_secs(10);
    let mut ended = Ok(());
    for client in &mut storm.clients {
        ended = ended.and(client.end(until).await);
    }
    passed.and(healed).and(ended)?;
    if let Some(why) = field.idle() {
        return Err(Failure::Idle(why));
    }
    take_all(config, place.locks, &names, &field).await;
    Ok(field.history())
}

/// Every name once more, now that all is well. Whoever is the last in a queue has all others in front of it.
async fn take_all(config: &Config, locks: &Locks, names: &[LockName], field: &Field) {
    field.record(Record::NOBODY, None, Event::Healed);
    let limit = 3 * config.ttl + Duration::from_secs(20);
    let actor = config.clients * config.tasks;
    for name in names {
        field.record(actor, Some(name), Event::Invoke);
        let event = match locks.lock(name).ttl(config.ttl).wait_for(limit).await {
            Ok(guard) => {
                field.record(actor, Some(name), Event::Ok(guard.token()));
                field.record(actor, Some(name), Event::Released(guard.token()));
                let _ = guard.release().await;
                continue;
            }
            Err(LockError::TimedOut { .. }) => Event::Busy,
            Err(_) => Event::Unknown,
        };
        field.record(actor, Some(name), event);
    }
}

/// The faults that are under way.
struct Storm<'a> {
    field: &'a Field,
    clients: Vec<Client>,
    server: Option<&'a dyn Server>,
    under_way: Vec<Planned>,
}

impl Storm<'_> {
    /// Carries out the plan.
    async fn pass(
        &mut self,
        plan: &Plan,
        time: Duration,
        mut stop: std::pin::Pin<&mut impl Future<Output = ()>>,
        progress: &mut impl FnMut(&Progress),
    ) -> io::Result<()> {
        let mut coming = plan.iter().cloned().peekable();
        let mut faults = 0;
        let mut report = Duration::ZERO;
        loop {
            let now = self.field.now();
            self.end_until(now).await?;
            for client in &mut self.clients {
                client.must_live()?;
            }
            while let Some(next) = coming.next_if(|next| next.at <= now) {
                faults += 1;
                // What is carried out later than planned comes in the planned order all the same.
                self.end_until(next.at).await?;
                self.begin(next).await?;
            }
            if now >= time && coming.peek().is_none() {
                return Ok(());
            }
            if now >= report {
                progress(
                    &self
                        .field
                        .progress(faults, self.under_way.iter().map(Planned::to_string).collect()),
                );
                report = now + TURN;
            }
            let ends = self.under_way.iter().map(|planned| planned.until);
            let due = ends
                .chain(coming.peek().map(|next| next.at))
                .chain([report, time.max(now)])
                .min();
            let rest = due.unwrap_or(report).saturating_sub(now);
            tokio::select! {
                () = &mut stop => return Ok(()),
                () = tokio::time::sleep(rest) => {}
            }
        }
    }

    async fn begin(&mut self, planned: Planned) -> io::Result<()> {
        let (what, overlap) = (planned.what.to_string(), planned.what.permits_overlap());
        let actor = planned.client.unwrap_or(Record::NOBODY);
        // Before it is done, so that whatever comes of it comes later.
        self.field.record(actor, None, Event::Fault { what, overlap });
        match (planned.client, &planned.what) {
            (Some(client), what) => self.clients[client].begin(what).await?,
            (None, What::Server(fault, _)) => {
                if let Some(server) = self.server {
                    server.begin(fault).await?;
                }
            }
            (None, _) => {}
        }
        self.under_way.push(planned);
        Ok(())
    }

    async fn end_until(&mut self, now: Duration) -> io::Result<()> {
        while let Some(i) = self.under_way.iter().position(|planned| planned.until <= now) {
            let planned = self.under_way.remove(i);
            match (planned.client, &planned.what) {
                (Some(client), what) => self.clients[client].heal(what).await?,
                (None, What::Server(fault, _)) => {
                    if let Some(server) = self.server {
                        server.end(fault).await?;
                    }
                }
                (None, _) => {}
            }
            let what = planned.what.to_string();
            let actor = planned.client.unwrap_or(Record::NOBODY);
            self.field.record(actor, None, Event::Over { what });
        }
        Ok(())
    }

    async fn heal(&mut self) -> io::Result<()> {
        self.end_until(Duration::MAX).await
    }
}
