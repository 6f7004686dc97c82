//! What only root can set up, or a namespace.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use rustix::process::Signal;

use crate::world::{Done, Process, World, binary, not_shown, wait_until};

/// A user without other processes, with a copy of `fencelock` and a file for locks; only root can be another user.
struct User {
    number: u32,
    fencelock: PathBuf,
    url: String,
}

impl User {
    fn new(world: &World) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            not_shown("this needs root");
            return None;
        }
        let fencelock = world.path("fencelock");
        // Not by this process: another thread that starts a program meanwhile would keep the copy open for writing.
        assert!(
            Command::new("cp")
                .arg(binary())
                .arg(&fencelock)
                .status()
                .unwrap()
                .success()
        );
        let (place, number) = (world.path("place"), 60_000 + std::process::id() % 5_000);
        fs::create_dir(&place).unwrap();
        chown(&place, Some(number), Some(number)).unwrap();
        for path in [world.dir(), &fencelock] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let url = format!("sqlite:{}/locks.db", place.display());
        Some(Self { number, fencelock, url })
    }

    fn runs(&self, program: &str) -> Command {
        let mut command = Command::new("setsid");
        command.arg(program).env("FENCELOCK_URL", &self.url).current_dir("/");
        command.uid(self.number).gid(self.number);
        command
    }
}

#[test]
fn where_no_thread_can_be_started_it_says_so_and_leaves_no_lock() {
    let world = World::new();
    let Some(user) = User::new(&world) else { return };
    let mut codes = Vec::new();
    for processes in 1..14 {
        let mut shell = user.runs("bash");
        shell.args(["-c", r#"ulimit -u "$1"; exec "$0" run "$1" -- true"#]);
        let done = Done::of(shell.arg(&user.fencelock).arg(processes.to_string()));
        assert!(!done.stderr.contains("panicked"), "{processes}: {done:?}");
        assert!(matches!(done.code, Some(0 | 69 | 126)), "{processes}: {done:?}");
        codes.push(done.code);
        let held = Done::of(user.runs(user.fencelock.to_str().unwrap()).args(["list", "--names"]));
        assert_eq!(held.stdout, "", "{processes}: {done:?}");
    }
    assert_eq!((codes[0], codes[12]), (Some(69), Some(0)), "{codes:?}");
}

#[test]
fn a_user_who_may_only_read_the_file_sees_the_locks() {
    let world = World::new();
    let Some(user) = User::new(&world) else { return };
    fs::write(world.path("locks.db"), "").unwrap();
    fs::set_permissions(world.path("locks.db"), fs::Permissions::from_mode(0o644)).unwrap();
    let running = world.start(&["--ttl", "1h"], "exec sleep 600");
    let look = || {
        let mut look = user.runs(user.fencelock.to_str().unwrap());
        Done::of(look.env("FENCELOCK_URL", world.url()).args(["list", "--names"]))
    };
    let done = look();
    assert_eq!((done.code, done.stdout.as_str()), (Some(0), "lock\n"), "{done:?}");
    fs::set_permissions(world.path("locks.db"), fs::Permissions::from_mode(0o600)).unwrap();
    let done = look();
    assert!(
        done.one_line(78).contains("is not readable for this process"),
        "{done:?}"
    );
    running.stop();
}

#[test]
fn a_command_that_cannot_be_signalled_is_not_called_ended() {
    let world = World::new();
    let Some(user) = User::new(&world) else { return };
    // As sudo does, it becomes root for good.
    let raise = world.path("raise");
    assert!(
        Command::new("cp")
            .arg("/usr/bin/setpriv")
            .arg(&raise)
            .status()
            .unwrap()
            .success()
    );
    fs::set_permissions(&raise, fs::Permissions::from_mode(0o4755)).unwrap();
    let pid = world.path("pid");
    let script = format!(
        "exec > /dev/null 2>&1; echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600",
        pid.display()
    );
    let mut running = user.runs(user.fencelock.to_str().unwrap());
    running.args(["run", "--ttl", "2s", "lock", "--"]).arg(&raise);
    running.args(["--reuid=0", "--regid=0", "--clear-groups", "sh", "-c", &script]);
    let mut running = running.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut failed = None;
    wait_until("the command to run, or to fail", || {
        failed = running.try_wait().unwrap();
        failed.is_some() || pid.exists()
    });
    if failed.is_some() {
        not_shown("this machine allows no set-user-ID programs in its temporary folder");
        return;
    }
    let command = world.pid("pid");
    let forced = Done::of(
        user.runs(user.fencelock.to_str().unwrap())
            .args(["release", "--force", "lock"]),
    );
    assert_eq!(forced.code, Some(0), "{forced:?}");
    let done = Done::from(running.wait_with_output().unwrap());
    let is_alive = command.is_alive();
    Process(command.0).signal(Signal::KILL);
    let line = done.one_line(76);
    assert!(
        is_alive && line.contains("runs on without the lock: ") && line.contains("as another user"),
        "{line}"
    );
    assert!(!line.contains("was ended"), "{line}");
}

#[test]
fn a_session_and_group_outside_the_pid_namespace_are_no_obstacle() {
    let world = World::new();
    // As in a sandbox or container that was entered without a new session: both have the number 0 then.
    for proc in [&["--mount-proc"][..], &[]] {
        let inside = |script: &str| {
            let mut unshare = Command::new("unshare");
            unshare
                .args(["--map-root-user", "--pid", "--fork"])
                .args(proc)
                .args(["sh", "-c", script, binary()]);
            Done::of(unshare.env("FENCELOCK_URL", world.url()).current_dir(world.dir()))
        };
        if inside("true").code != Some(0) {
            not_shown("this machine allows no pid namespaces");
            return;
        }
        let script = r#""$0" run lock -- sh -c 'sleep 600 > /dev/null 2>&1 & echo $! > left'
            code=$?; kill -0 $(cat left) 2> /dev/null; echo "code $code, left $?""#;
        let done = inside(script);
        assert_eq!(done.stdout, "code 0, left 1\n", "{done:?}");
        assert!(done.stderr.contains("they were ended"), "{done:?}");
    }
}
