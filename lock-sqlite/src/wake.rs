//! A named pipe beside the database, through which a release wakes the clients that wait in other processes.
//!
//! The client that frees a name leaves one byte in the pipe, and nobody reads it: `epoll` reports each write once to every
//! client that listens (`EPOLLET`). A pipe, unlike an inotify instance, counts against no limit of its user.
//!
//! Wake-ups only save time. A waiter whose wake-up is lost finds the change at its next planned look, and a client that
//! cannot open the pipe looks more often.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Uid, fchmod, fchown, fstat, mknodat, open, stat};
use rustix::io::{Errno, read, write};

/// Marks events of the pipe; those of the [`Alarm`] have another number.
const PIPE: u64 = 1;

/// Enough to make room in a pipe that somebody has filled.
const PAGE: usize = 4_096;

/// The open pipe.
#[derive(Debug)]
pub(crate) struct WakePipe {
    pipe: OwnedFd,
    /// Set while this client listens.
    listening: Option<OwnedFd>,
}

impl WakePipe {
    /// Opens the pipe at `path`, or makes one that the users of `database` may use.
    pub(crate) fn open(path: &Path, database: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let pipe = match open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) => {
                let like = stat(database)?;
                let mode = Mode::from_raw_mode(like.st_mode) & (Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP);
                match mknodat(CWD, path, FileType::Fifo, mode, 0) {
                    Ok(()) => {
                        let pipe = open(path, flags, Mode::empty())?;
                        // As SQLite does with its own files. Without it other users look more often.
                        let _ = fchown(
                            &pipe,
                            Some(Uid::from_raw(like.st_uid)),
                            Some(Gid::from_raw(like.st_gid)),
                        );
                        let _ = fchmod(&pipe, mode);
                        pipe
                    }
                    // Another process was faster.
                    Err(Errno::EXIST) => open(path, flags, Mode::empty())?,
                    Err(error) => return Err(error.into()),
                }
            }
            opened => opened?,
        };
        if FileType::from_raw_mode(fstat(&pipe)?.st_mode) != FileType::Fifo {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a named pipe"));
        }
        Ok(Self { pipe, listening: None })
    }

    /// Whether the pipe has been removed, so that other clients use another one.
    pub(crate) fn is_removed(&self) -> bool {
        fstat(&self.pipe).is_ok_and(|file| file.st_nlink == 0)
    }

    /// Wakes every client that listens.
    pub(crate) fn wake_all(&self) {
        // Some kernels report only a write into an empty pipe.
        let _ = read(&self.pipe, &mut [0; PAGE][..]);
        if let Err(error) = write(&self.pipe, b"1") {
            tracing::debug!(target: "fencelock", %error, "those who wait in other processes were not woken");
        }
    }

    pub(crate) fn is_listening(&self) -> bool {
        self.listening.is_some()
    }

    /// Listens from now on. A wake-up of before may be reported once more.
    pub(crate) fn listen(&mut self, alarm: &Alarm) -> io::Result<()> {
        if self.listening.is_some() {
            return Ok(());
        }
        let Some(event) = &alarm.event else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, event, EventData::new_u64(0), flags)?;
        epoll::add(&epoll, &self.pipe, EventData::new_u64(PIPE), flags)?;
        self.listening = Some(epoll);
        Ok(())
    }

    /// Sleeps until a wake-up comes, the alarm is raised, or `limit` is over. True after a wake-up.
    pub(crate) fn sleep(&self, limit: Duration) -> bool {
        let Some(epoll) = &self.listening else { return false };
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 2];
        // A day is longer than anything that is waited for here.
        let limit = Timespec::try_from(limit.min(Duration::from_secs(86_400))).ok();
        match epoll::wait(epoll, &mut events, limit.as_ref()) {
            Ok(count) => events[..count].iter().any(|event| event.data.u64() == PIPE),
            // Interrupted.
            Err(_) => false,
        }
    }
}

/// Ends the sleep of a client's thread when there is a request for it.
#[derive(Debug)]
pub(crate) struct Alarm {
    asleep: AtomicBool,
    event: Option<OwnedFd>,
}

impl Alarm {
    /// Without a descriptor to be had the client does not listen.
    pub(crate) fn new() -> Self {
        Self {
            asleep: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok(),
        }
    }

    /// To be called after a request was queued.
    pub(crate) fn raise(&self) {
        // Either this sees that the thread is about to sleep, or the thread sees the request.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed)
            && let Some(event) = &self.event
        {
            let _ = write(event, &1_u64.to_ne_bytes());
        }
    }

    /// Looks for a request by `next`, and sleeps if there is none, and looks again.
    pub(crate) fn sleep_unless<T>(&self, mut next: impl FnMut() -> Option<T>, sleep: impl FnOnce()) -> Option<T> {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let found = next().or_else(|| {
            sleep();
            next()
        });
        self.asleep.store(false, Ordering::Relaxed);
        found
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::{fs, thread};

    use super::*;

    /// Longer than a machine stands still.
    const LONG: Duration = Duration::from_secs(60);

    fn beside(dir: &tempfile::TempDir) -> (PathBuf, PathBuf) {
        let database = dir.path().join("a.db");
        fs::write(&database, "").unwrap();
        (dir.path().join("a.db-wake"), database)
    }

    #[test]
    fn each_wake_up_reaches_every_client_that_listens() {
        let dir = tempfile::tempdir().unwrap();
        let (path, database) = beside(&dir);
        let open = || WakePipe::open(&path, &database).unwrap();
        let (sender, alarm) = (open(), Alarm::new());
        let mut listeners = [open(), open()];
        for listener in &mut listeners {
            listener.listen(&alarm).unwrap();
            assert!(!listener.sleep(Duration::ZERO));
        }
        for _ in 0..100 {
            sender.wake_all();
            for listener in &listeners {
                assert!(listener.sleep(LONG));
                assert!(!listener.sleep(Duration::ZERO), "reported twice");
            }
        }
    }

    #[test]
    fn an_alarm_ends_the_sleep() {
        let dir = tempfile::tempdir().unwrap();
        let (path, database) = beside(&dir);
        let alarm = Arc::new(Alarm::new());
        let mut pipe = WakePipe::open(&path, &database).unwrap();
        pipe.listen(&alarm).unwrap();
        let (send, requests) = std::sync::mpsc::channel();
        let raising = Arc::clone(&alarm);
        let sender = thread::spawn(move || {
            for request in 0..1_000 {
                send.send(request).unwrap();
                raising.raise();
            }
        });
        for request in 0..1_000 {
            let next = || requests.try_recv().ok();
            let mut got = None;
            while got.is_none() {
                got = alarm.sleep_unless(next, || _ = pipe.sleep(LONG));
            }
            assert_eq!(got, Some(request));
        }
        sender.join().unwrap();
    }

    #[test]
    fn the_users_of_the_database_may_use_the_pipe() {
        let dir = tempfile::tempdir().unwrap();
        let (path, database) = beside(&dir);
        fs::set_permissions(&database, fs::Permissions::from_mode(0o660)).unwrap();
        WakePipe::open(&path, &database).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
    }

    #[test]
    fn what_is_no_pipe_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let (path, database) = beside(&dir);
        fs::write(&path, "").unwrap();
        WakePipe::open(&path, &database).unwrap_err();
        fs::remove_file(&path).unwrap();
        let pipe = WakePipe::open(&path, &database).unwrap();
        assert!(!pipe.is_removed());
        fs::remove_file(&path).unwrap();
        assert!(pipe.is_removed());
    }
}
