//! Lines for people, and output for programs.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write, stderr, stdout};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::exit::{Failure, OUTPUT};
use crate::streams;

static QUIET: AtomicBool = AtomicBool::new(false);

/// Suppresses remarks from now on.
pub(crate) fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether remarks are suppressed.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// One line on stderr. Nobody may be listening there any more, which is no reason to stop.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(stderr(), "fencelock: {line}");
}

/// One line on stderr that is no error; nothing with `--quiet`.
pub(crate) fn remark(line: impl Display) {
    if !is_quiet() {
        say(line);
    }
}

/// Writes what was asked for to stdout.
pub(crate) fn print(text: &str) -> Result<ExitCode, Failure> {
    written(stdout().lock().write_all(text.as_bytes()))
}

/// What writing to stdout comes to. A reader that has seen enough is not an error.
pub(crate) fn written(written: io::Result<()>) -> Result<ExitCode, Failure> {
    match written.and_then(|()| stdout().flush()) {
        _ if streams::is_stdout_closed() => Err(Failure::new(OUTPUT, "stdout cannot be written: it is closed")),
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::new(OUTPUT, format!("stdout cannot be written: {e}")))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}
