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
use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Stat, Uid, fchmod, fchown, fstat, lstat, mknodat, open, stat};
use rustix::io::{Errno, read, write};

/// Marks events of the pipe; those of the [`Alarm`] have another number.
const PIPE: u64 = 1;

/// What is read at once, and how often, to empty a pipe that somebody has filled.
const PAGE: usize = 4_096;
const PAGES: usize = 16;

/// The open pipe.
#[derive(Debug)]
pub(crate) struct WakePipe {
    pipe: OwnedFd,
    /// Set while this client listens.
    listening: Option<OwnedFd>,
}

impl WakePipe {
    /// Opens the pipe at `path`, or makes one, for all who may write to `database`.
    pub(crate) fn open(path: &Path, database: &Path) -> io::Result<Self> {
        let like = stat(database)?;
        if let Some(there) = existing(path)? {
            // Not opened to find out: closing a database of that name would drop SQLite's locks on it.
            if FileType::from_raw_mode(there.st_mode) != FileType::Fifo {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a named pipe"));
            }
        } else {
            match mknodat(CWD, path, FileType::Fifo, mode_like(&like), 0) {
                // Another process was faster.
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let pipe = open(path, flags, Mode::empty())?;
        let opened = fstat(&pipe)?;
        if FileType::from_raw_mode(opened.st_mode) != FileType::Fifo {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a named pipe"));
        }
        // It may be another program's, which a user of this directory has given this name.
        if opened.st_nlink > 1 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a pipe with another name"));
        }
        share(&pipe, &opened, &like);
        Ok(Self { pipe, listening: None })
    }

    /// Whether the pipe has been removed, so that other clients use another one.
    pub(crate) fn is_removed(&self) -> bool {
        fstat(&self.pipe).is_ok_and(|file| file.st_nlink == 0)
    }

    /// Wakes every client that listens.
    pub(crate) fn wake_all(&self) {
        // Some kernels report only a write into an empty pipe, and a full one takes none. Mostly there is one byte in it.
        for _ in 0..PAGES {
            if read(&self.pipe, &mut [0; PAGE][..]) != Ok(PAGE) {
                break;
            }
        }
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

fn existing(path: &Path) -> io::Result<Option<Stat>> {
    match lstat(path) {
        Ok(file) => Ok(Some(file)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Both rights for everyone who may write to the database, and none for the others, who could only take wake-ups away.
fn mode_like(database: &Stat) -> Mode {
    let database = Mode::from_raw_mode(database.st_mode);
    let classes = [
        (Mode::WUSR, Mode::RUSR | Mode::WUSR),
        (Mode::WGRP, Mode::RGRP | Mode::WGRP),
        (Mode::WOTH, Mode::ROTH | Mode::WOTH),
    ];
    let allowed = classes.into_iter().filter(|(write, _)| database.contains(*write));
    allowed.fold(Mode::empty(), |mode, (_, both)| mode | both)
}

/// Gives the pipe to the users of the database, which may have become others since it was made. Only its owner or root can.
/// Users who cannot open it look more often.
fn share(pipe: &OwnedFd, opened: &Stat, database: &Stat) {
    let (owner, group) = (Uid::from_raw(database.st_uid), Gid::from_raw(database.st_gid));
    // Only root can give it to another user, but its owner can to another group.
    if (opened.st_uid, opened.st_gid) != (database.st_uid, database.st_gid)
        && fchown(pipe, Some(owner), Some(group)).is_err()
    {
        let _ = fchown(pipe, None, Some(group));
    }
    let mode = mode_like(database);
    if Mode::from_raw_mode(opened.st_mode) != mode {
        let _ = fchmod(pipe, mode);
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
    fn who_may_write_to_the_database_may_use_the_pipe() {
        let dir = tempfile::tempdir().unwrap();
        let (path, database) = beside(&dir);
        // It is made once, and follows the database.
        for (mode, wanted) in [(0o644, 0o600), (0o660, 0o660), (0o666, 0o666), (0o640, 0o600)] {
            fs::set_permissions(&database, fs::Permissions::from_mode(mode)).unwrap();
            WakePipe::open(&path, &database).unwrap();
            let found = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            assert_eq!(found, wanted, "{found:o} instead of {wanted:o} for {mode:o}");
        }
    }

    #[test]
    fn a_pipe_that_somebody_filled_or_emptied_still_wakes() {
        let dir = tempfile::tempdir().unwrap();
        let (path, database) = beside(&dir);
        let alarm = Alarm::new();
        let mut pipe = WakePipe::open(&path, &database).unwrap();
        pipe.listen(&alarm).unwrap();
        let stranger = WakePipe::open(&path, &database).unwrap();
        while write(&stranger.pipe, &[0; PAGE]).is_ok() {}
        assert!(pipe.sleep(LONG));
        stranger.wake_all();
        assert!(pipe.sleep(LONG), "full");
        while read(&stranger.pipe, &mut [0; PAGE][..]).is_ok() {}
        stranger.wake_all();
        assert!(pipe.sleep(LONG), "empty");
    }

    #[test]
    fn what_is_no_pipe_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let (path, database) = beside(&dir);
        fs::write(&path, "").unwrap();
        WakePipe::open(&path, &database).unwrap_err();
        fs::remove_file(&path).unwrap();
        WakePipe::open(&path, &database).unwrap();
        let other = dir.path().join("other");
        fs::hard_link(&path, &other).unwrap();
        WakePipe::open(&path, &database).unwrap_err();
        fs::remove_file(&other).unwrap();
        let pipe = WakePipe::open(&path, &database).unwrap();
        assert!(!pipe.is_removed());
        fs::remove_file(&path).unwrap();
        assert!(pipe.is_removed());
    }
}
