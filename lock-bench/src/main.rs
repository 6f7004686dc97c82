//! What fencelock's locks cost, beside other libraries and raw round trips of the same run: `make bench`, or
//! `cargo run --release -p lock-bench -- redis`.

mod backend;
mod chart;
mod child;
mod contestant;
mod etcd;
mod measures;
mod memory;
mod page;
mod postgres;
mod redis;
mod report;
mod sqlite;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum as _};

use backend::{Backend, Site};
use contestant::Result;
use measures::{Bench, Measure};
use report::{Report, load, machine};

/// Measures locks beside other libraries and raw round trips.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Arguments {
    /// Where the locks are kept; all of them in turn by default.
    backends: Vec<Backend>,
    /// Measures for a short time.
    #[arg(long)]
    quick: bool,
    /// Measures these alone, and keeps no figures.
    #[arg(long, value_enum)]
    only: Vec<Measure>,
    /// Writes the tables of all that was measured last to the end of this page, and the chart beside it.
    #[arg(long)]
    page: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(hide = true)]
    Child { job: String },
    #[command(hide = true)]
    Repeat { times: u64 },
}

// One thread does what a caller does, so that no time is that of a switch between the caller's own threads.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let ended = match &arguments.command {
        Some(Command::Child { job }) => child::work(job).await.map(|result| println!("{result}")),
        Some(Command::Repeat { times }) => measures::repeat(*times).await,
        None => run(&arguments).await,
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lock-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &Arguments) -> Result {
    if cfg!(debug_assertions) {
        eprintln!("lock-bench: built without optimizations: use --release for figures that mean something");
    }
    let all = Backend::value_variants();
    for backend in all {
        if !arguments.backends.is_empty() && !arguments.backends.contains(backend) {
            continue;
        }
        let report = measure(*backend, arguments).await?;
        print!("{}", page::section(&report));
        if arguments.only.is_empty() {
            std::fs::write(kept(*backend)?, serde_json::to_string_pretty(&report)?)?;
        }
    }
    if let Some(page) = &arguments.page {
        let mut reports: Vec<Report> = Vec::new();
        for backend in all {
            let path = kept(*backend)?;
            if path.exists() {
                reports.push(serde_json::from_slice(&std::fs::read(path)?)?);
            }
        }
        page::write(page, &reports)?;
    }
    Ok(())
}

async fn measure(backend: Backend, arguments: &Arguments) -> Result<Report> {
    let before = load();
    let bench = Bench {
        site: Site::start(backend).await?,
        quick: arguments.quick,
    };
    let mut report = Report {
        backend,
        server: bench.site.version.clone(),
        machine: machine(),
        load: [before; 2],
        contestants: Vec::new(),
        rows: Vec::new(),
        notes: Vec::new(),
    };
    if arguments.quick {
        report.note("**Measured for a short time.**".to_owned());
    }
    for measure in Measure::value_variants() {
        if arguments.only.is_empty() || arguments.only.contains(measure) {
            eprintln!("{backend}: {measure:?}");
            bench.run(*measure, &mut report).await?;
        }
    }
    report.load[1] = load();
    Ok(report)
}

/// Where the figures of a backend are kept: in a folder `bench` beside what cargo builds.
fn kept(backend: Backend) -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let target = program.parent().and_then(Path::parent);
    let folder = target.ok_or("this program lies in no target folder")?.join("bench");
    std::fs::create_dir_all(&folder)?;
    Ok(folder.join(format!("{}.json", backend.to_string().to_lowercase())))
}
