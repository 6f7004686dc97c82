//! A primary, its replicas, and the sentinels that watch them.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lock_redis::RedisConfig;
use lock_redis::redis;

use super::{Server, until};

/// What the sentinels call it.
pub(crate) const SERVICE: &str = "mymaster";

/// After what time without an answer a sentinel takes a server for down.
pub(crate) const DOWN_AFTER: Duration = Duration::from_millis(1000);

/// One primary, two replicas and three sentinels, each on a free port of the loopback.
pub(crate) struct Service {
    pub(crate) servers: Vec<Server>,
    pub(crate) sentinels: Vec<Server>,
}

impl Service {
    pub(crate) async fn start() -> Self {
        Self::with(&[], "").await
    }

    /// The same with further arguments for all servers, and lines for the configuration of all sentinels.
    pub(crate) async fn with(arguments: &[&str], configuration: &str) -> Self {
        let primary = Server::with(&[&["--repl-diskless-sync-delay", "0"], arguments].concat());
        let of = ["--replicaof", "127.0.0.1", &primary.port().to_string()].map(str::to_owned);
        let replica = || {
            let of: Vec<_> = of.iter().map(String::as_str).collect();
            Server::with(&[&["--repl-diskless-sync-delay", "0"], &*of, arguments].concat())
        };
        let servers = vec![primary, replica(), replica()];
        let sentinels = (0..3).map(|_| sentinel(servers[0].port(), configuration)).collect();
        let service = Self { servers, sentinels };
        service.until_ready().await;
        service
    }

    /// Waits until every sentinel knows the others, and that the replicas follow the primary.
    pub(crate) async fn until_ready(&self) {
        for sentinel in &self.sentinels {
            until("the sentinel knows the others", async || {
                let state = state(sentinel).await;
                state["num-other-sentinels"] == "2" && state["flags"] == "master"
            })
            .await;
            until_following(sentinel, 2).await;
        }
    }

    pub(crate) fn config(&self) -> RedisConfig {
        let sentinels: Vec<_> = self.sentinels.iter().collect();
        config(&sentinels)
    }

    /// Where the primary is, as that sentinel says.
    pub(crate) async fn named_by(&self, sentinel: usize) -> u16 {
        let ask_for = redis::cmd("SENTINEL")
            .arg("GET-MASTER-ADDR-BY-NAME")
            .arg(SERVICE)
            .clone();
        let (_, port): (String, u16) = self.sentinels[sentinel].ask(&ask_for).await;
        port
    }

    /// Which server is the primary, as the sentinels say. They must agree.
    pub(crate) async fn primary(&self) -> usize {
        let mut found = None;
        until("the sentinels agree", async || {
            let mut ports = Vec::new();
            for sentinel in 0..self.sentinels.len() {
                ports.push(self.named_by(sentinel).await);
            }
            found = ports.iter().all(|port| *port == ports[0]).then_some(ports[0]);
            found.is_some()
        })
        .await;
        let port = found.unwrap();
        self.servers.iter().position(|server| server.port() == port).unwrap()
    }

    /// Waits until one of those sentinels names another primary than the server `from`, and returns which, and since when.
    pub(crate) async fn until_switched(&self, from: usize, sentinels: &[usize]) -> (usize, Instant) {
        let old = self.servers[from].port();
        let mut now = None;
        until("the sentinels name another primary", async || {
            for sentinel in sentinels {
                let port = self.named_by(*sentinel).await;
                if port != old {
                    now = Some((port, Instant::now()));
                    return true;
                }
            }
            false
        })
        .await;
        let (port, since) = now.unwrap();
        let at = self.servers.iter().position(|server| server.port() == port).unwrap();
        (at, since)
    }

    /// Has the sentinels look at the servers, and tell an old primary of its demotion, much sooner than usual.
    pub(crate) async fn hurry(&self) {
        for sentinel in &self.sentinels {
            let _: () = sentinel
                .command("SENTINEL DEBUG info-period 500 publish-period 250")
                .await;
        }
    }

    /// How many of the library's connections to that server listen to messages.
    pub(crate) async fn subscribed(&self, server: usize) -> usize {
        let clients: String = self.servers[server].command("CLIENT LIST TYPE pubsub").await;
        clients.lines().filter(|client| client.contains("resp=3")).count()
    }

    /// See [`fail_over`].
    pub(crate) async fn fail_over(&self) {
        fail_over(&self.sentinels[0]).await;
    }
}

