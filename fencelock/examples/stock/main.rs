//! A limited stock is sold by several processes, in eight acts: with locks as people write them, and with this one.
//!
//! ```sh
//! cargo run --release --example stock -- [--url URL] [--stock 100] [--buyers 200] [--processes 4]
//! ```
//!
//! The store lies on the same backend as the lock. The program starts itself again for each process, leaves nothing
//! behind, and fails if an act ends otherwise than its line says.

mod acts;
mod arguments;
#[path = "../stage/crew.rs"]
mod crew;
#[path = "../stage/folder.rs"]
mod folder;
#[path = "../stage/interruption.rs"]
mod interruption;
mod judge;
#[path = "../stage/lines.rs"]
mod lines;
#[path = "../stage/screen.rs"]
mod screen;
mod shop;
mod store;
mod till;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use acts::{ACTS, Act, Ending};
use arguments::Arguments;
use clap::Parser;
use interruption::interruption;
use screen::{Screen, complain};
use shop::Shop;
use tempfile::TempDir;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    if let (Some("till"), Some(run), Some(act)) = (words.next().as_deref(), words.next(), words.next()) {
        return till::work(&run, &act).await;
    }
    let arguments = Arguments::parse();
    if let Err(error) = arguments.check() {
        complain(&error.to_string());
        return ExitCode::from(2);
    }
    let screen = Screen::new();
    match sale(&screen, arguments).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            screen.failure(error);
            ExitCode::FAILURE
        }
    }
}

/// Plays until it is over or somebody presses Ctrl-C. Either way no process and nothing in the store stays.
async fn sale(screen: &Screen, arguments: Arguments) -> Outcome<()> {
    let (url, folder) = store::address(arguments.url.as_deref(), "fencelock-stock-")?;
    let shop = Shop::found(arguments, url).await?;
    let outcome = tokio::select! {
        biased;
        name = interruption() => Err(format!("Interrupted ({name}).").into()),
        outcome = play(screen, &shop) => outcome,
    };
    let cleared = shop.clear(ACTS.iter().map(|act| act.number)).await;
    outcome?;
    cleared?;
    folder.map_or(Ok(()), TempDir::close)?;
    Ok(())
}

async fn play(screen: &Screen, shop: &Shop) -> Outcome<()> {
    let start = Instant::now();
    screen.title(&shop.announcement())?;
    let mut endings = Vec::new();
    for act in &ACTS {
        screen.scene(&format!("{}. {}", act.number, act.title), act.story)?;
        let ending = acts::play(shop, act).await?;
        let sold = format!("{} sold of {}", ending.sold, shop.stock());
        screen.row(&sold, ending.result, &ending.meaning)?;
        endings.push((act, ending));
    }
    table(screen, &endings)?;
    screen.end(&format!(
        "All as it should be, in {:.1} s.",
        start.elapsed().as_secs_f64()
    ))?;
    Ok(())
}

fn table(screen: &Screen, endings: &[(&Act, Ending)]) -> Outcome<()> {
    screen.scene("All acts", "")?;
    let columns = |sold: &str, oversold: &str, refused: &str| format!("{sold:>5}{oversold:>9}{refused:>8}");
    screen.row("", &columns("sold", "oversold", "refused"), "seconds")?;
    for (act, ending) in endings {
        let numbers = [ending.sold, ending.oversold, ending.refused].map(|number| number.to_string());
        screen.row(
            &format!("{}. {}", act.number, act.title),
            &columns(&numbers[0], &numbers[1], &numbers[2]),
            &format!("{:.1}", ending.took.as_secs_f64()),
        )?;
    }
    Ok(())
}
