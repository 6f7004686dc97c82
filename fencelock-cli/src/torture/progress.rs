//! How far a run is, for a person at a terminal.

use std::io::{IsTerminal, Write, stderr};
use std::time::Duration;

use conformance_tests::torture::Progress;

use crate::say::is_quiet;
use crate::terminal::{Terminal, width};
use crate::waiting::cut;

/// One line that is written anew; nothing where that cannot be done.
pub(super) struct Line {
    terminal: Option<Terminal>,
    time: Duration,
    shown: bool,
}

impl Line {
    pub(super) fn new(time: Duration) -> Self {
        let kind = std::env::var_os("TERM").unwrap_or_default();
        let in_place = stderr().is_terminal() && !is_quiet() && !kind.is_empty() && kind != "dumb";
        Self {
            terminal: in_place.then(Terminal::own).flatten(),
            time,
            shown: false,
        }
    }

    pub(super) fn show(&mut self, progress: &Progress) {
        // Another job has the terminal if not.
        if !self.terminal.as_ref().is_some_and(Terminal::is_home) {
            return;
        }
        let now = match progress.now.as_slice() {
            [] => String::new(),
            now => format!("; now {}", now.join(", ")),
        };
        let text = format!(
            "fencelock: {} of {} s, {} grants, {} faults, {} stale writes refused{now}",
            progress.time.as_secs(),
            self.time.as_secs_f64().ceil(),
            progress.grants,
            progress.faults,
            progress.refused,
        );
        let _ = write!(stderr(), "\r{}\x1b[K", cut(&text, width().saturating_sub(1)));
        self.shown = true;
    }

    /// Takes the line away.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}
