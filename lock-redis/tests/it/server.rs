//! Servers of a test's own, and what tests do with them.

use std::time::{Duration, Instant};

pub(crate) use conformance_tests::faults::{Direction, Proxy, Traffic};
use lock_core::{Attempt, Busy, Claim, Clock, DistributedLock, Grant, LockGuard, LockName, Stamp, Wait};
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{AsyncConnectionConfig, Client, Cmd, FromRedisValue};
use lock_redis::{RedisConfig, RedisLock};
pub(crate) use test_servers::{Data, FakeSentinel, Kind, RedisCluster, RedisSentinels, Server};
use tokio::task::JoinHandle;

/// How long a test waits for what must happen, and takes it for hung after that.
pub(crate) const HANG_LIMIT: Duration = Duration::from_secs(60);

/// A busy machine may stand still for seconds, in which no test is to find that the server did not answer.
const OP_TIMEOUT: Duration = Duration::from_secs(30);

/// A ttl that is longer than any test. Refreshes and renewals, a third of it apart, come after [`HANG_LIMIT`]: what happens within that is
/// not by them.
pub(crate) const LONG: Duration = Duration::from_secs(300);

pub(crate) async fn start() -> Server {
    start_with(&[]).await
}

/// Starts a server with further command line arguments.
pub(crate) async fn start_with(arguments: &[&str]) -> Server {
    Server::start_own(&Kind::LOCAL_REDIS, arguments).await.unwrap()
}

/// Starts a server whose wall clock can be set.
pub(crate) async fn start_clocked() -> Server {
    Server::start_own(&Kind::CLOCKED_REDIS, &[]).await.unwrap()
}

/// Starts a sentinel with these lines of its configuration.
pub(crate) async fn start_sentinel(lines: &[&str]) -> Server {
    Server::start_own(&Kind::LOCAL_SENTINEL, lines).await.unwrap()
}

/// A sentinel that watches the primary.
pub(crate) async fn sentinel_of(primary: &Server, further: &[&str]) -> Server {
    let watches = format!(
        "sentinel monitor {} 127.0.0.1 {} 1",
        RedisSentinels::SERVICE,
        primary.port()
    );
    start_sentinel(&[&[&*watches], further].concat()).await
}

/// A primary, and a replica of it that is up to date.
pub(crate) async fn pair() -> (Server, Server) {
    let (primary, replica) = (start_with(&["--repl-diskless-sync-delay", "0"]).await, start().await);
    replica.follow(Some(&primary)).await;
    (primary, replica)
}

/// What tests ask of a server.
pub(crate) trait Ask {
    fn port(&self) -> u16;
    fn config(&self) -> RedisConfig;
    async fn client(&self) -> RedisLock;
    /// A connection that is not the backend's.
    async fn plain(&self) -> MultiplexedConnection;
    async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> T;
    /// Runs a command, written with spaces between its words.
    async fn command<T: FromRedisValue>(&self, words: &str) -> T;
    /// Everything stored but token counters.
    async fn leftovers(&self) -> Vec<String>;
    /// How many scripts the server has run.
    async fn scripts(&self) -> u64;
    /// Waits until the lock of the name is stored, or is not any more.
    async fn until_locked(&self, name: &str, locked: bool);
    /// Waits until that many claims are in the queue for the name.
    async fn until_queued(&self, name: &str, waiters: usize);
    /// Waits until `INFO` says so.
    async fn until_info(&self, section: &str, words: &str);
    /// Makes it a replica of that server that is up to date, or a primary again.
    async fn follow(&self, primary: Option<&Server>);
}

impl Ask for Server {
    fn port(&self) -> u16 {
        let (_, port) = self.authority().rsplit_once(':').unwrap();
        port.parse().unwrap()
    }

    fn config(&self) -> RedisConfig {
        RedisConfig::new("127.0.0.1", self.port()).op_timeout(OP_TIMEOUT)
    }

    async fn client(&self) -> RedisLock {
        self.config().connect().await.unwrap()
    }

    async fn plain(&self) -> MultiplexedConnection {
        let client = Client::open(self.url()).unwrap();
        // Its own limits are half a second and a second, for which a busy machine may not run a server.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(HANG_LIMIT))
            .set_response_timeout(Some(HANG_LIMIT));
        client
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .unwrap()
    }

    async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> T {
        command.query_async(&mut self.plain().await).await.unwrap()
    }

    async fn command<T: FromRedisValue>(&self, words: &str) -> T {
        let mut command = Cmd::new();
        command.arg(words.split(' ').collect::<Vec<_>>());
        self.ask(&command).await
    }

