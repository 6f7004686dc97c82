//! The suite on the Redis backend, on servers of its own, with real child processes.

#![allow(clippy::expect_used, reason = "a test may fail")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::{Fault, Harness, Injection, Namespace, Resource};
use lock_core::{DistributedLock, FencingToken, LockError, LockName, OwnerId};
use lock_redis::RedisConfig;
use lock_redis::fence::{self, FenceError};
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{self, Client, Cmd, FromRedisValue};
use rustix::process::{Pid, Signal, kill_process};

/// A server per namespace, so that whatever is done to it disturbs no other case.
#[derive(Default)]
struct Redis {
    servers: Mutex<HashMap<PathBuf, Server>>,
}

#[async_trait]
impl Harness for Redis {
    fn name(&self) -> &str {
        "redis"
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        let config = RedisConfig::new("127.0.0.1", self.port(namespace)).credentials("locks", PASSWORD);
        Ok(Arc::new(config.connect().await?))
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let mut keys: Vec<String> = self.ask(namespace, redis::cmd("KEYS").arg("*")).await?;
        // Counters stay for a day.
        keys.retain(|key| !key.ends_with("}:fence"));
        keys.sort_unstable();
        Ok(Some(keys))
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        match fault {
            Fault::Expire(name) => {
                let expire = redis::cmd("PEXPIRE").arg(lock(name)).arg(1).clone();
                self.ask::<()>(namespace, &expire).await?;
            }
            Fault::Delete(name) => self.ask::<()>(namespace, redis::cmd("DEL").arg(lock(name))).await?,
            Fault::Steal(name) => {
                let token: u64 = self.ask(namespace, redis::cmd("INCR").arg(counter(name))).await?;
                let stranger = format!("1 {} {token} 0 stranger 0 host", OwnerId::random());
                let steal = redis::cmd("SET").arg(lock(name)).arg(stranger).arg("KEEPTTL").clone();
                self.ask::<()>(namespace, &steal).await?;
            }
            Fault::Freeze(time) => self.with_server(namespace, |server| server.freeze(*time)),
            Fault::Restart => self.with_server(namespace, |server| {
                server.kill();
                server.start();
            }),
            Fault::RestartWithoutData => self.with_server(namespace, |server| {
                server.kill();
                std::fs::remove_dir_all(server.data()).unwrap_or_default();
                server.start();
            }),
            Fault::Copy => self.with_server(namespace, |server| {
                copy(&server.data(), &server.folder.join("copy"));
            }),
            Fault::Restore => self.with_server(namespace, |server| {
                server.kill();
                std::fs::remove_dir_all(server.data()).unwrap_or_default();
                copy(&server.folder.join("copy"), &server.data());
                server.start();
            }),
            _ => return Ok(Injection::NotPossible),
        }
        Ok(Injection::Done)
    }

    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        let mut connection = self.connection(namespace).await?;
        // Apart from the locks.
        redis::cmd("SELECT")
            .arg(1)
            .exec_async(&mut connection)
            .await
            .map_err(failed)?;
        Ok(Some(Arc::new(FencedKey {
            connection,
            resource: resource.to_owned(),
        })))
    }

    fn child_environment(&self, namespace: &Namespace) -> Vec<(String, String)> {
        // A child finds the server of its parent.
        self.port(namespace);
        Vec::new()
    }

    // Sent by one task, answered by another.
    fn fewest_polls(&self) -> usize {
        2
    }
}

impl Redis {
    /// The port of the namespace's server, which is started if there is none.
    fn port(&self, namespace: &Namespace) -> u16 {
        let read = || {
            std::fs::read_to_string(namespace.folder().join("port"))
                .ok()?
                .parse()
                .ok()
        };
        match read() {
            Some(port) => port,
            None => self.with_server(namespace, |server| server.port),
        }
    }

    fn with_server<T>(&self, namespace: &Namespace, work: impl FnOnce(&mut Server) -> T) -> T {
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        // Those of cases that have ended.
        servers.retain(|folder, _| folder.exists());
        let folder = namespace.folder().to_owned();
        work(
            servers
                .entry(folder)
                .or_insert_with_key(|folder| Server::new(folder.clone())),
        )
    }

    async fn connection(&self, namespace: &Namespace) -> Result<MultiplexedConnection, LockError> {
        let client = Client::open(("127.0.0.1", self.port(namespace))).map_err(failed)?;
        client.get_multiplexed_async_connection().await.map_err(failed)
    }

    async fn ask<T: FromRedisValue>(&self, namespace: &Namespace, command: &Cmd) -> Result<T, LockError> {
        let mut connection = self.connection(namespace).await?;
        command.query_async(&mut connection).await.map_err(failed)
    }
}

fn lock(name: &LockName) -> String {
    format!("{{fencelock:{name}}}:lock")
}

fn counter(name: &LockName) -> String {
    format!("{{fencelock:{name}}}:fence")
}

