//! What the suite must know of a backend.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use lock_core::fence::Fence;
use lock_core::{DistributedLock, FencingToken, LockError, LockName};
use tempfile::TempDir;
use tokio::runtime::Handle;

/// What the author of a backend writes: how to reach it, and what can be done to it.
///
/// Only [`name`](Self::name) and [`client`](Self::client) are required. Every other method makes more cases applicable;
/// a case that is not applicable is reported with its reason.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// The backend, as the summary shows it.
    fn name(&self) -> &str;

    /// A client that shares nothing with those made before but the namespace: what a process of its own would make.
    ///
    /// Where the backend's [`Scope`](lock_core::Scope) is wider than a process, the suite calls this in child processes
    /// too, with the same namespace.
    ///
    /// # Errors
    ///
    /// Whatever the backend answers to a failed connection; the case fails with it.
    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError>;

    /// Gets ready, once, before the first case: starts servers, for example. Not called in child processes.
    ///
    /// The answer says on what the run works: which server of which version, where it came from, and as which user. It is
    /// printed at the start and in the summary.
    ///
    /// # Errors
    ///
    /// If there is nothing to run on. No case is run then, and the run fails.
    async fn begin(&self) -> Result<Option<String>, LockError> {
        Ok(None)
    }

    /// What is known not to be applicable to this backend, cases and planted bugs: a line each, `name: reason`, as the summary prints them.
    /// With such a list, the run fails if anything else is skipped, such as when the harness has lost a fault, and if something that is
    /// listed could be judged. Without one, the default, whatever is not applicable is skipped.
    ///
    /// A list is right for one way to reach the server. A harness that can do less to a server that it has not started gives
    /// none for that.
    fn known_skips(&self) -> Option<&str> {
        None
    }

    /// Host and port of the namespace's server, for a proxy to stand before it. `None` if there is no such thing: the
    /// cases about the network are not applicable then.
    ///
    /// # Errors
    ///
    /// If there is no server; the case fails with it.
    async fn address(&self, namespace: &Namespace) -> Result<Option<String>, LockError> {
        let _ = namespace;
        Ok(None)
    }

    /// As [`client`](Self::client), by way of that address instead of the server's own: a proxy listens there. Everything
    /// that the client sends takes this way. Its [`op_timeout`](lock_core::Capabilities::op_timeout) may be shorter than
    /// usual, so that the cases need not wait for long.
    ///
    /// # Errors
    ///
    /// Whatever the backend answers to a failed connection. The default answers that it cannot be done.
    async fn client_at(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        let _ = (namespace, address);
        Err(LockError::not_supported("reaching the server at another address"))
    }

    /// As [`client`](Self::client), with its connections worked on that runtime, which will end. The default, a client as any
    /// other, is right where a backend has no connections of its own.
    ///
    /// # Errors
    ///
    /// Whatever the backend answers to a failed connection; the case fails with it.
    async fn client_on(&self, namespace: &Namespace, runtime: Handle) -> Result<Arc<dyn DistributedLock>, LockError> {
        let _ = runtime;
        self.client(namespace).await
    }

    /// What is in each request that changes something at the server, and in none that only looks. The cases that hold a
    /// request back or lose its reply mean such a one. The default, nothing, is in every request: that is right where every
    /// step is one request.
    fn committing_request(&self) -> &[u8] {
        b""
    }

    /// Whether these bytes, which came from the server in one piece, answer a request. Cases that lose a reply mean such a
    /// piece, and count on the request's having been carried out. The default, that all do, is right where a server says
    /// nothing unasked; HTTP/2, for one, acknowledges what it has received before it answers.
    fn is_reply(&self, bytes: &[u8]) -> bool {
        let _ = bytes;
        true
    }

    /// How many claims the server keeps in line for `name`, not counting the one that holds it. `None` if it has no queue
    /// or does not show it. Cases wait for this before they go on; of a backend that says it is
    /// [fair](lock_core::Capabilities::fair) the order can be checked only with it.
    ///
    /// # Errors
    ///
    /// If looking failed; the case fails with it.
    async fn in_line(&self, namespace: &Namespace, name: &LockName) -> Result<Option<usize>, LockError> {
        let _ = (namespace, name);
        Ok(None)
    }

    /// The namespace is not used any more: what it has of its own, such as a server, can go.
    async fn over(&self, namespace: &Namespace) {
        let _ = namespace;
    }

    /// What is left of the namespace on the server, one line each: locks, queue entries, sessions. `None` if the harness
    /// cannot look; the suite then asks the backend's `list`, if it has one.
    ///
    /// # Errors
    ///
    /// If looking failed; the case fails with it.
    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let _ = namespace;
        Ok(None)
    }

    /// Does `fault` to the server, or says that this harness cannot.
    ///
    /// # Errors
    ///
    /// If it should have worked and did not; the case fails with it.
    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        let _ = (namespace, fault);
        Ok(Injection::NotPossible)
    }

    /// A resource called `resource` that is protected by what the backend ships for that: its value is 0, or what was
    /// written through an earlier handle. `None` if the backend ships nothing; the fence of `lock-core` is used then.
    ///
    /// # Errors
    ///
    /// If there should be one and could not be made; the case fails with it.
    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        let _ = (namespace, resource);
        Ok(None)
    }

    /// Environment variables that child processes need beside those that they inherit.
    fn child_environment(&self, namespace: &Namespace) -> Vec<(String, String)> {
        let _ = namespace;
        Vec::new()
    }

    /// Whether a lease is a connection: it ends with it, and whatever is asked on it keeps all of its locks. Cases about
    /// connections that are cut expect the loss then, and otherwise that a new connection finds the lease as it was.
    fn leases_are_connections(&self) -> bool {
        false
    }

    /// Whether a lease counts from the call that granted it, unless that call told of a wait. Not so where a call can ask again by
    /// itself, as with several servers of which too few have granted the claim: the lease then counts from a later request.
    fn leases_count_from_the_call(&self) -> bool {
        true
    }

    /// Whether an acquisition may renew, before anything else, the lease that locks of its client share, and whatever comes of it. What a
    /// server has promised to keep then counts from there at the earliest.
    fn acquisitions_renew(&self) -> bool {
        false
    }

    /// Whether [`client`](Self::client) works outside of a tokio runtime, as those of fencelock's backends do. The cases that make
    /// a client there are not applicable otherwise.
    fn connects_without_runtime(&self) -> bool {
        false
    }

    /// In how many polls an acquisition of a free name takes at the least. A case that drops futures at every poll fails
    /// if it met fewer: it would show nothing.
    fn fewest_polls(&self) -> usize {
        1
    }
}

