//! A resource with a fence refuses the late write of an earlier holder: memory, SQLite, Redis, Postgres, etcd.
//!
//! ```sh
//! cargo run --example fences
//! cargo run --example fences --features full -- redis://localhost
//! ```
//!
//! Locks and resource are at the address. The resource stays there: `example/stock`, in a database a table of that name.

use std::error::Error;
use std::sync::LazyLock;

use fencelock::FencingToken;
use fencelock::fence::Fence;

const NAME: &str = "example/stock";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    let locks = fencelock::connect(&url).await?;
    // A holder whose lock ends without its knowledge, as in a long pause, and the holder after it.
    let paused = locks.lock(NAME).await?;
    let late = paused.token();
    paused.release().await?;
    let guard = locks.lock(NAME).await?;
    for (holder, token, expected) in [
        ("the first holder", late, true),
        ("the second holder", guard.token(), true),
        ("the first holder again", late, false),
    ] {
        let accepted = match url.split(':').next() {
            #[cfg(feature = "etcd")]
            Some("etcd") => etcd(&url, token).await?,
            #[cfg(feature = "postgres")]
            Some("postgres") => postgres(&url, token).await?,
            #[cfg(feature = "redis")]
            Some("redis") => redis(&url, token).await?,
            #[cfg(feature = "sqlite")]
            Some("sqlite") => sqlite(&url, token)?,
            Some("memory") => memory(token),
            _ => return Err("this example has no resource for such an address".into()),
        };
        println!(
            "{holder} writes with token {token}: {}",
            if accepted { "accepted" } else { "refused" }
        );
        if accepted != expected {
            return Err("that write should have had the other outcome".into());
        }
    }
    guard.release().await?;
    Ok(())
}

// Each function sells one article, and returns false if a later holder has been there.

fn memory(token: FencingToken) -> bool {
    static STOCK: LazyLock<Fence<u64>> = LazyLock::new(|| Fence::new(NAME, 100));
    STOCK.write(token, |left| *left -= 1).is_ok()
}

#[cfg(feature = "sqlite")]
fn sqlite(url: &str, token: FencingToken) -> Result<bool, Box<dyn Error>> {
    use fencelock::sqlite::SqliteConfig;
    use fencelock::sqlite::fence::{self, FenceError};
    use fencelock::sqlite::rusqlite::{Connection, TransactionBehavior};

    let mut data = SqliteConfig::from_url(url)?.path().as_os_str().to_owned();
    data.push("-stock");
    let mut connection = Connection::open(data)?;
    connection.execute_batch(fence::CREATE_SQL)?;
    connection.execute_batch("CREATE TABLE IF NOT EXISTS example (name TEXT PRIMARY KEY, amount INTEGER)")?;
    // IMMEDIATE: no other write comes between the check and the commit.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    match fence::admit(&transaction, NAME, token) {
        Err(FenceError::Stale(_)) => return Ok(false),
        admitted => admitted?,
    }
    transaction.execute(
        "INSERT INTO example VALUES (?1, 99) ON CONFLICT DO UPDATE SET amount = amount - 1",
        [NAME],
    )?;
    transaction.commit()?;
    Ok(true)
}

#[cfg(feature = "postgres")]
async fn postgres(url: &str, token: FencingToken) -> Result<bool, Box<dyn Error>> {
    use fencelock::postgres::fence::{self, FenceError};
    use fencelock::postgres::tokio_postgres::{self, NoTls};

    let (mut client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute(fence::CREATE_SQL).await?;
    client
        .batch_execute("CREATE TABLE IF NOT EXISTS example (name text PRIMARY KEY, amount bigint)")
        .await?;
    let transaction = client.transaction().await?;
    match fence::admit(&transaction, NAME, token).await {
        Err(FenceError::Stale(_)) => return Ok(false),
        admitted => admitted?,
    }
    let sell = "INSERT INTO example VALUES ($1, 99) ON CONFLICT (name) DO UPDATE SET amount = example.amount - 1";
    transaction.execute(sell, &[&NAME]).await?;
    transaction.commit().await?;
    Ok(true)
}

#[cfg(feature = "redis")]
async fn redis(url: &str, token: FencingToken) -> Result<bool, Box<dyn Error>> {
    use fencelock::redis::fence::{self, FenceError};
    use fencelock::redis::redis::{Client, cmd};

    let mut connection = Client::open(url)?.get_multiplexed_async_connection().await?;
    let sell = cmd("DECR").arg(NAME).clone();
    match fence::write::<i64>(&mut connection, NAME, token, &sell).await {
        Err(FenceError::Stale(_)) => Ok(false),
        written => Ok(written.map(|_left| true)?),
    }
}

#[cfg(feature = "etcd")]
async fn etcd(url: &str, token: FencingToken) -> Result<bool, Box<dyn Error>> {
    use fencelock::etcd::etcd_client::{Client, TxnOp};
    use fencelock::etcd::fence::{self, FenceError};

    let client = Client::connect([url.trim_start_matches("etcd://")], None).await?;
    // Admitted before the read, so that no older holder writes between the read and the write.
    match fence::admit(&client, NAME, token).await {
        Err(FenceError::Stale(_)) => return Ok(false),
        admitted => admitted?,
    }
    let read = client.kv_client().get(NAME, None).await?;
    let left: i64 = read
        .kvs()
        .first()
        .map_or(Ok(100), |found| found.value_str().unwrap_or_default().parse())?;
    let sell = TxnOp::put(NAME, (left - 1).to_string(), None);
    match fence::write(&client, NAME, token, [sell]).await {
        Err(FenceError::Stale(_)) => Ok(false),
        written => Ok(written.map(|_| true)?),
    }
}
