//! How claims that wait are woken, beside the looks that they take by themselves.
//!
//! Beside the database lies a named pipe. The client that frees a name that others wait for leaves one byte in it, which is never read: `epoll`
//! reports each write once to every client that listens (`EPOLLET`). It counts against no limit of a user, as inotify instances do, and works
//! across containers. A client with several claims that wait then finds out with one query which of them may go on.
//!
//! Wake-ups only save time. A waiter whose wake-up is lost finds the change at its next planned look, and a client that cannot open the pipe looks
//! more often.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{Busy, OwnerId};
use tokio::sync::Notify;

/// Between looks of a client that listens: a process that ends between its release and the wake-up tells no one.
const LISTENING: Duration = Duration::from_millis(250);

/// Between looks of a client that cannot listen.
const DEAF: Duration = Duration::from_millis(10);

/// A client's claims that wait, and its ways to wake others and to be woken.
pub(crate) struct Wake {
    /// Has the client find out which of its claims may go on, and [wake](Self::wake) them.
    find: Box<dyn Fn() + Send + Sync>,
    /// Whether the client was asked to, and has not begun.
    is_asked: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Where links lead to.
    database: PathBuf,
    waiting: HashMap<OwnerId, Arc<Notify>>,
    pipe: Option<pipe::Pipe>,
}

impl Wake {
    pub(crate) fn new(find: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        let (find, is_asked, state) = (Box::new(find), AtomicBool::new(false), Mutex::default());
        Arc::new(Self { find, is_asked, state })
    }

    pub(crate) fn set_database(&self, path: &Path) {
        path.clone_into(&mut self.state().database);
    }

    /// Listens for the claim until it [leaves](Self::leave). What is returned remembers a wake-up that comes before it is waited for.
    pub(crate) fn join(self: &Arc<Self>, owner: OwnerId) -> Arc<Notify> {
        let mut state = self.state();
        self.open(&mut state);
        Arc::clone(state.waiting.entry(owner).or_default())
    }

    pub(crate) fn leave(&self, owner: OwnerId) {
        self.state().waiting.remove(&owner);
    }

    /// The time until the next look, with jitter, or processes that once woke together would forever.
    pub(crate) fn pause(&self, busy: &Busy) -> Duration {
        let longest = if self.state().pipe.is_some() { LISTENING } else { DEAF };
        let pause = longest.mul_f64(0.5 + fastrand::f64());
        busy.retry_after
            .map_or(pause, |end| pause.min(end.max(Duration::from_millis(1))))
    }

    /// Wakes the clients of the file.
    pub(crate) fn wake_clients(self: &Arc<Self>) {
        let mut state = self.state();
        self.open(&mut state);
        if let Some(pipe) = &state.pipe {
            pipe.write();
        }
    }

    /// Has those claims of this client look at once; all of them without a list.
    pub(crate) fn wake(&self, owners: Option<&[OwnerId]>) {
        let waiting = &self.state().waiting;
        match owners {
            Some(owners) => owners
                .iter()
                .filter_map(|owner| waiting.get(owner))
                .for_each(|claim| claim.notify_one()),
            None => waiting.values().for_each(|claim| claim.notify_one()),
        }
    }

    /// The client begins to find out. A wake-up from now on asks it again.
    pub(crate) fn begin_to_find(&self) {
        self.is_asked.store(false, Ordering::Release);
    }

    /// A client has freed a name.
    fn heard(&self) {
        let waiting = self.state().waiting.len();
        if waiting == 1 {
            // It looks by itself.
            self.wake(None);
        } else if waiting > 1 && !self.is_asked.swap(true, Ordering::AcqRel) {
            (self.find)();
        }
    }

