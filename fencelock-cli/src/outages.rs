//! Telling why waiting goes on, to people who asked for no log.

use std::fmt::{Debug, Write as _};
use std::io::{IsTerminal, Write as _, stderr};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber};

use crate::exit::Failure;
use crate::say::say;

/// Says on stderr what is told of outages, and nothing else.
pub(crate) fn tell() {
    // There is no other one.
    let _ = tracing::subscriber::set_global_default(Telling);
}

struct Telling;

impl Subscriber for Telling {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) {
            Interest::always()
        } else {
            Interest::never()
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let is_outage = metadata.target() == "fencelock" && metadata.fields().field("outage").is_some();
        is_outage && metadata.is_event() && *metadata.level() <= LevelFilter::INFO
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        if stderr().is_terminal() {
            // The line that says what is waited for comes again.
            let _ = write!(stderr(), "\r\x1b[K");
        }
        // One line without secrets.
        say(Failure::unavailable(text.0));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            let _ = write!(self.0, "{value:?}");
        }
    }
}
