//! Containers of one machine: they exclude each other through one file, unless each writes to a layer of its own.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::world::{Done, World, binary, not_shown};

/// A program in the namespaces that an engine makes for a container.
fn in_container(world: &World, program: &[&str]) -> Command {
    let mut command = world.program("unshare");
    if !rustix::process::getuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args("--mount --pid --ipc --uts --fork --kill-child --mount-proc --".split(' '));
    command.args(program);
    command
}

/// Starts it, and gives the token that its command prints.
fn holding(command: &mut Command) -> (Child, u64) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    (child, line.trim().parse().unwrap())
}

const HOLD: &str = "echo $FENCELOCK_TOKEN; read line";

#[test]
fn containers_exclude_each_other_through_one_file() {
    let world = World::new();
    let fencelock = |options: &str, script: &str| {
        let mut command = in_container(&world, &[binary(), "run", "--ttl", "6s"]);
        command.args(options.split_whitespace()).args(["lock", "-c", script]);
        command
    };
    if Done::of(&mut in_container(&world, &["true"])).code != Some(0) {
        not_shown("this machine allows no namespaces");
        return;
    }
    let (mut holder, held) = holding(&mut fencelock("", HOLD));
    Done::of(&mut fencelock("-n", "true")).ends_with(75);
    // Everything in the container ends with it.
    holder.kill().unwrap();
    holder.wait().unwrap();
    let next = Done::of(&mut fencelock("--wait 60s", "echo $FENCELOCK_TOKEN"));
    assert!(next.token() > held);
}

#[test]
fn containers_with_layers_of_their_own_both_hold_and_are_warned() {
    let world = World::new();
    for dir in ["image", "own", "merged"] {
        fs::create_dir(world.path(dir)).unwrap();
    }
    // It sees `image` as `merged`. What is written there goes to a layer that ends with the container.
    let script = r#"mount -t tmpfs tmpfs own && mkdir own/upper own/work &&
        mount -t overlay -o lowerdir=image,upperdir=own/upper,workdir=own/work overlay merged || exit 99
        exec "$0" "$@""#;
    let fencelock = |args: &[&str]| {
        let mut command = in_container(&world, &["sh", "-c", script, binary()]);
        command.args(args).env("FENCELOCK_URL", world.file("merged/locks.db"));
        command
    };
    if Done::of(&mut fencelock(&["--version"])).code != Some(0) {
        not_shown("this machine allows no overlay mounts");
        return;
    }
    // The file of the image, which both have as their lower one.
    let plain = world.run_at(&world.file("image/locks.db"), "check");
    plain.ends_with(0);
    let before = fs::read(world.path("image/locks.db")).unwrap();
    // The two do not exclude each other, as the warning says.
    let holders = [(); 2].map(|()| holding(&mut fencelock(&["run", "-n", "lock", "-c", HOLD])).0);
    let warned = Done::of(&mut fencelock(&["check"]));
    let place = world.path("merged/locks.db");
    let says = format!("  warning  {} lies on overlayfs", place.display());
    warned.shows(0, &[&says, "are not excluded"]);
    let report = Done::of(&mut fencelock(&["check", "--json"])).json();
    assert_eq!(report["ok"], true);
    assert_eq!(report["warnings"].as_array().unwrap().len(), 1, "{report}");
    for mut holder in holders {
        // The end of its input ends `read`, and with it the command.
        drop(holder.stdin.take());
        assert_eq!(holder.wait().unwrap().code(), Some(1));
    }
    assert!(fs::read(world.path("image/locks.db")).unwrap() == before);
    let kind = Done::of(world.program("stat").args(["--file-system", "--format", "%T", "."]));
    assert_eq!(
        plain.stdout.contains("overlayfs"),
        kind.stdout.trim() == "overlayfs",
        "{kind:?}"
    );
}
