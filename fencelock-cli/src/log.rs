//! What is told on stderr of what the library says.

use std::fmt::{Debug, Write as _};
use std::io::{IsTerminal, stderr};
use std::sync::{Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::{EnvFilter, Registry, fmt};

use crate::exit::Failure;
use crate::say::{is_quiet, say};

/// Tells warnings, and that a wait goes on or the server answers again; with `--verbose` all that happens.
pub(crate) fn start(verbose: u8) {
    let filter = match verbose {
        // An outage that passes is no error; one that does not comes out as one.
        0 if is_quiet() => return,
        0 => {
            // There is no other one.
            let _ = tracing::subscriber::set_global_default(Registry::default().with(Warnings(Mutex::default())));
            return;
        }
        1 => "warn,fencelock=debug",
        _ => "trace",
    };
    fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .init();
}

/// What was told last.
struct Warnings(Mutex<String>);

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let is_outage = metadata.fields().field("outage").is_some();
        // The loss of a lock has a line of its own, with what became of the command.
        let is_loss = metadata.fields().field("reason").is_some();
        if metadata.target() != "fencelock" || is_loss || !(is_outage || *metadata.level() <= Level::WARN) {
            return;
        }
        let mut text = Text::default();
        event.record(&mut text);
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // What repeats itself is told once. A release that fails follows a failure that is told.
        if *last == text.message || text.message.starts_with("releases are tried again") {
            return;
        }
        last.clone_from(&text.message);
        // One line without secrets.
        say(Failure::unavailable(text.message + &text.fields));
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(tracing::level_filters::LevelFilter::INFO)
    }
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "outage" => Ok(()),
            name => write!(self.fields, ", {name}: {value:?}"),
        };
    }
}
