//! Servers as processes of this machine, with or without a file system of their own.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process_group};
use tempfile::TempDir;

use super::error::ServerError;
use super::family::{family, is_alive, pid, send};
use super::kind::{Kind, Place};

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

/// Whom servers run as if the tests run as root: some refuse to be root, and none needs to be.
const NOBODY: u32 = 65_534;

/// How long the processes of a killed server may take to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where the program is.
#[derive(Clone, Debug)]
pub(super) enum Home {
    /// In this folder, as the root of the file system.
    Root(PathBuf),
    /// Here.
    Path(PathBuf),
}

/// A server as a process of its own. Ends when dropped.
#[derive(Debug)]
pub(super) struct Process {
    kind: &'static Kind,
    home: Home,
    port: u16,
    arguments: Vec<String>,
    folder: TempDir,
    /// The data that a server of this kind starts with, made once for all that there are at a time: it takes longer than most
    /// tests.
    prepared: Option<Arc<TempDir>>,
    child: Option<Child>,
}

impl Process {
    pub(super) fn start(
        kind: &'static Kind,
        home: Home,
        port: u16,
        arguments: Vec<String>,
    ) -> Result<Self, ServerError> {
        let parent = match &home {
            Home::Root(root) => root.join("tmp"),
            Home::Path(_) => std::env::temp_dir(),
        };
        let folder = tempfile::Builder::new().prefix("fencelock-").tempdir_in(parent);
        let folder = folder.map_err(ServerError::system("making a folder for a server"))?;
        let mut process = Self {
            kind,
            home,
            port,
            arguments,
            folder,
            prepared: None,
            child: None,
        };
        process.start_anew()?;
        Ok(process)
    }

    pub(super) fn pause(&self) -> Result<(), ServerError> {
        self.members().iter().try_for_each(|&member| send(member, Signal::STOP))
    }

    pub(super) fn resume(&self) -> Result<(), ServerError> {
        self.members().iter().try_for_each(|&member| send(member, Signal::CONT))
    }

    pub(super) fn kill(&mut self) -> Result<(), ServerError> {
        let members = self.members();
        let killed = members.iter().try_for_each(|&member| send(member, Signal::KILL));
        if let Some(mut child) = self.child.take() {
            // The watcher too, and before its server is waited for, so that the pid cannot belong to another.
            if let Some(group) = pid(child.id()) {
                let _ = kill_process_group(group, Signal::KILL);
            }
            child
                .wait()
                .map_err(ServerError::system("waiting for a killed server"))?;
        }
        // What the others hold, their shared memory above all, would be in the way of the next start.
        let start = Instant::now();
        while members.iter().any(|&member| is_alive(member)) && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        killed
    }

    pub(super) fn start_again(&mut self) -> Result<(), ServerError> {
        let data = self.seen_from_within(&self.data());
        let place = Place {
            contained: false,
            port: self.port,
            data: &data,
        };
        let mut command = self.kind.command(place);
        command.extend(self.arguments.iter().cloned());
        let log = File::options().create(true).append(true).open(self.log_file());
        let log = log.map_err(ServerError::system("opening the log of a server"))?;
        let mut command = self.command(&command);
        command
            .stdin(Stdio::piped())
            .stdout(
                log.try_clone()
                    .map_err(ServerError::system("opening the log of a server"))?,
            )
            .stderr(log);
        self.child = Some(command.spawn().map_err(ServerError::system("starting a server"))?);
        Ok(())
    }

    pub(super) fn start_anew(&mut self) -> Result<(), ServerError> {
        self.prepare()
            .map_err(ServerError::system("preparing the data of a server"))?;
        self.start_again()
    }

    pub(super) fn copy(&self) -> Result<(), ServerError> {
        remove(&self.copy_folder())
            .and_then(|()| copy(&self.data(), &self.copy_folder()))
            .map_err(ServerError::system("copying the data of a server"))
    }

    pub(super) fn start_with_copy(&mut self) -> Result<(), ServerError> {
        remove(&self.data())
            .and_then(|()| copy(&self.copy_folder(), &self.data()))
            .map_err(ServerError::system("restoring the data of a server"))?;
        self.start_again()
    }

