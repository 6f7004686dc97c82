//! Holders, for display.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use crate::{Claim, FencingToken, LockName, Mode, OwnerId};

/// The holder of a lock, for display and tools; never base a decision about the resource on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Holder {
    /// The name, where the server can tell it.
    pub name: Option<LockName>,
    /// The owner of the acquisition.
    pub owner: Option<OwnerId>,
    /// The token of the grant: the last one of its block, if it came with several. That of a guard may be lower.
    pub token: Option<FencingToken>,
    /// The text that the holder has set for display.
    pub label: Option<String>,
    /// The holder's machine.
    pub host: Option<String>,
    /// The holder's process.
    pub pid: Option<u32>,
    /// When it got the lock, by the wall clock of the server or client that recorded it.
    pub acquired_at: Option<SystemTime>,
    /// How long the server keeps it unless it is renewed.
    pub remaining: Option<Duration>,
    /// Which others may hold it at the same time.
    #[cfg_attr(feature = "serde", serde(default))]
    pub mode: Mode,
    /// Whether the holder has released it, and the name is only reserved for what is left of its
    /// [`at_least`](crate::LockRequest::at_least).
    #[cfg_attr(feature = "serde", serde(default))]
    pub is_reserved: bool,
    /// The key under which the server keeps it, where that is not the name itself.
    pub key: Option<String>,
    /// After a forced release that had to end more than this lock: how many other locks of the holder ended with it. `None` if the
    /// lock was released alone.
    pub also_released: Option<u64>,
}

impl Holder {
    /// A holder of which nothing is known.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// This process as the holder of `claim` from now on, as backends store it beside a lock.
    #[must_use]
    pub fn of(claim: &Claim) -> Self {
        Self {
            name: Some(claim.name().clone()),
            owner: Some(claim.owner()),
            label: claim.label().map(str::to_owned),
            host: Some(HOST.clone()),
            pid: Some(std::process::id()),
            acquired_at: Some(SystemTime::now()),
            mode: claim.mode(),
            ..Self::default()
        }
    }
}

/// `host:pid (label)`, as much of it as is known.
impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.host, self.pid) {
            (Some(host), Some(pid)) => write!(f, "{host}:{pid}")?,
            (Some(host), None) => f.write_str(host)?,
            (None, Some(pid)) => write!(f, "process {pid}")?,
            (None, None) => f.write_str("an unknown holder")?,
        }
        match &self.label {
            Some(label) => write!(f, " ({label})"),
            None => Ok(()),
        }
    }
}

static HOST: LazyLock<String> = LazyLock::new(host);

#[cfg(unix)]
fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn host() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "unknown".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_shown_as_host_pid_and_label() {
        let claim = Claim::new("n".parse().unwrap(), Duration::from_secs(1)).with_label("nightly");
        let shown = Holder::of(&claim).to_string();
        assert!(
            shown.ends_with(&format!(":{} (nightly)", std::process::id())),
            "{shown}"
        );
        assert_eq!(Holder::new().to_string(), "an unknown holder");
    }
}
