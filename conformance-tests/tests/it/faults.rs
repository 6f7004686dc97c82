//! The proxy, against a server that sends back what it gets.

use std::io;
use std::time::Duration;

use conformance_tests::faults::{Direction, Proxy, Then, Traffic};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

/// Longer than anything takes that is to happen.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long is waited for what is not to happen.
const QUIET: Duration = Duration::from_millis(80);

/// Sends back every piece with `re: ` in front, and reports what it got: the bytes, or how a connection ended.
struct Echo {
    address: String,
    got: mpsc::UnboundedReceiver<Got>,
}

#[derive(Debug, PartialEq, Eq)]
enum Got {
    Bytes(String),
    Closed,
    Reset,
}

impl Echo {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (report, got) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            loop {
                let (mut socket, _) = listener.accept().await.unwrap();
                let report = report.clone();
                tokio::spawn(async move {
                    let mut buffer = [0; 1024];
                    loop {
                        let got = match socket.read(&mut buffer).await {
                            Ok(0) => Got::Closed,
                            Ok(length) => Got::Bytes(String::from_utf8_lossy(&buffer[..length]).into_owned()),
                            Err(_) => Got::Reset,
                        };
                        if let Got::Bytes(bytes) = &got {
                            let _ = socket.write_all(format!("re: {bytes}").as_bytes()).await;
                        }
                        let last = !matches!(got, Got::Bytes(_));
                        let _ = report.send(got);
                        if last {
                            return;
                        }
                    }
                });
            }
        });
        Self { address, got }
    }

    async fn next(&mut self) -> Got {
        timeout(PATIENCE, self.got.recv()).await.unwrap().unwrap()
    }

    async fn gets(&mut self, bytes: &str) {
        assert_eq!(self.next().await, Got::Bytes(bytes.to_owned()));
    }

    async fn gets_nothing(&mut self) {
        let got = timeout(QUIET, self.got.recv()).await;
        assert!(got.is_err(), "the server got {got:?}");
    }
}

async fn with_proxy() -> (Echo, Proxy, TcpStream) {
    let echo = Echo::start().await;
    let proxy = Proxy::start(&echo.address).await.unwrap();
    let client = TcpStream::connect(proxy.address()).await.unwrap();
    (echo, proxy, client)
}

async fn send(client: &mut TcpStream, bytes: &str) {
    client.write_all(bytes.as_bytes()).await.unwrap();
}

/// The next piece that the client gets; empty if the connection was closed.
async fn receive(client: &mut TcpStream) -> io::Result<String> {
    let mut buffer = [0; 1024];
    let length = timeout(PATIENCE, client.read(&mut buffer)).await.unwrap()?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

async fn receive_nothing(client: &mut TcpStream) {
    let mut buffer = [0; 1024];
    let received = timeout(QUIET, client.read(&mut buffer)).await;
    assert!(received.is_err(), "the client got {received:?}");
}

async fn ask(client: &mut TcpStream, question: &str) {
    send(client, question).await;
    assert_eq!(receive(client).await.unwrap(), format!("re: {question}"));
}

#[tokio::test]
async fn everything_passes_and_is_counted() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    ask(&mut client, "one").await;
    ask(&mut client, "three").await;
    let counts = proxy.counts();
    assert_eq!((counts.connections, counts.open), (1, 1));
    assert_eq!((counts.bytes_to_server, counts.bytes_to_client), (8, 16));
    assert_eq!((counts.sends_to_server, counts.sends_to_client), (2, 2));
    drop(client);
    echo.gets("one").await;
    echo.gets("three").await;
    assert_eq!(echo.next().await, Got::Closed);
    timeout(PATIENCE, proxy.counted(|counts| counts.open == 0))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_reset_is_passed_on_as_a_reset() {
    let (mut echo, _proxy, mut client) = with_proxy().await;
    ask(&mut client, "one").await;
    client.set_zero_linger().unwrap();
    drop(client);
    echo.gets("one").await;
    assert_eq!(echo.next().await, Got::Reset);
}

#[tokio::test]
async fn replies_are_delayed_and_requests_are_not() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    proxy.set(Direction::ToClient, Traffic::Delayed(Duration::from_secs(3600)));
    send(&mut client, "one").await;
    echo.gets("one").await;
    receive_nothing(&mut client).await;
}

#[tokio::test]
async fn a_delay_is_the_length_of_the_line_not_its_width() {
    let delay = Duration::from_secs(3);
    let (mut echo, proxy, mut client) = with_proxy().await;
    client.set_nodelay(true).unwrap();
    proxy.set(Direction::ToServer, Traffic::Delayed(delay));
    let sent = Instant::now();
    for i in 0..5 {
        send(&mut client, "x").await;
        let all = i + 1;
        timeout(PATIENCE, proxy.counted(|counts| counts.sends_to_server == all))
            .await
            .unwrap();
    }
    let mut got = String::new();
    while got.len() < 5 {
        if let Got::Bytes(bytes) = echo.next().await {
            got += &bytes;
        }
    }
    let took = sent.elapsed();
    assert!(took >= delay && took < 5 * delay, "five delayed requests took {took:?}");
}

