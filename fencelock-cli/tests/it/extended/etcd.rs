//! What only an etcd can do to a command.

use etcd_client::{Client, GetOptions, Permission};

use crate::server::Server;
use crate::world::{Backend, World, binary};

/// How many leases and keys there are.
fn leases_and_keys(server: &Server) -> (usize, i64) {
    server.block_on(async {
        let mut etcd = Client::connect([server.authority()], None).await.unwrap();
        let leases = etcd.leases().await.unwrap().leases().len();
        let all = GetOptions::new().with_all_keys().with_count_only();
        (leases, etcd.get("", Some(all)).await.unwrap().count())
    })
}

#[test]
fn commands_that_end_leave_no_lease() {
    let world = World::on_own(Backend::Etcd);
    let run = || world.run("run --ttl 1h lock -- true").is(0, "", "");
    run();
    // The end of a command waits for half a second. A cluster that stalls for longer keeps the lease, and must not always do.
    let mut rounds = Vec::new();
    while rounds.len() < 3 {
        let before = leases_and_keys(world.server());
        run();
        for line in ["list", "check"] {
            world.run(line).ends_with(0);
        }
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
    let server = world.server();
    server.block_on(async {
        let mut etcd = Client::connect([server.authority()], None).await.unwrap();
        for name in ["root", "look"] {
            etcd.role_add(name).await.unwrap();
            etcd.user_add(name, "PASSWORD", None).await.unwrap();
            etcd.user_grant_role(name, name).await.unwrap();
        }
        let read = Permission::read("fencelock:").with_prefix();
        etcd.role_grant_permission("look", read).await.unwrap();
        etcd.auth_enable().await.unwrap();
    });
    let as_user = |user: &str| world.url().replace("etcd://", &format!("etcd://{user}:PASSWORD@"));
    // With the output of `fencelock list` as its own, the command shows what is held while it runs.
    world.job(r#"FENCELOCK_URL="$2" "$1" list --names"#);
    let job = format!("run lock -- sh job {} {}", binary(), as_user("look"));
    world.run_at(&as_user("root"), &job).is(0, "ready\nlock\n", "");
    world.run_at(&as_user("look"), "holder lock").ends_with(1);
    world.run_at(&as_user("look"), "run -n lock -- true").one_line(78);
}
