//! The processes of a command.

use std::fs;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, kill_process_group, test_kill_process_group};

/// The command, and the process group in which it and what it starts are. Whatever leaves the group is not reached.
///
/// Without a terminal the command is the head of a group of its own. On a terminal it shares the group of `fencelock`, the job that the
/// shell knows: so the keyboard, Ctrl-C and Ctrl-Z work as they do without `fencelock`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) command: Pid,
    pub(crate) group: Pid,
}

impl Target {
    pub(crate) fn is_shared(self) -> bool {
        self.command != self.group
    }

    /// Sends a signal to the whole group. Fails if that reaches none of its processes.
    pub(crate) fn signal(self, signal: Signal) -> Result<(), Errno> {
        kill_process_group(self.group, signal)
    }

    /// Whether a process of the group is left. The system also counts those that have ended, until their parent asks about them, which
    /// the init of many a container never does: `/proc` tells them apart, where it shows the processes of this pid namespace.
    pub(crate) fn is_left(self) -> bool {
        if test_kill_process_group(self.group) == Err(Errno::SRCH) {
            return false;
        }
        let own = getpid().as_raw_nonzero().to_string();
        let is_ours = fs::read_link("/proc/self").is_ok_and(|link| link.as_os_str() == own.as_str());
        let Ok(entries) = fs::read_dir("/proc") else {
            return true;
        };
        let states = entries.filter_map(|entry| state_in(&entry.ok()?.path(), self.group));
        let states: Vec<char> = states.collect();
        // Those of other users may be hidden.
        !is_ours || states.is_empty() || states.iter().any(|state| !matches!(state, 'Z' | 'X'))
    }

    /// Why processes that got SIGKILL are left.
    pub(crate) fn why_left(self) -> &'static str {
        match test_kill_process_group(self.group) {
            Err(Errno::PERM) => "they run as another user, who may not be signalled",
            _ => "SIGKILL has no effect on them so far: they hang in the kernel, or run as another user",
        }
    }
}

/// The state of the process with that folder in `/proc`, if it is of the group.
fn state_in(process: &Path, group: Pid) -> Option<char> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    // State, parent and group follow the name, which may hold anything.
    let mut words = stat.rsplit_once(") ")?.1.split(' ');
    let state = words.next()?.chars().next();
    state.filter(|_| words.nth(1) == Some(&group.as_raw_nonzero().to_string()))
}
