//! What the command finds around it where root or a namespace is needed to make it so.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::world::{Done, World, binary, not_shown};

#[test]
fn where_no_thread_can_be_started_it_says_so_in_one_line_and_leaves_no_lock() {
    use std::os::unix::process::CommandExt;

    let world = World::new();
    if !rustix::process::geteuid().is_root() {
        // The limit counts all processes of a user, and only root can be another one.
        not_shown("this needs root");
        return;
    }
    let copy = world.path("fencelock");
    assert!(Command::new("cp").arg(binary()).arg(&copy).status().unwrap().success());
    for path in [world.dir(), &copy] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let place = world.path("place");
    fs::create_dir(&place).unwrap();
    // A user without other processes.
    let user = 60_000 + std::process::id() % 5_000;
    std::os::unix::fs::chown(&place, Some(user), Some(user)).unwrap();
    let url = format!("sqlite:{}/locks.db", place.display());
    let mut codes = Vec::new();
    for processes in 1..12 {
        let mut shell = Command::new("bash");
        shell.args(["-c", r#"ulimit -u "$1"; exec "$0" run "$1" -- true"#]);
        shell.arg(&copy).arg(processes.to_string());
        let done = Done::of(shell.env("FENCELOCK_URL", &url).current_dir("/").uid(user).gid(user));
        assert!(!done.stderr.contains("panicked"), "{processes}: {done:?}");
        let lines = done.stderr.matches('\n').count();
        assert_eq!(done.stdout, "");
        match done.code {
            Some(0) => assert_eq!(lines, 0, "{done:?}"),
            // The supervisor or the starter says what has failed.
            Some(69 | 126) => assert!((1..3).contains(&lines), "{processes}: {done:?}"),
            _ => panic!("{processes}: {done:?}"),
        }
        codes.push(done.code);
        let mut list = Command::new(&copy);
        list.args(["list", "--names"]).env("FENCELOCK_URL", &url);
        let held = Done::of(list.current_dir("/").uid(user).gid(user));
        assert_eq!(held.stdout, "", "{processes}: {done:?}");
    }
    assert_eq!((codes[0], codes[10]), (Some(69), Some(0)), "{codes:?}");
}

#[test]
fn a_proc_of_another_pid_namespace_is_refused() {
    let world = World::new();
    let inside = |program: &str| {
        let mut unshare = Command::new("unshare");
        unshare.args(["--map-root-user", "--pid", "--fork", program]);
        unshare.args(["run", "lock", "--", "touch", "ran"]);
        Done::of(unshare.env("FENCELOCK_URL", world.url()).current_dir(world.dir()))
    };
    if inside("true").code != Some(0) {
        not_shown("this machine allows no pid namespaces");
        return;
    }
    let done = inside(binary());
    assert!(done.one_line(78).contains("--mount-proc"), "{done:?}");
    assert!(!world.path("ran").exists());
}

#[test]
fn a_session_and_group_outside_the_pid_namespace_are_no_obstacle() {
    let world = World::new();
    // As in a sandbox or container that was entered without a new session: both have the number 0 then.
    let inside = |script: &str| {
        let mut unshare = Command::new("unshare");
        unshare.args([
            "--map-root-user",
            "--pid",
            "--fork",
            "--mount-proc",
            "sh",
            "-c",
            script,
            binary(),
        ]);
        Done::of(unshare.env("FENCELOCK_URL", world.url()).current_dir(world.dir()))
    };
    if inside("true").code != Some(0) {
        not_shown("this machine allows no pid namespaces");
        return;
    }
    let script = r#"cut -d " " -f 5,6 /proc/$$/stat; "$0" run lock -- sh -c '
        sleep 600 & echo $! > left; setsid sleep 600 & echo $! > daemon; while ! grep -q sleep /proc/$!/cmdline; do :; done'
        code=$?; kill -0 $(cat left) 2> /dev/null; echo "code $code, left $?"
        kill -0 $(cat daemon); echo "daemon $?""#;
    let done = inside(script);
    assert_eq!(
        (done.code, done.stdout.as_str(), done.stderr.as_str()),
        (
            Some(0),
            "0 0\ncode 0, left 1\ndaemon 0\n",
            "fencelock: the command left processes behind in its session; they were ended with it\n"
        )
    );
}
