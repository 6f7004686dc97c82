//! `list` and `holder` only read.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use crate::world::{Done, World, binary};

/// What a directory holds: the bytes, the time of the last write, the mode and the owner of each file.
pub(crate) type Files = BTreeMap<PathBuf, (Vec<u8>, SystemTime, u32, u32)>;

pub(crate) fn files(dir: &Path) -> Files {
    let file = |path: PathBuf| {
        let data = fs::symlink_metadata(&path).unwrap();
        let bytes = if data.is_file() {
            fs::read(&path).unwrap()
        } else {
            Vec::new()
        };
        (path, (bytes, data.modified().unwrap(), data.mode(), data.uid()))
    };
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|entry| file(entry.unwrap().path())).collect()
}

/// `list` and `holder` on the file, with what they are to answer.
#[track_caller]
pub(crate) fn look(file: &Path, held: bool, prepare: impl Fn(Command) -> Command) {
    let run = |args: &[&str]| {
        let mut command = Command::new(binary());
        command
            .env_clear()
            .env("FENCELOCK_URL", format!("sqlite:{}", file.display()));
        command.args(args).current_dir("/");
        Done::of(&mut prepare(command))
    };
    let list = run(&["list", "--names"]);
    let names = if held { "lock\n" } else { "" };
    assert_eq!((list.code, list.stdout.as_str()), (Some(0), names), "{list:?}");
    let holder = run(&["holder", "lock"]);
    assert_eq!(holder.code, Some(if held { 0 } else { 1 }), "{holder:?}");
}

/// Copies what a holder has on disk at that moment, as it is left behind by one that is killed.
pub(crate) fn left_behind(world: &World) -> PathBuf {
    let dir = world.path("left");
    fs::create_dir(&dir).unwrap();
    for name in ["locks.db", "locks.db-wal", "locks.db-shm"] {
        fs::copy(world.path(name), dir.join(name)).unwrap();
    }
    dir.join("locks.db")
}

/// What is there when the last client has closed the file: it takes the log with it.
pub(crate) fn closed(world: &World) -> Files {
    assert_eq!(world.run(["check"]).code, Some(0));
    let closed = files(world.dir());
    assert!(!closed.contains_key(&world.path("locks.db-wal")));
    closed
}

#[test]
fn a_list_leaves_every_file_as_it_is() {
    let world = World::new();
    let running = world.start(&["--ttl", "1h"], "exec sleep 600");
    let dead = left_behind(&world);
    let (live, left) = (files(world.dir()), files(&world.path("left")));
    look(&world.path("locks.db"), true, |command| command);
    assert!(files(world.dir()) == live, "with a holder");
    look(&dead, true, |command| command);
    assert!(files(&world.path("left")) == left, "after a holder was killed");

    running.stop();
    let closed = closed(&world);
    look(&world.path("locks.db"), false, |command| command);
    assert!(files(world.dir()) == closed, "with nobody connected");
}

#[test]
fn a_mistyped_path_is_told_and_nothing_is_made_there() {
    let world = World::new();
    for path in ["no/such/dir/x.db", "x.db"] {
        let url = format!("sqlite:{}", world.path(path).display());
        for args in [&["list"][..], &["holder", "lock"]] {
            let done = Done::of(world.fencelock().env("FENCELOCK_URL", &url).args(args));
            let line = done.one_line(78);
            assert!(line.contains(path) && line.contains("check the path"), "{line}");
            assert_eq!(files(world.dir()), Files::new(), "{args:?}");
        }
    }
}

#[test]
fn the_users_own_file_that_was_never_made_holds_no_locks() {
    let world = World::new();
    let run = |args: &[&str]| {
        let mut command = world.fencelock();
        Done::of(command.env_remove("FENCELOCK_URL").env("HOME", world.dir()).args(args))
    };
    let done = run(&["list"]);
    let place = world.path(".local/state/fencelock/locks.db");
    assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""));
    assert_eq!(
        done.stderr,
        format!("fencelock: no locks are held in {}\n", place.display())
    );
    assert_eq!(run(&["list", "--json"]).code, Some(0));
    let done = run(&["holder", "lock"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(1), "lock is free\n"));
    assert_eq!(files(world.dir()), Files::new());
}

#[test]
fn an_empty_file_holds_no_locks_and_stays_empty() {
    let world = World::new();
    fs::write(world.path("locks.db"), "").unwrap();
    let before = files(world.dir());
    look(&world.path("locks.db"), false, |command| command);
    assert!(files(world.dir()) == before);
}

#[test]
fn what_is_no_database_of_locks_is_refused_and_left_as_it_is() {
    for content in ["a database", "Dear diary\n"] {
        let world = World::new();
        if content == "a database" {
            let other = rusqlite::Connection::open(world.path("locks.db")).unwrap();
            other
                .execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE lock (name)")
                .unwrap();
        } else {
            fs::write(world.path("locks.db"), content.repeat(500)).unwrap();
        }
        let before = files(world.dir());
        let done = world.run(["list"]);
        let line = done.one_line(78);
        let says = ["is the database of another program", "is not an SQLite database"];
        assert!(says.iter().any(|says| line.contains(says)), "{line}");
        assert!(files(world.dir()) == before, "{content}");
    }
}

#[test]
fn an_address_that_is_read_only_takes_no_locks() {
    let world = World::new();
    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    let url = format!("{}?mode=ro", world.url());
    let before = files(world.dir());
    let run = |args: &[&str]| Done::of(world.fencelock().env("FENCELOCK_URL", &url).args(args));
    for args in [
        &["run", "lock", "--", "true"][..],
        &["run", "-n", "lock", "--", "true"],
        &["release", "--force", "lock"],
    ] {
        let done = run(args);
        let line = done.one_line(78);
        assert!(line.contains("read-only") && line.contains("mode=ro"), "{line}");
    }
    assert_eq!(run(&["check"]).code, Some(78));
    assert_eq!(run(&["list"]).code, Some(0));
    assert_eq!(run(&["holder", "lock"]).code, Some(1));
    assert!(files(world.dir()) == before);
}
