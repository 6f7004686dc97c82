//! A Redis server of a test's own, and what tests do with it.

#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod clock;
mod proxy;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lock_core::{Attempt, Busy, Claim, Clock, DistributedLock, Grant, LockName, Stamp};
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{Client, Cmd, FromRedisValue};
use lock_redis::{RedisConfig, RedisLock};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use clock::WallClock;
#[allow(unused_imports, reason = "each test binary uses its part")]
pub(crate) use proxy::Proxy;

/// Longer than any test.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// The server binary; one that is missing fails the test.
const BINARY: &str = "redis-server";

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

    /// A Sentinel that watches nothing.
    pub(crate) fn sentinel() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // It wants to write to its configuration.
        let file = folder.path().join("sentinel.conf");
        std::fs::write(&file, "").unwrap();
        Self::start_in(folder, &[file.to_str().unwrap(), "--sentinel"], None)
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

    /// A server with a certificate for `localhost`, the folder with that certificate, `cert.pem`, and the port for TLS.
    #[cfg(feature = "tls")]
    pub(crate) fn secure() -> (Self, TempDir, u16) {
        let folder = tempfile::tempdir().unwrap();
        let own = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("cert.pem"), own.cert.pem()).unwrap();
        std::fs::write(path("key.pem"), own.signing_key.serialize_pem()).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = Self::with(&[
            "--tls-port",
            &port.to_string(),
            "--tls-cert-file",
            &path("cert.pem"),
            "--tls-key-file",
            &path("key.pem"),
            "--tls-auth-clients",
            "no",
        ]);
        (server, folder, port)
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
            if let Some(process) = run(port, &arguments, wall_clock.as_ref()) {
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
        RedisConfig::new("127.0.0.1", self.port)
    }

    pub(crate) async fn client(&self) -> RedisLock {
        self.config().connect().await.unwrap()
    }

    /// A connection that is not the backend's.
    pub(crate) async fn plain(&self) -> MultiplexedConnection {
        let client = Client::open(("127.0.0.1", self.port)).unwrap();
        client.get_multiplexed_async_connection().await.unwrap()
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
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Starts it again after it was killed, on the same port.
    pub(crate) fn revive(&mut self) {
        let process = run(self.port, &self.arguments, self.wall_clock.as_ref());
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

    /// Waits until `INFO` says so.
    pub(crate) async fn until_info(&self, section: &str, words: &str) {
        until(&format!("INFO {section} says {words}"), async || {
            self.command::<String>(&format!("INFO {section}")).await.contains(words)
        })
        .await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn signal_process(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
}

fn run(port: u16, arguments: &[String], wall_clock: Option<&WallClock>) -> Option<Child> {
    let mut command = Command::new(BINARY);
    if let Some(clock) = wall_clock {
        clock.govern(&mut command);
    }
    let mut process = command
        .args(arguments)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|e| panic!("{BINARY} cannot be run ({e}); install it: apt-get install redis-server"));
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let is_ready = |line: &str| line.contains("eady to accept connections") || line.contains("Sentinel ID is");
    let ready = lines.any(|line| is_ready(&line.unwrap()));
    if !ready {
        process.wait().unwrap();
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

/// The rights of the user, as `docs/redis.md` lists them, with the password `hunter2`.
pub(crate) fn rights(user: &str) -> String {
    let page = include_str!("../../../docs/redis.md");
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

pub(crate) fn soon() -> Option<Stamp> {
    Some(Clock::system().now() + Duration::from_secs(20))
}

pub(crate) async fn granted(lock: &RedisLock, claim: &Claim) -> Grant {
    let attempt = lock.try_acquire(claim).await.unwrap();
    attempt.granted().expect("the lock is free")
}

pub(crate) async fn busy(lock: &RedisLock, claim: &Claim) -> Busy {
    match lock.try_acquire(claim).await.unwrap() {
        Attempt::Busy(busy) => busy,
        other => panic!("granted although held: {other:?}"),
    }
}

/// Waits until it is so, for no longer than any test should take.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is_so().await {
        assert!(Instant::now() < end, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
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
