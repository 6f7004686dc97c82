//! Faults of the only server, or of a minority of several.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use conformance_tests::servers::{Data, Kind, Server, ServerError};
use conformance_tests::torture;

const PAUSE: &str = "pause";
const RESTART: &str = "kill, restart";
const RESTART_WITHOUT_DATA: &str = "kill, restart without data";

/// The longest ttl on several servers: for so long one that was restarted grants nothing.
pub(crate) const MAX_TTL: Duration = Duration::from_secs(3);

/// The only server, or several of which a minority has a fault at a time.
pub(crate) struct Servers {
    pub(crate) servers: Vec<Server>,
    name: &'static str,
    minority: Mutex<Minority>,
}

/// Which of several servers have a fault, or had one.
#[derive(Default)]
struct Minority {
    first: usize,
    /// Since when those that were restarted are back.
    restarted: Option<Instant>,
}

impl Servers {
    pub(crate) async fn start(name: &'static str, kind: &'static Kind, count: usize) -> Result<Self, ServerError> {
        let mut servers = Vec::new();
        for _ in 0..count {
            servers.push(Server::start_own(kind, &[]).await?);
        }
        Ok(Self {
            servers,
            name,
            minority: Mutex::default(),
        })
    }

    /// The servers that the next fault befalls: others than the last time, unless those were restarted a short time ago. They count as
    /// lost until they take part again.
    fn next(&self) -> Vec<&Server> {
        let mut minority = self.minority.lock().unwrap_or_else(PoisonError::into_inner);
        if minority.restarted.is_none_or(|since| since.elapsed() > MAX_TTL) {
            minority.first += 1;
            minority.restarted = None;
        }
        drop(minority);
        self.current()
    }

    fn current(&self) -> Vec<&Server> {
        let first = self.minority.lock().unwrap_or_else(PoisonError::into_inner).first;
        let count = self.servers.len();
        (0..count.div_ceil(2).max(2) - 1)
            .map(|at| &self.servers[(first + at) % count])
            .collect()
    }
}

#[async_trait]
impl torture::Server for Servers {
    fn faults(&self) -> Vec<(&'static str, bool)> {
        // The locks of Postgres are its sessions', which no restart survives.
        let is_postgres = self.name.starts_with("postgres");
        let mut faults = vec![(PAUSE, false), (RESTART, is_postgres)];
        if self.name.starts_with("redis") || self.name == "valkey" {
            faults.push((RESTART_WITHOUT_DATA, true));
        }
        if self.servers.len() > 1 {
            faults.push((RESTART_WITHOUT_DATA, false));
        }
        faults
    }

    async fn begin(&self, fault: &str) -> io::Result<()> {
        for server in self.next() {
            let done = match fault {
                PAUSE => server.pause().await,
                _ => server.kill().await,
            };
            done.map_err(io::Error::other)?;
        }
        Ok(())
    }

    async fn end(&self, fault: &str) -> io::Result<()> {
        for server in self.current() {
            let done = match fault {
                PAUSE => server.resume().await,
                RESTART => server.restart(Data::Kept).await,
                _ => server.restart(Data::Lost).await,
            };
            done.map_err(io::Error::other)?;
        }
        if fault != PAUSE {
            let mut minority = self.minority.lock().unwrap_or_else(PoisonError::into_inner);
            minority.restarted = Some(Instant::now());
        }
        Ok(())
    }
}
