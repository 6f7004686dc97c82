//! The `fencelock` command: run a command while holding a distributed lock, on any backend.
//!
//! `fencelock run` holds the lock and is the parent of the command. A process beside it, the *watchdog*, ends the command in time if
//! `fencelock` cannot. How they work together is described in `docs/run.md`.

#[cfg(not(any(target_os = "linux", target_os = "android")))]
compile_error!(
    "the fencelock command needs Linux: timers that run on in suspend, signals and processes as descriptors, and /proc"
);

mod args;
mod check;
mod command;
mod exit;
mod guard;
mod inherited;
mod job;
mod location;
mod locks;
mod manual;
mod output;
mod run;
mod secrets;
mod signals;
mod timing;
mod watchdog;

use std::env;
use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use exit::Failure;
use location::Location;

fn main() -> ExitCode {
    inherited::keep_closed();
    let mut args = env::args_os();
    match args.next() {
        Some(name) if name == watchdog::NAME => return watchdog::main(args),
        Some(name) if name == command::STARTER => return command::main(args),
        _ => {}
    }
    let done = match Cli::try_parse() {
        Ok(cli) => carry_out(cli),
        Err(error) => manual::answer(&error),
    };
    done.unwrap_or_else(|failure| {
        output::tell(&failure);
        ExitCode::from(failure.code)
    })
}

fn carry_out(Cli { common, command }: Cli) -> Result<ExitCode, Failure> {
    output::start(common.quiet, common.verbose);
    let url = common.url;
    match command {
        Command::Run(run) => at(url, async |location| run::run(location, run).await),
        Command::Holder(of) => at(url, async |location| locks::holder(location, &of).await),
        Command::List(list) => at(url, async |location| locks::list(location, &list).await),
        Command::Release(release) => at(url, async |location| locks::release(location, &release).await),
        Command::Check(check) => at(url, async |location| check::check(location, check.json).await),
        #[cfg(feature = "postgres")]
        Command::Schema(of) => {
            let args::Database::Postgres = of.database;
            let sql = fencelock::postgres::schema_sql(&of.schema, of.role.as_deref());
            output::print(&sql.map_err(|error| Failure::usage(format!("{error:#}")))?)
        }
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { command } => manual::page(command.as_deref()),
    }
}

/// Works on the locks at that address.
fn at(
    url: Option<String>,
    work: impl AsyncFnOnce(&Location) -> Result<ExitCode, Failure>,
) -> Result<ExitCode, Failure> {
    let location = Location::find(url)?;
    location::runtime()?.block_on(work(&location))
}
