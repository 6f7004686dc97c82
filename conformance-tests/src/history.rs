//! What happened in a case, for the reader of its failure.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lock_core::{Clock, Stamp};

/// How many of the last events are kept.
const KEPT: usize = 120;

/// The last events of a case.
#[derive(Debug)]
pub(crate) struct History {
    start: Stamp,
    events: Mutex<Events>,
}

#[derive(Debug, Default)]
struct Events {
    last: VecDeque<(Duration, String)>,
    forgotten: usize,
}

impl History {
    pub(crate) fn new() -> Self {
        Self {
            start: Clock::system().now(),
            events: Mutex::default(),
        }
    }

    pub(crate) fn note(&self, event: impl Into<String>) {
        let at = Clock::system().now().since(self.start);
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.last.len() == KEPT {
            events.last.pop_front();
            events.forgotten += 1;
        }
        events.last.push_back((at, event.into()));
    }

    pub(crate) fn render(&self) -> String {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::from("history:\n");
        if events.forgotten > 0 {
            let _ = writeln!(text, "  ... {} earlier events", events.forgotten);
        }
        for (at, event) in &events.last {
            let _ = writeln!(text, "  {:>9.1} ms  {event}", at.as_secs_f64() * 1000.0);
        }
        text
    }
}
