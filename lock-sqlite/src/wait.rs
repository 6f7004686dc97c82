//! How a claim waits: it looks again when a client has freed a name, when the holder's lease ends, and a few times a second.
//!
//! Beside the database lies a named pipe. The client that frees a name that others wait for leaves one byte in it, and nobody reads it: `epoll`
//! reports each write once to every client that listens (`EPOLLET`). It counts against no limit of a user, as inotify instances do, and works
//! across containers.
//!
//! Wake-ups only save time. A waiter whose wake-up is lost finds the change at its next planned look, and a client that cannot open the pipe looks
//! more often.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use lock_core::{Busy, Claim};
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, oneshot};

use crate::client::Client;

/// Between looks of a client that listens: a process that ends between its release and the wake-up tells no one.
const LISTENING: Duration = Duration::from_millis(250);

/// Between looks of a client that cannot listen.
const DEAF: Duration = Duration::from_millis(10);

/// The time until the next look, with jitter, or processes that once woke together would forever.
pub(crate) fn pause(listening: &Option<Arc<Listening>>, busy: &Busy) -> Duration {
    let longest = if listening.is_some() { LISTENING } else { DEAF };
    let pause = longest.mul_f64(0.5 + fastrand::f64());
    busy.retry_after
        .map_or(pause, |end| pause.min(end.max(Duration::from_millis(1))))
}

/// The place of a claim among the waiters. Dropping it leaves them.
pub(crate) struct Place<'a> {
    client: &'a Client,
    claim: Option<Claim>,
}

impl<'a> Place<'a> {
    pub(crate) fn new(client: &'a Client, claim: &Claim) -> Self {
        let claim = Some(claim.clone());
        Self { client, claim }
    }

    /// The grant has taken the claim from among the waiters.
    pub(crate) fn granted(mut self) {
        self.claim = None;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(claim) = self.claim.take() {
            self.client.leave(claim);
        }
    }
}

/// A client's ways to wake others and to be woken.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    notify: Arc<Notify>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Where links lead to.
    database: PathBuf,
    listening: Weak<Listening>,
    pipe: Option<pipe::Pipe>,
}

/// A task that listens. It ends with the last waiter.
#[derive(Debug)]
pub(crate) struct Listening {
    _ends: oneshot::Sender<()>,
}

impl Wake {
    pub(crate) fn set_database(&self, path: &Path) {
        path.clone_into(&mut self.state().database);
    }

    /// Wakes the waiters of every client of the file.
    pub(crate) fn wake_all(&self) {
        self.notify.notify_waiters();
        let mut state = self.state();
        if state.pipe.as_ref().is_none_or(pipe::Pipe::is_removed) {
            state.pipe = pipe::Pipe::open(&state.database).ok();
        }
        if let Some(pipe) = &state.pipe {
            pipe.wake_all();
        }
    }

    /// Has the waiters of this client look at once.
    pub(crate) fn end_waits(&self) {
        self.notify.notify_waiters();
    }

