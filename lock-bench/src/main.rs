//! What fencelock's locks cost, next to what one would use instead and next to bare round trips, in one run:
//! `make bench`, or `cargo run --release -p lock-bench -- --backend redis`.

mod backend;
mod bars;
mod child;
mod clock;
mod contestant;
mod etcd;
mod figures;
mod instructions;
mod measures;
mod ours;
mod page;
mod picture;
mod postgres;
mod redis;
mod redis_cluster;
mod redlock;
mod sqlite;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum as _};

use backend::{Backend, Site};
use clock::Processors;
use contestant::Failure;
use figures::{Machine, Measure, Report};
use measures::Arena;

/// Measures locks beside what one would use instead and beside bare round trips.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Where the locks are kept; all of them in turn if none is named.
    #[arg(long, value_enum)]
    backend: Vec<Backend>,
    /// Measures for a short time, to see that it works.
    #[arg(long)]
    quick: bool,
    /// Measures these alone, such as B1.
    #[arg(long)]
    only: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Counts the instructions of the client (needs valgrind).
    Instructions,
    /// Prints docs/performance.md, of what was measured last.
    Page,
    #[command(hide = true)]
    Child { job: String },
    #[command(hide = true)]
    Repeat { case: String, times: u64 },
}

// One thread does what a caller does, so that a measured time is not that of a switch between the caller's own threads.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lock-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<(), Failure> {
    match arguments.command {
        Some(Command::Child { job }) => {
            child::run(&job).await;
            Ok(())
        }
        Some(Command::Repeat { case, times }) => instructions::repeat(&case, times).await,
        Some(Command::Instructions) => {
            let counts = instructions::count()?;
            print!("{}", page::instructions(&counts));
            let json = serde_json::to_string_pretty(&counts)?;
            Ok(std::fs::write(results()?.join("instructions.json"), json)?)
        }
        Some(Command::Page) => {
            print!("{}", page::page(&results()?)?);
            Ok(())
        }
        None => {
            let wanted = if arguments.backend.is_empty() {
                Backend::value_variants().to_vec()
            } else {
                arguments.backend
            };
            if cfg!(debug_assertions) {
                eprintln!("lock-bench: built without optimizations: use --release for figures that mean something");
            }
            for backend in wanted {
                let report = measure(backend, arguments.quick, &arguments.only).await?;
                print!("{}", table::page(&report));
                // A part is no report.
                if arguments.only.is_empty() {
                    keep(&results()?, &report)?;
                }
            }
            Ok(())
        }
    }
}

async fn measure(backend: Backend, quick: bool, only: &[String]) -> Result<Report, Failure> {
    let (load, before) = (figures::load(), Processors::look());
    let site = Site::start(backend).await?;
    eprintln!("{backend}: are they locks?");
    let checks = measures::check::check(&site.place).await?;
    let arena = Arena { site, quick, checks };
    let mut report = Report {
        backend,
        server: arena.site.version.clone(),
        machine: Machine::look(load, before),
        quick,
        checks: arena.checks.clone(),
        measures: Vec::new(),
        bars: Vec::new(),
    };
    for id in ["B1", "B2", "B3", "B4", "B5", "B6", "B7", "B8", "B9"] {
        // There is one server at least that can be spared.
        if id == "B9" && backend != Backend::Redlock {
            continue;
        }
        // The others are about what a primary does alone.
        if backend == Backend::RedisCluster && !["B1", "B2", "B3"].contains(&id) {
            continue;
        }
        if only.is_empty() || only.iter().any(|only| only.eq_ignore_ascii_case(id)) {
            eprintln!("{backend}: {id}");
            report.measures.push(one(id, &arena).await?);
        }
    }
    report.bars = bars::bars(backend, &report.checks, &report.measures);
    report.machine = Machine::look(load, before);
    Ok(report)
}

async fn one(id: &str, arena: &Arena) -> Result<Measure, Failure> {
    match id {
        "B1" => measures::pair::measure(arena).await,
        "B2" => measures::many_names::measure(arena).await,
        "B3" => measures::one_name::measure(arena).await,
        "B4" => measures::processes::measure(arena).await,
        "B5" => measures::killed::measure(arena).await,
        "B6" => measures::held::measure(arena).await,
        "B7" => measures::wait::measure(arena).await,
        "B8" => measures::growth::measure(arena).await,
        _ => measures::nodes_down::measure(arena).await,
    }
}

/// Where results are kept: beside what cargo builds.
fn results() -> Result<PathBuf, Failure> {
    let program = std::env::current_exe()?;
    let target = program
        .parent()
        .and_then(Path::parent)
        .ok_or("this program lies in no target folder")?;
    let results = target.join("bench");
    std::fs::create_dir_all(&results)?;
    Ok(results)
}

/// Writes the figures, and a picture of each measure.
fn keep(results: &Path, report: &Report) -> Result<(), Failure> {
    let key = report.backend.key();
    std::fs::write(
        results.join(format!("{key}.json")),
        serde_json::to_string_pretty(report)?,
    )?;
    for measure in &report.measures {
        if let Some(picture) = picture::picture(report, measure) {
            std::fs::write(
                results.join(format!("{key}-{}.svg", measure.id.to_lowercase())),
                picture,
            )?;
        }
    }
    Ok(())
}
