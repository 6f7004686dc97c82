//! A Redis server of a test's own, and what tests do with it.

mod clock;
mod cluster;
mod sentinels;
#[cfg(feature = "tls")]
mod tls;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

pub(crate) use conformance_tests::faults::{Direction, Proxy, Traffic};
use lock_core::{Attempt, Busy, Claim, Clock, DistributedLock, Grant, LockGuard, LockName, Stamp, Wait};
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{AsyncConnectionConfig, Client, Cmd, FromRedisValue};
use lock_redis::{RedisConfig, RedisLock};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

use clock::WallClock;
pub(crate) use cluster::{Cluster, NODE_TIMEOUT};
pub(crate) use sentinels::{FakeSentinel, SERVICE, Service, config as sentinels_config, sentinel};
#[cfg(feature = "tls")]
pub(crate) use sentinels::{fail_over, until_following};
#[cfg(feature = "tls")]
pub(crate) use tls::Certificate;

/// How long a test waits for what must happen, and takes it for hung after that.
pub(crate) const HANG_LIMIT: Duration = Duration::from_secs(60);

/// A busy machine may stand still for seconds, in which no test is to find that the server did not answer.
const OP_TIMEOUT: Duration = Duration::from_secs(30);

/// A ttl that is longer than any test. Refreshes and renewals, a third of it apart, come after [`HANG_LIMIT`]: what happens within that is
/// not by them.
pub(crate) const LONG: Duration = Duration::from_secs(300);

/// The server binary; one that is missing fails the test.
const BINARY: &str = "redis-server";

/// Ends the server, and removes its folder, when the process that started it has ended, however it did: the pipe that is read has no
/// other end then. If a line comes instead, the folder stays. The server itself takes the place of the shell.
const WATCH: &str = r#"folder=$1
shift
exec 3<&0
(
    exec >/dev/null 2>&1
    trap '' HUP INT TERM
    if read -r _ <&3; then folder=; fi
    kill -9 $$
    [ -z "$folder" ] || rm -rf "$folder"
) &
exec "$@" </dev/null 3<&-"#;

/// What a shell ends with that has not found the program.
const NOT_FOUND: i32 = 127;

/// A server on a free port of the loopback, with its files in a folder that is removed at the end.
pub(crate) struct Server {
    folder: TempDir,
    port: u16,
    arguments: Vec<String>,
    process: Child,
    wall_clock: Option<WallClock>,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    /// A Sentinel with that configuration, and further command line arguments.
    pub(crate) fn sentinel(configuration: &str, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // It wants to write to its configuration.
        let file = folder.path().join("sentinel.conf");
        std::fs::write(&file, configuration).unwrap();
        let arguments = [&[file.to_str().unwrap(), "--sentinel"], arguments].concat();
        Self::start_in(folder, &arguments, None)
    }

    /// A server with further command line arguments.
    pub(crate) fn with(arguments: &[&str]) -> Self {
        Self::in_folder(tempfile::tempdir().unwrap(), arguments, None)
    }

