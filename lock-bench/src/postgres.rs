//! Postgres: who else locks there, the bare round trips, and what the server counts.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{PgAdvisoryLock, PgPool, PgPoolOptions};
use sqlx::{Connection as _, Either, PgConnection};
use tokio::sync::Mutex;
use tokio_postgres::{Client, NoTls, Statement};

use crate::backend::{Orders, Peer};
use crate::contestant::{Body, Contestant, Failure, Trips};

pub(crate) const FLOOR: &str = "pg_try_advisory_lock + pg_advisory_unlock";

const POOLED: &str = "sqlx 0.9 PgAdvisoryLock, pool";
const ALONE: &str = "sqlx 0.9 PgAdvisoryLock, one connection";
const ROW: &str = "a row of a table";

pub(crate) const PEERS: &[Peer] = &[
    Peer::new(POOLED),
    // Its connection is taken by whoever waits, so that nobody else of the process can do anything meanwhile.
    Peer::for_one_task(ALONE),
    Peer::new(ROW),
];

/// What the server is started with: connections for a hundred processes, and a count of statements.
pub(crate) const ARGUMENTS: &[&str] = &[
    "-c",
    "max_connections=500",
    "-c",
    "shared_preload_libraries=pg_stat_statements",
];

/// What every contestant may count on.
pub(crate) async fn prepare(url: &str) -> Result<(), Failure> {
    let client = connect(url).await?;
    client
        .batch_execute(
            "CREATE EXTENSION IF NOT EXISTS pg_stat_statements;
             CREATE TABLE IF NOT EXISTS bench_lock (
                 name text PRIMARY KEY, holder bigint, token bigint NOT NULL, until timestamptz NOT NULL
             )",
        )
        .await?;
    Statements(client).turn("off").await
}

async fn connect(url: &str) -> Result<Client, Failure> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// A client of one of the peers.
pub(crate) async fn peer(who: &str, url: &str, ttl: Duration) -> Result<Arc<dyn Contestant>, Failure> {
    Ok(match who {
        POOLED => {
            // Each lock keeps a connection, and so does each task that waits.
            let pool = PgPoolOptions::new().max_connections(80).connect(url).await?;
            Arc::new(Pooled(pool))
        }
        ALONE => Arc::new(Alone(Mutex::new(Some(PgConnection::connect(url).await?)))),
        ROW => Arc::new(Row::new(connect(url).await?, ttl).await?),
        other => return Err(format!("there is no contestant {other} on Postgres").into()),
    })
}

struct Pooled(PgPool);

#[async_trait]
impl Contestant for Pooled {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let guard = PgAdvisoryLock::new(name).acquire(self.0.acquire().await?).await?;
        body.await;
        guard.release_now().await?;
        Ok(())
    }
}

struct Alone(Mutex<Option<PgConnection>>);

#[async_trait]
impl Contestant for Alone {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let mut place = self.0.lock().await;
        let connection = place.take().ok_or("the connection broke")?;
        let guard = PgAdvisoryLock::new(name).acquire(connection).await?;
        body.await;
        *place = Some(guard.release_now().await?);
        Ok(())
    }

    async fn within(&self, name: &str, limit: Duration, body: Body) -> Option<Result<bool, Failure>> {
        // There is no limit but none at all.
        if !limit.is_zero() {
            return None;
        }
        let attempt = async {
            let mut place = self.0.lock().await;
            let connection = place.take().ok_or("the connection broke")?;
            match PgAdvisoryLock::new(name).try_acquire(connection).await? {
                Either::Left(guard) => {
                    body.await;
                    *place = Some(guard.release_now().await?);
                    Ok(true)
                }
                Either::Right(connection) => {
                    *place = Some(connection);
                    Ok(false)
                }
            }
        };
        Some(attempt.await)
    }
}

/// What one writes by hand: a row per name, taken if it is free or its time is over. It survives a crash of the server, and
/// each acquisition waits for the disk. Not renewed.
struct Row {
    client: Client,
    take: Statement,
    free: Statement,
    ttl: f64,
}

/// How often one who waits asks.
const ASKING: Duration = Duration::from_millis(50);

impl Row {
    async fn new(client: Client, ttl: Duration) -> Result<Self, Failure> {
        let take = client
            .prepare(
                "INSERT INTO bench_lock AS l VALUES ($1, $2, 1, now() + make_interval(secs => $3))
                 ON CONFLICT (name) DO UPDATE SET holder = $2, token = l.token + 1, until = excluded.until
                     WHERE l.holder IS NULL OR l.until < now()
                 RETURNING token",
            )
            .await?;
        let free = client
            .prepare("UPDATE bench_lock SET holder = NULL WHERE name = $1 AND holder = $2")
            .await?;
        Ok(Self {
            client,
            take,
            free,
            ttl: ttl.as_secs_f64(),
        })
    }
}

