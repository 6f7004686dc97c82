//! Where a server runs, and what can be done to it there.

use super::container::Container;
use super::error::ServerError;
use super::process::Process;

/// What runs a server.
#[derive(Debug)]
pub(super) enum Machine {
    Container(Box<Container>),
    Process(Process),
}

impl Machine {
    /// Stops it where it is: it keeps its connections and answers nobody.
    pub(super) async fn pause(&mut self) -> Result<(), ServerError> {
        match self {
            Self::Container(container) => container.pause().await,
            Self::Process(process) => process.pause(),
        }
    }

    /// Lets it go on, if it was paused.
    pub(super) async fn resume(&mut self) -> Result<(), ServerError> {
        match self {
            Self::Container(container) => container.resume().await,
            Self::Process(process) => process.resume(),
        }
    }

    /// Ends it as `kill -9` does, if it runs.
    pub(super) async fn kill(&mut self) -> Result<(), ServerError> {
        match self {
            Self::Container(container) => container.kill().await,
            Self::Process(process) => process.kill(),
        }
    }

    /// Starts it again after it was killed, with its data.
    pub(super) async fn start_again(&mut self) -> Result<(), ServerError> {
        match self {
            Self::Container(container) => container.start_again().await,
            Self::Process(process) => process.start_again(),
        }
    }

    /// The same without its data.
    pub(super) async fn start_anew(&mut self) -> Result<(), ServerError> {
        match self {
            Self::Container(container) => container.start_anew().await,
            Self::Process(process) => process.start_anew(),
        }
    }

    /// Makes a copy of its data, in the place of an earlier one. It should be paused.
    pub(super) async fn copy(&mut self) -> Result<(), ServerError> {
        match self {
            Self::Container(container) => container.copy().await,
            Self::Process(process) => process.copy(),
        }
    }

    /// Starts it again after it was killed, with the copy of its data.
    pub(super) async fn start_with_copy(&mut self) -> Result<(), ServerError> {
        match self {
            Self::Container(container) => container.start_with_copy().await,
            Self::Process(process) => process.start_with_copy(),
        }
    }

    pub(super) async fn runs(&mut self) -> bool {
        match self {
            Self::Container(container) => container.runs().await,
            Self::Process(process) => process.runs(),
        }
    }

    /// What it wrote.
    pub(super) async fn log(&self) -> String {
        match self {
            Self::Container(container) => container.log().await,
            Self::Process(process) => process.log(),
        }
    }

    /// Ends it for good, with its data.
    pub(super) async fn remove(&mut self) {
        match self {
            Self::Container(container) => container.remove().await,
            Self::Process(process) => process.remove(),
        }
    }
}