    async fn leftovers(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.command("KEYS *").await;
        keys.retain(|key| !key.ends_with(":fence"));
        keys
    }

    async fn scripts(&self) -> u64 {
        let stats: String = self.command("INFO commandstats").await;
        let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        let scripts = stats.lines().filter(|line| line.starts_with("cmdstat_eval"));
        scripts.filter_map(calls).sum()
    }

    async fn until_locked(&self, name: &str, locked: bool) {
        let key = format!("EXISTS {{fencelock:{name}}}:lock");
        let is_so = async || self.command::<bool>(&key).await == locked;
        until(&format!("the lock of {name} is there: {locked}"), is_so).await;
    }

    async fn until_queued(&self, name: &str, waiters: usize) {
        let mut plain = self.plain().await;
        let length = format!("{{fencelock:{name}}}:order");
        let length = lock_redis::redis::cmd("ZCARD").arg(length).clone();
        until(&format!("{waiters} wait for {name}"), async || {
            length.query_async::<usize>(&mut plain).await.unwrap() == waiters
        })
        .await;
    }

    async fn until_info(&self, section: &str, words: &str) {
        // Sentinels end all connections to a server that they make a replica.
        let question = format!("INFO {section}");
        let is_so = async || self.redis(&question).await.is_ok_and(|info| info.contains(words));
        until(&format!("{question} says {words}"), is_so).await;
    }

    async fn follow(&self, primary: Option<&Server>) {
        let of = primary.map_or("NO ONE".to_owned(), |primary| format!("127.0.0.1 {}", primary.port()));
        let _: () = self.command(&format!("REPLICAOF {of}")).await;
        if let Some(primary) = primary {
            // The primary must know it, too.
            primary.until_info("replication", "state=online").await;
        }
    }
}

/// A client whose requests may take that long, and the way that they go.
pub(crate) async fn by_proxy(server: &Server, limit: Duration) -> (RedisLock, Proxy) {
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let config = RedisConfig::new("127.0.0.1", proxy.address().port()).op_timeout(limit);
    (config.connect().await.unwrap(), proxy)
}

/// The rights of the user, as `docs/redis.md` lists them behind `rule`, with the password `hunter2`.
pub(crate) fn rights(rule: &str) -> String {
    let page = include_str!("../../../docs/redis.md");
    let (_, words) = page.split_once(&format!("{rule} ")).unwrap();
    let (words, _) = words.split_once("```").unwrap();
    let words: Vec<_> = words.split_whitespace().collect();
    format!("{rule} {}", words.join(" ").replace("PASSWORD", "hunter2"))
}

pub(crate) fn claim(name: &str, ttl: Duration) -> Claim {
    Claim::new(name.parse().unwrap(), ttl)
}

pub(crate) fn name(name: &str) -> LockName {
    name.parse().unwrap()
}

/// The deadline of a wait that comes to an end before that.
pub(crate) fn soon() -> Option<Stamp> {
    Some(Clock::system().now() + HANG_LIMIT)
}

pub(crate) async fn granted(lock: &impl DistributedLock, claim: &Claim) -> Grant {
    let attempt = lock.try_acquire(claim).await.unwrap();
    attempt.granted().expect("the lock is free")
}

/// Waits until the claim is granted.
pub(crate) async fn waited(lock: &impl DistributedLock, claim: &Claim) -> Grant {
    let attempt = lock.acquire(claim, Wait::until(soon())).await.unwrap();
    attempt.granted().expect("granted before the deadline")
}

/// The same in a task of its own.
pub(crate) fn waiting(lock: &(impl DistributedLock + Clone), claim: &Claim) -> JoinHandle<Grant> {
    let (lock, claim) = (lock.clone(), claim.clone());
    tokio::spawn(async move { waited(&lock, &claim).await })
}

pub(crate) async fn busy(lock: &impl DistributedLock, claim: &Claim) -> Busy {
    match lock.try_acquire(claim).await.unwrap() {
        Attempt::Busy(busy) => busy,
        other => panic!("granted although held: {other:?}"),
    }
}

/// Waits until it is so.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        let waited = began.elapsed();
        assert!(waited < HANG_LIMIT, "waited in vain until {what}");
        // Many tests wait at once: what takes long is looked at less often.
        let pause = (waited / 20).clamp(Duration::from_millis(1), Duration::from_millis(20));
        tokio::time::sleep(pause).await;
    }
}

/// Waits until the lock is renewed.
pub(crate) async fn until_renewed(guard: &LockGuard) {
    until("a renewal succeeds", async || guard.renew_now().await.is_ok()).await;
}