/// A number that only the latest holder can change.
#[async_trait]
pub trait Resource: Send + Sync {
    /// Shuts out every holder older than `token`. False if `token` itself is stale.
    ///
    /// # Errors
    ///
    /// If the resource failed; the case fails with it.
    async fn admit(&self, token: FencingToken) -> Result<bool, LockError>;

    /// The same for a holder that shares the lock: it shuts out older holders that do not, and only a newer one of those shuts it out.
    ///
    /// # Errors
    ///
    /// If the resource failed; the case fails with it. The default answers that it cannot be done, which is right for a backend without
    /// shared locks.
    async fn admit_shared(&self, token: FencingToken) -> Result<bool, LockError> {
        let _ = token;
        Err(LockError::not_supported("admitting a holder that shares the lock"))
    }

    /// The number.
    ///
    /// # Errors
    ///
    /// If the resource failed; the case fails with it.
    async fn read(&self) -> Result<i64, LockError>;

    /// Admits the token and writes the number, in one step. False, and nothing is written, if the token is stale.
    ///
    /// # Errors
    ///
    /// If the resource failed; the case fails with it.
    async fn write(&self, token: FencingToken, number: i64) -> Result<bool, LockError>;
}

#[async_trait]
impl Resource for Fence<i64> {
    async fn admit(&self, token: FencingToken) -> Result<bool, LockError> {
        Ok(Self::admit(self, token).is_ok())
    }

    async fn admit_shared(&self, token: FencingToken) -> Result<bool, LockError> {
        Ok(Self::admit_shared(self, token).is_ok())
    }

    async fn read(&self) -> Result<i64, LockError> {
        Ok(*Self::read(self))
    }

