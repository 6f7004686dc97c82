//! Programs and folders of this machine, and the end of servers that this program leaves behind.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::process::geteuid;
use tempfile::TempDir;

/// Whom servers run as if the tests run as root: Postgres refuses to be root.
const NOBODY: u32 = 65_534;

/// Not every init takes note of the end of what it inherits: such a process has ended all the same.
pub(super) fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // After the name, which may have any characters in it.
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes()[0]);
    !matches!(state, None | Some(b'Z' | b'X'))
}

pub(super) fn children(pid: u32) -> Vec<u32> {
    let file = format!("/proc/{pid}/task/{pid}/children");
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// A folder for a server, which ends with this program at the latest.
pub(crate) fn new_folder() -> TempDir {
    let folder = tempfile::Builder::new().prefix("fencelock-pg-").tempdir().unwrap();
    give(folder.path());
    after_this_program(folder.path());
    folder
}

/// A program of the newest Postgres on this machine, as somebody who is not root.
pub(crate) fn program(name: &str) -> Command {
    command(bin().join(name))
}

/// The command, as somebody who is not root.
pub(crate) fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    if geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command.current_dir("/").env("LC_ALL", "C").process_group(0);
    command
}

/// What a folder has to have, or else it is not the one of a server.
const PROGRAMS: [&str; 4] = ["initdb", "pg_basebackup", "pg_dump", "postgres"];

fn bin() -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut folders: Vec<_> = versions.map(|version| version.path().join("bin")).collect();
    folders.sort();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let all = std::env::split_paths(&path).chain(folders.into_iter().rev());
    let mut found = all.filter(|folder| PROGRAMS.iter().all(|program| folder.join(program).exists()));
    found
        .next()
        .expect("there is no PostgreSQL; install it: apt-get install postgresql")
}

pub(crate) fn copy(from: &Path, to: &Path) {
    let output = Command::new("cp").arg("-Rp").args([from, to]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Lets servers use the folder.
pub(crate) fn give(folder: &Path) {
    if geteuid().is_root() {
        std::os::unix::fs::chown(folder, Some(NOBODY), Some(NOBODY)).unwrap();
    }
}

/// The library by which the environment sets the clock of a program: libfaketime.
pub(super) fn clock_library() -> &'static str {
    static LIBRARY: OnceLock<String> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // It knows where its own is; the program under it would not get our signals.
        let asked = Command::new("faketime")
            .args(["-f", "-1h", "printenv", "LD_PRELOAD"])
            .env_remove("LD_PRELOAD")
            .output()
            .expect("there is no faketime; install it: apt-get install faketime");
        assert!(asked.status.success(), "{asked:?}");
        String::from_utf8(asked.stdout).unwrap().trim_end().to_owned()
    })
}

/// Reads folders until the program that names them has ended, however it ended; then ends their servers, and deletes them.
/// A server that was killed leaves the id of its process, which may be that of another process by then.
const SCRIPT: &str = r#"
folders=
while IFS= read -r folder; do folders="$folders $folder"; done
for folder in $folders; do
    pid=$(head -n 1 "$folder/data/postmaster.pid" 2>/dev/null) || continue
    grep -qF "$folder" "/proc/$pid/cmdline" 2>/dev/null && kill -QUIT "$pid"
done
for folder in $folders; do
    tries=0
    while [ -e "$folder/data/postmaster.pid" ] && [ "$tries" -lt 100 ]; do
        sleep 0.05
        tries=$((tries + 1))
    done
    rm -rf "$folder"
done
"#;

/// Has the folder deleted, and the server on its data ended, when this program ends.
fn after_this_program(folder: &Path) {
    static WATCHER: Mutex<Option<Child>> = Mutex::new(None);
    let mut watcher = WATCHER.lock().unwrap_or_else(PoisonError::into_inner);
    let watcher = watcher.get_or_insert_with(|| {
        let mut shell = Command::new("sh");
        // In a group of processes of its own, so that a Ctrl-C does not end it, too.
        shell.process_group(0).args(["-c", SCRIPT]).current_dir("/");
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        shell.spawn().unwrap()
    });
    writeln!(watcher.stdin.as_mut().unwrap(), "{}", folder.display()).unwrap();
}
