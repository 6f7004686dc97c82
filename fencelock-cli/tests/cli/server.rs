//! A Redis server of a test's own.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::world::{CEILING, Process};

/// A server on a free port of the loopback, which ends with its value.
pub(crate) struct Server {
    process: Child,
    port: u16,
}

impl Server {
    /// A server that keeps nothing on the disk, with further options.
    pub(crate) fn start(dir: &Path, options: &[&str]) -> Self {
        // Between the look for a free port and the start another process may take it.
        for _ in 0..10 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            if let Some(process) = run(dir, port, options) {
                return Self { process, port };
            }
        }
        panic!("redis-server did not start with {options:?}");
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn process(&self) -> Process {
        Process(self.process.id() as i32)
    }

    /// Runs a command, written with spaces between its words, and gives the first line of the answer.
    pub(crate) fn ask(&self, command: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(CEILING)).unwrap();
        write!(stream, "{command}\r\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn run(dir: &Path, port: u16, options: &[&str]) -> Option<Child> {
    let mut server = Command::new("redis-server")
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
        ])
        .arg(dir)
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|e| panic!("redis-server cannot be run ({e}); install it: apt-get install redis-server"));
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    if !lines.any(|line| line.unwrap().contains("eady to accept connections")) {
        server.wait().unwrap();
        return None;
    }
    // It would block when nobody reads what it says.
    std::thread::spawn(move || lines.for_each(drop));
    Some(server)
}
