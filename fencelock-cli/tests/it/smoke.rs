//! The command on each server, once: it runs, it says that a lock is busy, it shows the holder and takes a lock away.

use rustix::process::Signal;

use crate::world::{Backend, World};

#[cfg(feature = "etcd")]
#[test]
fn etcd() {
    works_on(Backend::Etcd);
}

#[cfg(feature = "postgres")]
#[test]
fn postgres() {
    works_on(Backend::Postgres);
}

#[cfg(feature = "redis")]
#[test]
fn redis() {
    works_on(Backend::Redis);
}

#[track_caller]
fn works_on(backend: Backend) {
    let world = World::on(backend);
    let token = || {
        let done = world.run(["run", "lock", "--", "sh", "-c", "echo $FENCELOCK_TOKEN; exit 3"]);
        assert_eq!((done.code, done.stderr.as_str()), (Some(3), ""), "{done:?}");
        done.stdout.trim().parse::<u64>().unwrap()
    };
    let first = token();
    let running = world.start(&["--label", "nightly"], "exec sleep 600");
    let pid = running.locker().0;
    let busy = world.run(["run", "-n", "lock", "--", "true"]);
    assert!(
        busy.one_line(75).contains(&format!(":{pid} (nightly) for ")),
        "{busy:?}"
    );
    let holder = world.run(["holder", "lock"]);
    assert_eq!(holder.code, Some(0), "{holder:?}");
    assert!(holder.stdout.contains(&format!(":{pid} (nightly) for ")), "{holder:?}");
    running.locker().signal(Signal::TERM);
    assert_eq!(running.end().code, Some(143));

    let holder = world.run(["holder", "lock"]);
    assert_eq!((holder.code, holder.stdout.as_str()), (Some(1), "lock is free\n"));
    let reserved = world.run(["run", "-n", "--at-least", "1h", "lock", "--", "true"]);
    assert_eq!(reserved.code, Some(0), "{reserved:?}");
    assert_eq!(world.run(["run", "-n", "lock", "--", "true"]).code, Some(75));
    let forced = world.run(["release", "--force", "lock"]);
    assert_eq!(forced.code, Some(0), "{forced:?}");
    assert!(token() > first);
}
