//! etcd, alone and of several members.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::kind::{Kind, Place, Role};
use crate::machine::free_port;
use crate::server::Server;

/// Of a member of a cluster, further arguments say which one it is, and which others there are.
pub(crate) fn arguments(place: Place<'_>, bind: &str, alone: bool) -> Vec<String> {
    let client = format!("http://{bind}:{}", place.port);
    // No other member is to talk to it; any free port will do.
    let peer = "http://127.0.0.1:0";
    let cluster = format!("test={peer}");
    let words = [
        ["--data-dir", place.data],
        ["--listen-client-urls", &client],
        ["--advertise-client-urls", &client],
        ["--name", "test"],
        ["--listen-peer-urls", peer],
        ["--initial-advertise-peer-urls", peer],
        ["--initial-cluster", &cluster],
    ];
    let words = if alone { &words[..] } else { &words[..3] };
    // Tests end processes, not the machine.
    let words = words.concat().into_iter().chain(["--unsafe-no-fsync"]);
    words.map(str::to_owned).collect()
}

/// Further arguments name the endpoints behind it.
pub(crate) fn proxy_arguments(place: Place<'_>) -> Vec<String> {
    let listen = format!("--listen-addr=127.0.0.1:{}", place.port);
    let data = format!("--data-dir={}", place.data);
    ["grpc-proxy", "start", &listen, &data].map(str::to_owned).to_vec()
}

/// Whether it is ready, and so, if it is a proxy, the cluster behind it.
pub(crate) async fn healthy(authority: &str) -> Result<()> {
    let health = get(authority, "/health").await?;
    ensure!(health.contains("\"health\":\"true\""), "it is not well: {health}");
    Ok(())
}

pub(crate) async fn probe(authority: &str) -> Result<String> {
    healthy(authority).await?;
    let versions = get(authority, "/version").await?;
    let version = versions.split_once("\"etcdserver\":\"");
    let version = version.and_then(|(_, rest)| rest.split_once('"'));
    let (version, _) = version.context("it does not tell its version")?;
    Ok(format!("etcd {version}"))
}

async fn get(authority: &str, path: &str) -> Result<String> {
    let mut connection = TcpStream::connect(authority).await?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {authority}\r\n\r\n");
    connection.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// Where the other members of a cluster find one of them.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Where it listens.
    pub listens: SocketAddr,
    /// Where the others believe that it listens: something else may stand between.
    pub reached: SocketAddr,
}

impl Peer {
    /// At a port of the loopback that is free now.
    pub fn free() -> Result<Self> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        Ok(Self {
            listens: address,
            reached: address,
        })
    }
}

/// An etcd of several members on the loopback of this machine, which ends, with its data, when this is dropped.
///
/// Each member is a [`Server`] as others are, except that its container, if it is in one, shares the network of this machine.
#[derive(Debug)]
pub struct EtcdCluster {
    members: Vec<Server>,
    peers: Vec<(String, Peer)>,
    arguments: Vec<String>,
    named: usize,
}

impl EtcdCluster {
    /// Starts that many members, with further arguments for each, and waits until all take requests.
    ///
    /// # Errors
    ///
    /// Those of [`Server::start_own`].
    pub async fn start(members: usize, arguments: &[&str]) -> Result<Self> {
        let peers: Vec<_> = (0..members).map(|_| Peer::free()).collect::<Result<_>>()?;
        Self::start_at(&peers, arguments).await
    }

    /// The same, with members that find each other there.
    pub async fn start_at(peers: &[Peer], arguments: &[&str]) -> Result<Self> {
        let named = peers.iter().enumerate();
        let mut cluster = Self {
            members: Vec::new(),
            peers: named.map(|(number, &peer)| (name(number), peer)).collect(),
            arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
            named: peers.len(),
        };
        // None is ready before most of them are.
        let peers = cluster.peers.iter();
        cluster.members = try_join_all(peers.map(|(name, peer)| cluster.member(name, peer, "new"))).await?;
        Ok(cluster)
    }

    /// The members, in the order in which they came.
    #[must_use]
    pub fn members(&self) -> &[Server] {
        &self.members
    }

    /// Forgets a member, which ends when it is dropped. It is the caller that tells the cluster.
    pub fn remove(&mut self, at: usize) -> Server {
        self.peers.remove(at);
        self.members.remove(at)
    }

    /// Starts one more member, of which the cluster knows already.
    pub async fn add(&mut self, peer: Peer) -> Result<()> {
        let name = name(self.named);
        self.named += 1;
        self.peers.push((name.clone(), peer));
        let member = self.member(&name, &peer, "existing").await?;
        self.members.push(member);
        Ok(())
    }

    async fn member(&self, name: &str, peer: &Peer, state: &str) -> Result<Server> {
        let reached = |(name, peer): &(String, Peer)| format!("{name}=http://{}", peer.reached);
        let all = self.peers.iter().map(reached).collect::<Vec<_>>().join(",");
        let [listens, reached] = [peer.listens, peer.reached].map(|address| format!("http://{address}"));
        let own = [
            ["--name", name],
            ["--listen-peer-urls", &listens],
            ["--initial-advertise-peer-urls", &reached],
            ["--initial-cluster", &all],
            ["--initial-cluster-state", state],
        ];
        let further = self.arguments.iter().map(String::as_str);
        let arguments: Vec<_> = own.concat().into_iter().chain(further).collect();
        Server::start_as(Kind::ETCD.with(Role::EtcdMember), &arguments).await
    }
}

fn name(number: usize) -> String {
    format!("member-{number}")
}
