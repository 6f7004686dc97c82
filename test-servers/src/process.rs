//! Servers as processes of this machine.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use async_trait::async_trait;
use rustix::process::{Signal, geteuid, kill_process_group};
use tempfile::TempDir;

use crate::kind::{Kind, Place};
use crate::machine::{Data, Machine};
use crate::run::{family, is_alive, pid, send};
use crate::wall_clock;

/// Ends the server, with its folder, when the process that started it has ended, however it did. The pipe that is read
/// has no other end then. The server itself takes the place of the shell.
const WATCH: &str = r#"folder=$1 prepared=$2
shift 2
exec 3<&0
(
    trap '' HUP INT TERM
    read -r _ <&3
    kill -9 $$
    rm -rf "$folder" "$prepared"
) &
echo $! >"$folder/watcher"
exec "$@" </dev/null 3<&-"#;

/// The user of servers if the tests run as root: some refuse to be root, and none needs to be.
const NOBODY: u32 = 65_534;

/// How long the processes of a killed server may take to end.
const LONGEST_END: Duration = Duration::from_secs(5);

/// How long a server may take to end in order.
const LONGEST_STOP: Duration = Duration::from_secs(60);

/// A server as a process of its own. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    kind: Kind,
    program: PathBuf,
    port: u16,
    arguments: Vec<String>,
    /// Variables of its environment.
    pub(crate) environment: Vec<(&'static str, String)>,
    folder: TempDir,
    /// The data that a server of this kind starts with, made once for all that there are at a time: it takes longer than most
    /// tests.
    prepared: Option<Arc<TempDir>>,
    child: Option<Child>,
}

