//! Which processes descend from this one, as `/proc` tells it.

use std::fs;
use std::io;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, kill_process, pidfd_open, pidfd_send_signal};

/// A process as it was when it was looked at.
///
/// A parent, group or session that is outside this process's pid namespace has the number 0, as when a container or
/// `unshare --pid` was entered without a new session. The system calls say so, too, but rustix's wrappers of `getpgrp`,
/// `getpgid` and `getsid` do not expect it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    parent: i32,
    pub(crate) group: i32,
    pub(crate) session: i32,
    /// Ended, and not yet asked about by its parent.
    zombie: bool,
    /// Tells it from a later process of the same number.
    started: u64,
}

impl Process {
    /// Sends a signal to this very process, if it is still there.
    pub(crate) fn signal(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.pid) else { return };
        // What is opened stays the same process, so that the look after it counts.
        let opened = pidfd_open(pid, PidfdFlags::empty());
        let same = read(self.pid).is_some_and(|now| now.started == self.started);
        let sent = match opened {
            _ if !same => Ok(()),
            Ok(process) => pidfd_send_signal(process, signal),
            Err(Errno::SRCH) => Ok(()),
            // Some sandboxes forbid it.
            Err(_) => kill_process(pid, signal),
        };
        if let Err(error) = sent
            && error != Errno::SRCH
        {
            tracing::warn!(target: "fencelock", pid = self.pid, %error, "a process could not be signalled");
        }
    }
}

/// Whether `/proc` shows the processes of this process's pid namespace, under the numbers that system calls know them by. It
/// shows those of another one after `unshare --pid` without `--mount-proc`, for example.
pub(crate) fn proc_is_ours() -> bool {
    let own = getpid().as_raw_nonzero().get();
    fs::read_link("/proc/self").is_ok_and(|link| link.as_os_str() == own.to_string().as_str())
}

/// Everything alive that descends from this process.
pub(crate) fn descendants() -> Vec<Process> {
    below(getpid().as_raw_nonzero().get(), &all())
}

/// This process.
pub(crate) fn own() -> Option<Process> {
    read(getpid().as_raw_nonzero().get())
}

/// The group of a process, if it can be named here.
pub(crate) fn group_of(pid: Pid) -> Option<Pid> {
    Pid::from_raw(read(pid.as_raw_nonzero().get())?.group)
}

/// The other members of this process's group.
pub(crate) fn companions() -> Vec<Process> {
    // Members of several groups outside look like one group 0.
    let Some(own) = own().filter(|own| own.group != 0) else {
        return Vec::new();
    };
    let mut all = all();
    all.retain(|process| process.group == own.group && process.pid != own.pid && !process.zombie);
    all
}

/// Whether this process's group is orphaned: no shell watches it that could continue what it sees stopped.
pub(crate) fn in_orphaned_group() -> bool {
    let Some(own) = own() else { return true };
    let all = all();
    let is_watched = |member: &&Process| {
        let parent = all.iter().find(|p| p.pid == member.parent);
        parent.is_some_and(|parent| parent.session == own.session && parent.group != own.group)
    };
    !all.iter().filter(|p| p.group == own.group).any(|p| is_watched(&p))
}

fn below(root: i32, all: &[Process]) -> Vec<Process> {
    let mut found: Vec<Process> = Vec::new();
    let mut parents = vec![root];
    while let Some(parent) = parents.pop() {
        for process in all.iter().filter(|p| p.parent == parent && p.pid != parent) {
            parents.push(process.pid);
            if !process.zombie {
                found.push(*process);
            }
        }
    }
    found
}

fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(read).collect()
}

fn read(pid: i32) -> Option<Process> {
    parse(pid, &fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// `pid (name) state parent group session ... started ...`; the name may hold anything, brackets too.
fn parse(pid: i32, stat: &[u8]) -> Option<Process> {
    let name_end = stat.iter().rposition(|&b| b == b')')?;
    let rest = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
    let words: Vec<&str> = rest.split_ascii_whitespace().collect();
    let number = |at: usize| words.get(at)?.parse().ok();
    Some(Process {
        pid,
        parent: number(1)?,
        group: number(2)?,
        session: number(3)?,
        zombie: matches!(*words.first()?, "Z" | "X" | "x"),
        started: words.get(19)?.parse().ok()?,
    })
}

/// The signals that this process ignores, as bits: bit 0 is signal 1. Whoever started it chose so, and a command run by
/// it is to ignore them too.
pub(crate) fn ignored_signals() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .ok_or_else(|| io::Error::other("/proc/self/status has no SigIgn"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_and_blanks_is_no_obstacle() {
        let line = b"42 (a) b (c) S 7 8 9 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 0 0\n";
        let process = parse(42, line).unwrap();
        assert_eq!(
            (process.parent, process.group, process.session, process.started),
            (7, 8, 9, 12345)
        );
        assert!(!process.zombie);
        assert!(parse(42, b"42 (a) Z 7").is_none());
    }

    #[test]
    fn descendants_are_found_at_any_depth() {
        let process = |pid, parent, zombie| Process {
            pid,
            parent,
            group: 1,
            session: 1,
            zombie,
            started: 0,
        };
        let all = [
            process(1, 0, false),
            process(2, 1, false),
            process(3, 2, false),
            process(4, 2, true),
            process(5, 1, false),
        ];
        let mut pids: Vec<_> = below(2, &all).iter().map(|p| p.pid).collect();
        pids.sort_unstable();
        assert_eq!(pids, [3]);
        assert_eq!(below(1, &all).len(), 3);
    }

    #[test]
    fn this_process_is_read() {
        let me = getpid().as_raw_nonzero().get();
        let found = all().into_iter().find(|p| p.pid == me).unwrap();
        assert_eq!(Some(found), read(me));
        assert!(ignored_signals().is_ok());
    }
}
