//! Lines for people, and output for programs.

use std::fmt::Display;
use std::io::{ErrorKind, Write, stderr, stdout};

use crate::exit::{Failure, OUTPUT};

/// One line on stderr. Nobody may be listening there any more, which is no reason to stop.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(stderr(), "fencelock: {line}");
}

/// Writes what was asked for to stdout. A reader that has seen enough is not an error.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::new(OUTPUT, format!("stdout cannot be written: {e}")))
        }
        _ => Ok(()),
    }
}
