//! The proxy as a test holds it.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use super::connection::carry;
use super::trap::{Held, Kind, Swallowing, Then, Trap, Traps};
use crate::background::{background, in_background};
use crate::port::free_port;

/// How often a port is tried that somebody else may take in the same moment.
const TRIES: usize = 5;

/// A TCP proxy on the loopback. Everything passes, until it is told otherwise.
///
/// Dropping it closes its port and cuts its connections.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: AbortHandle,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server: requests.
    ToServer,
    /// From the server to the client: replies.
    ToClient,
    /// Both ways.
    Both,
}

/// What happens to bytes on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Traffic {
    /// They pass.
    Flows,
    /// They arrive that much later, in their order, as over a long line.
    Delayed(Duration),
    /// They wait, and arrive when the traffic flows again: as while a network is split and TCP sends again and again.
    /// The end of a connection waits too.
    Stalled,
    /// They are thrown away, and the connections that this happened to never recover, nor do they end, neither by FIN
    /// nor by RST: as when a firewall or a router has forgotten them. Those made later are not concerned once the
    /// traffic flows again.
    Lost,
}

/// What has passed since the proxy was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Connections that were accepted.
    pub connections: u64,
    /// Connections that are open.
    pub open: u64,
    /// Bytes that came from clients, whatever became of them.
    pub bytes_to_server: u64,
    /// Bytes that came from the server, whatever became of them.
    pub bytes_to_client: u64,
    /// Pieces in which clients sent: as many as requests, where clients send one at a time.
    pub sends_to_server: u64,
    /// Pieces in which the server sent.
    pub sends_to_client: u64,
}

/// What the proxy and its connections know of each other.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) target: String,
    pub(super) to_server: watch::Sender<Traffic>,
    pub(super) to_client: watch::Sender<Traffic>,
    pub(super) traps: Traps,
    pub(super) counts: watch::Sender<Counts>,
    // Counts the cuts.
    pub(super) cut: watch::Sender<u64>,
    refusing: watch::Sender<bool>,
    listening: watch::Sender<bool>,
}

