//! etcd: who else locks there, the bare round trips, and what the server counts.

use std::sync::Arc;
use std::time::Duration;

use ash_lock::{EtcdBackend, LockClient, LockConfig};
use async_trait::async_trait;
use etcd_client::{Client, LockOptions};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::backend::{Orders, Peer};
use crate::contestant::{Body, Contestant, Failure, Kept, Trips};

pub(crate) const FLOOR: &str = "2 x put";

const LEASE_EACH: &str = "etcd-client 0.21 Lock, a lease per lock";
const ONE_LEASE: &str = "etcd-client 0.21 Lock, one lease";
const ASH: &str = "ash-lock 0.1";

pub(crate) const PEERS: &[Peer] = &[Peer::new(LEASE_EACH), Peer::new(ONE_LEASE), Peer::new(ASH)];

/// A client of one of the peers.
pub(crate) async fn peer(who: &str, authority: &str, ttl: Duration) -> Result<Arc<dyn Contestant>, Failure> {
    let seconds = i64::try_from(ttl.as_secs())?;
    Ok(match who {
        LEASE_EACH => Arc::new(LeaseEach {
            client: connect(authority).await?,
            seconds,
        }),
        ONE_LEASE => Arc::new(OneLease::new(connect(authority).await?, seconds).await?),
        ASH => {
            let backend = EtcdBackend::connect([authority], None).await?;
            let config = LockConfig {
                default_ttl: ttl,
                watchdog_interval: ttl / 3,
                ..LockConfig::default()
            };
            Arc::new(Ash(LockClient::connect_with(config, Arc::new(backend)).await?))
        }
        other => return Err(format!("there is no contestant {other} on etcd").into()),
    })
}

async fn connect(authority: &str) -> Result<Client, Failure> {
    Ok(Client::connect([authority], None).await?)
}

/// The server's own Lock, with a lease for each lock, so that each ends by itself. Not renewed.
struct LeaseEach {
    client: Client,
    seconds: i64,
}

#[async_trait]
impl Contestant for LeaseEach {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let mut client = self.client.clone();
        let lease = client.lease_grant(self.seconds, None).await?.id();
        let options = LockOptions::new().with_lease(lease);
        let answer = client.lock(name, Some(options)).await?;
        body.await;
        client.unlock(answer.key()).await?;
        client.lease_revoke(lease).await?;
        Ok(())
    }
}

/// The server's own Lock, with a lease for all locks of the client, which is kept alive.
struct OneLease {
    client: Client,
    lease: i64,
    keeping: tokio::task::JoinHandle<()>,
}

impl OneLease {
    async fn new(mut client: Client, seconds: i64) -> Result<Self, Failure> {
        let lease = client.lease_grant(seconds, None).await?.id();
        let (mut keeper, mut answers) = client.lease_keep_alive(lease).await?;
        let pause = Duration::from_secs(seconds.unsigned_abs()) / 3;
        let keeping = tokio::spawn(async move {
            while keeper.keep_alive().await.is_ok() && matches!(answers.message().await, Ok(Some(_))) {
                tokio::time::sleep(pause).await;
            }
        });
        Ok(Self { client, lease, keeping })
    }
}

impl Drop for OneLease {
    fn drop(&mut self) {
        self.keeping.abort();
    }
}

#[async_trait]
impl Contestant for OneLease {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let mut client = self.client.clone();
        let options = LockOptions::new().with_lease(self.lease);
        let answer = client.lock(name, Some(options)).await?;
        body.await;
        client.unlock(answer.key()).await?;
        Ok(())
    }
}

struct Ash(LockClient);

#[async_trait]
impl Contestant for Ash {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let guard = self.0.lock(name).await.acquire().await?;
        body.await;
        guard.unlock().await?;
        Ok(())
    }

    async fn keep(&self, name: &str) -> Option<Result<Kept, Failure>> {
        let guard = self.0.lock(name).await.acquire().await;
        Some(guard.map(|guard| Box::new(guard) as Kept).map_err(Into::into))
    }
}

/// The bare round trips on one connection.
struct Puts(Client);

pub(crate) async fn trips(authority: &str) -> Result<Arc<dyn Trips>, Failure> {
    Ok(Arc::new(Puts(connect(authority).await?)))
}

#[async_trait]
impl Trips for Puts {
    async fn first(&self, name: &str) -> Result<(), Failure> {
        self.0.kv_client().put(format!("bench/{name}"), "x", None).await?;
        Ok(())
    }

    async fn second(&self, name: &str) -> Result<(), Failure> {
        self.first(name).await
    }
}

const KEY: &str = "bench-push";

/// Tells of each change, which another process made by [`say`].
pub(crate) async fn hear(
    authority: &str,
    times: usize,
    ready: impl FnOnce(),
    mut heard: impl FnMut(),
) -> Result<(), Failure> {
    let mut changes = connect(authority).await?.watch(KEY, None).await?;
    ready();
    let mut left = times;
    while left > 0 {
        let change = changes.message().await?.ok_or("the watch ended")?;
        for _ in change.events() {
            heard();
            left = left.saturating_sub(1);
        }
    }
    Ok(())
}

/// Makes a change at each order.
pub(crate) async fn say(authority: &str, ready: impl FnOnce(), mut orders: Orders) -> Result<(), Failure> {
    let mut client = connect(authority).await?;
    ready();
    while let Some(done) = orders.recv().await {
        client.put(KEY, "x", None).await?;
        let _ = done.send(());
    }
    Ok(())
}

/// How many messages clients have sent.
pub(crate) async fn messages(authority: &str) -> Result<u64, Failure> {
    let mut connection = TcpStream::connect(authority).await?;
    let request = format!("GET /metrics HTTP/1.0\r\nHost: {authority}\r\n\r\n");
    connection.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    let counts = answer
        .lines()
        .filter(|line| line.starts_with("grpc_server_msg_received_total{"))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    // A count, which a float of its size keeps exactly.
    Ok(counts.sum::<f64>() as u64)
}
