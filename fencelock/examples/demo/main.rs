//! Real processes take turns under a lock, and the things happen that locks are for: `make demo`.
//!
//! The demonstration starts itself again for each process. It needs no server and no root, leaves nothing behind, and
//! fails if anything turns out otherwise than the text says.

#[path = "../stage/crew.rs"]
mod crew;
#[path = "../stage/folder.rs"]
mod folder;
#[path = "../stage/interruption.rs"]
mod interruption;
#[path = "../stage/lines.rs"]
mod lines;
#[path = "../stage/screen.rs"]
mod screen;
mod shop;
mod worker;

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crew::Worker;
use folder::folder;
use interruption::interruption;
use screen::{Screen, complain};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// How many processes count, and how far each.
const PROCESSES: u64 = 4;
const ADDITIONS: u64 = 50;

/// The ttl of the locks whose holders come to harm.
const TTL: Duration = Duration::from_millis(1500);
/// How much later than its ttl a lock may be free on the busiest machine. On others it takes milliseconds.
const SLACK: Duration = Duration::from_secs(20);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match &args[..] {
        [] => play().await,
        [worker, role, dir] if worker == "worker" => worker::work(&role.to_string_lossy(), Path::new(dir)).await,
        _ => {
            complain("the demonstration takes no arguments");
            ExitCode::from(2)
        }
    }
}

/// Runs the scenes until they are over or somebody presses Ctrl-C. Either way no process and no file stays.
async fn play() -> ExitCode {
    let screen = Screen::new();
    let outcome = tokio::select! {
        biased;
        name = interruption() => Err(format!("Interrupted ({name}). No process and no file is left.").into()),
        outcome = scenes(&screen) => outcome,
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            screen.failure(error);
            ExitCode::FAILURE
        }
    }
}

async fn scenes(screen: &Screen) -> Outcome<()> {
    let start = Instant::now();
    let dir = folder("fencelock-demo-")?;
    screen.title("fencelock: several real processes, one lock, no server")?;
    counting(screen, dir.path()).await?;
    let mut tokens = tokens_of_the_count(dir.path())?;
    tokens.extend(killed_holder(screen, dir.path()).await?);
    tokens.extend(stopped_holder(screen, dir.path()).await?);
    rising(screen, &tokens)?;
    dir.close()?;
    screen.end(&format!(
        "All as it should be, in {:.1} s.",
        start.elapsed().as_secs_f64()
    ))?;
    Ok(())
}

/// The same program with and without the lock.
async fn counting(screen: &Screen, dir: &Path) -> Outcome<()> {
    let all = PROCESSES * ADDITIONS;
    screen.scene(
        "Counting",
        &format!(
            "{PROCESSES} processes add 1 to the number in a file, {ADDITIONS} times each. It should end at {all}."
        ),
    )?;
    let bare = count("count-bare", dir).await?;
    screen.row(
        "without the lock",
        &bare.to_string(),
        &format!("{} additions lost", all.saturating_sub(bare)),
    )?;
    expect(
        bare < all,
        "without the lock no addition was lost, though all processes began with the same number",
    )?;
    let locked = count("count-locked", dir).await?;
    screen.row("with the lock", &locked.to_string(), "none lost")?;
    expect(
        locked == all,
        &format!("with the lock the count is {locked} and not {all}"),
    )
}

fn start(role: &str, dir: &Path) -> Outcome<Worker> {
    Worker::start(role, |command| {
        command.args(["worker", role]).arg(dir);
    })
}

async fn count(role: &str, dir: &Path) -> Outcome<u64> {
    shop::write_count(dir, 0)?;
    let mut workers = Vec::new();
    for _ in 0..PROCESSES {
        let mut worker = start(role, dir)?;
        worker.hear("ready").await?;
        workers.push(worker);
    }
    for worker in &mut workers {
        worker.tell("go").await?;
    }
    for worker in &mut workers {
        worker.hear("done").await?;
    }
    Ok(shop::read_count(dir)?)
}

