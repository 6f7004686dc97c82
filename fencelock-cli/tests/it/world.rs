//! A place of its own for each test, and ways to look at processes from outside.

use std::ffi::OsStr;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN, SIGTTOU, SIGUSR1, SIGUSR2};
use tempfile::TempDir;

#[cfg(any(feature = "etcd", feature = "postgres", feature = "redis"))]
use crate::server::Server;

/// How long a test waits for a condition before it fails. A process that is to be ended by something else lives longer
/// than that.
pub(crate) const HANG_LIMIT: Duration = Duration::from_secs(60);

/// The same, as options of `fencelock run`.
pub(crate) const PATIENTLY: [&str; 2] = ["--wait", "60s"];

/// For a lock that is lost: the renewal after a third of the ttl finds that out, and may come seconds late on a busy machine.
pub(crate) const SHORT_TTL: [&str; 2] = ["--ttl", "6s"];

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

/// What these tests were started to ignore, as after `&` in a script, everything that they start would ignore too. What
/// is handled here instead is as usual there.
fn heed_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let ignored = Process(std::process::id() as i32).mask("SigIgn:");
        for signal in [
            SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN, SIGTTOU, SIGUSR1, SIGUSR2,
        ] {
            if ignored & (1 << (signal - 1)) != 0 {
                signal_hook::flag::register(signal, Arc::default()).unwrap();
            }
        }
    });
}

/// Where a world keeps its locks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Backend {
    #[cfg(feature = "etcd")]
    Etcd,
    #[cfg(feature = "postgres")]
    Postgres,
    #[cfg(feature = "redis")]
    Redis,
    Sqlite,
}

impl Backend {
    /// What the server calls itself.
    pub(crate) fn product(self) -> String {
        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres => "PostgreSQL".to_owned(),
            _ => format!("{self:?}"),
        }
    }
}

/// Why a lock is lost that was taken away by force.
pub(crate) const TAKEN_AWAY: &str = "it was released by force or deleted, or it expired where it is kept";

/// A folder, a place for locks, and nothing of the caller's environment.
pub(crate) struct World {
    store: Store,
    dir: TempDir,
}

/// What keeps the locks of a world.
enum Store {
    #[cfg(any(feature = "etcd", feature = "postgres", feature = "redis"))]
    Server(Server),
    File,
}

