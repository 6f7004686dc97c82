//! Clients that make a server do all that it can, and faults of servers and connections meanwhile.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use conformance_tests::servers::{Data, Kind, Server};
use fastrand::Rng;
use lock_core::{DistributedLock, LockError, Locks};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::decisions::{Decisions, Recorded};
use crate::monitor::Monitor;
use crate::proxy::{Faults, Proxy};
use crate::transcript::{Ran, transcript};

/// How many clients there are at a time.
const CLIENTS: u64 = 6;

/// How many requests a client makes at a time, at most: a lock can pass from one to the other within the client.
const TASKS: u64 = 2;

/// How many faults there are at least, one after the other: one of each kind.
pub(crate) const ROUNDS: usize = 6;

/// After which time fewer grants do.
const LONGEST: Duration = Duration::from_secs(25);

/// What makes a backend.
pub(crate) type Connect = Arc<dyn Fn() -> Connecting + Send + Sync>;

pub(crate) type Connecting = Pin<Box<dyn Future<Output = Result<Box<dyn DistributedLock>, LockError>> + Send>>;

/// A server, with a proxy before it.
pub(crate) struct Node {
    pub(crate) server: Server,
    pub(crate) proxy: Proxy,
    monitor: Monitor,
}

impl Node {
    pub(crate) async fn start(seed: u64) -> Self {
        let server = Server::start_own(&Kind::REDIS, &[]).await.unwrap();
        let proxy = Proxy::start(server.authority(), seed).await;
        let monitor = Monitor::default();
        monitor.listen(&server).await;
        Self { server, proxy, monitor }
    }

    /// The address of the proxy.
    pub(crate) fn url(&self) -> String {
        self.server.url_at(self.proxy.address)
    }

    /// Stops the server for that time. What it is sent meanwhile arrives late.
    pub(crate) async fn pause(&self, time: Duration) {
        self.server.pause().await.unwrap();
        sleep(time).await;
        self.server.resume().await.unwrap();
    }

    /// Kills the server and starts it again after that time. `on_end` is called between.
    pub(crate) async fn restart(&self, data: Data, down: Duration, on_end: impl FnOnce()) {
        // What a server has done and not answered would not be recorded.
        self.proxy.hold().await;
        self.monitor.catch_up(&self.server).await;
        self.server.kill().await.unwrap();
        self.proxy.cut();
        on_end();
        sleep(down).await;
        self.server.restart(data).await.unwrap();
        self.monitor.listen(&self.server).await;
        self.proxy.pass();
    }

    /// Every script that the server ran, once all clients have ended.
    pub(crate) async fn end(&self) -> Vec<Ran> {
        let record = self.proxy.end().await;
        self.monitor.catch_up(&self.server).await;
        let [requests, answers, delays] = record.faults;
        eprintln!("lost {requests} requests and {answers} answers, and delayed {delays} of either");
        transcript(&record, &self.monitor.take())
    }
}

/// For a while, messages are lost and delayed.
pub(crate) fn disturb_traffic(proxy: &Proxy, random: &mut Rng) {
    proxy.set(match random.bool() {
        true => Faults {
            delays: 0.1,
            longest: Duration::from_millis(400),
            ..Faults::default()
        },
        false => Faults {
            loses_request: 0.02,
            loses_answer: 0.02,
            delays: 0.05,
            longest: Duration::from_millis(100),
        },
    });
}

/// Clients that work with one name.
pub(crate) struct Torture {
    pub(crate) name: &'static str,
    pub(crate) connect: Connect,
    pub(crate) decisions: Decisions,
    /// How long a client is there, in milliseconds.
    pub(crate) lives: Range<u64>,
    pub(crate) seed: u64,
}

impl Torture {
    /// Lets the clients work until `stop`.
    pub(crate) async fn run(self: Arc<Self>, stop: watch::Receiver<bool>) {
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let random = Rng::with_seed(self.seed ^ number << 32);
            clients.spawn(Arc::clone(&self).client(random, stop.clone()));
        }
        while let Some(client) = clients.join_next().await {
            client.unwrap();
        }
    }

    /// One client after the other.
    async fn client(self: Arc<Self>, mut random: Rng, mut stop: watch::Receiver<bool>) {
        while !*stop.borrow() {
            let backend = match (self.connect)().await {
                Ok(backend) => backend,
                Err(error) => {
                    assert!(error.is_retryable(), "{error}");
                    sleep(Duration::from_millis(20)).await;
                    continue;
                }
            };
            let (kill, dead) = watch::channel(false);
            let locks = Locks::new(Recorded {
                backend,
                decisions: self.decisions.clone(),
                dead,
            });
            let life = Duration::from_millis(random.u64(self.lives.clone()));
            let mut tasks = JoinSet::new();
            for _ in 0..random.u64(1..=TASKS) {
                tasks.spawn(task(locks.clone(), self.name, random.fork()));
            }
            tokio::select! {
                () = sleep(life) => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
            if random.bool() {
                // As a process that is killed: nothing more is sent, and its connections end.
                kill.send_replace(true);
                tasks.shutdown().await;
            } else {
                tasks.shutdown().await;
                let _ = timeout(Duration::from_secs(1), locks.shutdown()).await;
                kill.send_replace(true);
            }
        }
    }
}

/// What one task of a client does until it is dropped.
async fn task(locks: Locks, name: &'static str, mut random: Rng) {
    loop {
        let ttl = Duration::from_millis(random.u64(400..900));
        let hold = Duration::from_micros(random.u64(..4000));
        let request = locks.lock(name).ttl(ttl).wait_for(Duration::from_secs(2));
        let guard = match random.u8(..100) {
            0..15 => {
                let patience = Duration::from_millis(random.u64(..30));
                timeout(patience, request).await.ok().and_then(Result::ok)
            }
            15..35 => locks.lock(name).ttl(ttl).no_wait().await.ok(),
            _ => request.await.ok(),
        };
        let Some(guard) = guard else {
            sleep(Duration::from_millis(random.u64(..5))).await;
            continue;
        };
        sleep(hold).await;
        match random.u8(..100) {
            0..10 => {
                let _ = guard.renew_now().await;
            }
            10..13 => {
                let lost = guard.lost();
                let _ = timeout(ttl.mul_f64(1.2), lost).await;
            }
            _ => {}
        }
        if random.u8(..4) > 0 {
            let _ = guard.release().await;
        }
    }
}

/// Waits until there are that many grants of each, and that many rounds of faults are over. On a machine that is very busy there are fewer grants.
pub(crate) async fn until_enough(decisions: &[Decisions], grants: usize, rounds: &AtomicUsize) {
    let began = Instant::now();
    let fewest = || decisions.iter().map(Decisions::grants).min();
    let is_over = || fewest() >= Some(grants) || began.elapsed() > LONGEST;
    while rounds.load(Ordering::Relaxed) < ROUNDS || !is_over() {
        sleep(Duration::from_millis(20)).await;
    }
}
