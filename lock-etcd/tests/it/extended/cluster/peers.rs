//! The ways between the members of a cluster, which can be cut.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;

use test_servers::Peer;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Relays, one before each member. Whom a connection comes from is told by a header that members send along.
pub(crate) struct Peers {
    peers: Vec<Peer>,
    alone: watch::Sender<HashSet<Member>>,
}

/// A member as its relay knows it, or as it calls itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Member {
    At(SocketAddr),
    Id(u64),
}

impl Peers {
    pub(crate) async fn start(members: usize) -> Self {
        let alone = watch::Sender::default();
        let mut peers = Vec::new();
        for _ in 0..members {
            peers.push(relay(&alone).await);
        }
        Self { peers, alone }
    }

    /// One more.
    pub(crate) async fn add(&mut self) -> Peer {
        let peer = relay(&self.alone).await;
        self.peers.push(peer);
        peer
    }

    pub(crate) fn all(&self) -> &[Peer] {
        &self.peers
    }

    /// Cuts a member off from all others, and not from its clients.
    pub(crate) fn cut_off(&self, at: usize, id: u64) {
        let alone = [Member::At(self.peers[at].reached), Member::Id(id)];
        self.alone.send_replace(HashSet::from(alone));
    }

    pub(crate) fn heal(&self) {
        self.alone.send_replace(HashSet::new());
    }
}

async fn relay(alone: &watch::Sender<HashSet<Member>>) -> Peer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut peer = Peer::free().unwrap();
    peer.reached = listener.local_addr().unwrap();
    let alone = Arc::new(alone.clone());
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            let alone = alone.subscribe();
            tokio::spawn(async move {
                let _ = carry(connection, peer, alone).await;
            });
        }
    });
    peer
}

/// Carries a connection for as long as the members at its ends may speak with each other.
async fn carry(mut from: TcpStream, peer: Peer, mut alone: watch::Receiver<HashSet<Member>>) -> std::io::Result<()> {
    let (caller, seen) = caller(&mut from).await?;
    let cut = |alone: &HashSet<Member>| {
        alone
            .iter()
            .any(|one| *one == Member::At(peer.reached) || Some(*one) == caller)
    };
    let carrying = async {
        let mut to = TcpStream::connect(peer.listens).await?;
        to.write_all(&seen).await?;
        copy_bidirectional(&mut from, &mut to).await
    };
    tokio::select! {
        biased;
        _ = alone.wait_for(cut) => Ok(()),
        carried = carrying => carried.map(drop),
    }
}

/// Who says that it calls, and what it has said by then.
async fn caller(from: &mut TcpStream) -> std::io::Result<(Option<Member>, Vec<u8>)> {
    let mut seen = Vec::new();
    while !seen.windows(4).any(|end| end == b"\r\n\r\n") {
        if from.read_buf(&mut seen).await? == 0 {
            break;
        }
    }
    let head = String::from_utf8_lossy(&seen).to_lowercase();
    let id = head.lines().find_map(|line| line.strip_prefix("x-server-from: "));
    let id = id.and_then(|id| u64::from_str_radix(id.trim(), 16).ok());
    Ok((id.map(Member::Id), seen))
}
