//! Containers that start from one image: each writes to a layer of its own.

use std::fs;
use std::process::{Child, Command, Stdio};

use crate::world::{Done, World, binary, not_shown, wait_until};

/// `fencelock` in a container of its own, which sees the folder `image` of the world as `merged`. What is written there goes
/// to a layer that ends with the container.
fn in_container(world: &World, url: &str) -> Command {
    let script = r#"mount -t tmpfs tmpfs own && mkdir own/upper own/work &&
        mount -t overlay -o lowerdir=image,upperdir=own/upper,workdir=own/work overlay merged || exit 99
        exec "$0" "$@""#;
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--mount", "sh", "-c", script, binary()]);
    command.env("FENCELOCK_URL", url).current_dir(world.dir());
    command
}

#[test]
fn containers_with_layers_of_their_own_both_hold_and_are_warned() {
    let world = World::new();
    for dir in ["image", "own", "merged"] {
        fs::create_dir(world.path(dir)).unwrap();
    }
    let path = world.path("merged/locks.db").display().to_string();
    let fencelock = |args: &[&str]| {
        let mut command = in_container(&world, &format!("sqlite:{path}"));
        command.args(args);
        command
    };
    if Done::of(&mut fencelock(&["--version"])).code != Some(0) {
        not_shown("this machine allows no overlay mounts");
        return;
    }
    // The file of the image, which both have as their lower one.
    let mut made = world.fencelock();
    made.env(
        "FENCELOCK_URL",
        format!("sqlite:{}", world.path("image/locks.db").display()),
    );
    assert_eq!(Done::of(made.arg("check")).code, Some(0));
    let before = fs::read(world.path("image/locks.db")).unwrap();

    let hold = |mark: &str| -> Child {
        let script = format!("touch {mark}; read line");
        let mut command = fencelock(&["run", "--no-wait", "lock", "--", "sh", "-c", &script]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    };
    let mut holders = ["one", "other"].map(hold);
    // Nobody is excluded: that is what the warning is about.
    wait_until("both to hold", || {
        ["one", "other"].iter().all(|mark| world.path(mark).exists())
    });
    let running = holders.each_mut().map(|holder| holder.try_wait().unwrap());
    assert_eq!(running, [None, None]);
    let warned = Done::of(&mut fencelock(&["check"]));
    assert_eq!(warned.code, Some(0), "{warned:?}");
    assert!(
        warned.stdout.contains(&format!("{path} lies on overlayfs")) && warned.stdout.contains("are not excluded"),
        "{warned:?}"
    );
    for mut holder in holders {
        drop(holder.stdin.take());
        // The end of its input ends `read`, and with it the command.
        assert_eq!(holder.wait().unwrap().code(), Some(1));
    }
    assert!(fs::read(world.path("image/locks.db")).unwrap() == before);
}

#[test]
fn a_folder_that_is_no_overlay_is_not_warned_of() {
    let world = World::new();
    let mut kind = Command::new("stat");
    let kind = Done::of(kind.args(["--file-system", "--format", "%T"]).arg(world.dir()));
    let warned = world.run(["check"]).stdout.contains("overlayfs");
    assert_eq!(warned, kind.stdout.trim() == "overlayfs", "{kind:?}");
}