impl World {
    /// With its locks in a file in the folder.
    pub(crate) fn new() -> Self {
        heed_signals();
        Self {
            store: Store::File,
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// With its locks in a namespace of its own, if they are on a server.
    pub(crate) fn on(backend: Backend) -> Self {
        match backend {
            Backend::Sqlite => Self::new(),
            #[cfg(any(feature = "etcd", feature = "postgres", feature = "redis"))]
            backend => Self {
                store: Store::Server(Server::shared(backend)),
                ..Self::new()
            },
        }
    }

    /// With its locks on a server that no other world uses, which may be harmed.
    #[cfg(any(feature = "etcd", feature = "postgres", feature = "redis"))]
    pub(crate) fn on_own(backend: Backend) -> Self {
        Self {
            store: Store::Server(Server::own(backend)),
            ..Self::new()
        }
    }

    /// The server that keeps the locks.
    #[cfg(any(feature = "etcd", feature = "postgres", feature = "redis"))]
    pub(crate) fn server(&self) -> &Server {
        match &self.store {
            Store::Server(server) => server,
            Store::File => panic!("the locks of this world are in a file"),
        }
    }

    /// Waits until the lock has been renewed.
    #[track_caller]
    pub(crate) fn renewed(&self) {
        let mut last = u64::MAX;
        wait_until("a renewal", || {
            let remaining = self.holder()["remaining_ms"].as_u64().unwrap();
            let is_more = remaining > last;
            last = remaining;
            is_more
        });
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn url(&self) -> String {
        match &self.store {
            #[cfg(any(feature = "etcd", feature = "postgres", feature = "redis"))]
            Store::Server(server) => server.url(),
            Store::File => format!("sqlite:{}", self.path("locks.db").display()),
        }
    }

    /// The address as people are shown it.
    pub(crate) fn place(&self) -> String {
        let url = self.url();
        match url.split_once('?') {
            Some((place, _)) => format!("{place}?..."),
            None => url,
        }
    }

    /// `fencelock`, to be given its arguments. It keeps its locks in this world, and has no terminal: on that of whoever runs the tests, what
    /// ends a command would end the tests.
    pub(crate) fn fencelock(&self) -> Command {
        let setsid = ["/usr/bin/setsid", "/bin/setsid"]
            .into_iter()
            .find(|path| Path::new(path).exists());
        let mut command = Command::new(setsid.unwrap());
        command
            .arg(binary())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("FENCELOCK_URL", self.url())
            .current_dir(self.dir())
            .stdin(Stdio::null());
        command
    }

    /// The holder of the lock, as `fencelock holder --json` shows it.
    pub(crate) fn holder(&self) -> serde_json::Value {
        serde_json::from_str(&self.run(["holder", "lock", "--json"]).stdout).unwrap()
    }

    /// A transaction that nobody can write beside, until it is committed.
    pub(crate) fn keep_file_to_itself(&self) -> rusqlite::Connection {
        let others = rusqlite::Connection::open(self.path("locks.db")).unwrap();
        others.busy_timeout(HANG_LIMIT).unwrap();
        others.execute_batch("BEGIN IMMEDIATE").unwrap();
        others
    }

    /// Runs `fencelock` to its end.
    pub(crate) fn run<A: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Done {
        Done::of(self.fencelock().args(args))
    }

    /// Starts `fencelock run` with `options`, and a script as the command, and waits until the script has written its
    /// number to the file `pid`. If it ends in `exec sleep 600`, it sleeps by then.
    pub(crate) fn start(&self, options: &[&str], script: &str) -> Running {
        // That of a command before it.
        let _ = fs::remove_file(self.path("pid"));
        let script = format!("echo $$ > pid.new; mv pid.new pid; {script}");
        let mut command = self.fencelock();
        command
            .arg("run")
            .args(options)
            .args(["lock", "--", "sh", "-c", &script]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        let command = self.pid("pid");
        if script.ends_with("exec sleep 600") {
            command.becomes("sleep");
        }
        Running { child, command }
    }

    /// Writes a script that first writes its number to the file `pid`, and says `ready`.
    pub(crate) fn script(&self, name: &str, text: &str) {
        let text = format!("echo $$ > pid.new; mv pid.new pid; echo ready; {text}");
        fs::write(self.path(name), text).unwrap();
    }

    /// Waits until the script of that kind that ends in `exec sleep 600` sleeps.
    pub(crate) fn asleep(&self) -> Process {
        self.pid("pid").becomes("sleep")
    }

    /// Waits for a file with the number of a process in it.
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

/// A port of the loopback at which nothing listens and that nobody else gets meanwhile.
#[cfg(feature = "redis")]
pub(crate) struct ClosedPort(std::os::fd::OwnedFd);

#[cfg(feature = "redis")]
impl ClosedPort {
    pub(crate) fn new() -> Self {
        use rustix::net::{AddressFamily, SocketType, bind, socket};

        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&socket, &std::net::SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        Self(socket)
    }

    pub(crate) fn address(&self) -> std::net::SocketAddr {
        rustix::net::getsockname(&self.0).unwrap().try_into().unwrap()
    }
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
        let output = command.output();
        output
            .unwrap_or_else(|error| panic!("{} cannot be run: {error}", command.get_program().display()))
            .into()
    }

    /// Checks that it failed with that code and one line, and gives the line.
    #[track_caller]
    pub(crate) fn one_line(&self, code: i32) -> &str {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        assert_eq!(self.stderr.matches('\n').count(), 1, "{self:?}");
        let line = self
            .stderr
            .strip_prefix("fencelock: ")
            .unwrap_or_else(|| panic!("{self:?}"));
        line.trim_end()
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

    /// The watchdog of the command.
    pub(crate) fn watchdog(&self) -> Process {
        let mut found = Vec::new();
        wait_until("one watchdog", || {
            found = self.watchdogs();
            found.len() == 1
        });
        found[0]
    }

    pub(crate) fn watchdogs(&self) -> Vec<Process> {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let processes = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Process));
        let is_watchdog = |process: &Process| {
            let name = fs::read(format!("/proc/{}/cmdline", process.0)).unwrap_or_default();
            name.starts_with(b"lock-watchdog")
                && process.is_alive()
                && process.word(1) == Some(self.child.id().to_string())
        };
        processes.filter(is_watchdog).collect()
    }

    /// Ends the command, and waits for the end of `fencelock`.
    #[track_caller]
    pub(crate) fn stop(self) -> Done {
        self.command.signal(Signal::TERM);
        self.end()
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn end(mut self) -> Done {
        wait_for(&mut self.child);
        self.child.wait_with_output().unwrap().into()
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(pub(crate) i32);

impl Process {
    pub(crate) fn signal(self, signal: Signal) {
        kill_process(Pid::from_raw(self.0).unwrap(), signal).unwrap();
    }

    /// Signals, as a line of its status lists them: bit 0 is signal 1.
    pub(crate) fn mask(self, line: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0)).unwrap_or_default();
        let mask = status.lines().find_map(|found| found.strip_prefix(line));
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

    /// As `ps` shows it.
    pub(crate) fn state(self) -> Option<char> {
        self.word(0)?.chars().next()
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
