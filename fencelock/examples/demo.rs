//! Real processes compete for a lock, and the failures happen that locks are for: `make demo`.
//!
//! The program starts itself again for each process. It needs no server and no root, leaves nothing behind, and fails if an outcome is not the
//! one that its text states.

use std::error::Error;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use fencelock::sqlite::SqliteConfig;
use fencelock::sqlite::fence::{self, FenceError};
use fencelock::sqlite::rusqlite::{self, Connection, TransactionBehavior};
use fencelock::{FencingToken, Locks, Renew};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{sleep, timeout};

type Outcome<T> = Result<T, Box<dyn Error>>;

const PROCESSES: u32 = 4;
const ADDITIONS: u32 = 50;
/// The ttl of the holders that are killed or stopped.
const TTL: Duration = Duration::from_millis(1500);
/// Longest time of a step on the busiest machine.
const HANG_LIMIT: Duration = Duration::from_secs(120);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, folder] = &arguments[..] {
        // A process that is stopped does not notice otherwise that its parent was killed.
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        return work(role, Path::new(folder)).await;
    }
    let folder = tempfile::Builder::new().prefix("fencelock-demo-").tempdir()?;
    tokio::select! {
        biased;
        _ = tokio::signal::ctrl_c() => Err("interrupted; no process and no file is left".into()),
        done = scenes(folder.path()) => done,
    }
}

async fn scenes(folder: &Path) -> Outcome<()> {
    let shop = open(folder)?;
    shop.pragma_update(None, "journal_mode", "WAL")?;
    shop.execute_batch("CREATE TABLE stock (amount INTEGER); INSERT INTO stock VALUES (0)")?;
    shop.execute_batch(fence::CREATE_SQL)?;

    let all = PROCESSES * ADDITIONS;
    println!("\nCounting: {PROCESSES} processes add 1 to a number, {ADDITIONS} times each. It should end at {all}.");
    let bare = count("count-bare", folder, &shop).await?;
    row("without the lock", bare, "additions are lost", bare < all)?;
    let locked = count("count-locked", folder, &shop).await?;
    row("with the lock", locked, "none is lost", locked == all)?;

    println!("\nCrash: A has the lock and is killed (kill -9) while B waits for it. The ttl is {TTL:?}.");
    let mut a = Worker::start("sell", folder).await?;
    row("A has the lock", a.hear("token").await?, "", true)?;
    let mut b = Worker::start("sell", folder).await?;
    let killed = Instant::now();
    a.process.kill().await?;
    let token = b.hear("token").await?;
    let after = format!("{:.1?} after the kill", killed.elapsed());
    row("B has the lock", token, &after, true)?;
    b.tell("write").await?;
    b.hear("accepted").await?;

    println!("\nStale holder: A takes the lock to sell 1 of 100 articles, and is stopped (SIGSTOP) between its read");
    println!("and its write. Its ttl passes, and B gets the lock and sells 1. Then A continues.");
    write(&shop, 100)?;
    let mut a = Worker::start("sell", folder).await?;
    row("A reads 100, is stopped", a.hear("token").await?, "", true)?;
    a.signal(Signal::STOP)?;
    a.tell("write").await?;
    let mut b = Worker::start("sell", folder).await?;
    let token = b.hear("token").await?;
    b.tell("write").await?;
    b.hear("accepted").await?;
    row("B reads 100, writes 99", token, "accepted", true)?;
    a.signal(Signal::CONT)?;
    row("A wakes, writes 99", "", &a.hear("refused").await?, true)?;
    row("A looks at its lock", "", &a.hear("lost").await?, true)?;
    let left = read(&shop)?;
    row("the stock", left, "one article is sold, once\n", left == 99)
}

async fn count(role: &str, folder: &Path, shop: &Connection) -> Outcome<u32> {
    write(shop, 0)?;
    let mut workers = Vec::new();
    for _ in 0..PROCESSES {
        workers.push(Worker::start(role, folder).await?);
    }
    for worker in &mut workers {
        worker.tell("go").await?;
    }
    for worker in &mut workers {
        worker.hear("done").await?;
    }
    Ok(read(shop)?)
}

/// Shows what happened, and fails if it is not what the text says.
fn row(what: &str, number: impl ToString, meaning: &str, as_expected: bool) -> Outcome<()> {
    println!("    {what:<26}{:>22}   {meaning}", number.to_string());
    as_expected
        .then_some(())
        .ok_or_else(|| "that is not as it should be".into())
}

