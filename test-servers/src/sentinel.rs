//! A Redis with replicas, watched by sentinels, and what stands in for a sentinel.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures_util::future::try_join_all;

use crate::kind::{Kind, Role};
use crate::redis::{self, eventually};
use crate::server::Server;

/// A Redis or Valkey with replicas, and the sentinels that watch it, on the loopback of this machine. They end, with their data, when this is
/// dropped.
///
/// Each is a [`Server`] as others are, except that its container, if it is in one, shares the network of this machine.
#[derive(Debug)]
pub struct RedisSentinels {
    servers: Vec<Server>,
    sentinels: Vec<Server>,
}

impl RedisSentinels {
    /// What the sentinels call the service.
    pub const SERVICE: &str = "fencelock-tests";

    /// Starts a primary of that kind with so many replicas and so many sentinels, with further arguments for each server, and waits until all know
    /// each other. The sentinels replace a primary that has not answered for `down_after`.
    ///
    /// # Errors
    ///
    /// Those of [`Server::start_own`], or if they do not come to know each other.
    pub async fn start(
        kind: &'static Kind,
        replicas: usize,
        sentinels: usize,
        down_after: Duration,
        arguments: &[&str],
    ) -> Result<Self> {
        let peer = kind.with(Role::RedisPeer);
        // A replica is synchronized as soon as it comes.
        let arguments = [&["--repl-diskless-sync-delay", "0"], arguments].concat();
        let primary = Server::start_as(peer, &arguments).await?;
        let (host, port) = primary.authority().rsplit_once(':').unwrap_or_default();
        let of = [&["--replicaof", host, port], &*arguments].concat();
        let replicas = try_join_all((0..replicas).map(|_| Server::start_as(peer, &of))).await?;
        // Sentinels look at a replica as soon as they know it, and then every 10 s.
        for replica in &replicas {
            redis::until(replica, "INFO replication", &["master_link_status:up"]).await?;
        }
        let (service, millis) = (Self::SERVICE, down_after.as_millis());
        let lines = [
            format!("sentinel monitor {service} {host} {port} {}", sentinels / 2 + 1),
            format!("sentinel down-after-milliseconds {service} {millis}"),
            // After twice that time the sentinels may replace the next primary.
            format!("sentinel failover-timeout {service} {millis}"),
        ];
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let watching = (0..sentinels).map(|_| Server::start_as(kind.with(Role::RedisSentinel), &lines));
        let sentinels = try_join_all(watching).await?;
        let servers = [primary].into_iter().chain(replicas).collect();
        let group = Self { servers, sentinels };
        // A failover needs all replicas and sentinels.
        group.until_whole().await?;
        Ok(group)
    }

    /// Waits until every sentinel knows all the others and all replicas, and that these follow the primary.
    ///
    /// # Errors
    ///
    /// If that takes too long.
    pub async fn until_whole(&self) -> Result<()> {
        let (others, replicas) = (self.sentinels.len() - 1, self.servers.len() - 1);
        for sentinel in &self.sentinels {
            eventually("the sentinels know all", || async {
                let primary = sentinel.redis(&format!("SENTINEL MASTER {}", Self::SERVICE)).await?;
                let known = sentinel.redis(&format!("SENTINEL REPLICAS {}", Self::SERVICE)).await?;
                let follow = known.matches("\nflags\nslave\n").count() == replicas
                    && known.matches("\nmaster-link-status\nok\n").count() == replicas;
                let fields = [format!("num-other-sentinels\n{others}\n"), "flags\nmaster\n".to_owned()];
                Ok(follow && fields.iter().all(|field| primary.contains(field)))
            })
            .await?;
        }
        Ok(())
    }

