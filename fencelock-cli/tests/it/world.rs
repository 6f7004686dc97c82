//! A place of its own for each test, and ways to look at processes from outside.

use std::ffi::OsStr;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::server::Server;
pub(crate) use crate::server::{Backend, HANG_LIMIT};

/// [`HANG_LIMIT`] as an option of `fencelock run`.
pub(crate) const PATIENTLY: &str = "--wait 60s";

/// For a lock that is lost: the renewal after a third of the ttl finds that out, and may come seconds late on a busy machine.
pub(crate) const SHORT_TTL: &str = "--ttl 15s";

/// What a script does first: it writes its number to the file `pid`.
const TELL: &str = "echo $$ > pid.new; mv pid.new pid;";

/// A script that sleeps.
const SLEEP: &str = "exec sleep 600";

/// Fails because something is missing that a test needs, unless the environment variable `FENCELOCK_TEST_LESS` is set.
pub(crate) fn not_shown(why: &str) {
    let allowed = std::env::var_os("FENCELOCK_TEST_LESS").is_some();
    assert!(
        allowed,
        "{why}; with FENCELOCK_TEST_LESS=1 such tests show nothing and pass"
    );
    // Past the capture of output.
    let _ = writeln!(std::io::stderr(), "not shown: {why}");
}

/// A folder, a place for locks, and nothing of the caller's environment.
pub(crate) struct World {
    /// None if the locks are in a file in the folder.
    server: Option<Server>,
    dir: TempDir,
}

impl World {
    /// With its locks in a file in the folder.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { server: None, dir }
    }

    /// With its locks in a namespace of its own, if they are on a server.
    pub(crate) fn on(backend: Backend) -> Self {
        let server = (backend != Backend::Sqlite).then(|| Server::shared(backend));
        Self { server, ..Self::new() }
    }

    /// With its locks on a server that no other world uses, which may be harmed.
    pub(crate) fn on_own(backend: Backend) -> Self {
        let server = Some(Server::own(backend));
        Self { server, ..Self::new() }
    }

    /// The server that keeps the locks.
    pub(crate) fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// The address of that file for locks in the folder.
    pub(crate) fn file(&self, name: &str) -> String {
        format!("sqlite:{}", self.path(name).display())
    }

    pub(crate) fn url(&self) -> String {
        let server = self.server.as_ref().map(Server::url);
        server.unwrap_or_else(|| self.file("locks.db"))
    }

    /// `fencelock`, to be given its arguments. It keeps its locks in this world, and has no terminal: on that of whoever runs the tests, what
    /// ends a command would end the tests.
    pub(crate) fn fencelock(&self) -> Command {
        let mut command = self.program("setsid");
        command.arg(binary());
        command
    }

    /// A program, to be given its arguments, with nothing in its environment but the address of the locks. It ignores no signals, whatever the
    /// tests were started to ignore, as after `&` in a script.
    pub(crate) fn program(&self, name: &str) -> Command {
        let mut command = Command::new("env");
        command
            .args(["--default-signal", name])
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("FENCELOCK_URL", self.url())
            .current_dir(self.dir())
            .stdin(Stdio::null());
        command
    }

    /// Runs `fencelock` to its end, with the words of the line as its arguments.
    pub(crate) fn run(&self, line: &str) -> Done {
        self.run_words(line.split_whitespace())
    }

    /// The same with the locks at another address.
    pub(crate) fn run_at(&self, url: &str, line: &str) -> Done {
        let mut command = self.fencelock();
        Done::of(command.env("FENCELOCK_URL", url).args(line.split_whitespace()))
    }

    pub(crate) fn run_words<A: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Done {
        Done::of(self.fencelock().args(args))
    }

    /// Runs a script under the lock to its end.
    pub(crate) fn run_script(&self, options: &str, script: &str) -> Done {
        let mut command = self.fencelock();
        command.arg("run").args(options.split_whitespace());
        Done::of(command.args(["lock", "-c", script]))
    }

    /// Runs a script of the shell, given `fencelock` as `$0`.
    pub(crate) fn shell(&self, script: &str) -> Done {
        Done::of(self.program("setsid").args(["-w", "sh", "-c", script, binary()]))
    }

    /// Whether the lock is free.
    pub(crate) fn is_free(&self) -> bool {
        self.run("holder lock").code == Some(1)
    }

    /// The holder of the lock, as `fencelock holder --json` shows it.
    pub(crate) fn holder(&self) -> serde_json::Value {
        self.run("holder lock --json").json()
    }

    /// Waits until the lock has been renewed.
    #[track_caller]
    pub(crate) fn renewed(&self) {
        let mut last = u64::MAX;
        wait_until("a renewal", || {
            let remaining = self.holder()["remaining_ms"].as_u64().unwrap();
            std::mem::replace(&mut last, remaining) < remaining
        });
    }

    /// Takes the lock away from its holder.
    #[track_caller]
    pub(crate) fn take_away(&self) {
        self.run("release --force lock").ends_with(0);
    }

    /// A transaction beside which nothing can be written, until it is committed.
    pub(crate) fn keep_file_to_itself(&self) -> rusqlite::Connection {
        let others = rusqlite::Connection::open(self.path("locks.db")).unwrap();
        others.busy_timeout(HANG_LIMIT).unwrap();
        others.execute_batch("BEGIN IMMEDIATE").unwrap();
        others
    }

    /// Starts `fencelock run` with `options`, and a script as the command, and waits until the script has written its
    /// number to the file `pid`. If it ends in `exec sleep 600`, it sleeps by then.
    pub(crate) fn start(&self, options: &str, script: &str) -> Running {
        let mut command = self.fencelock();
        command.arg("run").args(options.split_whitespace());
        let script = format!("{TELL} {script}");
        self.started(command.args(["lock", "--", "sh", "-c", &script]), &script)
    }

    /// Starts such a command by a program, and waits in the same way.
    pub(crate) fn started(&self, program: &mut Command, script: &str) -> Running {
        // That of a command before it.
        let _ = fs::remove_file(self.path("pid"));
        let child = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let command = self.pid("pid");
        if script.ends_with(SLEEP) {
            command.becomes("sleep");
        }
        Running { child, command }
    }

    /// The same, and waits until the lock is held by a command that sleeps.
    pub(crate) fn sleeper(&self, options: &str) -> Running {
        self.start(options, SLEEP)
    }

    /// Writes a script to the file `job` that first writes its number to the file `pid`, and says `ready`.
    pub(crate) fn job(&self, text: &str) {
        self.write("job", &format!("{TELL} echo ready; {text}"));
    }

    /// Waits until the script of that kind that ends in `exec sleep 600` sleeps.
    pub(crate) fn asleep(&self) -> Process {
        self.pid("pid").becomes("sleep")
    }

    /// Waits for a file with the number of a process in it.
    #[track_caller]
    pub(crate) fn pid(&self, file: &str) -> Process {
        let path = self.path(file);
        let mut found = None;
        wait_until(&format!("a number in {file}"), || {
            found = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
            found.is_some()
        });
        Process(found.unwrap())
    }
}