#[tokio::test]
async fn what_is_stalled_arrives_later_with_the_end_of_its_connection() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    proxy.set(Direction::ToServer, Traffic::Stalled);
    send(&mut client, "one").await;
    drop(client);
    echo.gets_nothing().await;
    proxy.heal().await;
    echo.gets("one").await;
    assert!(matches!(echo.next().await, Got::Closed | Got::Reset));
}

#[tokio::test]
async fn what_is_lost_stays_lost_and_nobody_is_told_of_an_end() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    ask(&mut client, "one").await;
    echo.gets("one").await;
    proxy.set(Direction::Both, Traffic::Lost);
    send(&mut client, "two").await;
    receive_nothing(&mut client).await;
    // Connections can still be made: their requests are lost.
    let mut late = TcpStream::connect(proxy.address()).await.unwrap();
    send(&mut late, "three").await;
    receive_nothing(&mut late).await;
    let all = "one".len() + "two".len() + "three".len();
    proxy.counted(|counts| counts.bytes_to_server >= all as u64).await;
    proxy.heal().await;
    send(&mut client, "four").await;
    receive_nothing(&mut client).await;
    drop(client);
    echo.gets_nothing().await;
    // Those made after that are well.
    let mut new = TcpStream::connect(proxy.address()).await.unwrap();
    ask(&mut new, "five").await;
    echo.gets("five").await;
}

#[tokio::test]
async fn replies_alone_can_be_lost() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    proxy.set(Direction::ToClient, Traffic::Lost);
    send(&mut client, "one").await;
    echo.gets("one").await;
    receive_nothing(&mut client).await;
}

#[tokio::test]
async fn a_connection_is_cut_at_every_byte_of_a_request() {
    let (mut echo, proxy, first) = with_proxy().await;
    drop(first);
    assert_eq!(echo.next().await, Got::Closed);
    for bytes in 0..=5 {
        let mut client = TcpStream::connect(proxy.address()).await.unwrap();
        let trap = proxy.cut_after(Direction::ToServer, bytes);
        send(&mut client, "12345").await;
        assert!(timeout(PATIENCE, trap.sprung()).await.unwrap());
        if bytes > 0 {
            echo.gets(&"12345"[..bytes]).await;
        }
        assert_ne!(echo.next().await, Got::Bytes(String::new()));
        let end = receive(&mut client).await;
        assert!(end.as_ref().is_ok_and(String::is_empty) || end.is_err(), "got {end:?}");
    }
}

#[tokio::test]
async fn a_cut_counts_over_several_pieces_and_ways() {
    let (_echo, proxy, mut client) = with_proxy().await;
    // "one" and "re: one" are ten bytes.
    let trap = proxy.cut_after(Direction::Both, 12);
    ask(&mut client, "one").await;
    assert!(!trap.has_sprung());
    send(&mut client, "four").await;
    assert!(timeout(PATIENCE, trap.sprung()).await.unwrap());
    let end = receive(&mut client).await;
    assert!(end.as_ref().is_ok_and(String::is_empty) || end.is_err(), "got {end:?}");
}

#[tokio::test]
async fn a_held_request_arrives_after_its_client_has_gone() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    let held = proxy.hold(b"take");
    // A reply to a client that has gone does not end the connection.
    proxy.set(Direction::ToClient, Traffic::Stalled);
    send(&mut client, "look").await;
    echo.gets("look").await;
    send(&mut client, "please take it").await;
    timeout(PATIENCE, held.caught()).await.unwrap();
    client.set_zero_linger().unwrap();
    drop(client);
    proxy.set(Direction::ToClient, Traffic::Flows);
    // The clean-up comes on a connection of its own, before the request.
    let mut other = TcpStream::connect(proxy.address()).await.unwrap();
    ask(&mut other, "forget it").await;
    echo.gets("forget it").await;
    held.deliver();
    echo.gets("please take it").await;
    assert!(matches!(echo.next().await, Got::Closed | Got::Reset));
}

#[tokio::test]
async fn a_held_request_that_is_dropped_never_arrives() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    let held = proxy.hold(b"");
    send(&mut client, "one").await;
    timeout(PATIENCE, held.caught()).await.unwrap();
    drop(held);
    assert_eq!(echo.next().await, Got::Reset);
    assert!(receive(&mut client).await.is_err());
}