impl Process {
    /// One that is not started, and has no data.
    pub(crate) fn new(kind: Kind, program: PathBuf, port: u16, arguments: Vec<String>) -> Result<Self> {
        let folder = folder().context("making a folder for a server")?;
        let environment = match kind.has_clock {
            true => wall_clock::environment(folder.path())?,
            false => Vec::new(),
        };
        Ok(Self {
            kind,
            program,
            port,
            arguments,
            environment,
            folder,
            prepared: None,
            child: None,
        })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn spawn(&mut self) -> io::Result<()> {
        let data = self.path("data").to_string_lossy().into_owned();
        let place = Place {
            contained: false,
            port: self.port,
            data: &data,
        };
        let mut words = self.kind.command(place);
        words.extend(self.arguments.iter().cloned());
        let inner = self.command(&words);
        let prepared = self.prepared.as_ref().map_or(Path::new(""), |prepared| prepared.path());
        let log = File::options().create(true).append(true).open(self.path("log"))?;
        let mut watched = Command::new("sh");
        watched
            .args(["-c", WATCH, "sh"])
            .args([self.folder.path(), prepared])
            .arg(inner.get_program())
            .args(inner.get_args())
            .process_group(0)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.child = Some(as_nobody(&mut watched).spawn()?);
        Ok(())
    }

    pub(crate) fn prepare(&mut self) -> Result<()> {
        static PREPARED: Mutex<BTreeMap<PathBuf, Weak<TempDir>>> = Mutex::new(BTreeMap::new());
        let data = self.path("data");
        remove(&data)?;
        let Some(preparation) = self.kind.preparation(&data.to_string_lossy()) else {
            fs::create_dir(&data)?;
            return Ok(give(&data)?);
        };
        // Others wait for it, as they need the same.
        let mut all = PREPARED.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.entry(self.program.clone()).or_default();
        if let Some(prepared) = known.upgrade() {
            copy(&prepared.path().join("data"), &data)?;
            self.prepared = Some(prepared);
            return Ok(());
        }
        fs::create_dir(&data)?;
        give(&data)?;
        run(as_nobody(&mut self.command(&preparation)))?;
        let prepared = Arc::new(folder()?);
        copy(&data, &prepared.path().join("data"))?;
        *known = Arc::downgrade(&prepared);
        self.prepared = Some(prepared);
        Ok(())
    }

    /// The program of that name: helpers are beside the server, except for those of the system.
    fn command(&self, words: &[String]) -> Command {
        let (program, arguments) = words.split_first().map_or(("", words), |(first, rest)| (first, rest));
        let beside = self.program.with_file_name(program);
        let mut command = Command::new(if beside.is_file() { beside } else { program.into() });
        command.args(arguments);
        command
    }

    /// The processes of the server. The one that watches over it must do so while it is stopped, too.
    fn members(&self) -> Vec<u32> {
        let watcher = fs::read_to_string(self.path("watcher")).unwrap_or_default();
        let mut members = self.child.as_ref().map_or(Vec::new(), |child| family(child.id()));
        members.retain(|member| member.to_string() != watcher.trim());
        members
    }

    /// The number of the first process of the server, if it was started.
    pub(crate) fn id(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Asks the server to end by that signal, and waits until it has.
    pub(crate) fn end_by(&mut self, signal: Signal) -> Result<()> {
        if let Some(child) = &mut self.child {
            send(child.id(), signal)?;
            let start = Instant::now();
            while child.try_wait()?.is_none() {
                ensure!(start.elapsed() < LONGEST_STOP, "a server does not end");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.reap()
    }

    fn send(&self, signal: Signal) -> Result<()> {
        self.members().iter().try_for_each(|&member| send(member, signal))
    }

    pub(crate) fn end(&mut self) -> Result<()> {
        let members = self.members();
        let killed = self.send(Signal::KILL);
        self.reap()?;
        // What the others hold, their shared memory above all, would be in the way of the next start.
        let start = Instant::now();
        while members.iter().any(|&member| is_alive(member)) && start.elapsed() < LONGEST_END {
            std::thread::sleep(Duration::from_millis(1));
        }
        killed
    }

    /// Waits for the server, which ends, and ends what watches over it.
    fn reap(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            // Before the server is waited for, so that the pid cannot belong to another; and before its end of the pipe is closed.
            if let Some(group) = pid(child.id()) {
                let _ = kill_process_group(group, Signal::KILL);
            }
            child.wait().context("waiting for a server")?;
        }
        Ok(())
    }
}

#[async_trait]
impl Machine for Process {
    async fn pause(&mut self) -> Result<()> {
        self.send(Signal::STOP)
    }

    async fn resume(&mut self) -> Result<()> {
        self.send(Signal::CONT)
    }

    async fn kill(&mut self) -> Result<()> {
        self.end()
    }

    async fn start_again(&mut self, data: Data) -> Result<()> {
        match data {
            Data::Kept => {}
            Data::Lost => self.prepare().context("preparing the data of a server")?,
            Data::Copied => {
                remove(&self.path("data"))?;
                copy(&self.path("copy"), &self.path("data")).context("restoring the data of a server")?;
            }
        }
        self.spawn().context("starting a server again")
    }

    async fn copy(&mut self) -> Result<()> {
        remove(&self.path("copy"))?;
        copy(&self.path("data"), &self.path("copy")).context("copying the data of a server")
    }

    fn set_clock(&self, ahead: i32) -> Result<()> {
        ensure!(self.kind.has_clock, "the server has no clock of its own");
        wall_clock::set(self.folder.path(), ahead)
    }

    async fn runs(&mut self) -> bool {
        let child = self.child.as_mut();
        child.is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    async fn log(&self) -> String {
        match fs::read(self.path("log")) {
            Ok(log) => String::from_utf8_lossy(&log).into_owned(),
            Err(error) => error.to_string(),
        }
    }

    async fn remove(&mut self) {
        // What is left of either is left to the end of this.
        let _ = self.end();
        let _ = fs::remove_dir_all(self.folder.path());
        // Now, as the program may end before this is dropped.
        self.prepared = None;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

pub(crate) fn folder() -> io::Result<TempDir> {
    let folder = tempfile::Builder::new().prefix("fencelock-").tempdir()?;
    give(folder.path())?;
    Ok(folder)
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Copies a folder with all rights to its files.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    run(Command::new("cp").arg("-Rp").args([from, to]))
}

fn run(command: &mut Command) -> Result<()> {
    // It has no input, so that nobody must wait for the end of it.
    let output = command.stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    Ok(())
}

/// Makes it theirs, as the user that servers run as.
pub(crate) fn give(folder: &Path) -> io::Result<()> {
    match geteuid().is_root() {
        true => chown(folder, Some(NOBODY), Some(NOBODY)),
        false => Ok(()),
    }
}

pub(crate) fn as_nobody(command: &mut Command) -> &mut Command {
    if geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    // The folder from which tests are run need not be open to everyone.
    command.current_dir("/").env("LC_ALL", "C")
}
