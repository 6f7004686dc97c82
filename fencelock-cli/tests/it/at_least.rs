//! A name stays taken for a time after the command has ended, as a scheduler on many machines needs it.

use crate::world::{Backend, World};

pub(crate) fn a_name_stays_taken_after_its_command(backend: Backend) {
    let world = World::on(backend);
    let reserve = [
        "run",
        "-n",
        "--at-least",
        "1h",
        "--label",
        "nightly",
        "lock",
        "--",
        "false",
    ];
    let done = world.run(reserve);
    assert_eq!(done.code, Some(1), "{done:?}");
    let busy = world.run(["run", "-n", "lock", "--", "true"]);
    let line = busy.one_line(75);
    assert!(
        line.contains("lock is busy, reserved by ") && line.contains(" (nightly)"),
        "{line}"
    );
    let shown = world.run(["holder", "lock"]);
    assert_eq!(shown.code, Some(0), "{shown:?}");
    assert!(
        shown.stdout.starts_with("lock, reserved by ") && shown.stdout.contains(" (nightly) for "),
        "{shown:?}"
    );
    let listed = world.run(["list"]);
    assert!(listed.stdout.contains("reserved ("), "{listed:?}");
    let listed = world.run(["list", "--json"]);
    assert!(listed.stdout.contains("\"reserved\":true"), "{listed:?}");
    let forced = world.run(["release", "--force", "lock"]);
    assert_eq!(forced.code, Some(0), "{forced:?}");
    let done = world.run(["run", "-n", "lock", "--", "true"]);
    assert_eq!(done.code, Some(0), "{done:?}");
}
