//! Servers of etcd for tests, and what tests do with them.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use conformance_tests::faults::{Direction, Held, Proxy, Traffic};
use lock_core::{
    Attempt, Busy, Claim, Clock, DistributedLock, Grant, LockError, LockGuard, LossReason, Released, Stamp, Wait,
};
use lock_etcd::etcd_client::{Client, ConnectOptions, GetOptions, KeyValue, SortOrder, SortTarget};
use lock_etcd::{EtcdConfig, EtcdLock};
use test_servers::{Kind, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

/// Longer than any test.
pub(crate) const LONG: Duration = Duration::from_secs(120);
/// So long that no renewal comes before [`HANG_LIMIT`]: what a holder hears within that limit was pushed.
pub(crate) const UNRENEWED: Duration = Duration::from_secs(600);
/// The shortest that etcd grants.
pub(crate) const SHORT: Duration = Duration::from_secs(2);
/// Limit for everything that is to happen. Only a test that hangs reaches it.
pub(crate) const HANG_LIMIT: Duration = Duration::from_secs(60);
/// For how long a request that is held back is waited for: longer than a machine that is busy may not run a test or a server.
pub(crate) const GIVEN_UP: Duration = Duration::from_secs(8);

/// The namespace of clients for which none is set.
const USUAL: &str = "fencelock";

/// A server, and the namespace that a test has on it.
pub(crate) struct Etcd {
    server: Arc<Server>,
    namespace: String,
}

impl Etcd {
    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }
}

impl Deref for Etcd {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

/// A client of the library, not of the backend, for the keys of a namespace.
pub(crate) struct Plain {
    client: Client,
    namespace: String,
}

impl Plain {
    /// Connects to the server at `authority`, for the usual namespace.
    pub(crate) async fn connect(authority: &str) -> Self {
        Self::connect_with(authority, USUAL, None).await
    }

    async fn connect_with(authority: &str, namespace: &str, options: Option<ConnectOptions>) -> Self {
        Self {
            client: Client::connect([authority], options).await.unwrap(),
            namespace: namespace.to_owned(),
        }
    }

    /// The key of the base of tokens.
    pub(crate) fn base_key(&self) -> String {
        format!("{}:base", self.namespace)
    }

