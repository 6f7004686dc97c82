//! A TCP proxy that holds bytes up.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Passes bytes on, or holds them until it is told to pass them. What is held arrives even if its sender has gone.
pub(crate) struct Proxy {
    port: u16,
    state: watch::Sender<State>,
}

#[derive(Clone, Copy)]
struct State {
    /// The port that new connections lead to.
    server: u16,
    /// How many connections were made to it.
    made: usize,
    /// How many bytes may still pass, to the server and to clients.
    to_server: usize,
    to_client: usize,
    /// How many bytes have come from clients and not passed.
    held: usize,
    cuts: usize,
    hang_ups: usize,
}

/// One of the two numbers of bytes that may still pass.
type Way = fn(&mut State) -> &mut usize;

const ALL: usize = usize::MAX;

impl Proxy {
    pub(crate) async fn to(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = watch::Sender::new(State {
            server,
            made: 0,
            to_server: ALL,
            to_client: ALL,
            held: 0,
            cuts: 0,
            hang_ups: 0,
        });
        let shared = state.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let then = *shared.borrow();
                if let Ok(server) = TcpStream::connect(("127.0.0.1", then.server)).await {
                    tokio::spawn(carry(client, server, shared.clone(), then));
                    shared.send_modify(|state| state.made += 1);
                }
            }
        });
        Self { port, state }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Passes that many bytes more of what clients send, and holds up the rest.
    pub(crate) fn hold_requests_after(&self, bytes: usize) {
        self.state.send_modify(|state| state.to_server = bytes);
    }

    /// How many bytes may still pass of what clients send.
    pub(crate) fn left(&self) -> usize {
        self.state.borrow().to_server
    }

    /// Whether something has come from a client that may not pass.
    pub(crate) fn waits(&self) -> bool {
        self.state.borrow().held > 0
    }

    /// Ends every connection for its client. What that has sent goes on to the server, once it may pass.
    pub(crate) fn hang_up(&self) {
        self.state.send_modify(|state| state.hang_ups += 1);
    }

    /// Holds up what the server sends.
    pub(crate) fn hold_answers(&self) {
        self.state.send_modify(|state| state.to_client = 0);
    }

    /// Delivers what was held up, and whatever comes from now on.
    pub(crate) fn pass(&self) {
        self.state
            .send_modify(|state| (state.to_server, state.to_client) = (ALL, ALL));
    }

    /// Ends every connection; those that follow lead to another server.
    pub(crate) fn lead_to(&self, server: u16) {
        self.state.send_modify(|state| (state.server, state.made) = (server, 0));
        self.cut();
    }

    /// Connections that are made from now on end at once; those that there are stay.
    pub(crate) fn take_no_more(&self) {
        // Nobody can be reached at that port.
        self.state.send_modify(|state| state.server = 0);
    }

    /// Waits until that many connections were made since the proxy leads to its present server.
    pub(crate) async fn until_made(&self, wanted: usize) {
        // The sender is this proxy's own, so it cannot be gone.
        let _ = self.state.subscribe().wait_for(|state| state.made >= wanted).await;
    }

    /// Ends every connection, and with it what it holds.
    pub(crate) fn cut(&self) {
        self.state.send_modify(|state| state.cuts += 1);
    }
}

/// Carries a connection that was accepted when the state was `then`.
async fn carry(client: TcpStream, server: TcpStream, state: watch::Sender<State>, then: State) {
    let (client_in, client_out) = client.into_split();
    let (server_in, server_out) = server.into_split();
    let requests = pass(client_in, server_out, &state, |state| &mut state.to_server, true);
    let (mut cut, mut hung_up) = (state.subscribe(), state.subscribe());
    let answers = async {
        tokio::select! {
            () = pass(server_in, client_out, &state, |state| &mut state.to_client, false) => return,
            _ = hung_up.wait_for(|state| state.hang_ups != then.hang_ups) => {}
        }
        std::future::pending().await
    };
    tokio::select! {
        () = requests => {}
        () = answers => {}
        _ = cut.wait_for(|state| state.cuts != then.cuts) => {}
    }
}

async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    state: &watch::Sender<State>,
    way: Way,
    is_request: bool,
) {
    let mut open = state.subscribe();
    let mut buffer = vec![0; 65536];
    loop {
        let read = from.read(&mut buffer).await.unwrap_or(0);
        let mut rest = &buffer[..read];
        let held = if is_request { read } else { 0 };
        state.send_modify(|state| state.held += held);
        loop {
            if open.wait_for(|state| *way(&mut state.clone()) > 0).await.is_err() || read == 0 {
                return;
            }
            let mut passed = 0;
            state.send_modify(|state| {
                let open = way(state);
                passed = rest.len().min(*open);
                if *open != ALL {
                    *open -= passed;
                }
            });
            if to.write_all(&rest[..passed]).await.is_err() {
                return;
            }
            let passed_on = if is_request { passed } else { 0 };
            state.send_modify(|state| state.held -= passed_on);
            rest = &rest[passed..];
            if rest.is_empty() {
                break;
            }
        }
    }
}
