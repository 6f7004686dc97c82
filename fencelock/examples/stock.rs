//! Several processes sell a limited stock: exactly all of it, although one of them is killed while it has the lock.
//!
//! ```sh
//! cargo run --example stock --features sqlite
//! cargo run --example stock --features full -- redis://localhost
//! ```
//!
//! The locks are at the address, or else in a temporary SQLite file. The stock is in a SQLite database, which keeps the mark of its fence, too.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use fencelock::FencingToken;
use fencelock::sqlite::fence::{self, FenceError};
use fencelock::sqlite::rusqlite::{self, Connection, TransactionBehavior};
use tokio::time::sleep;

type Outcome<T> = Result<T, Box<dyn Error>>;

const STOCK: usize = 100;
const TILLS: usize = 4;
/// After this time the lock of the process that is killed is free.
const TTL: Duration = Duration::from_secs(2);
/// Longest time for which a till waits, for its lock and its database.
const WAIT: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, data] = &arguments[..]
        && role == "till"
    {
        return sell(open(Path::new(data))?).await;
    }
    let folder = tempfile::tempdir()?;
    let own = || format!("sqlite:{}", folder.path().join("locks.db").display());
    let url = arguments.first().cloned().unwrap_or_else(own);
    let data = folder.path().join("stock.db");
    let shop = open(&data)?;
    shop.execute_batch(fence::CREATE_SQL)?;
    shop.execute_batch("CREATE TABLE stock (amount INTEGER); CREATE TABLE sale (token INTEGER)")?;
    shop.execute("INSERT INTO stock VALUES (?1)", [STOCK as u32])?;
    let mut tills = Vec::new();
    for _ in 0..TILLS {
        let mut command = Command::new(std::env::current_exe()?);
        // Not an argument: every user of the machine can read those, and the address may hold a password.
        command.arg("till").arg(&data).env(fencelock::ENV, &url);
        tills.push(command.stdout(Stdio::piped()).spawn()?);
    }
    let mut killed = tills.remove(0);
    // A till writes a line after each sale, while it still has the lock.
    let first_sale = killed.stdout.take().map(|output| BufReader::new(output).lines().next());
    let killing = killed.kill();
    killed.wait()?;
    killing?;
    if first_sale.flatten().is_none() {
        return Err("the till that is killed has sold nothing before".into());
    }
    for till in tills {
        if !till.wait_with_output()?.status.success() {
            return Err("a till failed".into());
        }
    }
    let mut query = shop.prepare("SELECT token FROM sale ORDER BY rowid")?;
    let tokens = query
        .query_map([], |row| row.get(0))?
        .collect::<Result<Vec<i64>, _>>()?;
    println!("{} of {STOCK} sold, {} left", tokens.len(), left(&shop)?);
    if tokens.len() != STOCK || left(&shop)? != 0 {
        return Err("exactly all should be sold".into());
    }
    if !tokens.is_sorted_by(|earlier, later| earlier < later) {
        return Err(format!("each sale should have a higher token than the one before: {tokens:?}").into());
    }
    Ok(())
}

/// A till: sells until nothing is left.
async fn sell(mut shop: Connection) -> Outcome<()> {
    let locks = fencelock::from_env().await?;
    let ttl = TTL.max(locks.capabilities().min_ttl);
    let mut sold_out = false;
    while !sold_out {
        let guard = locks.lock("example/stock").ttl(ttl).wait_for(WAIT).await?;
        match purchase(&mut shop, guard.token()).await {
            Ok(true) => println!("sold with token {}", guard.token()),
            Ok(false) => sold_out = true,
            // The lock was lost on the way, and a later holder has been here: nothing was written.
            Err(FenceError::Stale(stale)) => eprintln!("{stale}"),
            Err(error) => return Err(error.into()),
        }
        guard.release().await?;
    }
    Ok(())
}

/// Sells one, with the token in each step. Returns false if none is left.
async fn purchase(shop: &mut Connection, token: FencingToken) -> Result<bool, FenceError> {
    // Admitted with the read: from here on no older holder can write.
    let left = step(shop, token, left)?;
    if left > 0 {
        // The payment.
        sleep(Duration::from_millis(1)).await;
        step(shop, token, |data| {
            data.execute("UPDATE stock SET amount = ?1", [left - 1])?;
            data.execute("INSERT INTO sale VALUES (?1)", [token.as_i64()])
        })?;
    }
    Ok(left > 0)
}

fn open(data: &Path) -> rusqlite::Result<Connection> {
    let shop = Connection::open(data)?;
    shop.busy_timeout(WAIT)?;
    Ok(shop)
}

fn left(shop: &Connection) -> rusqlite::Result<u32> {
    shop.query_row("SELECT amount FROM stock", [], |row| row.get(0))
}

/// Runs a step in one transaction, which the fence refuses if the token is stale.
fn step<T>(
    shop: &mut Connection,
    token: FencingToken,
    step: impl FnOnce(&Connection) -> rusqlite::Result<T>,
) -> Result<T, FenceError> {
    let transaction = shop.transaction_with_behavior(TransactionBehavior::Immediate)?;
    fence::admit(&transaction, "stock", token)?;
    let done = step(&transaction)?;
    transaction.commit()?;
    Ok(done)
}
