//! What becomes the command.

use std::env::ArgsOs;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::exit::{NOT_EXECUTABLE, NOT_FOUND, by_signal};
use crate::say::say;

/// What the process is called for the moment until it is the command.
pub(crate) const NAME: &str = "lock-starter";

/// Becomes the command in `args`, which follows the number of the supervisor.
///
/// Should the supervisor be killed, the kernel kills the command: it keeps this wish of a process when it becomes
/// another, unless that one has other rights.
pub(crate) fn main(mut args: ArgsOs) -> ExitCode {
    let supervisor: Option<i32> = args.next().and_then(|pid| pid.to_str()?.parse().ok());
    let Some(program) = args.next() else {
        return ExitCode::from(NOT_EXECUTABLE);
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        tracing::warn!(target: "fencelock", %error, "the command will not end with its supervisor");
    }
    // It may have been killed before the wish was made.
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != supervisor {
        return ExitCode::from(by_signal(Signal::KILL.as_raw()));
    }
    let error = Command::new(&program).args(args).exec();
    let program = match program.to_string_lossy() {
        empty if empty.is_empty() => "an empty name".to_owned(),
        program => program.escape_debug().to_string(),
    };
    say(format_args!("{program} cannot be run: {error}"));
    ExitCode::from(match error.kind() {
        ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    })
}