    /// A server whose wall clock can be set.
    pub(crate) fn with_wall_clock() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = WallClock::new(folder.path());
        Self::in_folder(folder, &[], Some(clock))
    }

    /// Sets its wall clock ahead of this machine's by that many seconds, or behind.
    pub(crate) fn set_clock(&self, ahead: i32) {
        self.wall_clock.as_ref().expect("a server with a wall clock").set(ahead);
    }

    /// A server with a certificate for `localhost`, that certificate, and the port for TLS.
    #[cfg(feature = "tls")]
    pub(crate) fn secure() -> (Self, Certificate, u16) {
        let certificate = Certificate::new(&[]);
        let (arguments, port) = certificate.arguments();
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        (Self::with(&arguments), certificate, port)
    }

    fn in_folder(folder: TempDir, arguments: &[&str], wall_clock: Option<WallClock>) -> Self {
        let path = folder.path().to_str().unwrap().to_owned();
        let arguments = [&["--save", "", "--dir", &path], arguments].concat();
        Self::start_in(folder, &arguments, wall_clock)
    }

    fn start_in(folder: TempDir, arguments: &[&str], wall_clock: Option<WallClock>) -> Self {
        let arguments: Vec<_> = arguments.iter().map(|&a| a.to_owned()).collect();
        // Between the look for a free port and the start another process may take it.
        for _ in 0..10 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            if let Some(process) = run(folder.path(), port, &arguments, wall_clock.as_ref()) {
                return Self {
                    folder,
                    port,
                    arguments,
                    process,
                    wall_clock,
                };
            }
        }
        panic!("{BINARY} did not start with {arguments:?}");
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn config(&self) -> RedisConfig {
        RedisConfig::new("127.0.0.1", self.port).op_timeout(OP_TIMEOUT)
    }

    pub(crate) async fn client(&self) -> RedisLock {
        self.config().connect().await.unwrap()
    }

    /// A connection that is not the backend's.
    pub(crate) async fn plain(&self) -> MultiplexedConnection {
        let client = Client::open(("127.0.0.1", self.port)).unwrap();
        // Its own limits are half a second and a second, for which a busy machine may not run a server.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(HANG_LIMIT))
            .set_response_timeout(Some(HANG_LIMIT));
        client
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .unwrap()
    }

    /// Runs a command, written with spaces between its words.
    pub(crate) async fn command<T: FromRedisValue>(&self, words: &str) -> T {
        let mut command = Cmd::new();
        for word in words.split(' ') {
            command.arg(word);
        }
        self.ask(&command).await
    }

    pub(crate) async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> T {
        command.query_async(&mut self.plain().await).await.unwrap()
    }

    /// Everything stored but token counters.
    pub(crate) async fn leftovers(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.command("KEYS *").await;
        keys.retain(|key| !key.ends_with(":fence"));
        keys
    }

    /// Ends the server at once, as a crash does.
    pub(crate) fn kill(&mut self) {
        end(&mut self.process);
    }

    /// Starts it again after it was killed, on the same port.
    pub(crate) fn revive(&mut self) {
        let process = run(self.folder.path(), self.port, &self.arguments, self.wall_clock.as_ref());
        self.process = process.expect("the server starts again on its port");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        signal_process(self.pid(), signal);
    }

    /// Waits until the lock of the name is stored, or is not any more.
    pub(crate) async fn until_locked(&self, name: &str, locked: bool) {
        until(&format!("the lock of {name} is there: {locked}"), async || {
            self.command::<bool>(&format!("EXISTS {{fencelock:{name}}}:lock")).await == locked
        })
        .await;
    }

    /// Makes it a replica of the server at that port of the loopback, or a primary again.
    pub(crate) async fn replicate(&self, primary: Option<u16>) {
        let of = primary.map_or("NO ONE".to_owned(), |port| format!("127.0.0.1 {port}"));
        let _: () = self.command(&format!("REPLICAOF {of}")).await;
    }

    /// Waits until `CLUSTER INFO` says so.
    pub(crate) async fn until_cluster_info(&self, words: &str) {
        until(&format!("CLUSTER INFO says {words}"), async || {
            self.command::<String>("CLUSTER INFO").await.contains(words)
        })
        .await;
    }

    /// Waits until `INFO` says so.
    pub(crate) async fn until_info(&self, section: &str, words: &str) {
        let info = lock_redis::redis::cmd("INFO").arg(section).clone();
        let client = Client::open(("127.0.0.1", self.port)).unwrap();
        until(&format!("INFO {section} says {words}"), async || {
            // Sentinels end all connections to a server that they make a replica.
            let Ok(mut connection) = client.get_multiplexed_async_connection().await else {
                return false;
            };
            let info = info.query_async::<String>(&mut connection).await;
            info.is_ok_and(|info| info.contains(words))
        })
        .await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        end(&mut self.process);
    }
}

/// Ends a server of this process at once; its folder stays.
fn end(process: &mut Child) -> ExitStatus {
    if let Some(mut watcher) = process.stdin.take() {
        // It may have ended with the server.
        let _ = writeln!(watcher);
    }
    process.kill().unwrap();
    process.wait().unwrap()
}

pub(crate) fn signal_process(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
}

