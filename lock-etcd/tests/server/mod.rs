//! An etcd of a test's own, and what tests do with it.

#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use conformance_tests::faults::{Direction, Held, Proxy, Traffic};
use conformance_tests::servers::{Kind, Server};
use lock_core::{Attempt, Busy, Claim, Clock, DistributedLock, Grant, LockError, Released, Stamp};
use lock_etcd::etcd_client::{Client, GetOptions, KeyValue, SortOrder, SortTarget};
use lock_etcd::{EtcdConfig, EtcdLock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Longer than any test.
pub(crate) const LONG: Duration = Duration::from_secs(120);
/// The shortest that etcd grants.
pub(crate) const SHORT: Duration = Duration::from_secs(2);
/// Longer than anything takes that is to happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// For how long a request that is held back is waited for: longer than a machine that is busy may not run a test or a server.
pub(crate) const GIVEN_UP: Duration = Duration::from_secs(8);

/// A server that waits for no disk.
pub(crate) async fn start() -> Server {
    Server::start_own(&Kind::ETCD, &["--unsafe-no-fsync"]).await.unwrap()
}

pub(crate) fn config(server: &Server) -> EtcdConfig {
    config_at(server.authority())
}

pub(crate) fn config_at(authority: &str) -> EtcdConfig {
    EtcdConfig::from_url(&format!("etcd://{authority}")).unwrap()
}

pub(crate) async fn client(server: &Server) -> EtcdLock {
    config(server).connect().await.unwrap()
}

/// A client of the library that is not the backend's.
pub(crate) async fn plain(server: &Server) -> Client {
    Client::connect([server.authority()], None).await.unwrap()
}

pub(crate) fn claim(name: &str, ttl: Duration) -> Claim {
    Claim::new(name.parse().unwrap(), ttl)
}

pub(crate) fn soon() -> Option<Stamp> {
    Some(Clock::system().now() + PATIENCE)
}

pub(crate) async fn granted(lock: &EtcdLock, claim: &Claim) -> Grant {
    let attempt = lock.try_acquire(claim).await.unwrap();
    attempt.granted().expect("the lock is free")
}

pub(crate) async fn busy(lock: &EtcdLock, claim: &Claim) -> Busy {
    match lock.try_acquire(claim).await.unwrap() {
        Attempt::Busy(busy) => busy,
        other => panic!("granted although held: {other:?}"),
    }
}

/// The keys of all claims on a name, the oldest first.
pub(crate) async fn queue(etcd: &Client, name: &str) -> Vec<KeyValue> {
    let oldest_first = GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Ascend);
    let key = format!("fencelock:lock/{name}/");
    let mut found = etcd.kv_client().get(key, Some(oldest_first)).await.unwrap();
    found.take_kvs()
}

/// Everything that is stored.
pub(crate) async fn everything(etcd: &Client) -> Vec<String> {
    let all = GetOptions::new().with_all_keys();
    let found = etcd.kv_client().get("", Some(all)).await.unwrap();
    let keys = found.kvs().iter();
    keys.map(|kv| kv.key_str().unwrap().to_owned()).collect()
}

/// Waits until that many claims wait for the name.
pub(crate) async fn until_queued(etcd: &Client, name: &str, waiters: usize) {
    until(async || queue(etcd, name).await.len() == waiters + 1).await;
}

/// Waits until it is so.
pub(crate) async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting)
        .await
        .expect("it becomes so in time");
}

/// What the server has counted, by the beginning of the line: `grpc_server_handled_total{...`.
pub(crate) async fn counted(server: &Server, metric: &str, with: &[&str]) -> u64 {
    let mut connection = TcpStream::connect(server.authority()).await.unwrap();
    let request = format!("GET /metrics HTTP/1.0\r\nHost: {}\r\n\r\n", server.authority());
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    let counts = answer
        .lines()
        .filter(|line| line.starts_with(metric) && with.iter().all(|part| line.contains(part)))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64);
    counts.sum()
}

/// How many transactions the server has carried out.
pub(crate) async fn transactions(server: &Server) -> u64 {
    counted(
        server,
        "grpc_server_handled_total",
        &["grpc_method=\"Txn\"", "grpc_code=\"OK\""],
    )
    .await
}

/// How many leases it has granted.
pub(crate) async fn leases_granted(server: &Server) -> u64 {
    counted(
        server,
        "grpc_server_handled_total",
        &["grpc_method=\"LeaseGrant\"", "grpc_code=\"OK\""],
    )
    .await
}

/// How many keepalives it has received.
pub(crate) async fn keepalives(server: &Server) -> u64 {
    counted(
        server,
        "grpc_server_msg_received_total",
        &["grpc_method=\"LeaseKeepAlive\""],
    )
    .await
}

/// How many requests of any other sort it has received, watches included.
pub(crate) async fn requests(server: &Server) -> u64 {
    counted(server, "grpc_server_msg_received_total", &[]).await - keepalives(server).await
}

/// How many keys it watches for clients.
pub(crate) async fn watchers(server: &Server) -> u64 {
    counted(server, "etcd_debugging_mvcc_watcher_total ", &[]).await
}

/// Releases a claim over another connection than the one that is stuck.
pub(crate) async fn clean_up(lock: &EtcdLock, claim: &Claim) -> Released {
    let cleaning = async {
        loop {
            match lock.release(claim).await {
                Ok(released) => return released,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(PATIENCE, cleaning).await.unwrap()
}

/// How many transactions the server has dealt with, in whatever way.
pub(crate) async fn dealt_with(server: &Server) -> u64 {
    counted(server, "grpc_server_handled_total", &["grpc_method=\"Txn\""]).await
}

/// Whether a piece of what the server sends is an answer, or a part of one: an acknowledgement and a ping come before it.
pub(crate) fn is_answer(bytes: &[u8]) -> bool {
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    let mut rest = bytes;
    while let Some((&[high, middle, low, kind, ..], after)) = rest.split_first_chunk::<9>() {
        if kind == DATA || kind == HEADERS {
            return true;
        }
        let length = u32::from_be_bytes([0, high, middle, low]);
        rest = after.get(length as usize..).unwrap_or_default();
    }
    false
}

/// Has a request fail that is held back: meanwhile no other connection is made on which it would be repeated.
pub(crate) async fn fails<T: std::fmt::Debug>(
    proxy: &Proxy,
    held: &Held,
    request: impl Future<Output = Result<T, LockError>>,
) {
    let (answer, ()) = tokio::join!(request, async {
        let caught = tokio::time::timeout(PATIENCE, held.caught()).await;
        caught.expect("the request is held back");
        proxy.refuse().await;
    });
    assert!(answer.is_err(), "it is held back: {answer:?}");
    proxy.heal().await;
}

/// Lets what was held back through to the server, and waits until that is done with it.
pub(crate) async fn deliver(server: &Server, proxy: &Proxy, held: Held) {
    let before = dealt_with(server).await;
    // The client has closed that connection, and the server would drop the request with it.
    proxy.set(Direction::ToServer, Traffic::Stalled);
    held.deliver();
    until(async || dealt_with(server).await > before).await;
    proxy.heal().await;
}

/// Raises the base of tokens above the clock, so that no new connection changes it: what makes a late request do nothing is
/// something else then.
pub(crate) async fn raise_base(etcd: &Client) {
    let ahead = SystemTime::now() + Duration::from_secs(3600);
    let base = ahead.duration_since(UNIX_EPOCH).unwrap().as_micros();
    etcd.kv_client()
        .put("fencelock:base", base.to_string(), None)
        .await
        .unwrap();
}
