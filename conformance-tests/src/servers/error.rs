//! What can go wrong with a server.

use std::fmt;
use std::time::Duration;

/// Why there is no server, or why a fault was not brought about.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// There is no way to such a server.
    #[error(
        "there is no {kind} to test against:\n{}\nstart a container engine and run `make images`, or run `make images` as \
         root, or install {kind}, or name a server in {variable}",
        bullets(.tried)
    )]
    NotAvailable {
        /// What was looked for.
        kind: &'static str,
        /// The variable that may name one.
        variable: String,
        /// Each way that was tried, and why it led nowhere.
        tried: Vec<String>,
    },
    /// The server was started and ended, or does not answer as such a server does.
    #[error("{server} did not become ready within {waited:?} ({last}); it wrote:\n{log}")]
    NotReady {
        /// The server.
        server: String,
        /// How long it was waited for.
        waited: Duration,
        /// What the last look came to.
        last: String,
        /// The end of what it wrote.
        log: String,
    },
    /// The server that the environment names is not there, or is no such server, or lets nobody in.
    #[error("{server} does not answer as such a server does: {why}")]
    NotThere {
        /// The server.
        server: String,
        /// What came instead.
        why: String,
    },
    /// This cannot be done to this server.
    #[error("{server} cannot be brought to {what}")]
    NotPossible {
        /// The server.
        server: String,
        /// What was asked for.
        what: &'static str,
    },
    /// The container engine failed.
    #[error("the container engine failed at {what}")]
    Engine {
        /// What it was asked to do.
        what: &'static str,
        /// Its answer.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The system failed.
    #[error("the system failed at {what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Its answer.
        #[source]
        source: std::io::Error,
    },
}

impl ServerError {
    pub(super) fn engine<E>(what: &'static str) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        move |error| Self::Engine {
            what,
            source: error.into(),
        }
    }

    pub(super) fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

/// The error and what it stands on.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// As for people: this is what a test shows that unwraps.
impl fmt::Debug for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&chain(self))
    }
}

fn bullets(lines: &[String]) -> String {
    lines
        .iter()
        .map(|line| format!("  - {line}"))
        .collect::<Vec<_>>()
        .join("\n")
}