impl Proxy {
    /// Starts a proxy to `target`, a host and a port.
    ///
    /// The target need not listen yet: while it does not, connections are accepted and reset.
    ///
    /// # Errors
    ///
    /// If no port of the loopback is free.
    pub async fn start(target: impl Into<String>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            target: target.into(),
            to_server: watch::Sender::new(Traffic::Flows),
            to_client: watch::Sender::new(Traffic::Flows),
            traps: Traps::default(),
            counts: watch::Sender::new(Counts::default()),
            cut: watch::Sender::new(0),
            refusing: watch::Sender::new(false),
            listening: watch::Sender::new(true),
        });
        let listener = in_background(listen()).await??;
        let address = listener.local_addr()?;
        let accepting = background()?.spawn(accept(listener, address, Arc::clone(&shared)));
        Ok(Self {
            address,
            shared,
            accepting: accepting.abort_handle(),
        })
    }

    /// Where clients connect to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What happens from now on to bytes in that direction, on all connections.
    pub fn set(&self, direction: Direction, traffic: Traffic) {
        if direction != Direction::ToClient {
            self.shared.to_server.send_replace(traffic);
        }
        if direction != Direction::ToServer {
            self.shared.to_client.send_replace(traffic);
        }
    }

    /// Lets everything pass again and listens again. Traps stay set.
    ///
    /// Returns when clients can connect.
    pub async fn heal(&self) {
        self.set(Direction::Both, Traffic::Flows);
        self.shared.refusing.send_replace(false);
        // The other end is as long-lived as this one.
        let _ = self.shared.listening.subscribe().wait_for(|listening| *listening).await;
    }

    /// Refuses new connections, as when no server runs. Open ones are not concerned: see [`cut`](Self::cut).
    ///
    /// Returns when nobody can connect any more.
    pub async fn refuse(&self) {
        self.shared.refusing.send_replace(true);
        let _ = self.shared.listening.subscribe().wait_for(|listening| !listening).await;
    }

    /// Resets all open connections, towards both ends.
    pub fn cut(&self) {
        self.shared.cut.send_modify(|cuts| *cuts += 1);
    }

    /// Lets `bytes` more bytes pass in that direction, over all connections, and then ends the connection that brought
    /// the last of them. With 0 the connection is ended by the next byte, which does not pass.
    ///
    /// [`Direction::Both`] counts both ways together.
    #[must_use = "a trap that is dropped is taken away"]
    pub fn cut_after(&self, direction: Direction, bytes: usize) -> Trap {
        self.shared.traps.set(Kind::CutAfter { direction, left: bytes })
    }

    /// Holds back the next piece of a request that contains `pattern`, and whatever its connection sends after that. It
    /// can be delivered later, also after the client has gone.
    ///
    /// The empty pattern is in every piece. A pattern is not found if it was sent in two pieces.
    #[must_use = "what is held is thrown away when the handle is dropped"]
    pub fn hold(&self, pattern: &[u8]) -> Held {
        let delivered = watch::Sender::new(None);
        let trap = self.shared.traps.set(Kind::Hold {
            pattern: pattern.to_vec(),
            delivered: delivered.subscribe(),
        });
        Held { trap, delivered }
    }

    /// Lets the next request that contains `pattern` pass, and throws its reply away: the server has done it, and the
    /// client is not told. `then` says what becomes of the connection, on which later replies could not be told from
    /// the one that is missing.
    ///
    /// The next piece that the server sends is the reply. For a server that sends other things first, as HTTP/2 does, see
    /// [`swallow_reply_that`](Self::swallow_reply_that).
    #[must_use = "a trap that is dropped is taken away"]
    pub fn swallow_reply(&self, pattern: &[u8], then: Then) -> Trap {
        self.swallow_reply_that(pattern, |_| true, then)
    }

    /// The same, where the reply is the next piece that `is_reply`. Those before it arrive.
    #[must_use = "a trap that is dropped is taken away"]
    pub fn swallow_reply_that(
        &self,
        pattern: &[u8],
        is_reply: impl Fn(&[u8]) -> bool + Send + 'static,
        then: Then,
    ) -> Trap {
        let is_reply = Box::new(is_reply);
        self.shared.traps.set(Kind::Swallow {
            pattern: pattern.to_vec(),
            swallowing: Swallowing { is_reply, then },
        })
    }

    /// What has passed.
    #[must_use]
    pub fn counts(&self) -> Counts {
        *self.shared.counts.borrow()
    }

    /// Waits until what has passed is as wanted.
    pub async fn counted(&self, wanted: impl FnMut(&Counts) -> bool) -> Counts {
        let mut counts = self.shared.counts.subscribe();
        let counted = counts.wait_for(wanted).await.map(|counts| *counts);
        counted.unwrap_or_else(|_| self.counts())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn listen() -> io::Result<TcpListener> {
    let mut tries = 0;
    loop {
        tries += 1;
        match TcpListener::bind((Ipv4Addr::LOCALHOST, free_port()?)).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && tries < TRIES => {}
            listener => return listener,
        }
    }
}

/// Accepts until it is aborted; its connections end with it.
async fn accept(mut listener: TcpListener, address: SocketAddr, shared: Arc<Shared>) {
    let mut refusing = shared.refusing.subscribe();
    let mut connections = JoinSet::new();
    loop {
        let refused = async {
            // The sender is in `shared`.
            let _ = refusing.wait_for(|refusing| *refusing).await;
        };
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((client, _)) = accepted {
                    connections.spawn(carry(client, Arc::clone(&shared)));
                }
            }
            _ = connections.join_next(), if !connections.is_empty() => {}
            () = refused => {
                for client in waiting(listener) {
                    connections.spawn(carry(client, Arc::clone(&shared)));
                }
                shared.listening.send_replace(false);
                listener = loop {
                    let _ = refusing.wait_for(|refusing| !refusing).await;
                    match TcpListener::bind(address).await {
                        Ok(listener) => break listener,
                        Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                    }
                };
                shared.listening.send_replace(true);
            }
        }
    }
}

/// Those that were connected before the refusal and not accepted yet: the runtime may not know of them.
fn waiting(listener: TcpListener) -> Vec<TcpStream> {
    let mut clients = Vec::new();
    if let Ok(listener) = listener.into_std() {
        while let Ok((client, _)) = listener.accept() {
            clients.extend(client.set_nonblocking(true).and_then(|()| TcpStream::from_std(client)));
        }
    }
    clients
}
