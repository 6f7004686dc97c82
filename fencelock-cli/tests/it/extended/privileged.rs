//! What only root can set up, or a namespace.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::world::{Done, World, binary, not_shown, wait_until};

/// A user without other processes, with a copy of `fencelock` and a file for locks.
struct User<'a> {
    world: &'a World,
    number: u32,
    url: String,
}

impl<'a> User<'a> {
    /// None if this is not root, who alone can be another user.
    fn new(world: &'a World) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            not_shown("this needs root");
            return None;
        }
        let number = 60_000 + std::process::id() % 5_000;
        let user = Self {
            world,
            number,
            url: world.file("place/locks.db"),
        };
        user.copy(binary(), "fencelock", 0o755);
        fs::create_dir(world.path("place")).unwrap();
        chown(world.path("place"), Some(number), Some(number)).unwrap();
        set_mode(world.dir(), 0o755);
        Some(user)
    }

    /// Not by this process: another thread that starts a program meanwhile would keep the copy open for writing.
    fn copy(&self, from: &str, name: &str, mode: u32) {
        Done::of(self.world.program("cp").args([from, name])).ends_with(0);
        set_mode(&self.world.path(name), mode);
    }

    fn runs(&self, program: &str, args: &[&str]) -> Command {
        let mut command = self.world.program("setsid");
        command.arg(program).args(args).env("FENCELOCK_URL", &self.url);
        command.uid(self.number).gid(self.number);
        command
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn where_no_thread_can_be_started_it_says_so_and_leaves_no_lock() {
    let world = World::new();
    let Some(user) = User::new(&world) else { return };
    let mut codes = Vec::new();
    for processes in 1..14 {
        let script = format!("ulimit -u {processes}; exec ./fencelock run lock -- true");
        let done = Done::of(&mut user.runs("bash", &["-c", &script]));
        assert!(!done.stderr.contains("panicked"), "{processes}: {done:?}");
        assert!(matches!(done.code, Some(0 | 69 | 126)), "{processes}: {done:?}");
        codes.push(done.code);
        let held = Done::of(&mut user.runs("./fencelock", &["list", "--names"]));
        assert_eq!(held.stdout, "", "{processes}: {done:?}");
    }
    assert_eq!((codes[0], codes[12]), (Some(69), Some(0)), "{codes:?}");
}

#[test]
fn a_user_who_may_only_read_the_file_sees_the_locks() {
    let world = World::new();
    let Some(user) = User::new(&world) else { return };
    world.write("locks.db", "");
    set_mode(&world.path("locks.db"), 0o644);
    let running = world.sleeper("--ttl 1h");
    let look = || {
        let mut look = user.runs("./fencelock", &["list", "--names"]);
        Done::of(look.env("FENCELOCK_URL", world.url()))
    };
    look().is(0, "lock\n", "");
    set_mode(&world.path("locks.db"), 0o600);
    look().fails(78, "is not readable for this process");
    running.stop();
}

#[test]
fn a_command_that_cannot_be_signalled_is_not_called_ended() {
    let world = World::new();
    let Some(user) = User::new(&world) else { return };
    // As sudo does, it becomes root for good.
    user.copy("/usr/bin/setpriv", "raise", 0o4755);
    world.job("exec > /dev/null 2>&1; exec sleep 600");
    let line = "run --ttl 2s lock -- ./raise --reuid=0 --regid=0 --clear-groups sh job";
    let mut running = user.runs("./fencelock", &line.split(' ').collect::<Vec<_>>());
    let mut running = running.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut failed = None;
    wait_until("the command to run, or to fail", || {
        failed = running.try_wait().unwrap();
        failed.is_some() || world.has("pid")
    });
    if failed.is_some() {
        not_shown("this machine allows no set-user-ID programs in its temporary folder");
        return;
    }
    let command = world.asleep();
    Done::of(&mut user.runs("./fencelock", &["release", "--force", "lock"])).ends_with(0);
    let done = Done::from(running.wait_with_output().unwrap());
    let is_alive = command.is_alive();
    command.clean_up();
    assert!(is_alive && !done.stderr.contains("was ended"), "{done:?}");
    done.fails(76, "runs on without the lock: ");
    done.fails(76, "as another user");
}

#[test]
fn what_proc_hides_is_not_called_ended() {
    let world = World::new();
    let Some(user) = User::new(&world) else { return };
    user.copy("/usr/bin/setpriv", "raise", 0o4755);
    world.job("exec > /dev/null 2>&1; exec sleep 600");
    let script = r#"mount -t proc -o hidepid=2 proc /proc && exec setpriv --clear-groups --reuid=$0 --regid=$0 "$@""#;
    let mut hidden = world.program("unshare");
    hidden.args(["--mount", "sh", "-c", script, &user.number.to_string()]);
    hidden.args("setsid ./fencelock run --grace 300ms lock -c".split(' '));
    hidden.arg("./raise --reuid=0 --regid=0 --clear-groups sh job & while ! test -e pid; do sleep 0.01; done");
    let done = Done::of(hidden.env("FENCELOCK_URL", &user.url));
    if done.stderr.contains("mount: ") {
        not_shown("this machine allows no mounts of /proc");
        return;
    }
    let left = world.asleep();
    left.clean_up();
    assert!(
        done.code == Some(0) && done.stderr.contains("run on without the lock: "),
        "{done:?}"
    );
}

#[test]
fn a_session_and_group_outside_the_pid_namespace_are_no_obstacle() {
    let world = World::new();
    // As in a sandbox or container that was entered without a new session: both have the number 0 then.
    for proc in [&["--mount-proc"][..], &[]] {
        let inside = |script: &str| {
            let mut unshare = world.program("unshare");
            unshare.args(["--map-root-user", "--pid", "--fork"]).args(proc);
            Done::of(unshare.args(["sh", "-c", script, binary()]))
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