    pub(super) fn runs(&mut self) -> bool {
        self.child
            .as_mut()
            .is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    pub(super) fn log(&self) -> String {
        std::fs::read(self.log_file()).map_or_else(
            |error| error.to_string(),
            |log| String::from_utf8_lossy(&log).into_owned(),
        )
    }

    pub(super) fn remove(&mut self) {
        // What is left of either is left to the end of this.
        let _ = self.kill();
        let _ = std::fs::remove_dir_all(self.folder.path());
        // Now, as the program may end before this is dropped.
        self.prepared = None;
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn copy_folder(&self) -> PathBuf {
        self.folder.path().join("copy")
    }

    fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// The path as the server sees it.
    fn seen_from_within(&self, path: &Path) -> String {
        let within = match &self.home {
            Home::Root(root) => path
                .strip_prefix(root)
                .map_or(path.to_owned(), |path| Path::new("/").join(path)),
            Home::Path(_) => path.to_owned(),
        };
        within.to_string_lossy().into_owned()
    }

    fn prepare(&mut self) -> io::Result<()> {
        static PREPARED: Mutex<BTreeMap<String, Weak<TempDir>>> = Mutex::new(BTreeMap::new());
        let data = self.data();
        remove(&data)?;
        give(self.folder.path())?;
        let Some(preparation) = self.kind.preparation(&self.seen_from_within(&data)) else {
            std::fs::create_dir(&data)?;
            return give(&data);
        };
        // Others wait for it, as they need the same.
        let mut all = PREPARED.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.entry(format!("{} {:?}", self.kind.title(), self.home)).or_default();
        if let Some(prepared) = known.upgrade() {
            copy(&prepared.path().join("data"), &data)?;
            self.prepared = Some(prepared);
            return Ok(());
        }
        std::fs::create_dir(&data)?;
        give(&data)?;
        // It has no input, so nobody must wait for the end of it.
        let output = self.unwatched(&preparation).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        let prepared = Arc::new(tempfile::Builder::new().prefix("fencelock-").tempdir()?);
        give(prepared.path())?;
        copy(&data, &prepared.path().join("data"))?;
        *known = Arc::downgrade(&prepared);
        self.prepared = Some(prepared);
        Ok(())
    }

    /// The command, ended with this process.
    fn command(&self, command: &[String]) -> Command {
        let inner = self.unwatched(command);
        let mut watched = Command::new("sh");
        let prepared = self.prepared.as_ref().map_or(Path::new(""), |prepared| prepared.path());
        watched.args(["-c", WATCH, "sh"]).args([self.folder.path(), prepared]);
        watched.arg(inner.get_program()).args(inner.get_args());
        self.as_nobody(&mut watched);
        watched.process_group(0);
        watched
    }

    fn unwatched(&self, command: &[String]) -> Command {
        let (program, arguments) = command
            .split_first()
            .map_or(("", command), |(first, rest)| (first, rest));
        let mut unwatched = match &self.home {
            Home::Root(root) => {
                let mut chroot = Command::new("chroot");
                chroot
                    .arg(format!("--userspec={NOBODY}:{NOBODY}"))
                    .arg(root)
                    .arg(program);
                chroot
            }
            // Its helpers are beside it, except for those of the system.
            Home::Path(path) => {
                let beside = path.with_file_name(program);
                Command::new(if beside.is_file() { beside } else { program.into() })
            }
        };
        unwatched.args(arguments);
        self.as_nobody(&mut unwatched);
        unwatched
    }

    fn as_nobody(&self, command: &mut Command) {
        // Outside as well as inside of a root: what is needed to enter it comes first.
        let folders = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"]
            .iter()
            .chain(self.kind.folders);
        let folders: Vec<_> = folders.copied().collect();
        match &self.home {
            Home::Root(_) => {
                command.env("PATH", folders.join(":"));
            }
            Home::Path(_) if is_root() => {
                command.uid(NOBODY).gid(NOBODY);
            }
            Home::Path(_) => {}
        }
        // The folder from which tests are run need not exist there, nor be open to everyone.
        command.current_dir("/").env("LC_ALL", "C");
    }

    /// The processes of the server. The one that watches over it must do so while it is stopped, too.
    fn members(&self) -> Vec<u32> {
        let watcher = std::fs::read_to_string(self.folder.path().join("watcher")).unwrap_or_default();
        let mut members = self.child.as_ref().map_or(Vec::new(), |child| family(child.id()));
        members.retain(|member| member.to_string() != watcher.trim());
        members
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Nobody is left who could be told.
        let _ = self.kill();
    }
}

fn remove(folder: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Copies a folder with all rights to its files.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let output = Command::new("cp").arg("-Rp").args([from, to]).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()))
}

/// Makes it theirs, as whom servers run.
fn give(folder: &Path) -> io::Result<()> {
    if is_root() {
        std::os::unix::fs::chown(folder, Some(NOBODY), Some(NOBODY))?;
    }
    Ok(())
}

pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