pub(crate) fn binary() -> &'static str {
    env!("CARGO_BIN_EXE_fencelock")
}

/// What a process that has ended said.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Done {
    pub(crate) fn of(command: &mut Command) -> Self {
        command.output().unwrap().into()
    }

    /// Checks its code.
    #[track_caller]
    pub(crate) fn ends_with(&self, code: i32) {
        assert_eq!(self.code, Some(code), "{self:?}");
    }

    /// Checks its code and all that it wrote.
    #[track_caller]
    pub(crate) fn is(&self, code: i32, stdout: &str, stderr: &str) {
        let seen = (self.code, self.stdout.as_str(), self.stderr.as_str());
        assert_eq!(seen, (Some(code), stdout, stderr));
    }

    /// Checks that it failed with that code and one line, and gives the line.
    #[track_caller]
    pub(crate) fn one_line(&self, code: i32) -> &str {
        let line = self.stderr.strip_prefix("fencelock: ");
        let is_one = self.stderr.matches('\n').count() == 1 && self.stdout.is_empty();
        assert!(self.code == Some(code) && is_one && line.is_some(), "{code}: {self:?}");
        line.unwrap_or_default().trim_end()
    }

    /// Checks that the line also says that.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, says: &str) {
        let line = self.one_line(code);
        assert!(line.contains(says), "{says}: {line}");
    }

    /// Checks its code, and that its output holds all of that.
    #[track_caller]
    pub(crate) fn shows(&self, code: i32, all: &[&str]) {
        let missing = all.iter().find(|says| !self.stdout.contains(**says));
        assert!(
            self.code == Some(code) && missing.is_none(),
            "{code}, {missing:?}: {self:?}"
        );
    }

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The token that the command printed.
    #[track_caller]
    pub(crate) fn token(&self) -> u64 {
        self.ends_with(0);
        self.stdout.trim().parse().unwrap()
    }
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// A `fencelock run` that is under way.
pub(crate) struct Running {
    pub(crate) child: Child,
    pub(crate) command: Process,
}

