//! The end of servers that this program leaves behind: those in statics, and all of them if it is killed.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

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
pub(super) fn after_this_program(folder: &Path) {
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
