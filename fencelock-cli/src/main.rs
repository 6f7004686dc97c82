//! The `fencelock` command: run a command while holding a distributed lock, on any backend.
//!
//! `fencelock run` is three processes in a row: the *locker*, which holds and renews the lock; the *supervisor*, which
//! ends the command when the lock ends; and the command. All three are started from the same file. How they work
//! together is described in `docs/run.md`.

#[cfg(not(any(target_os = "linux", target_os = "android")))]
compile_error!("the fencelock command needs Linux: subreapers, timers that run on in suspend, and /proc");

mod arguments;
mod channel;
mod check;
mod completions;
mod exit;
mod inspect;
mod locker;
mod manual;
mod outages;
mod place;
mod processes;
mod run;
mod say;
#[cfg(feature = "postgres")]
mod schema;
mod signals;
mod starter;
mod streams;
mod supervisor;
mod terminal;
mod timing;
mod waiting;

use std::env;
use std::process::ExitCode;

use clap::Parser;
use tokio::runtime::Builder;
use tracing_subscriber::EnvFilter;

use arguments::{Arguments, Command};
use exit::Failure;
use place::Place;
use say::{be_quiet, is_quiet};

fn main() -> ExitCode {
    streams::keep_closed();
    let mut args = env::args_os();
    match args.next() {
        Some(name) if name == supervisor::NAME => return supervisor::main(args),
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
    log(arguments.common.verbose);
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
            Command::Holder(of) => inspect::holder(&place, &of).await,
            Command::List(list) => inspect::list(&place, &list).await,
            Command::Release(release) => inspect::release(&place, &release).await,
            Command::Check(check) => check::check(&place, check.json).await,
            #[cfg(feature = "postgres")]
            Command::Schema(_) => Ok(ExitCode::SUCCESS),
            Command::Completions { .. } | Command::Man { .. } => Ok(ExitCode::SUCCESS),
        }
    })
}

fn log(verbose: u8) {
    let filter = match verbose {
        // An outage that passes is no error; one that does not comes out as one.
        0 if is_quiet() => return,
        0 => return outages::tell(),
        1 => "warn,fencelock=debug",
        _ => "trace",
    };
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}