impl Running {
    pub(crate) fn fencelock(&self) -> Process {
        Process(self.child.id() as i32)
    }

    /// The watchdog of the command, another one than `before`.
    pub(crate) fn watchdog(&self, before: Option<Process>) -> Process {
        let is_watchdog = |process: &Process| {
            let is_named = process.cmdline().starts_with("lock-watchdog");
            is_named && process.is_alive() && process.word(1) == Some(self.child.id().to_string())
        };
        let mut found = Vec::new();
        wait_until("a watchdog", || {
            let processes = fs::read_dir("/proc").unwrap().flatten();
            let processes = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Process));
            found = processes.filter(is_watchdog).collect();
            found.len() == 1 && found.first() != before.as_ref()
        });
        found[0]
    }

    pub(crate) fn kill(&self) {
        self.fencelock().signal(Signal::KILL);
    }

    /// Has `fencelock` end the command by SIGTERM, and waits for both.
    #[track_caller]
    pub(crate) fn stop(self) {
        self.fencelock().signal(Signal::TERM);
        self.end().is(143, "", "");
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn end(mut self) -> Done {
        wait_for(&mut self.child);
        self.child.wait_with_output().unwrap().into()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Process(pub(crate) i32);

impl Process {
    pub(crate) fn signal(self, signal: Signal) {
        kill_process(Pid::from_raw(self.0).unwrap(), signal).unwrap();
    }

    /// Whether the signal is in a set of its status, such as `SigBlk:`.
    pub(crate) fn has(self, set: &str, signal: Signal) -> bool {
        self.mask(set) & (1 << (signal.as_raw() - 1)) != 0
    }

    /// Signals, as a line of its status lists them: bit 0 is signal 1.
    pub(crate) fn mask(self, set: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0)).unwrap_or_default();
        let mask = status.lines().find_map(|found| found.strip_prefix(set));
        mask.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap())
    }

    /// Kills it if it is still there; for what a test leaves on purpose.
    pub(crate) fn clean_up(self) {
        let _ = kill_process(Pid::from_raw(self.0).unwrap(), Signal::KILL);
    }

    /// Whether it runs, or could if it were continued. What has ended and waits to be asked about does not.
    pub(crate) fn is_alive(self) -> bool {
        !matches!(self.state(), None | Some('Z' | 'X'))
    }

    pub(crate) fn cmdline(self) -> String {
        let line = fs::read(format!("/proc/{}/cmdline", self.0)).unwrap_or_default();
        String::from_utf8_lossy(&line).into_owned()
    }

    /// As `ps` shows it.
    pub(crate) fn state(self) -> Option<char> {
        self.word(0)?.chars().next()
    }

    #[track_caller]
    pub(crate) fn comes_to(self, state: char) {
        wait_until(&format!("state {state}"), || self.state() == Some(state));
    }

    #[track_caller]
    pub(crate) fn ends(self) {
        wait_until("the end of a process", || !self.is_alive());
    }

    /// Waits until it has become that program. A shell that was about to start one may overlook a signal.
    #[track_caller]
    pub(crate) fn becomes(self, program: &str) -> Self {
        let comm = format!("/proc/{}/comm", self.0);
        wait_until(program, || {
            fs::read_to_string(&comm).is_ok_and(|name| name.trim() == program)
        });
        self
    }

    pub(crate) fn parent(self) -> Self {
        Self(self.word(1).unwrap().parse().unwrap())
    }

    fn word(self, at: usize) -> Option<String> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0)).ok()?;
        let (_, words) = stat.rsplit_once(") ")?;
        words.split(' ').nth(at).map(str::to_owned)
    }
}

/// Waits until the condition is true; fails after [`HANG_LIMIT`].
#[track_caller]
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < HANG_LIMIT, "not within {HANG_LIMIT:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until the process has ended, and returns its exit code.
#[track_caller]
pub(crate) fn wait_for(child: &mut Child) -> Option<i32> {
    let mut status = None;
    wait_until("the end of a process", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap().code()
}
