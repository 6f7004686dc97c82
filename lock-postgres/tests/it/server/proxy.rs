//! A way to the server on which bytes can be held up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};

/// Passes bytes on, or holds them until it is told to pass them. What is held arrives even if its sender has gone.
pub(crate) struct Proxy {
    port: u16,
    /// Where connections lead that are made from now on.
    server: watch::Sender<u16>,
    /// How many connections were made since.
    made: watch::Sender<usize>,
    /// How many bytes may still pass.
    to_server: watch::Sender<usize>,
    to_client: watch::Sender<usize>,
    /// How many bytes have come from clients and not passed.
    held: Arc<AtomicUsize>,
    cut: watch::Sender<()>,
    hang_up: watch::Sender<()>,
}

const ALL: usize = usize::MAX;

impl Proxy {
    pub(crate) async fn to(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (to_server, to_client) = (watch::Sender::new(ALL), watch::Sender::new(ALL));
        let (cut, end) = watch::channel(());
        let (hang_up, hung_up) = watch::channel(());
        let held = Arc::new(AtomicUsize::new(0));
        let holds = Arc::clone(&held);
        let ways = (to_server.clone(), to_client.clone());
        let (server, made) = (watch::Sender::new(server), watch::Sender::new(0));
        let (leads_to, counted) = (server.clone(), made.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let port = *leads_to.borrow();
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else {
                    continue;
                };
                counted.send_modify(|made| *made += 1);
                let (client_in, client_out) = client.into_split();
                let (server_in, server_out) = server.into_split();
                let done = Arc::new(Notify::new());
                tokio::spawn(pass(
                    client_in,
                    server_out,
                    ways.0.clone(),
                    end.clone(),
                    Arc::clone(&done),
                    Arc::clone(&holds),
                ));
                let answers = pass(server_in, client_out, ways.1.clone(), end.clone(), done, Arc::default());
                let mut hung_up = hung_up.clone();
                hung_up.mark_unchanged();
                tokio::spawn(async move {
                    tokio::select! {
                        () = answers => {}
                        _ = hung_up.changed() => {}
                    }
                });
            }
        });
        Self {
            port,
            server,
            made,
            to_server,
            to_client,
            held,
            cut,
            hang_up,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Passes that many bytes more of what clients send, and holds up the rest.
    pub(crate) fn hold_requests_after(&self, bytes: usize) {
        self.to_server.send_replace(bytes);
    }

    /// How many bytes may still pass of what clients send.
    pub(crate) fn left(&self) -> usize {
        *self.to_server.borrow()
    }

    /// Whether something has come from a client that may not pass.
    pub(crate) fn waits(&self) -> bool {
        self.held.load(Ordering::SeqCst) > 0
    }

    /// Ends every connection for its client. What that has sent goes on to the server, once it may pass.
    pub(crate) fn hang_up(&self) {
        self.hang_up.send_replace(());
    }

    /// Holds up what the server sends.
    pub(crate) fn hold_answers(&self) {
        self.to_client.send_replace(0);
    }

    /// Neither side hears of the other any more, nor of its end.
    pub(crate) fn hold_everything(&self) {
        self.hold_requests_after(0);
        self.hold_answers();
    }

    /// Whether all that was to be held up after some bytes has come.
    pub(crate) fn holds_requests(&self) -> bool {
        *self.to_server.borrow() == 0
    }

    /// Delivers what was held up, and whatever comes from now on.
    pub(crate) fn pass(&self) {
        self.to_server.send_replace(ALL);
        self.to_client.send_replace(ALL);
    }

    /// Ends every connection; those that follow lead to another server.
    pub(crate) fn lead_to(&self, server: u16) {
        self.server.send_replace(server);
        self.made.send_replace(0);
        self.cut();
    }

    /// Connections that are made from now on end at once; those that there are stay.
    pub(crate) fn take_no_more(&self) {
        // Nobody can be reached at that port.
        self.server.send_replace(0);
    }

    /// Waits until that many connections were made since the proxy leads to its present server.
    pub(crate) async fn until_made(&self, wanted: usize) {
        // The sender is this proxy's own, so it cannot be gone.
        let _ = self.made.subscribe().wait_for(|made| *made >= wanted).await;
    }

    /// Ends every connection, and with it what it holds.
    pub(crate) fn cut(&self) {
        self.cut.send_replace(());
    }
}

async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    way: watch::Sender<usize>,
    mut cut: watch::Receiver<()>,
    other: Arc<Notify>,
    held: Arc<AtomicUsize>,
) {
    cut.mark_unchanged();
    let passing = async {
        let mut open = way.subscribe();
        let mut buffer = vec![0; 65536];
        loop {
            let read = from.read(&mut buffer).await.unwrap_or(0);
            let mut rest = &buffer[..read];
            held.fetch_add(read, Ordering::SeqCst);
            loop {
                if open.wait_for(|open| *open > 0).await.is_err() || read == 0 {
                    return;
                }
                let mut passed = 0;
                way.send_modify(|open| {
                    passed = rest.len().min(*open);
                    if *open != ALL {
                        *open -= passed;
                    }
                });
                if to.write_all(&rest[..passed]).await.is_err() {
                    return;
                }
                held.fetch_sub(passed, Ordering::SeqCst);
                rest = &rest[passed..];
                if rest.is_empty() {
                    break;
                }
            }
        }
    };
    tokio::select! {
        () = passing => {}
        _ = cut.changed() => {}
        () = other.notified() => {}
    }
    other.notify_one();
}
