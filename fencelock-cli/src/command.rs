//! The command: what becomes it once the watchdog knows it, and its processes.

use std::env::ArgsOs;
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use nix::sys::signal::Signal::SIGPIPE;
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, kill_process_group, test_kill_process_group, waitpid,
};

use crate::exit::{NOT_EXECUTABLE, NOT_FOUND, by_signal};
use crate::inherited;
use crate::output::say;
use crate::signals::unblock;

/// What the process is called until it is the command.
pub(crate) const STARTER: &str = "lock-starter";

/// A process that waits for leave to become the command. Without leave it ends: a command that no watchdog knows must not run.
pub(crate) struct Starter {
    pub(crate) pid: Pid,
    leave: PipeWriter,
}

impl Starter {
    /// Starts it, in a process group of its own if it is `apart`. It unblocks those signals.
    pub(crate) fn start(
        command: &[OsString],
        set: impl IntoIterator<Item = (&'static str, String)>,
        blocked: &str,
        apart: bool,
    ) -> io::Result<Self> {
        let (gate, leave) = io::pipe()?;
        fcntl_setfd(&gate, FdFlags::empty())?;
        let mut starter = Command::new("/proc/self/exe");
        starter.arg0(STARTER).arg(gate.as_raw_fd().to_string()).arg(blocked);
        // The standard library resets it in what it starts.
        starter.arg(if inherited::ignores(SIGPIPE) { IGNORED } else { "" });
        starter.args(command).envs(set);
        if apart {
            starter.process_group(0);
        }
        let child = starter.spawn()?;
        let pid = Pid::from_raw(child.id() as i32).ok_or_else(|| io::Error::other("a process without a number"))?;
        Ok(Self { pid, leave })
    }

    /// Ends it without leave. It is waited for: not every init would do so.
    pub(crate) fn end(self) {
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }

    /// Lets it become the command.
    pub(crate) fn go(mut self) {
        let _ = self.leave.write_all(b".");
    }
}

/// Said of SIGPIPE if the caller ignores it.
const IGNORED: &str = "ignored";

/// Becomes the command in `args`, after the descriptor that leave is read from, the signals to unblock, and whether SIGPIPE is ignored.
pub(crate) fn main(mut args: ArgsOs) -> ExitCode {
    let gate: Option<i32> = args.next().and_then(|number| number.to_str()?.parse().ok());
    let (blocked, pipe) = (args.next().unwrap_or_default(), args.next());
    let (Some(gate), Some(program)) = (gate, args.next()) else {
        return ExitCode::from(NOT_EXECUTABLE);
    };
    // Opened anew, it is closed in the command.
    let opened = File::open(format!("/proc/self/fd/{gate}"));
    let _ = nix::unistd::close(gate);
    if opened.and_then(|mut gate| gate.read_exact(&mut [0])).is_err() {
        return ExitCode::from(by_signal(nix::libc::SIGKILL));
    }
    unblock(&blocked.to_string_lossy());
    let error = match pipe {
        // The standard library ignores it in this process, and would reset it here, too.
        Some(pipe) if pipe == IGNORED => execute(&program, args),
        _ => Command::new(&program).args(args).exec(),
    };
    let program = match program.to_string_lossy() {
        empty if empty.is_empty() => "an empty name".to_owned(),
        program => program.escape_debug().to_string(),
    };
    say(format_args!("{program} cannot be run: {error}"));
    ExitCode::from(match error.kind() {
        ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    })
}

/// Becomes the program, with the signals that this process ignores.
fn execute(program: &OsStr, args: ArgsOs) -> io::Error {
    let words = [program.to_owned()].into_iter().chain(args);
    let words: Result<Vec<_>, _> = words.map(|word| CString::new(word.as_bytes())).collect();
    match words.map(|words| nix::unistd::execvp(&words[0], &words)) {
        Ok(Err(error)) => error.into(),
        Err(nul) => nul.into(),
    }
}

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
