//! A Postgres whose files, processes and clock a test can reach.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::kind::Kind;
use crate::machine::free_port;
use crate::process::{Process, as_nobody, copy, folder, give};

/// How long a server may take to start.
const LONGEST_START: Duration = Duration::from_secs(60);

/// A Postgres as processes of this machine: of the newest version that is installed. It trusts all users. Its data and processes end with
/// this, or with the program.
///
/// Every function blocks the thread until the server has done what was asked for, and fails if no Postgres is installed or the system fails.
#[derive(Debug)]
pub struct LocalPostgres {
    process: Process,
    port: u16,
}

impl LocalPostgres {
    /// Starts one with these settings, such as `fsync=off`, on new data or on a copy of those.
    pub fn start(settings: &[&str], data: Option<&Path>) -> Result<Self> {
        // In its folder, and so gone with it.
        let memory = ["dynamic_shared_memory_type=mmap"];
        let settings = memory.iter().chain(settings).flat_map(|setting| ["-c", setting]);
        let settings = settings.map(str::to_owned).collect();
        let (kind, program) = installed()?;
        let port = free_port()?;
        let mut process = Process::new(kind, program, port, settings)?;
        match data {
            Some(data) => copy(data, &process.path("data"))?,
            None => process.prepare()?,
        }
        let mut server = Self { process, port };
        server.start_again(None)?;
        Ok(server)
    }

    /// Starts it again after its [end](Self::end), with a clock as libfaketime has it: `-1h` is an hour behind, and `@FILE` as that file says at
    /// each moment. Its time goes on as time does, so that waits take as long as ever.
    pub fn start_again(&mut self, clock: Option<&str>) -> Result<()> {
        self.process.environment.clear();
        if let Some(clock) = clock {
            // No shared memory of the library, which a kill would leave behind.
            let mut variables = vec![
                ("LD_PRELOAD", clock_library()?.to_owned()),
                ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
                ("FAKETIME_DISABLE_SHM", "1".to_owned()),
            ];
            match clock.strip_prefix('@') {
                Some(file) => variables.extend([
                    ("FAKETIME_TIMESTAMP_FILE", file.to_owned()),
                    ("FAKETIME_NO_CACHE", "1".to_owned()),
                ]),
                None => variables.push(("FAKETIME", clock.to_owned())),
            }
            self.process.environment = variables;
        }
        self.process.spawn()?;
        let start = Instant::now();
        while !self.is_ready() {
            let id = self.process.id();
            let runs = id.is_some_and(crate::run::is_alive) && start.elapsed() < LONGEST_START;
            ensure!(runs, "postgres does not start: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Whether it takes requests, as it writes into its folder.
    fn is_ready(&self) -> bool {
        let text = fs::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
        let lines: Vec<_> = text.lines().map(str::trim).collect();
        let is_this = lines.first().and_then(|line| line.parse().ok()) == self.process.id();
        is_this && matches!(lines.get(7), Some(&("ready" | "standby")))
    }

    /// Ends it: by `KILL` as a crash does, by `QUIT` at once, by `INT` in order.
    pub fn end(&mut self, signal: Signal) -> Result<()> {
        match signal {
            Signal::KILL => self.process.end(),
            signal => self.process.end_by(signal),
        }
    }

    /// The port of the loopback that it listens at. Its socket is in [`data`](Self::data).
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder of its data.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.process.path("data")
    }

    /// A file of that name beside its data, which ends with it.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.process.path(name)
    }

    /// What it has written to its log since its first start.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.file("log")).unwrap_or_default()
    }

    /// A program that is installed with it, such as `pg_dump`, as the user that servers run as.
    pub fn program(name: &str) -> Result<Command> {
        let mut command = Command::new(installed()?.1.with_file_name(name));
        as_nobody(&mut command).stdin(Stdio::null());
        Ok(command)
    }

    /// Copies a folder, with all rights to its files.
    pub fn copy(from: &Path, to: &Path) -> Result<()> {
        copy(from, to)
    }

    /// A folder that servers may write into. It ends with the value.
    pub fn folder() -> io::Result<TempDir> {
        folder()
    }

    /// Lets servers use a file or folder.
    pub fn give(file: &Path) -> io::Result<()> {
        give(file)
    }
}

impl Drop for LocalPostgres {
    fn drop(&mut self) {
        // One that is killed leaves shared memory behind.
        let _ = self.process.end_by(Signal::QUIT);
    }
}

/// The newest version that is installed, and its program.
fn installed() -> Result<(Kind, PathBuf)> {
    static FOUND: OnceLock<Option<(Kind, PathBuf)>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let kinds = [Kind::POSTGRES, Kind::POSTGRES_15];
        // The other programs are beside it, and not beside a link to it.
        let found = |kind: Kind| Some((kind, kind.program_on_path().ok()?.canonicalize().ok()?));
        kinds.into_iter().find_map(found)
    });
    let missing = || anyhow!("there is no PostgreSQL 17 or 15; install it: apt-get install postgresql");
    found.clone().ok_or_else(missing)
}

/// The library by which the environment sets the clock of a program.
fn clock_library() -> Result<&'static str> {
    static LIBRARY: OnceLock<String> = OnceLock::new();
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    // It knows where its own is; the program under it would not get signals.
    let asked = Command::new("faketime")
        .args(["-f", "-1h", "printenv", "LD_PRELOAD"])
        .env_remove("LD_PRELOAD")
        .output()
        .context("there is no faketime; install it: apt-get install faketime")?;
    ensure!(asked.status.success(), "{asked:?}");
    let library = String::from_utf8(asked.stdout)?.trim_end().to_owned();
    Ok(LIBRARY.get_or_init(|| library))
}
