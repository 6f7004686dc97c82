//! Three instances of an HTTP service sell a limited stock to concurrent requests, and one instance is killed in the middle:
//! without a lock, and with `fencelock::tower::LockLayer`.
//!
//! ```sh
//! cargo run --release --example http_shop --features sqlite,tower
//! cargo run --release --example http_shop --features full,tower -- --url redis://localhost
//! ```
//!
//! The service is in `service.rs`; the rest starts it, sends requests and judges. The store is on the same backend as the
//! lock. The program starts itself again for each instance, leaves nothing behind, and fails if an act does not end as it should.

#[path = "../stage/crew.rs"]
#[allow(dead_code, reason = "the other examples also stop their processes")]
mod crew;
#[path = "../stage/folder.rs"]
mod folder;
mod instance;
#[path = "../stage/interruption.rs"]
mod interruption;
mod judge;
#[path = "../stage/lines.rs"]
mod lines;
mod payment;
#[path = "../stage/screen.rs"]
mod screen;
mod service;
#[cfg(test)]
mod service_tests;
#[path = "../stock"]
mod stock {
    #[allow(dead_code, reason = "the example `stock` also shows locks that are made of a key")]
    pub(crate) mod store;
}
mod traffic;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use clap::Parser;
use crew::Worker;
use interruption::interruption;
use judge::Verdict;
use screen::Screen;
use stock::store::{self, Store};
use tempfile::TempDir;
use traffic::{Replies, Traffic};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const STOCK: u32 = 100;
const INSTANCES: usize = 3;
const REQUESTS: u32 = 300;
/// The requests that come before the kill. Fewer than there are articles, so that each of them has its turn.
const BEFORE_THE_KILL: u32 = 90;
/// The instance that is killed, and in which of its payments.
const KILLED: usize = 0;
const KILLED_IN_PAYMENT: u32 = 10;

// The acts.
const WITHOUT_LOCK: usize = 1;
const WITH_LOCK: usize = 2;

/// Three instances of an HTTP service sell a limited stock, without a lock and with one, and one instance is killed
#[derive(Debug, Parser)]
#[command(name = "http_shop", version)]
struct Arguments {
    /// Where the locks and the store are, such as redis://localhost; a SQLite file in a temporary folder by default
    #[arg(long)]
    url: Option<String>,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [role, run, act, endless_payment @ ..] = &words[..]
        && role == "instance"
    {
        return instance::run(run, act, endless_payment.first().map(String::as_str)).await;
    }
    let arguments = Arguments::parse();
    let screen = Screen::new();
    match sale(&screen, arguments.url.as_deref()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            screen.failure(error);
            ExitCode::FAILURE
        }
    }
}

/// Plays until the end or an interruption. In both cases no process and nothing in the store stays.
async fn sale(screen: &Screen, url: Option<&str>) -> Outcome<()> {
    let (url, folder) = store::address(url, "fencelock-http-shop-")?;
    fencelock::connect(&url).await?.shutdown().await?;
    let run = store::new_run();
    let stores = [
        open(&url, &run, WITHOUT_LOCK).await?,
        open(&url, &run, WITH_LOCK).await?,
    ];
    let outcome = tokio::select! {
        biased;
        name = interruption() => Err(format!("Interrupted ({name}).").into()),
        outcome = play(screen, &url, &run, &stores) => outcome,
    };
    for store in &stores {
        store.clear().await?;
    }
    outcome?;
    folder.map_or(Ok(()), TempDir::close)?;
    Ok(())
}

async fn open(url: &str, run: &str, act: usize) -> Outcome<Arc<dyn Store>> {
    let store = store::connect(url, run, act).await;
    store.map_err(|error| format!("the store cannot be opened: {error}").into())
}

async fn play(screen: &Screen, url: &str, run: &str, [without_lock, with_lock]: &[Arc<dyn Store>; 2]) -> Outcome<()> {
    let start = Instant::now();
    let (scheme, _) = url.split_once(':').unwrap_or_default();
    screen.title(&format!(
        "fencelock: {INSTANCES} instances sell {STOCK} articles to {REQUESTS} requests, one is killed; lock and store on {scheme}"
    ))?;
    screen.scene(
        "1. without the lock",
        "Each request reads what is left, pays, and writes one less.",
    )?;
    let verdict = act(screen, url, run, WITHOUT_LOCK, &**without_lock).await?;
    if !matches!(verdict, Verdict::Oversold(_)) {
        return Err("Not as it should be: nothing was oversold without the lock.".into());
    }
    screen.scene(
        "2. with the lock",
        "The same handler behind LockLayer. The instance that is killed holds the lock: the others wait until its ttl ends,\n\
         or on postgres until its connection does.",
    )?;
    let verdict = act(screen, url, run, WITH_LOCK, &**with_lock).await?;
    if verdict != Verdict::Exact {
        return Err(format!("Not as it should be: with the lock {verdict}.").into());
    }
    screen.end(&format!(
        "All as it should be, in {:.1} s.",
        start.elapsed().as_secs_f64()
    ))?;
    Ok(())
}

/// Starts the instances, sends all requests, kills an instance, and judges.
async fn act(screen: &Screen, url: &str, run: &str, act: usize, store: &dyn Store) -> Outcome<Verdict> {
    store.open(STOCK).await?;
    let mut instances = Vec::new();
    for number in 0..INSTANCES {
        instances.push(Worker::start(&format!("instance {number}"), |command| {
            command.args(["instance", run, &act.to_string()]);
            if number == KILLED {
                command.arg(KILLED_IN_PAYMENT.to_string());
            }
            // Not an argument: every user of the machine can read those, and this one may contain a password.
            command.env(fencelock::ENV, url);
        })?);
    }
    let mut ports = Vec::new();
    for (number, instance) in instances.iter_mut().enumerate() {
        ports.push((number, instance.hear("ready").await?.parse()?));
    }
    let mut traffic = Traffic::new();
    traffic.send(0..BEFORE_THE_KILL, &ports);
    instances[KILLED].hear("paying").await?;
    instances[KILLED].kill().await?;
    ports.remove(KILLED);
    traffic.send(BEFORE_THE_KILL..REQUESTS, &ports);
    let replies = traffic.finish().await?;
    drop(instances);
    let books = store.books().await?;
    let verdict = Verdict::of(STOCK, &books);
    report(screen, &replies, books.sales.len(), verdict)?;
    judge::check(&replies, &books)?;
    Ok(verdict)
}

fn report(screen: &Screen, replies: &Replies, sold: usize, verdict: Verdict) -> Outcome<()> {
    screen.row("sold", &sold.to_string(), &format!("of {STOCK}, by the books"))?;
    for (status, meaning) in [
        (StatusCode::CONFLICT, "sold out"),
        (StatusCode::LOCKED, "the lock was busy to the end of the wait"),
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "the lock was lost, or the lock server failed",
        ),
    ] {
        let what = format!("refused with {}", status.as_u16());
        screen.row(&what, &replies.count(status).to_string(), meaning)?;
    }
    let cut_off = replies.cut_off(|_| true).len().to_string();
    screen.row("cut off", &cut_off, "by the kill")?;
    screen.row(
        "requests per second",
        &format!("{:.0}", replies.per_second()),
        "answered; until the last answer",
    )?;
    for percent in [50, 99] {
        let latency = milliseconds(replies.latency(percent));
        screen.row(&format!("latency, p{percent}"), &latency, "")?;
    }
    screen.row("verdict", "", &verdict.to_string())?;
    Ok(())
}

fn milliseconds(time: Duration) -> String {
    format!("{} ms", time.as_millis())
}