    /// What the keys of all claims on a name begin with.
    pub(crate) fn prefix(&self, name: &str) -> String {
        format!("{}:lock/{name}/", self.namespace)
    }
}

impl Deref for Plain {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// Starts a server of the test's own, for a test that pauses, stops or configures it, or counts what all its clients do. It waits
/// for no disk.
pub(crate) async fn start() -> Etcd {
    start_with(&["--unsafe-no-fsync"]).await
}

/// Starts a server of the test's own with these arguments.
pub(crate) async fn start_with(arguments: &[&str]) -> Etcd {
    start_kind(&Kind::ETCD, arguments).await
}

/// Starts a server of that kind, of the test's own, with these arguments.
pub(crate) async fn start_kind(kind: &'static Kind, arguments: &[&str]) -> Etcd {
    Etcd {
        server: Arc::new(Server::start_own(kind, arguments).await.unwrap()),
        namespace: USUAL.to_owned(),
    }
}

/// Returns a namespace of the test's own on the server that tests of this program share.
///
/// The server ends with the last test that uses it, since nothing is dropped at the end of the process. The next test starts another.
pub(crate) async fn shared() -> Etcd {
    static SERVER: Mutex<Weak<Server>> = Mutex::const_new(Weak::new());
    static NAMESPACES: AtomicUsize = AtomicUsize::new(0);
    let mut shared = SERVER.lock().await;
    let server = match shared.upgrade() {
        Some(server) => server,
        None => start().await.server,
    };
    *shared = Arc::downgrade(&server);
    let namespace = format!("test-{}", NAMESPACES.fetch_add(1, Ordering::Relaxed));
    Etcd { server, namespace }
}

pub(crate) fn config(server: &Etcd) -> EtcdConfig {
    config_at(server.authority())
        .namespace(&*server.namespace)
        // A busy machine may stand still for seconds.
        .op_timeout(Duration::from_secs(30))
}

/// Configures a client that reaches the server through a proxy.
pub(crate) fn config_behind(server: &Etcd, proxy: &Proxy) -> EtcdConfig {
    config_at(&proxy.address().to_string()).namespace(&*server.namespace)
}

/// Configures a client of the usual namespace.
pub(crate) fn config_at(authority: &str) -> EtcdConfig {
    EtcdConfig::from_url(&format!("etcd://{authority}")).unwrap()
}

pub(crate) async fn client(server: &Etcd) -> EtcdLock {
    config(server).connect().await.unwrap()
}

pub(crate) async fn plain(server: &Etcd) -> Plain {
    Plain::connect_with(server.authority(), &server.namespace, None).await
}

/// Connects with a user name and a password.
pub(crate) async fn plain_as(server: &Etcd, user: &str, password: &str) -> Plain {
    let options = ConnectOptions::new().with_user(user, password);
    Plain::connect_with(server.authority(), &server.namespace, Some(options)).await
}

pub(crate) fn claim(name: &str, ttl: Duration) -> Claim {
    Claim::new(name.parse().unwrap(), ttl)
}

pub(crate) fn soon() -> Option<Stamp> {
    Some(Clock::system().now() + HANG_LIMIT)
}

pub(crate) async fn granted(lock: &EtcdLock, claim: &Claim) -> Grant {
    let attempt = lock.try_acquire(claim).await.unwrap();
    attempt.granted().expect("the lock is free")
}

/// Waits for the lock, which it has to get.
pub(crate) async fn waited(lock: &EtcdLock, claim: &Claim) -> Grant {
    let attempt = lock.acquire(claim, Wait::until(soon())).await.unwrap();
    attempt.granted().expect("a wait is long enough")
}

/// [Waits](waited) for the lock beside whatever else happens.
pub(crate) fn waiting(lock: &EtcdLock, claim: &Claim) -> JoinHandle<Grant> {
    let (lock, claim) = (lock.clone(), claim.clone());
    tokio::spawn(async move { waited(&lock, &claim).await })
}

pub(crate) async fn busy(lock: &EtcdLock, claim: &Claim) -> Busy {
    match lock.try_acquire(claim).await.unwrap() {
        Attempt::Busy(busy) => busy,
        other => panic!("granted although held: {other:?}"),
    }
}

/// The keys of all claims on a name, the oldest first.
pub(crate) async fn queue(etcd: &Plain, name: &str) -> Vec<KeyValue> {
    let oldest_first = GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Ascend);
    let mut found = etcd
        .kv_client()
        .get(etcd.prefix(name), Some(oldest_first))
        .await
        .unwrap();
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
pub(crate) async fn until_queued(etcd: &Plain, name: &str, waiters: usize) {
    until(async || queue(etcd, name).await.len() == waiters + 1).await;
}

/// Waits until it is so.
pub(crate) async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let looking = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(HANG_LIMIT, looking)
        .await
        .expect("it becomes so in time");
}

/// Why the lock was lost, as its holder was told without a request of its own.
pub(crate) async fn lost(guard: &LockGuard) -> LossReason {
    tokio::time::timeout(HANG_LIMIT, guard.lost())
        .await
        .expect("the holder is told of the loss")
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

/// Releases a claim over another connection than the one that is stuck.
pub(crate) async fn clean_up(lock: &EtcdLock, claim: &Claim) -> Released {
    let cleaning = async {
        loop {
            match lock.release(claim, None).await {
                Ok(released) => return released,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(HANG_LIMIT, cleaning).await.unwrap()
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
        let caught = tokio::time::timeout(HANG_LIMIT, held.caught()).await;
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
pub(crate) async fn raise_base(etcd: &Plain) {
    let ahead = SystemTime::now() + Duration::from_secs(3600);
    let base = ahead.duration_since(UNIX_EPOCH).unwrap().as_micros();
    etcd.kv_client()
        .put(etcd.base_key(), base.to_string(), None)
        .await
        .unwrap();
}