/// Has the sentinel make another server the primary while this one goes on; it is demoted some seconds later.
pub(crate) async fn fail_over(sentinel: &Server) {
    let command = redis::cmd("SENTINEL").arg("FAILOVER").arg(SERVICE).clone();
    let mut sentinel = sentinel.plain().await;
    // A sentinel that has just looked at the replicas for the first time may not know yet that one is good.
    until("the sentinel has begun a failover", async || {
        command.exec_async(&mut sentinel).await.is_ok()
    })
    .await;
}

/// Waits until the sentinel knows so many replicas, which follow the primary.
pub(crate) async fn until_following(sentinel: &Server, replicas: usize) {
    let command = redis::cmd("SENTINEL").arg("REPLICAS").arg(SERVICE).clone();
    until("replicas follow the primary", async || {
        let known: Vec<HashMap<String, String>> = sentinel.ask(&command).await;
        let follows = |replica: &HashMap<String, String>| {
            let linked = replica.get("master-link-status").is_some_and(|status| status == "ok");
            linked && replica["flags"] == "slave"
        };
        known.len() == replicas && known.iter().all(follows)
    })
    .await;
}

/// A sentinel that watches the primary at that port.
pub(crate) fn sentinel(primary: u16, configuration: &str) -> Server {
    let down_after = DOWN_AFTER.as_millis();
    let watches = format!(
        "{configuration}\nsentinel monitor {SERVICE} 127.0.0.1 {primary} 2\nsentinel down-after-milliseconds {SERVICE} {down_after}\n\
         sentinel failover-timeout {SERVICE} 5000\nsentinel parallel-syncs {SERVICE} 2\n"
    );
    Server::sentinel(&watches, &[])
}

pub(crate) fn config(sentinels: &[&Server]) -> RedisConfig {
    RedisConfig::sentinel(sentinels.iter().map(|sentinel| ("127.0.0.1", sentinel.port())), SERVICE)
}

/// What the sentinel knows of the primary.
pub(crate) async fn state(sentinel: &Server) -> HashMap<String, String> {
    sentinel.ask(redis::cmd("SENTINEL").arg("MASTER").arg(SERVICE)).await
}

/// Answers as a sentinel does that names that primary, and never learns of another.
pub(crate) struct FakeSentinel {
    port: u16,
    connections: Arc<AtomicU32>,
    is_down: Arc<AtomicBool>,
}

impl FakeSentinel {
    pub(crate) fn naming(host: &str, port: u16) -> Self {
        Self::start(host, port, 0, false)
    }

    /// One that knows of that many failovers.
    pub(crate) fn since(epoch: u64, port: u16) -> Self {
        Self::start("127.0.0.1", port, epoch, false)
    }

    /// One that closes each connection once it has answered.
    pub(crate) fn closing(host: &str, port: u16) -> Self {
        Self::start(host, port, 0, true)
    }

    fn start(host: &str, port: u16, epoch: u64, closes: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap().port();
        let [name, host, port, epoch] =
            [SERVICE, host, &port.to_string(), &epoch.to_string()].map(|text| format!("${}\r\n{text}\r\n", text.len()));
        let named = format!("*2\r\n{host}{port}");
        let known = format!(
            "*1\r\n%4\r\n$4\r\nname\r\n{name}$2\r\nip\r\n{host}$4\r\nport\r\n{port}$12\r\nconfig-epoch\r\n{epoch}"
        );
        let (connections, is_down) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, down) = (Arc::clone(&connections), Arc::clone(&is_down));
        // It ends with the process.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (named, known, down) = (named.clone(), known.clone(), Arc::clone(&down));
                counted.fetch_add(1, Ordering::Relaxed);
                std::thread::spawn(move || answer(client.unwrap(), &named, &known, closes, &down));
            }
        });
        Self {
            port: own,
            connections,
            is_down,
        }
    }

    /// Whether it closes connections without an answer from now on.
    pub(crate) fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::SeqCst);
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// How many connections there have been.
    pub(crate) fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }
}

fn answer(mut client: TcpStream, named: &str, known: &str, closes: bool, is_down: &AtomicBool) {
    let hello = "%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n";
    let subscribed = ["a", "b", "c"].map(|channel| format!(">3\r\n$9\r\nsubscribe\r\n$1\r\n{channel}\r\n:1\r\n"));
    let subscribed = subscribed.concat();
    let mut request = vec![0; 4096];
    while let Ok(length @ 1..) = client.read(&mut request) {
        let request = String::from_utf8_lossy(&request[..length]);
        let answer = match () {
            () if request.contains("HELLO") => hello,
            () if request.contains("SUBSCRIBE") => &subscribed,
            () if request.contains("MASTERS") => known,
            () => named,
        };
        if is_down.load(Ordering::SeqCst) || client.write_all(answer.as_bytes()).is_err() || (closes && answer == named)
        {
            return;
        }
    }
}
