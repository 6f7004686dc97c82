//! A process that is started to play a role: this same binary.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::Signal;

use crate::server::{Server, signal_process};

/// The variable that names the role.
pub(crate) const ROLE: &str = "FENCELOCK_TEST_ROLE";

/// A started process that plays a role.
pub(crate) struct Player {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Player {
    /// Starts it, and waits until it is connected.
    pub(crate) fn start(role: &str, server: &Server) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg(server.port().to_string())
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut player = Self {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        };
        assert_eq!(player.line(), "ready");
        player
    }

    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub(crate) fn say(&mut self, what: &str) {
        writeln!(self.input.as_mut().unwrap(), "{what}").unwrap();
    }

    pub(crate) fn ask(&mut self, what: &str) -> String {
        self.say(what);
        self.line()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        signal_process(self.child.id(), signal);
    }

    /// Waits for its good end, and for the rest of what it said.
    pub(crate) fn finish(mut self) -> String {
        self.input = None;
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
        rest
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // A test that failed leaves no process behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