fn failed(error: redis::RedisError) -> LockError {
    LockError::unavailable("looking at the server", error)
}

/// A server in the folder of a namespace, which ends with this process however that ends.
struct Server {
    folder: PathBuf,
    port: u16,
    keeper: Child,
}

impl Server {
    fn new(folder: PathBuf) -> Self {
        // Between the look for a free port and the start another process may take it.
        for _ in 0..20 {
            let port = TcpListener::bind("127.0.0.1:0")
                .and_then(|l| l.local_addr())
                .expect("a free port")
                .port();
            if let Some(keeper) = run(&folder, port) {
                std::fs::write(folder.join("port"), port.to_string()).expect("the folder is writable");
                return Self { folder, port, keeper };
            }
        }
        panic!("redis-server did not start; see what it says when it is started by hand");
    }

    fn data(&self) -> PathBuf {
        self.folder.join("appendonlydir")
    }

    fn pid(&self) -> Pid {
        let pid = std::fs::read_to_string(self.folder.join("pid")).ok();
        let pid = pid.and_then(|pid| pid.trim().parse().ok()).and_then(Pid::from_raw);
        pid.expect("a running server has written its pid")
    }

    fn kill(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }

    fn start(&mut self) {
        self.keeper = run(&self.folder, self.port).expect("the server starts again on its port");
    }

    fn freeze(&self, time: Duration) {
        let pid = self.pid();
        kill_process(pid, Signal::STOP).expect("the server is there");
        std::thread::spawn(move || {
            std::thread::sleep(time);
            let _ = kill_process(pid, Signal::CONT);
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The password of the user that the backend works as.
const PASSWORD: &str = "secret";

/// A user with the least rights that the documentation names, as arguments of the server.
fn least_rights() -> Vec<String> {
    let page = include_str!("../../docs/redis.md");
    let rule = page
        .split_once("ACL SETUSER ")
        .and_then(|(_, rest)| rest.split_once("```"));
    let (rule, _) = rule.expect("the page has the rule");
    let words = rule.split_whitespace().map(|word| word.replace("PASSWORD", PASSWORD));
    ["--user".to_owned()].into_iter().chain(words).collect()
}

/// Starts a server under a shell that ends it as soon as nobody holds the other end of its input.
fn run(folder: &Path, port: u16) -> Option<Child> {
    const KEEPER: &str = r#"exec 3<&0; redis-server "$@" <&- & server=$!; echo "$server" > pid; (cat <&3 >/dev/null; kill -9 "$server") & wait "$server""#;
    let mut keeper = Command::new("sh")
        .args(["-c", KEEPER, "redis-server", "--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "yes", "--appendfsync", "no"])
        .args(least_rights())
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // The shell would say there that its server was killed.
        .stderr(Stdio::null())
        .spawn()
        .expect("there is a shell");
    let mut lines = BufReader::new(keeper.stdout.take().expect("it is piped")).lines();
    let ready = lines.any(|line| line.is_ok_and(|line| line.contains("eady to accept connections")));
    if !ready {
        drop(keeper.stdin.take());
        let _ = keeper.wait();
        return None;
    }
    // It would block when nobody reads what it says.
    std::thread::spawn(move || lines.for_each(drop));
    Some(keeper)
}

/// Copies the files of a folder.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder can be made");
    for file in std::fs::read_dir(from).expect("the server has data").flatten() {
        std::fs::copy(file.path(), to.join(file.file_name())).expect("a file can be copied");
    }
}

/// A number under a key, protected by the fence that the backend ships.
struct FencedKey {
    connection: MultiplexedConnection,
    resource: String,
}

impl FencedKey {
    fn key(&self) -> String {
        format!("{}:value", self.resource)
    }
}

#[async_trait]
impl Resource for FencedKey {
    async fn admit(&self, token: FencingToken) -> Result<bool, LockError> {
        admitted(fence::admit(&mut self.connection.clone(), &self.resource, token).await)
    }

    async fn read(&self) -> Result<i64, LockError> {
        let get = redis::cmd("GET").arg(self.key()).clone();
        let number: Option<i64> = get.query_async(&mut self.connection.clone()).await.map_err(failed)?;
        Ok(number.unwrap_or(0))
    }

    async fn write(&self, token: FencingToken, number: i64) -> Result<bool, LockError> {
        let set = redis::cmd("SET").arg(self.key()).arg(number).clone();
        admitted(fence::write(&mut self.connection.clone(), &self.resource, token, &set).await)
    }
}

fn admitted(outcome: Result<(), FenceError>) -> Result<bool, LockError> {
    match outcome {
        Ok(()) => Ok(true),
        Err(FenceError::Stale(_)) => Ok(false),
        Err(error) => Err(LockError::unavailable("admitting a token", error)),
    }
}

fn main() -> ExitCode {
    conformance_tests::run(Redis::default())
}
