//! What becomes the command, once the watchdog knows it.

use std::env::ArgsOs;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::Pid;

use crate::exit::{NOT_EXECUTABLE, NOT_FOUND, by_signal};
use crate::say::say;
use crate::signals::unblock;

/// What the process is called until it is the command.
pub(crate) const NAME: &str = "lock-starter";

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
        starter.arg0(NAME).arg(gate.as_raw_fd().to_string()).arg(blocked);
        starter.args(command).envs(set);
        if apart {
            starter.process_group(0);
        }
        let child = starter.spawn()?;
        let pid = Pid::from_raw(child.id() as i32).ok_or_else(|| io::Error::other("a process without a number"))?;
        Ok(Self { pid, leave })
    }

    /// Lets it become the command.
    pub(crate) fn go(mut self) {
        let _ = self.leave.write_all(b".");
    }
}

/// Becomes the command in `args`, after the number of the descriptor that leave is read from, and the signals to unblock.
pub(crate) fn main(mut args: ArgsOs) -> ExitCode {
    let gate: Option<i32> = args.next().and_then(|number| number.to_str()?.parse().ok());
    let blocked = args.next().unwrap_or_default();
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
    let error = Command::new(&program).args(args).exec();
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
