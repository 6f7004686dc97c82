//! `list` and `holder` for users who may do less than the holder, which only root can try.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::read_only::{closed, files, left_behind, look};
use crate::world::{Done, World, binary, not_shown};

/// The user that permissions stop. `None` if only root can be that user.
fn nobody() -> Option<u32> {
    if rustix::process::geteuid().is_root() {
        return Some(65_534);
    }
    not_shown("this needs root");
    None
}

/// `fencelock` where every user can start it.
fn copy_of_binary(world: &World) -> PathBuf {
    let copy = world.path("fencelock");
    // Not by this process: another thread that starts a program meanwhile would keep the copy open for writing.
    assert!(Command::new("cp").arg(binary()).arg(&copy).status().unwrap().success());
    for path in [world.dir(), &copy] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    copy
}

/// The same command, as the program `program` that `user` runs.
fn as_user(program: PathBuf, user: u32) -> impl Fn(Command) -> Command {
    move |command| {
        let mut other = Command::new(&program);
        other
            .args(command.get_args())
            .env_clear()
            .current_dir("/")
            .uid(user)
            .gid(user);
        other.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        other
    }
}

#[test]
fn a_user_who_may_only_read_sees_the_locks() {
    let Some(user) = nobody() else { return };
    let world = World::new();
    let reader = as_user(copy_of_binary(&world), user);
    fs::write(world.path("locks.db"), "").unwrap();
    fs::set_permissions(world.path("locks.db"), fs::Permissions::from_mode(0o644)).unwrap();
    let running = world.start(&["--ttl", "1h"], "exec sleep 600");
    look(&world.path("locks.db"), true, &reader);
    let dead = left_behind(&world);
    fs::set_permissions(world.path("left"), fs::Permissions::from_mode(0o755)).unwrap();
    look(&dead, true, &reader);
    running.stop();
    let closed = closed(&world);
    look(&world.path("locks.db"), false, &reader);
    assert!(files(world.dir()) == closed);

    fs::set_permissions(world.path("locks.db"), fs::Permissions::from_mode(0o600)).unwrap();
    let mut list = world.fencelock();
    list.arg("list");
    let refused = Done::of(&mut reader(list));
    assert!(
        refused.one_line(78).contains("is not readable for this process"),
        "{refused:?}"
    );
}

#[test]
fn root_looks_and_the_owner_of_the_file_still_takes_locks() {
    let Some(user) = nobody() else { return };
    let world = World::new();
    let owner = as_user(copy_of_binary(&world), user);
    let place = world.path("place");
    fs::create_dir(&place).unwrap();
    chown(&place, Some(user), Some(user)).unwrap();
    let file = place.join("locks.db");
    let run = |args: &[&str]| {
        let mut command = Command::new(binary());
        command
            .env("FENCELOCK_URL", format!("sqlite:{}", file.display()))
            .args(args);
        let done = Done::of(&mut owner(command));
        assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""), "{done:?}");
    };
    for last in [&["run", "lock", "--", "true"][..], &["check"]] {
        run(last);
        let before = files(&place);
        look(&file, false, |command| command);
        assert!(files(&place) == before, "after {last:?}");
    }
    assert!(!place.join("locks.db-wal").exists());
    run(&["run", "lock", "--", "true"]);
}
