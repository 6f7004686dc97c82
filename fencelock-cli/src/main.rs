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
mod locks;
mod log;
mod manual;
mod place;
mod run;
mod say;
#[cfg(feature = "postgres")]
mod schema;
mod signals;
mod starter;
mod streams;
mod target;
mod timing;
mod watchdog;

use std::env;
use std::process::ExitCode;

use clap::Parser;
use tokio::runtime::Builder;

use arguments::{Arguments, Command};
use exit::Failure;
use place::Place;
use say::be_quiet;

fn main() -> ExitCode {
    streams::keep_closed();
    let mut args = env::args_os();
    match args.next() {
        Some(name) if name == watchdog::NAME => return watchdog::main(args),
        Some(name) if name == starter::NAME => return starter::main(args),
        _ => {}
    }
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return manual::answer(&error),
    };
    if arguments.common.quiet {
        be_quiet();
    }
    log::start(arguments.common.verbose);
    carry_out(arguments).unwrap_or_else(|failure| {
        failure.tell();
        ExitCode::from(failure.code)
    })
}

fn carry_out(arguments: Arguments) -> Result<ExitCode, Failure> {
    match arguments.command {
        Command::Completions { shell } => return completions::completions(shell),
        Command::Man { command } => return manual::page(command.as_deref()),
        #[cfg(feature = "postgres")]
        Command::Schema(of) => return schema::print_it(&of),
        _ => {}
    }
    let place = Place::find(arguments.common.url)?;
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::unavailable(format!("no runtime could be started: {e}")))?;
    runtime.block_on(async {
        match arguments.command {
            Command::Run(run) => run::run(&place, run).await,
            Command::Holder(of) => locks::holder(&place, &of).await,
            Command::List(list) => locks::list(&place, &list).await,
            Command::Release(release) => locks::release(&place, &release).await,
            Command::Check(check) => check::check(&place, check.json).await,
            #[cfg(feature = "postgres")]
            Command::Schema(_) => Ok(ExitCode::SUCCESS),
            Command::Completions { .. } | Command::Man { .. } => Ok(ExitCode::SUCCESS),
        }
    })
}