fn run(folder: &Path, port: u16, arguments: &[String], wall_clock: Option<&WallClock>) -> Option<Child> {
    let mut command = Command::new("sh");
    if let Some(clock) = wall_clock {
        clock.govern(&mut command);
    }
    let mut process = command
        .args(["-c", WATCH, "sh"])
        .arg(folder)
        .arg(BINARY)
        .args(arguments)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let is_ready = |line: &str| line.contains("eady to accept connections") || line.contains("Sentinel ID is");
    let ready = lines.any(|line| is_ready(&line.unwrap()));
    if !ready {
        let found = end(&mut process).code() != Some(NOT_FOUND);
        assert!(found, "there is no {BINARY}; install it: apt-get install redis-server");
        return None;
    }
    // It would block when nobody reads what it says.
    std::thread::spawn(move || lines.for_each(drop));
    Some(process)
}

/// What a server before 6.0 answers to a greeting that it does not know.
pub(crate) const BEFORE_6: &str = "-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n";

/// Answers the first requests of one connection with those texts, and then waits until the other side closes it.
pub(crate) async fn answer(listener: &tokio::net::TcpListener, answers: &[&str]) {
    let (mut client, _) = listener.accept().await.unwrap();
    let mut request = vec![0; 4096];
    for answer in answers {
        assert!(client.read(&mut request).await.unwrap() > 0);
        client.write_all(answer.as_bytes()).await.unwrap();
    }
    let _ = tokio::io::copy(&mut client, &mut tokio::io::sink()).await;
}

/// A client whose requests may take that long, and the way that they go.
pub(crate) async fn by_proxy(server: &Server, limit: Duration) -> (RedisLock, Proxy) {
    let proxy = proxy(server).await;
    let config = config_by(&proxy).op_timeout(limit);
    (config.connect().await.unwrap(), proxy)
}

/// A way to the server that can fail.
pub(crate) async fn proxy(server: &Server) -> Proxy {
    Proxy::start(format!("127.0.0.1:{}", server.port())).await.unwrap()
}

/// The server that the proxy leads to.
pub(crate) fn config_by(proxy: &Proxy) -> RedisConfig {
    RedisConfig::new("127.0.0.1", proxy.address().port()).op_timeout(OP_TIMEOUT)
}

/// Waits for that many more connections.
pub(crate) async fn until_accepted(proxy: &Proxy, more: u64) {
    let wanted = proxy.counts().connections + more;
    let accepted = proxy.counted(|counts| counts.connections >= wanted);
    tokio::time::timeout(HANG_LIMIT, accepted)
        .await
        .expect("as many connections in time");
}

/// The rights of the user, as `docs/redis.md` lists them, with the password `hunter2`.
pub(crate) fn rights(user: &str) -> String {
    let page = include_str!("../../../../docs/redis.md");
    let (_, rule) = page.split_once(&format!("ACL SETUSER {user} ")).unwrap();
    let (rule, _) = rule.split_once("```").unwrap();
    let rule: Vec<_> = rule.split_whitespace().collect();
    format!("{user} {}", rule.join(" ").replace("PASSWORD", "hunter2"))
}

/// A primary, and a replica of it that is up to date.
pub(crate) async fn pair() -> (Server, Server) {
    let (primary, replica) = (Server::with(&["--repl-diskless-sync-delay", "0"]), Server::start());
    replica.replicate(Some(primary.port())).await;
    // The primary must know it, too.
    primary.until_info("replication", "state=online").await;
    (primary, replica)
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

/// Waits until that many claims are in the server's queue for the name.
pub(crate) async fn until_queued(server: &Server, name: &str, waiters: usize) {
    let con = server.plain().await;
    let length = lock_redis::redis::cmd("ZCARD")
        .arg(format!("{{fencelock:{name}}}:order"))
        .clone();
    until(&format!("{waiters} wait for {name}"), async || {
        length.query_async::<usize>(&mut con.clone()).await.unwrap() == waiters
    })
    .await;
}

/// How many scripts the server has run.
pub(crate) async fn scripts(server: &Server) -> u64 {
    let stats: String = server.command("INFO commandstats").await;
    let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
    let scripts = stats.lines().filter(|line| line.starts_with("cmdstat_eval"));
    scripts.filter_map(calls).sum()
}