/// A holder that cannot release any more.
async fn killed_holder(screen: &Screen, dir: &Path) -> Outcome<Vec<(&'static str, u64)>> {
    let ttl = TTL.as_secs_f64();
    screen.scene(
        "Crash",
        &format!("A has the lock and is killed (kill -9) while B waits for it. The ttl is {ttl} s."),
    )?;
    let mut a = start("hold", dir)?;
    let first = a.hear("held").await?.parse()?;
    screen.row("A has the lock", &token(first), "")?;
    let mut b = start("hold", dir)?;
    b.hear("asking").await?;
    let killed = Instant::now();
    a.kill().await?;
    let second = b.hear("held").await?.parse()?;
    let after = killed.elapsed();
    screen.row(
        "B has the lock",
        &token(second),
        &format!("{:.1} s after the kill", after.as_secs_f64()),
    )?;
    b.tell("release").await?;
    b.hear("released").await?;
    expect(
        after <= TTL + SLACK,
        &format!("the lock was free only {after:.1?} after its holder was killed"),
    )?;
    Ok(vec![("A, killed", first), ("B, after it", second)])
}

/// A holder that does not know that it is none any more.
async fn stopped_holder(screen: &Screen, dir: &Path) -> Outcome<Vec<(&'static str, u64)>> {
    screen.scene(
        "Stale holder",
        "A takes the lock to sell 1 of 100 articles, and is stopped (SIGSTOP) between reading the stock\n\
         and writing it. Its ttl passes, B gets the lock and sells 1. Then A goes on where it was.",
    )?;
    shop::open(dir)?;
    let mut a = start("sell", dir)?;
    let first = a.hear("read").await?.parse()?;
    screen.row("A reads 100, is stopped", &token(first), "")?;
    a.stop()?;
    // It finds this when it wakes, and writes before it looks at its lock.
    a.tell("write").await?;
    let mut b = start("sell", dir)?;
    let second = b.hear("read").await?.parse()?;
    b.tell("write").await?;
    let written = b.hear("write").await?;
    screen.row("B reads 100, writes 99", &token(second), &written)?;
    expect(written == "accepted", "the write of the present holder was refused")?;
    a.go_on()?;
    let refused = a.hear("write").await?;
    screen.row("A wakes up, writes 99", &token(first), &refused)?;
    expect(
        refused.starts_with("refused"),
        "the fence let the write of a stale holder pass",
    )?;
    let lost = a.hear("guard").await?;
    screen.row("A looks at its lock", "lost", &lost)?;
    expect(
        lost != "held",
        "a holder that was stopped past its ttl still believes in its lock",
    )?;
    let stock = shop::stock(dir)?;
    screen.row("the stock", &stock.to_string(), "one article sold, once")?;
    expect(stock == 99, &format!("the stock is {stock} and not 99"))?;
    Ok(vec![("A, stopped", first), ("B, after it", second)])
}

/// The tokens in the order in which the lock was held while counting.
fn tokens_of_the_count(dir: &Path) -> Outcome<Vec<(&'static str, u64)>> {
    let tokens = shop::read_tokens(dir)?;
    let last = tokens.len().saturating_sub(1);
    let named = tokens.into_iter().enumerate().map(|(n, token)| match n {
        0 => ("first addition", token),
        n if n == last => ("last addition", token),
        _ => ("", token),
    });
    Ok(named.collect())
}

fn rising(screen: &Screen, tokens: &[(&str, u64)]) -> Outcome<()> {
    screen.scene(
        "Tokens",
        &format!(
            "The lock was granted {} times, each time with a higher token. Six of them:",
            tokens.len()
        ),
    )?;
    for (who, token) in tokens.iter().filter(|(who, _)| !who.is_empty()) {
        screen.row(who, &self::token(*token), "")?;
    }
    let granted = (PROCESSES * ADDITIONS + 4) as usize;
    expect(tokens.len() == granted, &format!("{granted} grants were expected"))?;
    let rise = tokens.windows(2).all(|pair| pair[0].1 < pair[1].1);
    expect(rise, "a token is not higher than the one before")
}

fn token(token: u64) -> String {
    format!("token {token}")
}

fn expect(as_expected: bool, otherwise: &str) -> Outcome<()> {
    if as_expected {
        Ok(())
    } else {
        Err(format!("Not as it should be: {otherwise}").into())
    }
}
