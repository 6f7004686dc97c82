//! Locks on a Redis that sentinels lead to.

use std::time::Duration;

use conformance_tests::servers::{Kind, RedisSentinels};

use super::fails;
use crate::world::{Done, World};

#[test]
fn commands_find_the_primary_by_its_sentinels_and_name_the_address_to_use() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let service = runtime
        .block_on(RedisSentinels::start(
            &Kind::REDIS,
            1,
            1,
            Duration::from_secs(3600),
            &[],
        ))
        .unwrap();
    let world = World::new();
    let run = |args: &[&str]| Done::of(world.fencelock().env("FENCELOCK_URL", service.url()).args(args));
    let check = run(&["check"]);
    assert_eq!(check.code, Some(0), "{check:?}");
    let token = run(&["run", "lock", "--", "sh", "-c", "echo $FENCELOCK_TOKEN"]);
    assert_eq!(token.code, Some(0), "{token:?}");
    assert!(token.stdout.trim().parse::<u64>().unwrap() > 0, "{token:?}");
    let sentinel = service.sentinels()[0].authority();
    fails(&format!("redis://{sentinel}"), 78, &service.url());
    fails(
        &format!("redis+sentinel://{sentinel}/hers"),
        78,
        RedisSentinels::SERVICE,
    );
    let server = service.servers()[0].authority();
    fails(
        &format!("redis+sentinel://{server}/s"),
        78,
        &format!("redis://{server}"),
    );
}