/// A process, as its parent sees it. Killed when dropped.
struct Worker {
    process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    /// Starts a process, and waits until it is ready.
    async fn start(role: &str, folder: &Path) -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(role).arg(folder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // In a process group of its own: Ctrl-C is for the parent.
        let mut process = command.process_group(0).kill_on_drop(true).spawn()?;
        let (input, output) = process.stdin.take().zip(process.stdout.take()).ok_or("no pipes")?;
        let output = BufReader::new(output).lines();
        let mut worker = Self { process, input, output };
        worker.hear("ready").await?;
        Ok(worker)
    }

    async fn tell(&mut self, word: &str) -> Outcome<()> {
        Ok(self.input.write_all(format!("{word}\n").as_bytes()).await?)
    }

    /// Waits for the next line, which starts with `start`.
    async fn hear(&mut self, start: &str) -> Outcome<String> {
        let line = timeout(HANG_LIMIT, self.output.next_line()).await??.unwrap_or_default();
        match line.starts_with(start) {
            true => Ok(line),
            false => Err(format!("a process wrote {line:?} instead of {start:?}").into()),
        }
    }

    fn signal(&self, signal: Signal) -> Outcome<()> {
        let pid = self.process.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        Ok(kill_process(pid.ok_or("the process has ended")?, signal)?)
    }
}

/// What the processes do.
async fn work(role: &str, folder: &Path) -> Outcome<()> {
    let mut shop = open(folder)?;
    let config = SqliteConfig::new(folder.join("locks.db")).op_timeout(HANG_LIMIT);
    let locks = Locks::new(config.connect().await?);
    if role == "sell" {
        println!("ready");
        // Not renewed: a process that is stopped during a renewal blocks the whole file, not only its lock.
        let guard = locks.lock("demo").ttl(TTL).renew(Renew::Never).await?;
        // Admitted before the read: from here on no older holder can write.
        let left = fenced(&mut shop, guard.token(), read)?;
        say_and_wait(&format!("token {}", guard.token()))?;
        match fenced(&mut shop, guard.token(), |shop| write(shop, left - 1)) {
            Ok(()) => println!("accepted"),
            Err(FenceError::Stale(_)) => println!("refused by the fence: a later token was here"),
            Err(error) => return Err(error.into()),
        }
        if !guard.is_held() {
            println!("lost: {}", guard.lost().await);
        }
        guard.release().await?;
        return Ok(());
    }
    // All processes read before the first one writes, so that without the lock additions are lost on every machine.
    let mut number = read(&shop)?;
    say_and_wait("ready")?;
    for _ in 0..ADDITIONS {
        if role == "count-locked" {
            let guard = locks.lock("demo").await?;
            number = fenced(&mut shop, guard.token(), read)?;
            sleep(Duration::from_millis(1)).await;
            fenced(&mut shop, guard.token(), |shop| write(shop, number + 1))?;
            guard.release().await?;
        } else {
            write(&shop, number + 1)?;
            number = read(&shop)?;
            sleep(Duration::from_millis(1)).await;
        }
    }
    println!("done");
    Ok(())
}

/// Writes a line to the parent, and waits for a line from it.
fn say_and_wait(line: &str) -> Outcome<()> {
    println!("{line}");
    match std::io::stdin().read_line(&mut String::new())? {
        0 => Err("the parent has ended".into()),
        _ => Ok(()),
    }
}

/// The database that the lock protects. It is not the one that keeps the locks.
fn open(folder: &Path) -> rusqlite::Result<Connection> {
    let shop = Connection::open(folder.join("shop.db"))?;
    shop.busy_timeout(HANG_LIMIT)?;
    shop.pragma_update(None, "synchronous", "NORMAL")?;
    Ok(shop)
}

fn read(shop: &Connection) -> rusqlite::Result<u32> {
    shop.query_row("SELECT amount FROM stock", [], |row| row.get(0))
}

fn write(shop: &Connection, amount: u32) -> rusqlite::Result<()> {
    shop.execute("UPDATE stock SET amount = ?1", [amount]).map(drop)
}

/// Runs a step in the transaction that checks the token.
fn fenced<T>(
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
