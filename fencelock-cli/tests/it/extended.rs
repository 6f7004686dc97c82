//! What takes long, needs several servers or one of a test's own, or needs what not every user may do.

/// Makes a test of each function, on each backend.
macro_rules! on_every_backend {
    ($($test:ident),* $(,)?) => {
        on_every_backend! { @ $($test)*; sqlite: Sqlite, "sqlite"; etcd: Etcd, "etcd"; postgres: Postgres, "postgres"; redis: Redis, "redis" }
    };
    (@ $($test:ident)*; $name:ident: $backend:ident, $feature:literal $($rest:tt)*) => {
        #[cfg(feature = $feature)]
        mod $name {
            $(
                #[test]
                fn $test() {
                    super::$test(crate::world::Backend::$backend);
                }
            )*
        }
        on_every_backend! { @ $($test)* $($rest)* }
    };
    (@ $($test:ident)*) => {};
}

#[cfg(target_os = "linux")]
mod containers;
#[cfg(feature = "etcd")]
mod etcd;
#[cfg(target_os = "linux")]
mod overlay;
mod privileged;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redis")]
mod sentinel;
mod slow;

#[cfg(feature = "redis")]
use crate::world::{Done, World};

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
