//! Containers of one machine exclude each other through one file.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::world::{Done, World, binary};

/// What makes containers on this machine.
#[derive(Clone, Copy, Debug)]
enum Engine {
    Docker,
    /// The same namespaces that an engine makes, and with a clock of their own, which engines do not.
    Namespaces,
}

impl Engine {
    fn find() -> Self {
        let answers = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
        if answers(Command::new("docker").args(["image", "inspect", &image()])) {
            Self::Docker
        } else if answers(&mut namespaces("true")) {
            Self::Namespaces
        } else {
            panic!(
                "no container can be made: start Docker and run `make images`, or install unshare (util-linux) and allow \
                 user namespaces"
            );
        }
    }

    /// `fencelock` in a container, which shares nothing with others but the folder.
    fn fencelock(self, name: &str, folder: &Path) -> Command {
        match self {
            Self::Docker => {
                let same = |path: &Path, mode: &str| format!("{0}:{0}:{mode}", path.display());
                let user = format!(
                    "{}:{}",
                    rustix::process::getuid().as_raw(),
                    rustix::process::getgid().as_raw()
                );
                let mut command = Command::new("docker");
                command.args(["run", "--rm", "--interactive", "--network", "none", "--name", name]);
                command.args(["--user", &user, "--volume", &same(folder, "rw")]);
                // What the binary is linked with, whatever is in the image.
                command.args(["--volume", &same(Path::new("/usr"), "ro")]);
                command.args(["--volume", &same(Path::new(binary()), "ro")]);
                command.args(["--entrypoint", binary(), &image()]);
                command
            }
            Self::Namespaces => namespaces(binary()),
        }
    }

    /// Kills everything in the container.
    fn kill(self, name: &str, mut child: Child) {
        match self {
            Self::Docker => {
                let killed = Command::new("docker").args(["kill", name]).output().unwrap();
                assert!(killed.status.success(), "{killed:?}");
            }
            Self::Namespaces => child.kill().unwrap(),
        }
        child.wait().unwrap();
    }
}

/// The image that tests of Redis use; nothing of it is run.
fn image() -> String {
    std::env::var("FENCELOCK_TEST_REDIS_IMAGE").unwrap_or_else(|_| "redis:8".to_owned())
}

fn namespaces(program: &str) -> Command {
    let mut command = Command::new("unshare");
    if !rustix::process::getuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--mount", "--pid", "--ipc", "--uts"]);
    command.args(["--fork", "--kill-child", "--mount-proc", "--", program]);
    command
}

#[test]
fn containers_exclude_each_other_through_one_file() {
    let engine = Engine::find();
    let world = World::new();
    let name = |number: usize| format!("fencelock-test-{}-{number}", std::process::id());
    let fencelock = |number: usize, arguments: &[&str]| {
        let mut command = engine.fencelock(&name(number), world.dir());
        command
            .args(["run", "--ttl", "6s", "--url", &world.url()])
            .args(arguments);
        command
    };

    let mut holder = fencelock(1, &["lock", "--", "sh", "-c", "echo $FENCELOCK_TOKEN; read line"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut held = String::new();
    BufReader::new(holder.stdout.take().unwrap())
        .read_line(&mut held)
        .unwrap();
    let held: u64 = held.trim().parse().unwrap();

    let refused = Done::of(&mut fencelock(2, &["--no-wait", "lock", "--", "true"]));
    assert_eq!(refused.code, Some(75), "{engine:?}: {refused:?}");
    engine.kill(&name(1), holder);
    let next = Done::of(&mut fencelock(
        3,
        &["--wait", "60s", "lock", "--", "sh", "-c", "echo $FENCELOCK_TOKEN"],
    ));
    assert_eq!(next.code, Some(0), "{engine:?}: {next:?}");
    assert!(
        next.stdout.trim().parse::<u64>().unwrap() > held,
        "{next:?} after {held}"
    );
}
