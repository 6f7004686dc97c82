//! Processes that tests start: this same program, in which [`role`] alone runs.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, WaitOptions, waitpid};

use crate::server::{Server, signal_process};
use crate::{processes, warnings};

/// Names what a started process does.
const ROLE: &str = "FENCELOCK_TEST_ROLE";

/// The port of the server that it uses.
const PORT: &str = "FENCELOCK_TEST_PORT";

/// Begins each line that a process tells: the test harness writes lines of its own.
const MARK: &str = "> ";

/// What a started process does.
#[tokio::test]
#[ignore = "started by other tests, as a process of its own"]
async fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let port = std::env::var(PORT).unwrap().parse().unwrap();
    // The harness may have begun a line.
    println!();
    match &*role {
        "take turns" => processes::take_turns(port).await,
        "lock" => processes::lock(port).await,
        "keep a server" => processes::keep_a_server(),
        "log warnings" => warnings::log(port).await,
        other => panic!("no role {other}"),
    }
    std::process::exit(0);
}

/// Tells a line to the test that started this process.
pub(crate) fn tell(line: impl std::fmt::Display) {
    println!("{MARK}{line}");
}

/// Waits for a line of the test that started this process; `None` if there is no more.
pub(crate) fn listen() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line).unwrap();
    (read > 0).then(|| line.trim_end().to_owned())
}

/// A started process that plays a role.
pub(crate) struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts it, and waits until it is connected.
    pub(crate) fn start(role: &str, server: &Server) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::role", "--ignored", "--nocapture", "--quiet"])
            .env(ROLE, role)
            .env(PORT, server.port().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut process = Self {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        };
        assert_eq!(process.line(), "ready");
        process
    }

    /// The next line that it tells.
    pub(crate) fn line(&mut self) -> String {
        self.next().expect("the process has ended")
    }

    fn next(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(told) = line.strip_prefix(MARK) {
                return Some(told.trim_end().to_owned());
            }
        }
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

    /// Stops it, and waits until all its threads have stopped: until one of them has received the signal, the others run on.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let pid = Pid::from_raw(self.child.id().try_into().unwrap());
        let (_, status) = waitpid(pid, WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped(), "{status:?}");
    }

    /// Waits for its good end, and for the rest of what it tells.
    pub(crate) fn finish(mut self) -> Vec<String> {
        self.input = None;
        let rest = std::iter::from_fn(|| self.next()).collect();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
        rest
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A test that failed leaves no process behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