    /// The server that was started as the primary, and then its replicas.
    #[must_use]
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// The sentinels.
    #[must_use]
    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    /// The number of the server that is the primary, by the word of the first of these sentinels that answers.
    ///
    /// # Errors
    ///
    /// If none answers, or with another server.
    pub async fn primary_by(&self, sentinels: &[usize]) -> Result<usize> {
        let question = format!("SENTINEL GET-MASTER-ADDR-BY-NAME {}", Self::SERVICE);
        let mut named = None;
        for sentinel in sentinels {
            named = self.sentinels[*sentinel].redis(&question).await.ok();
            if named.is_some() {
                break;
            }
        }
        let named = named.context("no sentinel answers")?.replace('\n', ":");
        let place = self.servers.iter().position(|server| server.authority() == named);
        place.with_context(|| format!("the sentinels name {named}"))
    }

    /// The same by the word of the first of all that answers.
    ///
    /// # Errors
    ///
    /// As [`primary_by`](Self::primary_by).
    pub async fn primary(&self) -> Result<usize> {
        self.primary_by(&Vec::from_iter(0..self.sentinels.len())).await
    }

    /// Has the sentinels make another server the primary while the old one goes on; they demote that some seconds later.
    ///
    /// # Errors
    ///
    /// If they do not begin with it.
    pub async fn fail_over(&self) -> Result<()> {
        let order = format!("SENTINEL FAILOVER {}", Self::SERVICE);
        // A sentinel that has just looked at the replicas for the first time may not know yet that one is good.
        eventually("a failover begins", || async {
            self.sentinels[0].redis(&order).await.map(|_| true)
        })
        .await
    }

    /// How a client connects to the primary.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.sentinels.iter().map(Server::authority).collect();
        format!("redis+sentinel://{}/{}", hosts.join(","), Self::SERVICE)
    }
}

/// Answers as a sentinel does that names one primary, and never learns of another. It ends with the process.
///
/// A real sentinel would talk to that server, too.
#[derive(Debug)]
pub struct FakeSentinel {
    address: SocketAddr,
    is_down: Arc<AtomicBool>,
}

impl FakeSentinel {
    /// Starts one that names the primary there, and knows of so many failovers.
    ///
    /// # Errors
    ///
    /// If no port is free.
    pub fn naming(host: &str, port: u16, failovers: u64) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let [name, host, port, epoch] = [RedisSentinels::SERVICE, host, &port.to_string(), &failovers.to_string()]
            .map(|text| format!("${}\r\n{text}\r\n", text.len()));
        let named = format!("*2\r\n{host}{port}");
        let known = format!(
            "*1\r\n%4\r\n$4\r\nname\r\n{name}$2\r\nip\r\n{host}$4\r\nport\r\n{port}$12\r\nconfig-epoch\r\n{epoch}"
        );
        let is_down = Arc::new(AtomicBool::new(false));
        let down = Arc::clone(&is_down);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (named, known, down) = (named.clone(), known.clone(), Arc::clone(&down));
                std::thread::spawn(move || answer(client, &named, &known, &down));
            }
        });
        Ok(Self { address, is_down })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets whether it closes connections without an answer from now on.
    pub fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::SeqCst);
    }

    /// How a client connects to the primary that these name.
    #[must_use]
    pub fn url(sentinels: &[Self]) -> String {
        let hosts: Vec<_> = sentinels.iter().map(|sentinel| sentinel.address.to_string()).collect();
        format!("redis+sentinel://{}/{}", hosts.join(","), RedisSentinels::SERVICE)
    }
}

fn answer(mut client: TcpStream, named: &str, known: &str, is_down: &AtomicBool) {
    const HELLO: &str = "%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n";
    let subscribed = ["a", "b", "c"].map(|channel| format!(">3\r\n$9\r\nsubscribe\r\n$1\r\n{channel}\r\n:1\r\n"));
    let subscribed = subscribed.concat();
    let mut request = vec![0; 4096];
    while let Ok(length @ 1..) = client.read(&mut request) {
        let request = String::from_utf8_lossy(&request[..length]);
        let answer = match () {
            () if request.contains("HELLO") => HELLO,
            () if request.contains("SUBSCRIBE") => &subscribed,
            () if request.contains("MASTERS") => known,
            () => named,
        };
        if is_down.load(Ordering::SeqCst) || client.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}
