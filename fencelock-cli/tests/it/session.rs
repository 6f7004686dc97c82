//! An interactive shell on a terminal of its own, and somebody who types.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use pty_process::blocking::{Command, Pty, open};

use crate::world::{HANG_LIMIT, Process, World, binary};

pub(crate) const CTRL_C: &str = "\x03";
pub(crate) const CTRL_Z: &str = "\x1a";

/// A shell that waits for input. Its `fencelock` is ours.
pub(crate) struct Session {
    shell: Child,
    terminal: Pty,
    output: Receiver<Vec<u8>>,
    /// What was written and not looked at yet.
    unread: String,
}

impl Session {
    pub(crate) fn new(world: &World) -> Self {
        let (terminal, other_side) = open().unwrap();
        terminal.resize(pty_process::Size::new(24, 80)).unwrap();
        // First of all where ours is.
        let path = std::env::var("PATH").unwrap();
        let path = format!("{}:{path}", Path::new(binary()).parent().unwrap().display());
        let shell = Command::new("env")
            .args(["--default-signal", "sh", "-i"])
            .env_clear()
            .env("PATH", path)
            .env("FENCELOCK_URL", world.url())
            .env("TERM", "xterm")
            .env("PS1", "PROMPT> ")
            .current_dir(world.dir())
            .spawn(other_side)
            .unwrap();
        let mut reader = File::from(rustix::io::dup(&terminal).unwrap());
        let (tell, output) = channel();
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            // The terminal fails to be read once nobody has it open.
            while let Ok(length @ 1..) = reader.read(&mut part) {
                if tell.send(part[..length].to_vec()).is_err() {
                    break;
                }
            }
        });
        let mut session = Self {
            shell,
            terminal,
            output,
            unread: String::new(),
        };
        session.see("PROMPT> ");
        session
    }

    /// Types something.
    pub(crate) fn type_in(&mut self, text: &str) {
        (&self.terminal).write_all(text.as_bytes()).unwrap();
    }

    /// Types a line, and waits until the terminal has shown it.
    pub(crate) fn start(&mut self, line: &str) {
        self.type_in(line);
        self.see(line);
        self.type_in("\n");
    }

    /// Types a line, and waits for the next prompt. What came before it is given back.
    pub(crate) fn line(&mut self, line: &str) -> String {
        self.start(line);
        self.see("PROMPT> ")
    }

    /// Waits until the terminal shows that text, and gives what came before it.
    #[track_caller]
    pub(crate) fn see(&mut self, text: &str) -> String {
        let end = Instant::now() + HANG_LIMIT;
        loop {
            if let Some(at) = self.unread.find(text) {
                let before = self.unread[..at].to_owned();
                self.unread.drain(..at + text.len());
                return before;
            }
            match self.output.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(part) => self.unread += &String::from_utf8_lossy(&part),
                Err(_) => panic!("{text:?} was not seen, only {:?}", self.unread),
            }
        }
    }

    /// Waits for the prompt, and checks the exit code of what has ended.
    #[track_caller]
    pub(crate) fn ends_with(&mut self, code: i32) {
        self.see("PROMPT> ");
        let said = self.line("echo code=$?");
        assert!(said.contains(&format!("code={code}")), "{code}: {said}");
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // What still runs on the terminal is hung up with its shell.
        Process(self.shell.id() as i32).clean_up();
        let _ = self.shell.wait();
    }
}
