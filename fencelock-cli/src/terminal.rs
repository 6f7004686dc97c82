//! The terminal, which one process group at a time may use.
//!
//! The command has a process group of its own, so that all of it can be ended. It starts in the background. Only when
//! it needs the terminal, which stops it with SIGTTIN or SIGTTOU, the terminal is lent to it. So pipelines, loops and
//! scripts around `fencelock run` get Ctrl-C and Ctrl-Z as ever, and a pager beside it keeps its keyboard.

use std::io::stderr;
use std::os::fd::OwnedFd;

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, getpid};
use rustix::termios::{tcgetpgrp, tcgetwinsize, tcsetpgrp};

use crate::processes::group_of;

/// How many columns the terminal at stderr has; 80 where it does not know that itself.
pub(crate) fn width() -> usize {
    let known = tcgetwinsize(stderr()).map_or(0, |size| usize::from(size.ws_col));
    if known == 0 { 80 } else { known }
}

/// The controlling terminal of this process.
#[derive(Debug)]
pub(crate) struct Terminal {
    device: OwnedFd,
    home: Pid,
}

impl Terminal {
    /// The terminal, if this process has one. `home` is the group that has it when nobody borrows it.
    pub(crate) fn open(home: Pid) -> Option<Self> {
        let device = open(
            "/dev/tty",
            OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .ok()?;
        Some(Self { device, home })
    }

    /// The terminal as this process's group uses it.
    pub(crate) fn own() -> Option<Self> {
        Self::open(group_of(getpid())?)
    }

    /// Whether the home group is in the foreground.
    pub(crate) fn is_home(&self) -> bool {
        self.is_at(self.home)
    }

    /// Whether `group` is in the foreground.
    pub(crate) fn is_at(&self, group: Pid) -> bool {
        tcgetpgrp(&self.device).is_ok_and(|foreground| foreground == group)
    }

    /// Puts `group` in the foreground if the home group is there.
    pub(crate) fn lend(&self, group: Pid) {
        if self.is_home() {
            self.give(group);
        }
    }

    /// Puts the home group in the foreground again if `group` is there.
    pub(crate) fn take_back(&self, group: Pid) {
        if self.is_at(group) {
            self.give(self.home);
        }
    }

    fn give(&self, group: Pid) {
        // A background process that does this gets SIGTTOU, unless it is blocked.
        let mut stop = SigSet::empty();
        stop.add(Signal::SIGTTOU);
        let before = stop.thread_swap_mask(SigmaskHow::SIG_BLOCK);
        if let Err(error) = tcsetpgrp(&self.device, group) {
            tracing::debug!(target: "fencelock", %error, ?group, "the terminal could not be handed over");
        }
        if let Ok(before) = before {
            let _ = before.thread_set_mask();
        }
    }
}