    /// Opens the pipe if that is not done, or if it has been removed, so that other clients use another one.
    fn open(self: &Arc<Self>, state: &mut State) {
        if state.pipe.as_ref().is_none_or(pipe::Pipe::is_removed) {
            let wake = Arc::downgrade(self);
            let heard = move || {
                if let Some(wake) = wake.upgrade() {
                    wake.heard();
                }
            };
            state.pipe = pipe::Pipe::open(&state.database, heard).ok();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod pipe {
    use std::ffi::OsString;
    use std::io;
    use std::os::fd::OwnedFd;
    use std::path::Path;
    use std::sync::Arc;

    use lock_core::Executor;
    use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Stat, Uid, fchmod, fchown, fstat, mknodat, open, stat};
    use rustix::io::{Errno, read, write};
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;
    use tokio::sync::oneshot;

    /// The open pipe, and a task that listens for as long as this lives.
    pub(super) struct Pipe {
        pipe: Arc<OwnedFd>,
        _ends: oneshot::Sender<()>,
    }

    impl Pipe {
        /// Opens the pipe, or makes it, for all who may write to the database. Calls `heard` for each wake-up, on the background thread: it listens
        /// whatever runtime the callers have.
        ///
        /// It is hidden: a program that reads every file of the directory would wait at a pipe for ever.
        pub(super) fn open(database: &Path, heard: impl Fn() + Send + 'static) -> io::Result<Self> {
            let mut name = OsString::from(".");
            name.push(database.file_name().unwrap_or_default());
            name.push("-wake");
            let (path, like) = (database.with_file_name(name), stat(database)?);
            match mknodat(CWD, &path, FileType::Fifo, mode_like(&like), 0) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let pipe = open(&path, flags, Mode::empty())?;
            let opened = fstat(&pipe)?;
            // With another name it may be another program's.
            if FileType::from_raw_mode(opened.st_mode) != FileType::Fifo || opened.st_nlink > 1 {
                let message = "not a named pipe of our own";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
            }
            // For the users of the database, whatever the umask. Only the owner of the pipe or root can.
            let (owner, group) = (Uid::from_raw(like.st_uid), Gid::from_raw(like.st_gid));
            if fchown(&pipe, Some(owner), Some(group)).is_err() {
                let _ = fchown(&pipe, None, Some(group));
            }
            let _ = fchmod(&pipe, mode_like(&like));
            let pipe = Arc::new(pipe);
            let (ends, ended) = oneshot::channel();
            let listening = listen(Arc::clone(&pipe), ended, heard);
            Executor::default().spawn(listening).map_err(io::Error::other)?;
            Ok(Self { pipe, _ends: ends })
        }

        pub(super) fn is_removed(&self) -> bool {
            fstat(&self.pipe).is_ok_and(|file| file.st_nlink == 0)
        }

        pub(super) fn write(&self) {
            // Some kernels report only a write into an empty pipe, and a full one takes none. Mostly there is one byte in it.
            let _ = read(&self.pipe, &mut [0; 4_096][..]);
            let _ = write(&self.pipe, b"1");
        }
    }

    async fn listen(pipe: Arc<OwnedFd>, mut ended: oneshot::Receiver<()>, heard: impl Fn() + Send) {
        #[allow(deprecated, reason = "its successor is unsafe, and asks for what an `OwnedFd` is")]
        let Ok(pipe) = AsyncFd::with_interest(pipe, Interest::READABLE) else {
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
            heard();
        }
    }

    /// Both rights for everyone who may write to the database, and none for the others, who could only take wake-ups away.
    fn mode_like(database: &Stat) -> Mode {
        let writes = database.st_mode & 0o222;
        Mode::from_raw_mode(writes | writes << 1)
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod pipe {
    use std::io::{ErrorKind, Result};
    use std::path::Path;

    pub(super) struct Pipe;

    impl Pipe {
        pub(super) fn open(_database: &Path, _heard: impl Fn() + Send + 'static) -> Result<Self> {
            Err(ErrorKind::Unsupported.into())
        }

        pub(super) fn is_removed(&self) -> bool {
            false
        }

        pub(super) fn write(&self) {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[tokio::test]
    async fn of_several_claims_that_wait_only_those_are_woken_that_may_go_on() {
        let finds = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&finds);
        let wake = Wake::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let owners = [OwnerId::random(), OwnerId::random()];
        let [first, second] = owners.map(|owner| wake.join(owner));
        // Wake-ups ask the client once before it begins, and once more after that.
        wake.heard();
        wake.heard();
        wake.begin_to_find();
        wake.heard();
        wake.wake(Some(&owners[1..]));
        second.notified().await;
        assert_eq!(finds.load(Ordering::Relaxed), 2);
        wake.leave(owners[1]);
        let woken = first.notified();
        tokio::pin!(woken);
        assert!(!woken.as_mut().enable(), "it was woken for another name");
        // One alone looks by itself.
        wake.heard();
        woken.await;
    }
}
