//! Stands in for `wake.rs` on systems without `epoll`: clients there look more often.

use std::io;
use std::path::Path;
use std::time::Duration;

/// There is none.
#[derive(Debug)]
pub(crate) enum WakePipe {}

impl WakePipe {
    pub(crate) fn open(_path: &Path, _database: &Path) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn is_removed(&self) -> bool {
        match *self {}
    }

    pub(crate) fn wake_all(&self) {
        match *self {}
    }

    pub(crate) fn is_listening(&self) -> bool {
        match *self {}
    }

    pub(crate) fn listen(&mut self, _alarm: &Alarm) -> io::Result<()> {
        match *self {}
    }

    pub(crate) fn sleep(&self, _limit: Duration) -> bool {
        match *self {}
    }
}

/// Nothing sleeps.
#[derive(Debug)]
pub(crate) struct Alarm;

impl Alarm {
    pub(crate) fn new() -> Self {
        Self
    }

    pub(crate) fn raise(&self) {}

    pub(crate) fn sleep_unless<T>(&self, mut next: impl FnMut() -> Option<T>, sleep: impl FnOnce()) -> Option<T> {
        next().or_else(|| {
            sleep();
            next()
        })
    }
}