    async fn write(&self, token: FencingToken, number: i64) -> Result<bool, LockError> {
        Ok(Self::write(self, token, |value| *value = number).is_ok())
    }
}

/// What can be done to a server. The list grows; a harness answers [`Injection::NotPossible`] to what it does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The lease of this name ends before its time.
    Expire(LockName),
    /// Another client is made the holder of this name while another holds it.
    Steal(LockName),
    /// Whatever is stored of who holds this name is deleted behind the server's back.
    Delete(LockName),
    /// The counter from which the tokens of this name come is deleted behind the server's back.
    DeleteCounter(LockName),
    /// The counter from which the tokens of this name come is set to a value that it had long ago, behind the server's back.
    SetBackCounter(LockName),
    /// All that the server stores is deleted behind its back, while it runs on.
    DeleteAll,
    /// Whatever the server has kept of requests in order to answer the same sooner is dropped: scripts, plans.
    DropPrepared,
    /// The server has no more room: it refuses whatever needs some.
    Full,
    /// It has room again.
    Room,
    /// The clients may take no lock any more, until a person mends it: their user lacks a right, or what keeps the locks cannot
    /// be used. It does not matter whether what they hold can still be renewed and released.
    Revoke,
    /// They may again.
    Permit,
    /// The server answers no client for that long, and forgets nothing.
    Freeze(std::time::Duration),
    /// The server restarts and keeps its data.
    Restart,
    /// The server restarts and has lost all data.
    RestartWithoutData,
    /// A copy of the server's data is made, as for a backup.
    Copy,
    /// The last copy is put in the place of the data, as after a restore.
    Restore,
}

impl Fault {
    /// The fault in a few words, without what it is done to.
    #[must_use]
    pub fn words(&self) -> &'static str {
        match self {
            Self::Expire(_) => "a lease that ends before its time",
            Self::Steal(_) => "a lock given to somebody else",
            Self::Delete(_) => "a deleted lock",
            Self::DeleteCounter(_) => "a deleted counter",
            Self::SetBackCounter(_) => "a counter that is set back",
            Self::DeleteAll => "the deletion of everything",
            Self::DropPrepared => "the loss of prepared requests",
            Self::Full | Self::Room => "a full server",
            Self::Revoke | Self::Permit => "a right that is taken away",
            Self::Freeze(_) => "a frozen server",
            Self::Restart => "a restart",
            Self::RestartWithoutData => "a restart without data",
            Self::Copy => "a copy of the data",
            Self::Restore => "the restore of an older copy",
        }
    }
}

/// Whether a fault was injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injection {
    /// It was done.
    Done,
    /// This harness cannot do that; the case is reported as not applicable.
    NotPossible,
    /// It can, and others would suffer: it shares its server between namespaces. The case is run again, in a namespace
    /// that [wants a server of its own](Namespace::wants_own_server).
    NeedsOwnServer,
}

/// A part of the server that one case has to itself.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    folder: Folder,
    own_server: bool,
}

#[derive(Debug)]
enum Folder {
    Own(TempDir),
    Parents(PathBuf),
}

impl Namespace {
    pub(crate) fn fresh(own_server: bool) -> std::io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("fencelock-").tempdir()?;
        Ok(Self {
            name: name_of(folder.path()),
            folder: Folder::Own(folder),
            own_server,
        })
    }

    /// The namespace of the parent process, as its child sees it.
    pub(crate) fn of_parent(folder: PathBuf) -> Self {
        Self {
            name: name_of(&folder),
            folder: Folder::Parents(folder),
            // The parent has it, and tells where it is.
            own_server: false,
        }
    }

    /// A name of letters, digits and `-` that no other namespace has.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the case does something to the server that no other case should notice. Only a harness that has answered
    /// [`Injection::NeedsOwnServer`] need look.
    #[must_use]
    pub fn wants_own_server(&self) -> bool {
        self.own_server
    }

    /// An empty folder, deleted at the end of the case.
    #[must_use]
    pub fn folder(&self) -> &Path {
        match &self.folder {
            Folder::Own(folder) => folder.path(),
            Folder::Parents(folder) => folder,
        }
    }
}

fn name_of(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    name.chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect()
}
