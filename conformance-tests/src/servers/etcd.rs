//! etcd.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::kind::Place;

pub(super) fn arguments(place: Place<'_>) -> Vec<String> {
    let bind = if place.contained { "0.0.0.0" } else { "127.0.0.1" };
    // Nobody else is to talk to it; any free port will do.
    let peer = "http://127.0.0.1:0";
    let cluster = format!("test={peer}");
    let alone = [
        ["--name", "test"],
        ["--listen-peer-urls", peer],
        ["--initial-advertise-peer-urls", peer],
        ["--initial-cluster", &cluster],
    ];
    let alone = alone.concat().into_iter().map(str::to_owned);
    for_clients(place, bind).into_iter().chain(alone).collect()
}

/// Who it is, and who the others are, is said by whoever starts them.
pub(super) fn member_arguments(place: Place<'_>) -> Vec<String> {
    for_clients(place, "127.0.0.1")
}

/// The caller names the endpoints behind it when starting it.
pub(super) fn proxy_arguments(place: Place<'_>) -> Vec<String> {
    let listen = format!("--listen-addr=127.0.0.1:{}", place.port);
    let data = format!("--data-dir={}", place.data);
    ["grpc-proxy", "start", &listen, &data].map(str::to_owned).to_vec()
}

fn for_clients(place: Place<'_>, bind: &str) -> Vec<String> {
    let client = format!("http://{bind}:{}", place.port);
    [
        ["--data-dir", place.data],
        ["--listen-client-urls", &client],
        ["--advertise-client-urls", &client],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .collect()
}

/// Whether there is a cluster behind the proxy that answers.
pub(super) async fn probe_proxy(authority: &str) -> io::Result<String> {
    healthy(authority).await.map(|()| "etcd grpc-proxy".to_owned())
}

async fn healthy(authority: &str) -> io::Result<()> {
    let health = get(authority, "/health").await?;
    if health.contains("\"health\":\"true\"") {
        return Ok(());
    }
    Err(io::Error::other(format!("it is not well: {health}")))
}

pub(super) async fn probe(authority: &str) -> io::Result<String> {
    healthy(authority).await?;
    let versions = get(authority, "/version").await?;
    let version = versions
        .split_once("\"etcdserver\":\"")
        .and_then(|(_, rest)| rest.split_once('"'));
    match version {
        Some((version, _)) => Ok(format!("etcd {version}")),
        None => Err(io::Error::other("it does not tell its version")),
    }
}

async fn get(authority: &str, path: &str) -> io::Result<String> {
    let mut connection = TcpStream::connect(authority).await?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {authority}\r\n\r\n");
    connection.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    Ok(answer)
}