    /// Completes with the next wake-up from now on.
    pub(crate) fn woken(&self) -> Notified<'_> {
        self.notify.notified()
    }

    /// Listens for wake-ups by other clients for as long as the result is kept. `None` if that is not possible.
    pub(crate) fn listen(&self) -> Option<Arc<Listening>> {
        let mut state = self.state();
        if let Some(listening) = state.listening.upgrade() {
            return Some(listening);
        }
        let (ends, ended) = oneshot::channel();
        pipe::listen(&state.database, Arc::clone(&self.notify), ended).ok()?;
        let listening = Arc::new(Listening { _ends: ends });
        state.listening = Arc::downgrade(&listening);
        Some(listening)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod pipe {
    use std::ffi::OsString;
    use std::io;
    use std::os::fd::OwnedFd;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    use lock_core::Executor;
    use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Stat, Uid, fchmod, fchown, fstat, mknodat, open, stat};
    use rustix::io::{Errno, read, write};
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;
    use tokio::sync::{Notify, oneshot};

    /// What is read at once, and how often, to empty a pipe that somebody has filled.
    const PAGE: usize = 4_096;
    const PAGES: usize = 16;

    /// The open pipe.
    #[derive(Debug)]
    pub(super) struct Pipe(OwnedFd);

    /// Beside the database, hidden: a program that reads every file of the directory would wait at a pipe for ever.
    pub(super) fn path(database: &Path) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(database.file_name().unwrap_or_default());
        name.push("-wake");
        database.with_file_name(name)
    }

    impl Pipe {
        /// Opens the pipe, or makes it, for all who may write to the database.
        pub(super) fn open(database: &Path) -> io::Result<Self> {
            let (path, like) = (path(database), stat(database)?);
            match mknodat(CWD, &path, FileType::Fifo, mode_like(&like), 0) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let pipe = open(&path, flags, Mode::empty())?;
            let opened = fstat(&pipe)?;
            // With another name it may be another program's.
            if FileType::from_raw_mode(opened.st_mode) != FileType::Fifo || opened.st_nlink > 1 {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "not a named pipe of our own",
                ));
            }
            share(&pipe, &opened, &like);
            Ok(Self(pipe))
        }

        /// Whether the pipe has been removed, so that other clients use another one.
        pub(super) fn is_removed(&self) -> bool {
            fstat(&self.0).is_ok_and(|file| file.st_nlink == 0)
        }

        pub(super) fn wake_all(&self) {
            // Some kernels report only a write into an empty pipe, and a full one takes none. Mostly there is one byte in it.
            for _ in 0..PAGES {
                if read(&self.0, &mut [0; PAGE][..]) != Ok(PAGE) {
                    break;
                }
            }
            let _ = write(&self.0, b"1");
        }
    }

    /// Both rights for everyone who may write to the database, and none for the others, who could only take wake-ups away.
    fn mode_like(database: &Stat) -> Mode {
        let writes = database.st_mode & 0o222;
        Mode::from_raw_mode(writes | writes << 1)
    }

    /// Gives the pipe to the users of the database, whatever the umask. Only its owner or root can.
    fn share(pipe: &OwnedFd, opened: &Stat, database: &Stat) {
        let (owner, group) = (Uid::from_raw(database.st_uid), Gid::from_raw(database.st_gid));
        if (opened.st_uid, opened.st_gid) != (database.st_uid, database.st_gid)
            && fchown(pipe, Some(owner), Some(group)).is_err()
        {
            let _ = fchown(pipe, None, Some(group));
        }
        if Mode::from_raw_mode(opened.st_mode) != mode_like(database) {
            let _ = fchmod(pipe, mode_like(database));
        }
    }

    /// Tells `notify` of each wake-up until `ended` is. On the background thread: it listens whatever runtime the callers have.
    pub(super) fn listen(database: &Path, notify: Arc<Notify>, mut ended: oneshot::Receiver<()>) -> io::Result<()> {
        let pipe = Pipe::open(database)?;
        let listening = async move {
            #[allow(deprecated, reason = "its successor is unsafe, and asks for what an `OwnedFd` is")]
            let Ok(pipe) = AsyncFd::with_interest(pipe.0, Interest::READABLE) else {
                return;
            };
            loop {
                tokio::select! {
                    _ = &mut ended => return,
                    ready = pipe.readable() => match ready {
                        Ok(mut ready) => ready.clear_ready(),
                        Err(_) => return,
                    },
                }
                notify.notify_waiters();
            }
        };
        Executor::default().spawn(listening).map_err(io::Error::other)
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod pipe {
    use std::io::{ErrorKind, Result};
    use std::path::Path;
    use std::sync::Arc;

    use tokio::sync::{Notify, oneshot};

    #[derive(Debug)]
    pub(super) struct Pipe;

    impl Pipe {
        pub(super) fn open(_database: &Path) -> Result<Self> {
            Err(ErrorKind::Unsupported.into())
        }

        pub(super) fn is_removed(&self) -> bool {
            false
        }

        pub(super) fn wake_all(&self) {}
    }

    pub(super) fn listen(_database: &Path, _notify: Arc<Notify>, _ended: oneshot::Receiver<()>) -> Result<()> {
        Err(ErrorKind::Unsupported.into())
    }
}