#[tokio::test]
async fn exactly_one_reply_is_swallowed() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    let trap = proxy.swallow_reply(b"two", Then::Pass);
    ask(&mut client, "one").await;
    send(&mut client, "two").await;
    assert!(timeout(PATIENCE, trap.sprung()).await.unwrap());
    ask(&mut client, "three").await;
    for request in ["one", "two", "three"] {
        echo.gets(request).await;
    }
}

#[tokio::test]
async fn what_comes_before_the_reply_arrives() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    let trap = proxy.swallow_reply_that(b"one", |bytes| bytes.ends_with(b"two"), Then::Pass);
    ask(&mut client, "one").await;
    assert!(!trap.has_sprung());
    send(&mut client, "two").await;
    assert!(timeout(PATIENCE, trap.sprung()).await.unwrap());
    ask(&mut client, "two").await;
    for request in ["one", "two", "two"] {
        echo.gets(request).await;
    }
}

#[tokio::test]
async fn a_connection_is_cut_in_place_of_a_reply() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    let trap = proxy.swallow_reply(b"", Then::Cut);
    send(&mut client, "one").await;
    echo.gets("one").await;
    assert!(timeout(PATIENCE, trap.sprung()).await.unwrap());
    assert!(receive(&mut client).await.is_err());
    assert_eq!(echo.next().await, Got::Reset);
}

#[tokio::test]
async fn a_connection_falls_silent_in_place_of_a_reply() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    let trap = proxy.swallow_reply(b"", Then::Silence);
    send(&mut client, "one").await;
    assert!(timeout(PATIENCE, trap.sprung()).await.unwrap());
    send(&mut client, "two").await;
    echo.gets("one").await;
    echo.gets("two").await;
    receive_nothing(&mut client).await;
}

#[tokio::test]
async fn a_trap_that_is_dropped_is_taken_away() {
    let (_echo, proxy, mut client) = with_proxy().await;
    drop(proxy.swallow_reply(b"", Then::Cut));
    drop(proxy.hold(b""));
    drop(proxy.cut_after(Direction::Both, 0));
    ask(&mut client, "one").await;
}

#[tokio::test]
async fn connections_are_refused_until_it_heals() {
    let (_echo, proxy, mut client) = with_proxy().await;
    for _ in 0..3 {
        proxy.refuse().await;
        let refused = TcpStream::connect(proxy.address()).await;
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        ask(&mut client, "open ones are not concerned").await;
        proxy.heal().await;
        let mut new = TcpStream::connect(proxy.address()).await.unwrap();
        ask(&mut new, "one").await;
    }
}

#[tokio::test]
async fn all_connections_are_cut_at_once_and_new_ones_are_well() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    ask(&mut client, "one").await;
    echo.gets("one").await;
    proxy.set(Direction::Both, Traffic::Stalled);
    proxy.cut();
    assert_eq!(echo.next().await, Got::Reset);
    assert!(receive(&mut client).await.is_err());
    proxy.heal().await;
    let mut new = TcpStream::connect(proxy.address()).await.unwrap();
    ask(&mut new, "two").await;
}

#[tokio::test]
async fn without_a_server_connections_are_reset_and_later_ones_find_it() {
    // The port is taken, and nobody listens.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let target = socket.local_addr().unwrap().to_string();
    let proxy = Proxy::start(target).await.unwrap();
    // The reset may come before the system has told that there is a connection.
    if let Ok(mut client) = TcpStream::connect(proxy.address()).await {
        assert!(receive(&mut client).await.is_err());
    }
    let listener = socket.listen(1).unwrap();
    let mut client = TcpStream::connect(proxy.address()).await.unwrap();
    send(&mut client, "one").await;
    let (mut server, _) = timeout(PATIENCE, listener.accept()).await.unwrap().unwrap();
    assert_eq!(receive(&mut server).await.unwrap(), "one");
}

#[tokio::test]
async fn a_dropped_proxy_closes_its_port_and_its_connections() {
    let (mut echo, proxy, mut client) = with_proxy().await;
    ask(&mut client, "one").await;
    echo.gets("one").await;
    let address = proxy.address();
    drop(proxy);
    assert!(matches!(echo.next().await, Got::Closed | Got::Reset));
    let end = receive(&mut client).await;
    assert!(end.as_ref().is_ok_and(String::is_empty) || end.is_err(), "got {end:?}");
    let refused = TcpStream::connect(address).await;
    assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_blocked_runtime_does_not_hold_up_the_proxy() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let target = listener.local_addr().unwrap().to_string();
    let proxy = runtime.block_on(Proxy::start(target)).unwrap();
    // Nobody drives that runtime now.
    let client = std::net::TcpStream::connect(proxy.address()).unwrap();
    io::Write::write_all(&mut &client, b"one").unwrap();
    let (mut server, _) = listener.accept().unwrap();
    let mut got = [0; 3];
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    io::Read::read_exact(&mut server, &mut got).unwrap();
    assert_eq!(&got, b"one");
}
