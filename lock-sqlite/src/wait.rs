//! How claims that wait are woken, beside the looks that they take by themselves.
//!
//! Beside the database lies a named pipe. The client that frees a name that others wait for leaves one byte in it, which is never read: `epoll`
//! reports each write once to every client that listens (`EPOLLET`). It counts against no limit of a user, as inotify instances do, and works
//! across containers. A client with several claims that wait then finds out with one query which of them may go on.
//!
//! Wake-ups only save time. A waiter whose wake-up is lost finds the change at its next planned look, and a client that cannot open the pipe looks
//! more often.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{Busy, OwnerId};
use rustix::fs::fstat;
use rustix::io::{read, write};
use tokio::sync::{Notify, oneshot};

/// Between looks of a client that listens: a process that ends between its release and the wake-up tells no one.
const LISTENING: Duration = Duration::from_millis(250);

/// Between looks of a client that cannot listen.
const DEAF: Duration = Duration::from_millis(10);

/// A client's claims that wait, and its way to wake others and to be woken.
#[derive(Default)]
pub(crate) struct Wake(Mutex<State>);

#[derive(Default)]
struct State {
    /// Where links lead to.
    database: PathBuf,
    pipe: Option<Arc<OwnedFd>>,
    /// The listener ends when this is dropped.
    listening: Option<oneshot::Sender<()>>,
    waiting: HashMap<OwnerId, Arc<Notify>>,
}

/// What a client listens at, until `ended`.
pub(crate) struct Listener {
    pub(crate) pipe: Arc<OwnedFd>,
    pub(crate) ended: oneshot::Receiver<()>,
}

/// A claim that waits, until it is dropped.
pub(crate) struct Waiting {
    wake: Arc<Wake>,
    owner: OwnerId,
    /// Remembers a wake-up that comes before it is waited for.
    pub(crate) woken: Arc<Notify>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.wake.state().waiting.remove(&self.owner);
    }
}

impl Wake {
    pub(crate) fn set_database(&self, path: &Path) {
        path.clone_into(&mut self.state().database);
    }

    /// Has the claim woken from now on. Calls `listen` if no task listens yet.
    pub(crate) fn join(self: &Arc<Self>, owner: OwnerId, listen: impl FnOnce(Listener)) -> Waiting {
        let mut state = self.state();
        if let Some(pipe) = state.pipe()
            && state.listening.is_none()
        {
            let (ends, ended) = oneshot::channel();
            state.listening = Some(ends);
            listen(Listener { pipe, ended });
        }
        let woken = Arc::clone(state.waiting.entry(owner).or_default());
        let wake = Arc::clone(self);
        Waiting { wake, owner, woken }
    }

    /// The time until the next look, with jitter, or processes that once woke together would forever.
    pub(crate) fn pause(&self, busy: &Busy) -> Duration {
        let longest = if self.state().listening.is_some() {
            LISTENING
        } else {
            DEAF
        };
        let pause = longest.mul_f64(0.5 + fastrand::f64());
        busy.retry_after
            .map_or(pause, |end| pause.min(end.max(Duration::from_millis(1))))
    }

    /// Wakes the clients of the file.
    pub(crate) fn wake_clients(&self) {
        if let Some(pipe) = self.state().pipe() {
            // Some kernels report only a write into an empty pipe, and a full one takes none. Mostly there is one byte in it.
            let _ = read(&pipe, &mut [0; 4_096][..]);
            let _ = write(&pipe, b"1");
        }
    }

    /// How many claims of this client wait.
    pub(crate) fn waiting(&self) -> usize {
        self.state().waiting.len()
    }

    /// Has those claims of this client look at once; all of them without a list.
    pub(crate) fn wake(&self, owners: Option<&[OwnerId]>) {
        let waiting = &self.state().waiting;
        let all = waiting.iter();
        let chosen = all.filter(|(owner, _)| owners.is_none_or(|owners| owners.contains(owner)));
        chosen.for_each(|(_, claim)| claim.notify_one());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Opens the pipe if that is not done, or if it has been removed, so that other clients use another one.
    fn pipe(&mut self) -> Option<Arc<OwnedFd>> {
        let is_removed = |pipe: &Arc<OwnedFd>| fstat(pipe).is_ok_and(|file| file.st_nlink == 0);
        if self.pipe.as_ref().is_none_or(is_removed) {
            self.listening = None;
            self.pipe = pipe::open(&self.database).ok().map(Arc::new);
        }
        self.pipe.clone()
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod pipe {
    use std::ffi::OsString;
    use std::os::fd::OwnedFd;
    use std::path::Path;

    use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Uid, fchmod, fchown, fstat, mknodat, open as open_file, stat};
    use rustix::io::Errno;

    /// Opens the pipe, or makes it, for all who may write to the database, and none of the others, who could only take wake-ups away.
    ///
    /// It is hidden: a program that reads every file of the directory would wait at a pipe for ever.
    pub(super) fn open(database: &Path) -> Result<OwnedFd, Errno> {
        let mut name = OsString::from(".");
        name.push(database.file_name().unwrap_or_default());
        name.push("-wake");
        let (path, like) = (database.with_file_name(name), stat(database)?);
        let writes = like.st_mode & 0o222;
        let mode = Mode::from_raw_mode(writes | writes << 1);
        match mknodat(CWD, &path, FileType::Fifo, mode, 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let pipe = open_file(&path, flags, Mode::empty())?;
        let opened = fstat(&pipe)?;
        // With another name it may be another program's.
        if FileType::from_raw_mode(opened.st_mode) != FileType::Fifo || opened.st_nlink > 1 {
            return Err(Errno::INVAL);
        }
        // For the users of the database, whatever the umask. Only the owner of the pipe or root can.
        let (owner, group) = (Uid::from_raw(like.st_uid), Gid::from_raw(like.st_gid));
        if fchown(&pipe, Some(owner), Some(group)).is_err() {
            let _ = fchown(&pipe, None, Some(group));
        }
        let _ = fchmod(&pipe, mode);
        Ok(pipe)
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod pipe {
    pub(super) fn open(_database: &std::path::Path) -> Result<std::os::fd::OwnedFd, rustix::io::Errno> {
        Err(rustix::io::Errno::NOSYS)
    }
}
