//! The `fencelock` command: run a command while holding a distributed lock, on any backend.
//!
//! `fencelock run` holds the lock and is the parent of the command. A process beside it, the *watchdog*, ends the command in time if
//! `fencelock` cannot. How they work together is described in `docs/run.md`.

#[cfg(not(any(target_os = "linux", target_os = "android")))]
compile_error!(
    "the fencelock command needs Linux: timers that run on in suspend, signals and processes as descriptors, and /proc"
);

mod arguments;
mod check;
mod completions;
mod exit;
mod guard;
mod job;
mod locks;
mod log;
mod manual;
mod place;
mod run;
mod say;
mod signals;
mod starter;
mod streams;
mod target;
mod timing;
mod watchdog;

use std::env;
use std::process::ExitCode;

use clap::Parser;
use tokio::runtime::{Builder, Runtime};

use arguments::{Arguments, Command};
use exit::Failure;
use place::Place;

fn main() -> ExitCode {
    streams::keep_closed();
    let mut args = env::args_os();
    match args.next() {
        Some(name) if name == watchdog::NAME => return watchdog::main(args),
        Some(name) if name == starter::NAME => return starter::main(args),
        _ => {}
    }
    let done = match Arguments::try_parse() {
        Ok(arguments) => carry_out(arguments),
        Err(error) => manual::answer(&error),
    };
    done.unwrap_or_else(|failure| {
        failure.tell();
        ExitCode::from(failure.code)
    })
}

fn carry_out(arguments: Arguments) -> Result<ExitCode, Failure> {
    if arguments.common.quiet {
        say::be_quiet();
    }
    log::start(arguments.common.verbose);
    let url = arguments.common.url;
    match arguments.command {
        Command::Run(run) => at(url, async |place| run::run(place, run).await),
        Command::Holder(of) => at(url, async |place| locks::holder(place, &of).await),
        Command::List(list) => at(url, async |place| locks::list(place, &list).await),
        Command::Release(release) => at(url, async |place| locks::release(place, &release).await),
        Command::Check(check) => at(url, async |place| check::check(place, check.json).await),
        #[cfg(feature = "postgres")]
        Command::Schema(of) => {
            let arguments::Database::Postgres = of.database;
            let sql = fencelock::postgres::schema_sql(&of.schema, of.role.as_deref());
            say::print(&sql.map_err(|error| Failure::usage(format!("{error:#}")))?)
        }
        Command::Completions { shell } => completions::completions(shell),
        Command::Man { command } => manual::page(command.as_deref()),
    }
}

/// Works at that place.
fn at(url: Option<String>, work: impl AsyncFnOnce(&Place) -> Result<ExitCode, Failure>) -> Result<ExitCode, Failure> {
    let place = Place::find(url)?;
    runtime()?.block_on(work(&place))
}

pub(crate) fn runtime() -> Result<Runtime, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::unavailable(format!("no runtime could be started: {error}")))
}
