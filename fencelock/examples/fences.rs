//! A resource with a fence refuses the late write of an earlier holder: memory, SQLite, Redis, Postgres, etcd.
//!
//! ```sh
//! cargo run --example fences
//! cargo run --example fences --features full -- redis://localhost
//! ```
//!
//! Locks and resource are at the address, where the resource stays: the key `example/resource`, or the table `example`.

use std::error::Error;
use std::sync::LazyLock;

use fencelock::FencingToken;
use fencelock::fence::Fence;

const NAME: &str = "example/resource";

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
        ("the first holder", late, "accepted"),
        ("the second holder", guard.token(), "accepted"),
        ("the first holder again", late, "refused"),
    ] {
        let outcome = match url.split(':').next() {
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
        println!("{holder} writes with token {token}: {outcome}");
        if outcome != expected {
            return Err("that write should have had the other outcome".into());
        }
    }
    guard.release().await?;
    Ok(())
}

type Outcome = Result<&'static str, Box<dyn Error>>;

fn memory(token: FencingToken) -> &'static str {
    static RESOURCE: LazyLock<Fence<u64>> = LazyLock::new(|| Fence::new(NAME, 0));
    match RESOURCE.write(token, |value| *value = token.get()) {
        Ok(()) => "accepted",
        Err(_) => "refused",
    }
}

#[cfg(feature = "sqlite")]
fn sqlite(url: &str, token: FencingToken) -> Outcome {
    use fencelock::sqlite::SqliteConfig;
    use fencelock::sqlite::fence::{self, FenceError};
    use fencelock::sqlite::rusqlite::{Connection, TransactionBehavior};

    let data = SqliteConfig::from_url(url)?.path().with_extension("example");
    let mut connection = Connection::open(data)?;
    connection.execute_batch(fence::CREATE_SQL)?;
    connection.execute_batch("CREATE TABLE IF NOT EXISTS example (value INTEGER)")?;
    // IMMEDIATE: no other write comes between the check and the commit.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    match fence::admit(&transaction, NAME, token) {
        Err(FenceError::Stale(_)) => return Ok("refused"),
        admitted => admitted?,
    }
    transaction.execute("INSERT INTO example VALUES (?1)", [token.as_i64()])?;
    transaction.commit()?;
    Ok("accepted")
}

#[cfg(feature = "postgres")]
async fn postgres(url: &str, token: FencingToken) -> Outcome {
    use fencelock::postgres::fence::{self, FenceError};
    use fencelock::postgres::tokio_postgres::{self, NoTls};

    let (mut client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute(fence::CREATE_SQL).await?;
    let create = "CREATE TABLE IF NOT EXISTS example (value bigint)";
    client.batch_execute(create).await?;
    let transaction = client.transaction().await?;
    match fence::admit(&transaction, NAME, token).await {
        Err(FenceError::Stale(_)) => return Ok("refused"),
        admitted => admitted?,
    }
    let write = "INSERT INTO example VALUES ($1)";
    transaction.execute(write, &[&token.as_i64()]).await?;
    transaction.commit().await?;
    Ok("accepted")
}

#[cfg(feature = "redis")]
async fn redis(url: &str, token: FencingToken) -> Outcome {
    use fencelock::redis::fence::{self, FenceError};
    use fencelock::redis::redis::{Client, cmd};

    let mut connection = Client::open(url)?.get_multiplexed_async_connection().await?;
    let write = cmd("SET").arg(NAME).arg(token.get()).clone();
    match fence::write::<()>(&mut connection, NAME, token, &write).await {
        Err(FenceError::Stale(_)) => Ok("refused"),
        written => Ok(written.map(|()| "accepted")?),
    }
}

#[cfg(feature = "etcd")]
async fn etcd(url: &str, token: FencingToken) -> Outcome {
    use fencelock::etcd::etcd_client::{Client, TxnOp};
    use fencelock::etcd::fence::{self, FenceError};

    let client = Client::connect([url.trim_start_matches("etcd://")], None).await?;
    let write = TxnOp::put(NAME, token.to_string(), None);
    match fence::write(&client, NAME, token, [write]).await {
        Err(FenceError::Stale(_)) => Ok("refused"),
        written => Ok(written.map(|_| "accepted")?),
    }
}