#[async_trait]
impl Contestant for Row {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let holder = fastrand::i64(..);
        while self
            .client
            .query_opt(&self.take, &[&name, &holder, &self.ttl])
            .await?
            .is_none()
        {
            tokio::time::sleep(ASKING).await;
        }
        body.await;
        self.client.execute(&self.free, &[&name, &holder]).await?;
        Ok(())
    }
}

/// The bare pair on one session.
struct Pair(Client);

pub(crate) async fn trips(url: &str) -> Result<Arc<dyn Trips>, Failure> {
    Ok(Arc::new(Pair(connect(url).await?)))
}

/// A key for a name: no more than a number that differs.
fn key(name: &str) -> u64 {
    name.bytes().fold(7, |key: u64, byte| {
        key.wrapping_mul(31).wrapping_add(u64::from(byte)) >> 1
    })
}

#[async_trait]
impl Trips for Pair {
    async fn first(&self, name: &str) -> Result<(), Failure> {
        let asked = format!("SELECT pg_try_advisory_lock({})", key(name));
        self.0.simple_query(&asked).await?;
        Ok(())
    }

    async fn second(&self, name: &str) -> Result<(), Failure> {
        let asked = format!("SELECT pg_advisory_unlock({})", key(name));
        self.0.simple_query(&asked).await?;
        Ok(())
    }
}

/// Two keys in turn, so that each is taken back before it is needed again.
const KEYS: [u64; 2] = [1, 2];

async fn lock(client: &Client, key: u64) -> Result<(), Failure> {
    client.simple_query(&format!("SELECT pg_advisory_lock({key})")).await?;
    Ok(())
}

async fn unlock(client: &Client, key: u64) -> Result<(), Failure> {
    client
        .simple_query(&format!("SELECT pg_advisory_unlock({key})"))
        .await?;
    Ok(())
}

/// Tells of each lock that another process let go of in [`say`]: the barest hand-over that this server knows.
pub(crate) async fn hear(
    url: &str,
    times: usize,
    ready: impl FnOnce(),
    mut heard: impl FnMut(),
) -> Result<(), Failure> {
    let client = connect(url).await?;
    ready();
    for key in KEYS.into_iter().cycle().take(times) {
        lock(&client, key).await?;
        heard();
        unlock(&client, key).await?;
    }
    Ok(())
}

/// Lets go of a lock at each order.
pub(crate) async fn say(url: &str, ready: impl FnOnce(), mut orders: Orders) -> Result<(), Failure> {
    let client = connect(url).await?;
    for key in KEYS {
        lock(&client, key).await?;
    }
    // Now the other process may begin: it meets a lock that is held.
    ready();
    for key in KEYS.into_iter().cycle() {
        let Some(done) = orders.recv().await else { break };
        unlock(&client, key).await?;
        lock(&client, key).await?;
        let _ = done.send(());
    }
    Ok(())
}

/// How many statements clients have sent. Off unless somebody counts, since it costs most who sends the most different ones.
pub(crate) struct Statements(Client);

impl Statements {
    pub(crate) async fn start(url: &str) -> Result<Self, Failure> {
        let counting = Self(connect(url).await?);
        counting.turn("on").await?;
        counting.0.batch_execute("SELECT pg_stat_statements_reset()").await?;
        Ok(counting)
    }

    pub(crate) async fn stop(self) -> Result<(), Failure> {
        self.turn("off").await
    }

    /// All sessions count from their next statement on, or not any more.
    async fn turn(&self, wanted: &str) -> Result<(), Failure> {
        // Not in one message: the first wants a transaction of its own.
        self.0
            .batch_execute(&format!("ALTER SYSTEM SET compute_query_id = {wanted}"))
            .await?;
        self.0.batch_execute("SELECT pg_reload_conf()").await?;
        loop {
            let setting = self.0.query_one("SHOW compute_query_id", &[]).await?;
            if setting.get::<_, &str>(0) == wanted {
                break;
            }
        }
        // Prepared statements take note of it when they are planned anew, as all are when a schema comes or goes.
        Ok(self
            .0
            .batch_execute("CREATE SCHEMA bench_turn; DROP SCHEMA bench_turn")
            .await?)
    }

    pub(crate) async fn count(&self) -> Result<u64, Failure> {
        // What asks for the count is not counted.
        let asked = "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements
                     WHERE query NOT LIKE '%pg_stat_statements%'";
        let row = self.0.query_one(asked, &[]).await?;
        let count: i64 = row.get(0);
        Ok(count.unsigned_abs())
    }
}
