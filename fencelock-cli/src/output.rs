//! Lines for people on stderr, of the command and of the library, and output for programs on stdout.

use std::fmt::{Debug, Display, Write as _};
use std::io::{self, ErrorKind, IsTerminal, Write, stderr, stdout};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::{EnvFilter, Registry, fmt};

use crate::exit::{Failure, OUTPUT};
use crate::inherited;

static QUIET: AtomicBool = AtomicBool::new(false);

/// Has remarks and warnings suppressed with `quiet`. Otherwise warnings of the library are told, and that a wait goes on or the server answers
/// again; if `verbose`, all that happens.
pub(crate) fn start(quiet: bool, verbose: u8) {
    QUIET.store(quiet, Ordering::Relaxed);
    let filter = match verbose {
        // An outage that passes is no error; one that does not comes out as one.
        0 if quiet => return,
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

/// Whether remarks are suppressed.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// One line on stderr. Its reader may be gone, which is no reason to stop.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(stderr(), "fencelock: {line}");
}

/// One line on stderr that is no error; nothing with `--quiet`.
pub(crate) fn remark(line: impl Display) {
    if !is_quiet() {
        say(line);
    }
}

/// Tells why the command ends, on stderr.
pub(crate) fn tell(failure: &Failure) {
    if !failure.is_remark || !is_quiet() {
        say(failure);
    }
}

/// Writes what was asked for to stdout.
pub(crate) fn print(text: &str) -> Result<ExitCode, Failure> {
    written(stdout().lock().write_all(text.as_bytes()))
}

/// The result of writing to stdout. A reader that has seen enough is no error.
pub(crate) fn written(written: io::Result<()>) -> Result<ExitCode, Failure> {
    let refused = |why: &dyn Display| Failure::new(OUTPUT, format!("stdout cannot be written: {why}"));
    match written.and_then(|()| stdout().flush()) {
        _ if inherited::is_stdout_closed() => Err(refused(&"it is closed")),
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(refused(&e)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Tells warnings of the library. Holds the last one.
struct Warnings(Mutex<String>);

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let has = |field| metadata.fields().field(field).is_some();
        // The loss of a lock has a line of its own, with what became of the command.
        let is_told = (has("outage") || *metadata.level() <= Level::WARN) && !has("reason");
        if metadata.target() != "fencelock" || !is_told {
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
