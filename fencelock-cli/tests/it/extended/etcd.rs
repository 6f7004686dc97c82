//! What only an etcd can do to a command.

use crate::server::Server;
use crate::world::{Backend, Done, World, binary};

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
