//! A server as a test holds it.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex;

use super::error::ServerError;
use super::kind::Kind;
use super::machine::Machine;
use super::way::{named, ready, start_own};
use crate::background::{background, in_background};

/// How long is waited for a server to be removed.
const GOODBYE: Duration = Duration::from_secs(20);

/// A server to test against. It ends, with its data, when this is dropped.
#[derive(Debug)]
pub struct Server {
    pub(super) kind: &'static Kind,
    pub(super) url: String,
    pub(super) authority: String,
    pub(super) version: String,
    pub(super) way: String,
    // None if it is not ours.
    pub(super) machine: Option<Arc<Mutex<Machine>>>,
}

/// What a server still knows after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// All that it acknowledged.
    Kept,
    /// Nothing.
    Lost,
    /// What it knew when it was [copied](Server::copy) last.
    Copied,
}

impl Server {
    /// Starts a server of that kind, or finds the one that the environment names, and waits until it takes requests.
    ///
    /// The first of its kind in this process is told of on standard error, with its version.
    ///
    /// # Errors
    ///
    /// If there is no way to such a server, or if it does not become ready.
    pub async fn start(kind: &'static Kind) -> Result<Self, ServerError> {
        match named(kind).await? {
            Some(server) => Ok(server.announced()),
            None => Self::start_own(kind, &[]).await,
        }
    }

    /// Starts a server of that kind with these arguments of its own for the server's program, also if the environment
    /// names another.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    pub async fn start_own(kind: &'static Kind, arguments: &[&str]) -> Result<Self, ServerError> {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let server = in_background(start_own(kind, arguments)).await;
        Ok(server.map_err(ServerError::system("starting a server"))??.announced())
    }

    /// How a client of its kind connects to it.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same server, reached at another address: that of a proxy.
    #[must_use]
    pub fn url_at(&self, address: SocketAddr) -> String {
        self.url.replacen(&self.authority, &address.to_string(), 1)
    }

    /// Its host and port, as a proxy wants them.
    #[must_use]
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// What it is, and its version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Whether it was started for this run, so that it can be paused, killed and restarted.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.machine.is_some()
    }

    /// Stops it where it is: connections to it can still be made and stay open, and nobody gets an answer.
    ///
    /// # Errors
    ///
    /// If it is not ours, or the system failed.
    pub async fn pause(&self) -> Result<(), ServerError> {
        let machine = self.machine("a halt")?;
        self.work(async move { machine.lock().await.pause().await }).await
    }

    /// Lets it go on after a pause.
    ///
    /// # Errors
    ///
    /// If it is not ours, or the system failed.
    pub async fn resume(&self) -> Result<(), ServerError> {
        let machine = self.machine("going on")?;
        self.work(async move { machine.lock().await.resume().await }).await
    }

    /// Pauses it, returns, and resumes it after that time.
    ///
    /// # Errors
    ///
    /// If it is not ours, or the system failed.
    pub async fn pause_for(&self, time: Duration) -> Result<(), ServerError> {
        let machine = self.machine("a halt")?;
        let resumed = Arc::clone(&machine);
        self.work(async move { machine.lock().await.pause().await }).await?;
        let background = background().map_err(ServerError::system("resuming a server"))?;
        background.spawn(async move {
            tokio::time::sleep(time).await;
            // A server that has ended meanwhile need not go on.
            let _ = resumed.lock().await.resume().await;
        });
        Ok(())
    }

    /// Ends it as `kill -9` does. [`restart`](Self::restart) starts it again.
    ///
    /// # Errors
    ///
    /// If it is not ours, or the system failed.
    pub async fn kill(&self) -> Result<(), ServerError> {
        let machine = self.machine("its end")?;
        self.work(async move { machine.lock().await.kill().await }).await
    }

    /// Ends it as `kill -9` does, if it runs, starts it again at the same address, and waits until it takes requests.
    ///
    /// # Errors
    ///
    /// If it is not ours, or the system failed, or it does not become ready, or there is no copy that it could start
    /// with.
    pub async fn restart(&self, data: Data) -> Result<(), ServerError> {
        let machine = self.machine("a restart")?;
        let (kind, authority, title) = (self.kind, self.authority.clone(), self.to_string());
        self.work(async move {
            let mut machine = machine.lock().await;
            machine.kill().await?;
            match data {
                Data::Kept => machine.start_again().await?,
                Data::Lost => machine.start_anew().await?,
                Data::Copied => machine.start_with_copy().await?,
            }
            ready(kind, &authority, &title, &mut machine).await.map(drop)
        })
        .await
    }

    /// Copies its data as it is at this moment, for a [`restart`](Self::restart) with [`Data::Copied`]. An earlier copy is
    /// forgotten. The server is paused meanwhile.
    ///
    /// # Errors
    ///
    /// If it is not ours, or the system failed.
    pub async fn copy(&self) -> Result<(), ServerError> {
        let machine = self.machine("a copy")?;
        self.work(async move {
            let mut machine = machine.lock().await;
            machine.pause().await?;
            let copied = machine.copy().await;
            machine.resume().await?;
            copied
        })
        .await
    }

    /// Takes its container off its network. Its connections end.
    ///
    /// # Errors
    ///
    /// If it is in no container, or the engine failed.
    pub async fn disconnect(&self) -> Result<(), ServerError> {
        self.network(false).await
    }

    /// Puts its container back on its network, and waits until it takes requests.
    ///
    /// # Errors
    ///
    /// If it is in no container, or the engine failed, or it does not become ready.
    pub async fn reconnect(&self) -> Result<(), ServerError> {
        self.network(true).await
    }

    async fn network(&self, connected: bool) -> Result<(), ServerError> {
        let what = "leave its network";
        let machine = self.machine(what)?;
        let (kind, authority, title) = (self.kind, self.authority.clone(), self.to_string());
        self.work(async move {
            let mut machine = machine.lock().await;
            match &*machine {
                Machine::Container(container) if connected => container.reconnect().await?,
                Machine::Container(container) => return container.disconnect().await,
                Machine::Process(_) => return Err(ServerError::NotPossible { server: title, what }),
            }
            ready(kind, &authority, &title, &mut machine).await.map(drop)
        })
        .await
    }

    fn machine(&self, what: &'static str) -> Result<Arc<Mutex<Machine>>, ServerError> {
        self.machine.clone().ok_or_else(|| ServerError::NotPossible {
            server: self.to_string(),
            what,
        })
    }

    async fn work<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, ServerError>> + Send + 'static,
    ) -> Result<T, ServerError> {
        in_background(work)
            .await
            .map_err(ServerError::system("work on a server"))?
    }

    /// Tells of the first server of each sort.
    fn announced(self) -> Self {
        static TOLD: StdMutex<BTreeSet<String>> = StdMutex::new(BTreeSet::new());
        let sort = format!("{} {}", self.version, self.way);
        if TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(sort) {
            // Past the capture of what tests print, which would show it only when they fail.
            let _ = writeln!(std::io::stderr(), "server: {self}");
        }
        self
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} at {}", self.version, self.way, self.authority)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let (Some(machine), Ok(background)) = (self.machine.take(), background()) else {
            return;
        };
        let (done, wait) = std::sync::mpsc::channel();
        background.spawn(async move {
            machine.lock().await.remove().await;
            let _ = done.send(());
        });
        // The process may end right after this.
        let _ = wait.recv_timeout(GOODBYE);
    }
}
