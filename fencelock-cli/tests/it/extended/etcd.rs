//! What only an etcd can do to a command.

use conformance_tests::servers::Data;

use crate::server::Server;
use crate::world::{Backend, ClosedPort, Done, SHORT_TTL, TAKEN_AWAY, World, binary};

/// How many leases and keys there are.
fn leases_and_keys(server: &Server) -> (usize, i64) {
    server.block_on(async {
        let mut etcd = etcd_client::Client::connect([server.authority()], None).await.unwrap();
        let leases = etcd.leases().await.unwrap().leases().len();
        let all = etcd_client::GetOptions::new().with_all_keys().with_count_only();
        (leases, etcd.get("", Some(all)).await.unwrap().count())
    })
}

/// Lets in users with a password only: `root`, and `look`, who may read what begins with that.
fn lock_up(server: &Server, prefix: &str) {
    use etcd_client::Permission;

    server.block_on(async {
        let mut etcd = etcd_client::Client::connect([server.authority()], None).await.unwrap();
        for name in ["root", "look"] {
            etcd.role_add(name).await.unwrap();
            etcd.user_add(name, "PASSWORD", None).await.unwrap();
            etcd.user_grant_role(name, name).await.unwrap();
        }
        let read = Permission::read(prefix).with_prefix();
        etcd.role_grant_permission("look", read).await.unwrap();
        etcd.auth_enable().await.unwrap();
    });
}

#[test]
fn a_cluster_that_is_not_there_is_69_and_no_secret_is_shown() {
    let closed = ClosedPort::new();
    let world = World::new();
    let url = format!("etcd://joe:hunter2@{}", closed.address());
    let done = Done::of(world.fencelock().env("FENCELOCK_URL", url).args(["holder", "lock"]));
    let line = done.one_line(69);
    assert!(
        line.contains("cannot be reached") && !line.contains("hunter2"),
        "{line}"
    );
}

#[test]
fn commands_that_end_leave_no_lease() {
    let world = World::on_own(Backend::Etcd);
    let run = || assert_eq!(world.run(["run", "--ttl", "1h", "lock", "--", "true"]).code, Some(0));
    run();
    // The end of a command waits for half a second. A cluster that stalls for longer keeps the lease, and must not always do.
    let mut rounds = Vec::new();
    while rounds.len() < 3 {
        let before = leases_and_keys(world.server());
        run();
        assert_eq!(world.run(["list"]).code, Some(0));
        assert_eq!(world.run(["check"]).code, Some(0));
        let after = leases_and_keys(world.server());
        if after == before {
            return;
        }
        rounds.push((before, after));
    }
    panic!("leases and keys before and after: {rounds:?}");
}

#[test]
fn a_cluster_that_dies_ends_the_command_before_its_lease() {
    let world = World::on_own(Backend::Etcd);
    let running = world.start(&SHORT_TTL, "exec sleep 600");
    let command = running.command;
    world.server().kill();
    let line = running.end().one_line(76).to_owned();
    assert!(!command.is_alive());
    assert!(line.contains("could not be renewed in time ("), "{line}");
}

#[test]
fn a_cluster_that_forgets_its_locks_ends_the_command_at_the_next_renewal() {
    let world = World::on_own(Backend::Etcd);
    // Long enough for the server to be back before it is over.
    let running = world.start(&["--ttl", "30s"], "exec sleep 600");
    world.server().restart(Data::Lost);
    let command = running.command;
    let done = running.end();
    let line = done.one_line(76);
    // Its lease is unknown there, which the client may learn in either way.
    let (gone, ended) = (TAKEN_AWAY, "ended the session or lease that kept the lock");
    assert!(line.contains(gone) || line.contains(ended), "{line}");
    assert!(!command.is_alive());
}

#[test]
fn a_user_who_may_only_read_sees_the_locks_and_changes_none() {
    let world = World::on_own(Backend::Etcd);
    lock_up(world.server(), "fencelock:");
    let run = |user: &str, args: &[&str]| {
        let url = world.url().replace("etcd://", &format!("etcd://{user}:PASSWORD@"));
        Done::of(world.fencelock().env("FENCELOCK_URL", url).args(args))
    };
    // With the output of `fencelock list` as its own, the command shows what is held while it runs.
    let script =
        r#"FENCELOCK_URL="$1" "$0" list --names; FENCELOCK_URL="$1" "$0" holder "$FENCELOCK_NAME" > /dev/null"#;
    let look = world.url().replace("etcd://", "etcd://look:PASSWORD@");
    let seen = run("root", &["run", "lock", "--", "sh", "-c", script, binary(), &look]);
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(0), "lock\n"), "{seen:?}");
    assert_eq!(run("look", &["holder", "lock"]).code, Some(1));
    run("look", &["run", "-n", "lock", "--", "true"]).one_line(78);
}
