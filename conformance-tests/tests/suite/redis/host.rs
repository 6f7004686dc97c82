//! Where the locks of a namespace are.

use std::fmt;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use lock_core::LockError;
use test_servers::{Kind, RedisSentinels, Server, ServerError};

use super::role::rule;

/// Longer than any case: no server is replaced.
const NEVER: Duration = Duration::from_secs(3600);

/// A server, found by its address or by sentinels.
pub(crate) enum Host {
    Alone(Server),
    Watched(RedisSentinels),
}

impl Host {
    /// The one that the environment names, if it names one.
    pub(crate) async fn shared(kind: &'static Kind) -> Result<Self, ServerError> {
        Server::start(kind).await.map(Self::Alone)
    }

    /// One with the user of the tests.
    pub(crate) async fn own(kind: &'static Kind) -> Result<Self, ServerError> {
        let user = user();
        let user: Vec<_> = user.iter().map(String::as_str).collect();
        Server::start_own(kind, &user).await.map(Self::Alone)
    }

    /// One with the user of the tests, so many replicas and so many sentinels.
    pub(crate) async fn watched(kind: &'static Kind, replicas: usize, sentinels: usize) -> Result<Self, ServerError> {
        let user = user();
        let user: Vec<_> = user.iter().map(String::as_str).collect();
        RedisSentinels::start(kind, replicas, sentinels, NEVER, &user)
            .await
            .map(Self::Watched)
    }

    /// The one that grants the locks.
    pub(crate) fn server(&self) -> &Server {
        match self {
            Self::Alone(server) => server,
            Self::Watched(sentinels) => &sentinels.servers()[0],
        }
    }

    /// How clients connect.
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Alone(server) => server.url().to_owned(),
            Self::Watched(sentinels) => sentinels.url(),
        }
    }

    /// How clients connect through the proxy at that address.
    pub(crate) fn url_at(&self, address: SocketAddr) -> Result<String, LockError> {
        match self {
            Self::Alone(server) => Ok(server.url_at(address)),
            Self::Watched(_) => {
                let sentinel =
                    naming(address).map_err(|error| LockError::failed("standing in for a sentinel", error))?;
                Ok(format!("redis+sentinel://{sentinel}/{}", RedisSentinels::SERVICE))
            }
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alone(server) => server.fmt(f),
            Self::Watched(sentinels) => {
                let (servers, sentinels) = (sentinels.servers(), sentinels.sentinels());
                write!(
                    f,
                    "{} with {} replicas and {} sentinels",
                    servers[0],
                    servers.len() - 1,
                    sentinels.len()
                )
            }
        }
    }
}

/// As an argument, so that the user is there after every restart.
fn user() -> Vec<String> {
    ["--user".to_owned()].into_iter().chain(rule()).collect()
}

/// Starts what answers as a sentinel does that names the primary at that address. It ends with the process.
///
/// A real sentinel would talk to the server over the proxy, too, and be counted.
fn naming(address: SocketAddr) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let own = listener.local_addr()?;
    let text = |text: &str| format!("${}\r\n{text}\r\n", text.len());
    let [host, port] = [address.ip().to_string(), address.port().to_string()].map(|part| text(&part));
    let named = format!("*2\r\n{host}{port}");
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let named = named.clone();
            std::thread::spawn(move || answer(client, &named));
        }
    });
    Ok(own)
}

fn answer(mut client: TcpStream, named: &str) {
    const HELLO: &str = "%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n";
    let subscribed = ["a", "b", "c"].map(|channel| format!(">3\r\n$9\r\nsubscribe\r\n$1\r\n{channel}\r\n:1\r\n"));
    let subscribed = subscribed.concat();
    let mut request = vec![0; 4096];
    while let Ok(length @ 1..) = client.read(&mut request) {
        let request = String::from_utf8_lossy(&request[..length]);
        let answer = match () {
            () if request.contains("HELLO") => HELLO,
            () if request.contains("SUBSCRIBE") => &subscribed,
            () => named,
        };
        if client.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}
