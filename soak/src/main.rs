//! Are these locks what locks have to be? Processes share four of them while clients and servers are stopped, killed and cut off. Everything that
//! they see is written down and judged, and drawn: docs/torture.md.

mod client;
mod picture;
mod plan;
mod recorder;
mod result;
mod run;
mod servers;

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use conformance_tests::faults::WallClock;

use client::Task;
use plan::{Config, Kind};
use result::{History, Outcome};
use servers::{Group, KINDS};

/// Let processes share a few locks while faults come and go, and judge what happened.
///
/// The exit code is 1 if the locks did what locks must not do. The history and a picture of each run are left.
#[derive(Debug, Parser)]
struct Arguments {
    /// For how many seconds, on each kind of server.
    #[arg(default_value = "600")]
    seconds: u64,
    /// What to run on: all kinds if none is named.
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(KINDS))]
    kinds: Vec<String>,
    /// Run on the server at that address instead. It has no faults of its own then; do not take one that others need.
    #[arg(long, conflicts_with = "kinds")]
    url: Option<String>,
    /// Where the faults and the choices of the clients come from: a random one if not given.
    #[arg(long)]
    seed: Option<u64>,
    /// Run nothing, but judge that history and draw it.
    #[arg(long, value_name = "FILE.json", conflicts_with_all = ["kinds", "url", "seed"])]
    check: Option<PathBuf>,
    /// Where the history goes, with the picture beside it: the folder "soak-runs" of cargo's if not given.
    #[arg(long, value_name = "FILE.json", conflicts_with = "kinds")]
    history: Option<PathBuf>,
    /// For tests: the milliseconds that a lock outlives its holder.
    #[arg(long, hide = true)]
    ttl: Option<u64>,
    /// For tests: plants a bug that has to be found: clients take renewals for granted.
    #[arg(long, hide = true)]
    plant: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    if let Some(task) = Task::of_this_process() {
        client::run(task).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let arguments = Arguments::parse();
    if let Some(path) = &arguments.check {
        let history = fs::read_to_string(path).and_then(|text| History::read(&text));
        let history = history.map_err(|why| format!("{} cannot be judged: {why}", path.display()))?;
        let is_good = tell(&history, &path.with_extension("svg"))?;
        return Ok(ExitCode::from(u8::from(!is_good)));
    }
    let kinds = match &arguments.kinds[..] {
        _ if arguments.url.is_some() => vec!["elsewhere"],
        [] => KINDS.to_vec(),
        kinds => kinds.iter().map(String::as_str).collect(),
    };
    let mut is_good = true;
    for kind in kinds {
        is_good &= soak(kind, &arguments).await?;
    }
    Ok(ExitCode::from(u8::from(!is_good)))
}

/// Runs on a server of that kind, or on the one of the user.
async fn soak(kind: &str, arguments: &Arguments) -> Result<bool, Box<dyn Error>> {
    let mut group = match &arguments.url {
        Some(url) => Group::elsewhere(url),
        None => Group::start(kind).await?,
    };
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    let mut config = Config::new(Duration::from_secs(arguments.seconds), seed);
    config.plant = arguments.plant;
    if group.is_several() {
        // A lease has to last longer than a failover, or every one loses all locks. Most faults are those of the servers, which are many.
        let (ttl, rest) = (Duration::from_secs(3), Duration::from_secs(3));
        (config.ttl, config.server_rest, config.faults) = (ttl, rest, vec![Kind::Kill]);
        if kind == "redlock" {
            // A fault every second or so, one minority after the other.
            (config.ttl, config.server_rest) = (Duration::from_millis(700), Duration::ZERO);
        }
    } else if group.has_route() {
        config.faults.extend([Kind::Partition, Kind::Latency]);
    }
    config.ttl = arguments.ttl.map_or(config.ttl, Duration::from_millis);
    // Clocks of clients may lift the tokens of a store, which the server of a user would keep.
    let clocks = match WallClock::new() {
        _ if group.is_several() || arguments.url.is_some() => "steady".to_owned(),
        Ok(_) => "step with every fault of a client".to_owned(),
        Err(missing) => format!("steady: {missing}"),
    };
    config.clocks = clocks.starts_with("step");
    let records = run::run(&config, &mut group).await;
    run::progress("");
    let about = [
        ("locks in", group.title()),
        ("fencelock", env!("CARGO_PKG_VERSION").to_owned()),
        ("ttl", format!("{:?}", config.ttl)),
        ("wall clocks of clients", clocks),
        ("failovers", group.failovers.to_string()),
        ("seed", seed.to_string()),
    ];
    let about = about.map(|(name, value)| (name.to_owned(), value));
    let history = History::new(BTreeMap::from(about), records?);
    let path = match &arguments.history {
        Some(path) => path.clone(),
        None => {
            let program = std::env::current_exe()?;
            let folder = program.with_file_name("soak-runs");
            fs::create_dir_all(&folder)?;
            folder.join(format!("{kind}.json"))
        }
    };
    history.write(BufWriter::new(File::create(&path)?))?;
    Ok(tell(&history, &path.with_extension("svg"))?)
}

/// Says what a history came to, and draws it. Returns whether it has no violation.
fn tell(history: &History, drawing: &Path) -> io::Result<bool> {
    let outcome = Outcome::of(&history.records);
    fs::write(drawing, picture::picture(&history.records))?;
    println!("{outcome}");
    for (name, value) in &history.about {
        println!("  {name}: {value}");
    }
    println!("  drawn in {}", drawing.display());
    Ok(outcome.verdict.violations.is_empty())
}
