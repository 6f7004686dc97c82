//! A way to the server on which bytes can be held up.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::HANG_LIMIT;

/// Passes bytes on, or holds them until it is told to pass them. What is held arrives even if its sender has gone.
pub(crate) struct Proxy {
    port: u16,
    to_server: watch::Sender<bool>,
    to_client: watch::Sender<bool>,
    /// How long each direction holds up what it passes.
    delay: watch::Sender<Duration>,
    cut: watch::Sender<()>,
    /// How many more answers pass before their connection is cut.
    answers: watch::Sender<u32>,
    /// The port that new connections are led to.
    server: watch::Sender<u16>,
    /// How many connections there have been.
    accepted: watch::Receiver<u32>,
}

impl Proxy {
    pub(crate) async fn to(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (to_server, server_open) = watch::channel(true);
        let (to_client, client_open) = watch::channel(true);
        let (delay, delayed) = watch::channel(Duration::ZERO);
        let (cut, end) = watch::channel(());
        let (answers, _) = watch::channel(u32::MAX);
        let counted = answers.clone();
        let (server, target) = watch::channel(server);
        let (count, accepted) = watch::channel(0);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                count.send_modify(|count| *count += 1);
                let target = *target.borrow();
                let server = TcpStream::connect(("127.0.0.1", target)).await.unwrap();
                let way = |open: &watch::Receiver<bool>, answers: Option<&watch::Sender<u32>>| Way {
                    open: open.clone(),
                    answers: answers.cloned(),
                    delay: delayed.clone(),
                    cut: end.clone(),
                };
                let (client_in, client_out) = client.into_split();
                let (server_in, server_out) = server.into_split();
                let done = Arc::new(tokio::sync::Notify::new());
                tokio::spawn(pass(client_in, server_out, way(&server_open, None), Arc::clone(&done)));
                tokio::spawn(pass(server_in, client_out, way(&client_open, Some(&counted)), done));
            }
        });
        Self {
            port,
            to_server,
            to_client,
            delay,
            cut,
            answers,
            server,
            accepted,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Leads to another server from now on, as a virtual address does after a failover.
    pub(crate) fn lead_to(&self, server: u16) {
        self.server.send_replace(server);
        self.cut();
    }

    /// Waits for that many more connections.
    pub(crate) async fn until_accepted(&self, more: u32) {
        let mut accepted = self.accepted.clone();
        let wanted = *accepted.borrow() + more;
        let accepted = accepted.wait_for(|count| *count >= wanted);
        let accepted = tokio::time::timeout(HANG_LIMIT, accepted).await;
        accepted.expect("as many connections in time").unwrap();
    }

    /// Makes each round trip that much longer.
    pub(crate) fn delay(&self, round_trip: Duration) {
        self.delay.send_replace(round_trip / 2);
    }

    /// Holds up what clients send.
    pub(crate) fn hold_requests(&self) {
        self.to_server.send_replace(false);
    }

    /// Holds up what the server sends.
    pub(crate) fn hold_answers(&self) {
        self.to_client.send_replace(false);
    }

    /// Delivers what was held up, and whatever comes from now on.
    pub(crate) fn pass(&self) {
        self.to_server.send_replace(true);
        self.to_client.send_replace(true);
    }

    /// Ends each connection that has more than that many answers to pass from now on.
    pub(crate) fn cut_after_answers(&self, answers: u32) {
        self.answers.send_replace(answers);
    }

    /// Ends every connection, and with it what it holds.
    pub(crate) fn cut(&self) {
        self.cut.send_replace(());
    }
}

/// What one direction of one connection depends on.
struct Way {
    open: watch::Receiver<bool>,
    answers: Option<watch::Sender<u32>>,
    delay: watch::Receiver<Duration>,
    cut: watch::Receiver<()>,
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut way: Way, other: Arc<tokio::sync::Notify>) {
    way.cut.mark_unchanged();
    let passing = async {
        let mut buffer = vec![0; 65536];
        loop {
            let read = from.read(&mut buffer).await;
            let delay = *way.delay.borrow();
            // Even one of no time takes a millisecond.
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            if way.open.wait_for(|open| *open).await.is_err() {
                return;
            }
            let mut is_cut = false;
            if let Some(answers) = &way.answers {
                answers.send_if_modified(|left| {
                    is_cut = *left == 0;
                    let counts = !matches!(*left, 0 | u32::MAX);
                    *left -= u32::from(counts);
                    counts
                });
            }
            match read {
                Ok(0) | Err(_) => return,
                Ok(_) if is_cut => return,
                Ok(n) => {
                    if to.write_all(&buffer[..n]).await.is_err() {
                        return;
                    }
                }
            }
        }
    };
    tokio::select! {
        () = passing => {}
        _ = way.cut.changed() => {}
        () = other.notified() => {}
    }
    other.notify_one();
}
