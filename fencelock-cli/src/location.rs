//! Where the locks are kept.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fencelock::{ENV, LockError, Locks, Options, Scope};
use tokio::runtime::{Builder, Runtime};

use crate::exit::Failure;
use crate::secrets::address_without_secrets;

/// How long a request to a file may take if the caller does not wait, and at most.
const USUAL_PATIENCE: Duration = Duration::from_secs(5);
const LONGEST_PATIENCE: Duration = Duration::from_secs(30);

/// How long it may take to cancel what is under way on the server: it ends by itself.
pub(crate) const LEAVING: Duration = Duration::from_secs(2);

/// An address that was given, or that of a file of the user's own.
#[derive(Debug)]
pub(crate) struct Location {
    /// It may hold secrets.
    pub(crate) url: String,
    own_file: Option<PathBuf>,
}

impl Location {
    /// The address given, or that in the environment, or else the file in the user's state directory.
    pub(crate) fn find(given: Option<String>) -> Result<Self, Failure> {
        let set = || env::var_os(ENV).filter(|url| !url.is_empty());
        match given.map(Ok).or_else(|| Some(set()?.into_string())) {
            Some(Ok(url)) => Ok(Self { url, own_file: None }),
            Some(Err(_)) => Err(Failure::usage(format!("the address in {ENV} is not UTF-8"))),
            None => Self::of_user(),
        }
    }

    #[cfg(feature = "sqlite")]
    fn of_user() -> Result<Self, Failure> {
        use std::os::unix::ffi::OsStrExt;

        // The convention ignores what is relative, and another folder would be another place.
        let dir = |name| env::var_os(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
        let state = dir("XDG_STATE_HOME").or_else(|| dir("HOME").map(|home| home.join(".local/state")));
        let path = state.map(|dir| dir.join("fencelock/locks.db")).ok_or_else(|| {
            Failure::usage(format!(
                "there is no place to keep the locks, as HOME is not set to an absolute path; give --url, or set {ENV} or XDG_STATE_HOME"
            ))
        })?;
        let encoded = percent_encoding::percent_encode(path.as_os_str().as_bytes(), percent_encoding::NON_ALPHANUMERIC);
        Ok(Self {
            url: format!("sqlite:{encoded}"),
            own_file: Some(path),
        })
    }

    #[cfg(not(feature = "sqlite"))]
    fn of_user() -> Result<Self, Failure> {
        Err(Failure::usage(format!(
            "no address was given; give --url, or set {ENV}"
        )))
    }

    /// A client that connects with its first request.
    pub(crate) fn client(&self) -> Result<Locks, Failure> {
        self.writer(Options::new())
    }

    /// As `client`, for a caller that waits for so long. Hundreds of processes that come to one file at once keep each other waiting for
    /// longer than a request may take otherwise. A server has no such queue in front of it.
    pub(crate) fn patient_client(&self, patience: Duration) -> Result<Locks, Failure> {
        let is_file = self.url.starts_with("sqlite:") && !self.url.contains("op_timeout=");
        self.writer(match is_file {
            true => Options::new().op_timeout(patience.clamp(USUAL_PATIENCE, LONGEST_PATIENCE)),
            false => Options::new(),
        })
    }

    /// A client that only looks. None if nothing can be held: the user's own file is made with the first lock.
    pub(crate) fn inspector(&self) -> Result<Option<Locks>, Failure> {
        match &self.own_file {
            Some(path) if path.try_exists().is_ok_and(|exists| !exists) => Ok(None),
            _ => self.connect(Options::new().read_only(true)).map(Some),
        }
    }

    fn writer(&self, options: Options) -> Result<Locks, Failure> {
        if let Some(dir) = self.own_file.as_ref().and_then(|path| path.parent()) {
            make_private(dir)?;
        }
        self.connect(options)
    }

    fn connect(&self, options: Options) -> Result<Locks, Failure> {
        let locks = fencelock::connect_lazy_with(&self.url, options).map_err(|error| match error {
            // Locks in memory are refused below, so they are no advice.
            LockError::Configuration { .. } if self.own_file.is_none() => {
                Failure::usage(format!("{error:#}").replace(" memory:,", ""))
            }
            error => error.into(),
        })?;
        if locks.capabilities().scope == Scope::Process {
            return Err(Failure::usage(
                "locks of that address exist within one process only, so they would exclude no other process; choose another",
            ));
        }
        // Not before: of what could not be read as an address nothing is known to be fit to be shown.
        tracing::info!(target: "fencelock", "the locks are kept in {self}");
        Ok(locks)
    }
}

/// As people may see it: an address without anything secret, or the path of the file.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.own_file {
            Some(path) => path.display().fmt(f),
            None => f.write_str(&address_without_secrets(&self.url)),
        }
    }
}

/// Starts the runtime that clients need.
pub(crate) fn runtime() -> Result<Runtime, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::unavailable(format!("no runtime could be started: {error}")))
}

/// Cancels what is under way on the server.
pub(crate) async fn leave(locks: &Locks) {
    let _ = tokio::time::timeout(LEAVING, locks.shutdown()).await;
}

fn make_private(dir: &Path) -> Result<(), Failure> {
    use std::io::ErrorKind;
    use std::os::unix::fs::DirBuilderExt;

    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|error| {
        let (refused, advice): (fn(String) -> Failure, _) = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => (Failure::unavailable, "free some space"),
            _ => (Failure::configuration, "make it writable"),
        };
        let dir = dir.display();
        refused(format!(
            "the directory {dir} cannot be made: {error}; {advice}, or give --url"
        ))
    })
}
