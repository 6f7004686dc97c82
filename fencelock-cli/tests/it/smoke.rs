//! The command on each server, once: it runs, it says that a lock is busy, it shows the holder and takes a lock away.

use rustix::process::Signal;

use crate::modes;
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
    let holder = format!(":{} (nightly) for ", running.fencelock().0);
    let busy = world.run(["run", "-n", "lock", "--", "true"]);
    assert!(busy.one_line(75).contains(&holder), "{busy:?}");
    let shown = world.run(["holder", "lock"]);
    assert!(shown.code == Some(0) && shown.stdout.contains(&holder), "{shown:?}");
    running.fencelock().signal(Signal::TERM);
    assert_eq!(running.end().code, Some(143));

    let shown = world.run(["holder", "lock"]);
    assert_eq!((shown.code, shown.stdout.as_str()), (Some(1), "lock is free\n"));
    let reserved = world.run(["run", "-n", "--min-hold", "1h", "lock", "--", "true"]);
    assert_eq!(reserved.code, Some(0), "{reserved:?}");
    assert_eq!(world.run(["run", "-n", "lock", "--", "true"]).code, Some(75));
    let forced = world.run(["release", "--force", "lock"]);
    assert_eq!(forced.code, Some(0), "{forced:?}");
    assert!(token() > first);
    let check = world.run(["check", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&check.stdout).unwrap();
    let product = report["backend"]["product"].as_str().unwrap();
    assert!(
        check.code == Some(0) && product.eq_ignore_ascii_case(&backend.product()),
        "{check:?}"
    );
    modes::readers_share_a_lock_and_exclude_a_writer(backend);
    modes::a_number_of_holders_are_let_in_at_once(backend);
}
