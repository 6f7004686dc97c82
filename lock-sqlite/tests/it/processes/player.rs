//! A process that is started to play a role: this same binary.

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use lock_core::FencingToken;
use rustix::process::{Pid, Signal, kill_process};

use crate::file::File;

/// The variable that names the role.
pub(crate) const ROLE: &str = "FENCELOCK_TEST_ROLE";
/// The variable that names the path of the database.
pub(crate) const PATH: &str = "FENCELOCK_TEST_PATH";
/// What has this program play a role. With two threads the harness prints nothing more while the test runs.
const ARGUMENTS: [&str; 6] = [
    "--exact",
    "processes::a_process_plays_its_role",
    "--ignored",
    "--nocapture",
    "--quiet",
    "--test-threads=2",
];
/// What lines of a role begin with: the test harness prints lines as well.
pub(crate) const SAID: &str = "> ";

/// Tells the test that started this process.
pub(crate) fn say(what: impl Display) {
    println!("{SAID}{what}");
}

/// What was said in a line that has ended.
pub(crate) fn said(line: &str) -> Option<&str> {
    let (_, said) = line.strip_suffix('\n')?.split_once(SAID)?;
    Some(said)
}

/// A started process that plays a role.
pub(crate) struct Player {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Player {
    pub(crate) fn start(role: &str, file: &File) -> Self {
        Self::spawn(Self::command(role, file))
    }

    pub(crate) fn command(role: &str, file: &File) -> Command {
        Self::command_by(&[], role, &file.path())
    }

    /// The same, started by the program and the arguments before it, on the database at `path`.
    pub(crate) fn command_by(before: &[&str], role: &str, path: &Path) -> Command {
        let program = std::env::current_exe().unwrap();
        let words = before.iter().map(OsStr::new).chain([program.as_os_str()]);
        let mut words = words.chain(ARGUMENTS.iter().map(OsStr::new));
        let mut command = Command::new(words.next().unwrap());
        command.args(words).env(ROLE, role).env(PATH, path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
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
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the process has ended");
            if let Some(said) = said(&line) {
                return said.to_owned();
            }
        }
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
