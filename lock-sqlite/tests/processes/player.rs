//! A process that is started to play a role: this same binary.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use lock_core::FencingToken;
use rustix::process::{Pid, Signal, kill_process};

use crate::file::File;

/// The variable that names the role.
pub(crate) const ROLE: &str = "FENCELOCK_TEST_ROLE";

/// A started process that plays a role.
pub(crate) struct Player {
    child: Child,
    input: Option<ChildStdin>,
    pub(crate) output: BufReader<ChildStdout>,
}

impl Player {
    pub(crate) fn start(role: &str, file: &File) -> Self {
        Self::spawn(Self::command(role, file))
    }

    pub(crate) fn command(role: &str, file: &File) -> Command {
        let mut command = Self::with_role(Command::new(std::env::current_exe().unwrap()), role);
        command.arg(file.path());
        command
    }

    pub(crate) fn with_role(mut command: Command, role: &str) -> Command {
        command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        Self {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub(crate) fn ask(&mut self, what: &str) -> String {
        writeln!(self.input.as_mut().unwrap(), "{what}").unwrap();
        self.line()
    }

    pub(crate) fn take(&mut self, ttl: Duration) -> FencingToken {
        self.ask(&format!("take {}", ttl.as_millis())).parse().unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end, and for the rest of what it said.
    pub(crate) fn rest(mut self) -> String {
        self.input = None;
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        self.child.wait().unwrap();
        rest
    }

    /// Waits for its good end.
    pub(crate) fn finish(mut self) {
        self.input = None;
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // A test that failed leaves no process behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
