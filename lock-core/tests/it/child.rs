//! Tests that need a process of their own.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;

use crate::HANG_LIMIT;

/// Names the test that a child process runs.
const TEST: &str = "LOCK_CORE_TEST_IN_CHILD";

/// A process that runs one test of this program. Killed on drop.
pub(crate) struct Child {
    process: std::process::Child,
    lines: Receiver<String>,
}

impl Child {
    /// Starts a process that runs that test alone, in which [`is_child`] is true.
    ///
    /// `test` is the path of a test of this program, as libtest prints it.
    pub(crate) fn start(test: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(TEST, test)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let (send, lines) = channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        Self { process, lines }
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Waits for the next line of its output, among which are those of libtest: the path of the test can stand before the first one.
    /// Returns `None` at the end.
    pub(crate) fn next_line(&mut self) -> Option<String> {
        match self.lines.recv_timeout(HANG_LIMIT) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("the child hangs"),
        }
    }

    /// Waits for its end, which must be a success.
    pub(crate) fn succeeds(&mut self) {
        let status = self.process.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It fails if the child has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Whether this process was started to run that test alone.
pub(crate) fn is_child(test: &str) -> bool {
    std::env::var(TEST).is_ok_and(|name| name == test)
}
