//! An etcd of several members.

use std::net::{Ipv4Addr, SocketAddr};

use futures_util::future::try_join_all;

use super::error::ServerError;
use super::kind::Kind;
use super::server::Server;
use crate::port::free_port;

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
    ///
    /// # Errors
    ///
    /// If none is.
    pub fn free() -> Result<Self, ServerError> {
        let port = free_port().map_err(ServerError::system("finding a free port"))?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Ok(Self {
            listens: address,
            reached: address,
        })
    }
}

/// An etcd of several members on the loopback of this machine, which ends, with its data, when this is dropped.
///
/// Each member is a [`Server`] as others are, except that its container, if it is in one, shares the network of this machine
/// and cannot be taken off it.
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
    pub async fn start(members: usize, arguments: &[&str]) -> Result<Self, ServerError> {
        let peers: Result<Vec<_>, _> = (0..members).map(|_| Peer::free()).collect();
        Self::start_at(&peers?, arguments).await
    }

    /// The same, with members that find each other there.
    ///
    /// # Errors
    ///
    /// Those of [`Server::start_own`].
    pub async fn start_at(peers: &[Peer], arguments: &[&str]) -> Result<Self, ServerError> {
        let named = peers.iter().enumerate();
        let mut cluster = Self {
            members: Vec::new(),
            peers: named.map(|(number, &peer)| (name(number), peer)).collect(),
            arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
            named: peers.len(),
        };
        // None is ready before most of them are.
        let starting = cluster
            .peers
            .iter()
            .map(|(name, peer)| cluster.member(name, peer, "new"));
        cluster.members = try_join_all(starting).await?;
        Ok(cluster)
    }

    /// The members, in the order in which they came.
    #[must_use]
    pub fn members(&self) -> &[Server] {
        &self.members
    }

    /// Forgets a member, which ends when it is dropped. The cluster must be told by somebody else.
    pub fn remove(&mut self, at: usize) -> Server {
        self.peers.remove(at);
        self.members.remove(at)
    }

    /// Starts one more member, of which the cluster knows already.
    ///
    /// # Errors
    ///
    /// Those of [`Server::start_own`].
    pub async fn add(&mut self, peer: Peer) -> Result<(), ServerError> {
        let name = name(self.named);
        self.named += 1;
        self.peers.push((name.clone(), peer));
        let member = self.member(&name, &peer, "existing").await?;
        self.members.push(member);
        Ok(())
    }

    async fn member(&self, name: &str, peer: &Peer, state: &str) -> Result<Server, ServerError> {
        let all: Vec<_> = self
            .peers
            .iter()
            .map(|(name, peer)| format!("{name}=http://{}", peer.reached))
            .collect();
        let all = all.join(",");
        let (listens, reached) = (format!("http://{}", peer.listens), format!("http://{}", peer.reached));
        let who = [
            ["--name", name],
            ["--listen-peer-urls", &listens],
            ["--initial-advertise-peer-urls", &reached],
            ["--initial-cluster", &all],
            ["--initial-cluster-state", state],
        ];
        let further = self.arguments.iter().map(String::as_str);
        let arguments: Vec<_> = who.concat().into_iter().chain(further).collect();
        Server::start_own(&Kind::ETCD_MEMBER, &arguments).await
    }
}

fn name(number: usize) -> String {
    format!("member-{number}")
}
