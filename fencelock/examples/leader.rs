//! One of several hosts leads, and when it leaves, another one takes over.
//!
//! ```sh
//! cargo run --example leader
//! cargo run --example leader --features full -- redis://localhost
//! ```

use std::collections::BTreeSet;
use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fencelock::{FencingToken, LockError, Term};
use tokio::task::JoinSet;
use tokio::time::sleep;

const HOSTS: usize = 3;
static LEADING: AtomicBool = AtomicBool::new(false);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:hosts".to_owned());
    let mut hosts = JoinSet::new();
    for host in 0..HOSTS {
        hosts.spawn(run(format!("host {host}"), url.clone()));
    }
    let mut tokens = BTreeSet::new();
    while let Some(led) = hosts.join_next().await {
        tokens.extend(led??);
    }
    println!("{} hosts have led, with the tokens {tokens:?}", tokens.len());
    Ok(())
}

/// A host: a task here, a process elsewhere. Returns its token, or `None` if it was stopped before it led.
async fn run(host: String, url: String) -> Result<Option<FencingToken>, LockError> {
    let locks = fencelock::connect(url).await?;
    let stop = async {
        // Without a handler the signal ends the process.
        let _ = tokio::signal::ctrl_c().await;
    };
    let name = &*host;
    let lead = locks.lock("example/leader").label(name);
    // If the lock is lost, the body is cancelled at an await, and runs again once this host leads again.
    let led = lead.lead_until(stop, |term| serve(name, term)).await?;
    locks.shutdown().await?;
    Ok(led)
}

async fn serve(host: &str, term: Term) -> FencingToken {
    println!("{host} leads with token {}", term.token());
    assert!(!LEADING.swap(true, Ordering::Relaxed), "two hosts lead at once");
    for _ in 0..5 {
        if term.is_stopping() {
            break;
        }
        // A step of the work. Send the token with each write, so that a leader that was suspended cannot overwrite its successor's.
        sleep(Duration::from_millis(100)).await;
    }
    LEADING.store(false, Ordering::Relaxed);
    println!("{host} leaves");
    term.token()
}
