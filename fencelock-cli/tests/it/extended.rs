//! What takes long, needs several servers or one of a test's own, or needs what not every user may do.

mod at_least;
#[cfg(target_os = "linux")]
mod containers;
#[cfg(feature = "etcd")]
mod etcd;
mod losing;
#[cfg(target_os = "linux")]
mod overlay;
#[cfg(feature = "postgres")]
mod postgres;
mod read_only;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redis")]
mod sentinel;
mod surroundings;
mod terminal;
mod turns;

#[cfg(feature = "redis")]
use crate::world::{Done, World};

#[cfg(feature = "etcd")]
mod on_etcd {
    tests_of_every_backend!(Etcd);
}

#[cfg(feature = "postgres")]
mod on_postgres {
    tests_of_every_backend!(Postgres);
}

#[cfg(feature = "redis")]
mod on_redis {
    tests_of_every_backend!(Redis);
}

/// What no output shows.
#[cfg(feature = "redis")]
const SECRET: &str = "hunter2";

/// Tries each way to need the server, and checks that each fails with that code, in one line that holds `says` and no secret. A run that waits
/// may say first that it goes on.
#[cfg(feature = "redis")]
#[track_caller]
fn fails(url: &str, code: i32, says: &str) {
    let world = World::new();
    for args in [
        &["run", "lock", "--", "true"][..],
        &["run", "-n", "lock", "--", "true"],
        &["holder", "lock"],
        &["list"],
        &["release", "--force", "lock"],
    ] {
        let mut done = Done::of(world.fencelock().env("FENCELOCK_URL", url).args(args));
        assert!(!done.stderr.contains(SECRET), "{done:?}");
        if args.starts_with(&["run", "lock"])
            && done
                .stderr
                .starts_with("fencelock: waiting goes on after a failure that may pass: ")
        {
            done.stderr = done.stderr.split_once('\n').map(|(_, rest)| rest.to_owned()).unwrap();
        }
        let line = done.one_line(code);
        assert!(line.contains(says), "{line}");
    }
    let done = Done::of(world.fencelock().env("FENCELOCK_URL", url).arg("check"));
    assert_eq!((done.code, done.stderr.as_str()), (Some(code), ""));
    assert!(done.stdout.contains(says) && !done.stdout.contains(SECRET), "{done:?}");
}
