//! The resource's side where Redis is special: numbers in Lua, marks that another program wrote, and clients in other languages. The suite has
//! the rest, in `fences`.

use lock_core::FencingToken;
use lock_core::fence::StaleToken;
use lock_redis::fence::{self, ADMIT_LUA, FenceError, mark_key};
use lock_redis::redis::{self, RedisError, Value};

use crate::server::{Ask, start};

fn token(value: u64) -> FencingToken {
    FencingToken::new(value).unwrap()
}

fn stale(outcome: Result<(), FenceError>) -> StaleToken {
    match outcome {
        Err(FenceError::Stale(stale)) => stale,
        other => panic!("it should be stale, and is {other:?}"),
    }
}

#[tokio::test]
async fn marks_are_compared_as_numbers_to_the_last_digit() {
    let server = start().await;
    let mut con = server.plain().await;
    let below = token(FencingToken::MAX.get() - 1);
    fence::admit(&mut con, "r", FencingToken::MAX).await.unwrap();
    let refused = fence::admit(&mut con, "r", below).await;
    assert_eq!(stale(refused), StaleToken::new("r", below, FencingToken::MAX));
    fence::admit(&mut con, "digits", token(9)).await.unwrap();
    fence::admit(&mut con, "digits", token(10)).await.unwrap();
    stale(fence::admit(&mut con, "digits", token(9)).await);
}

#[tokio::test]
async fn a_mark_of_holders_that_share_refuses_and_is_told_apart_and_an_earlier_version_had_none() {
    let server = start().await;
    let mut con = server.plain().await;
    fence::admit_shared(&mut con, "r", token(7)).await.unwrap();
    assert_eq!(fence::mark(&mut con, "r").await.unwrap(), None);
    let refused = fence::admit(&mut con, "r", token(6)).await;
    assert_eq!(stale(refused), StaleToken::new("r", token(6), token(7)));
    let () = server.command("SET old:fence 5").await;
    stale(fence::admit_shared(&mut con, "old", token(4)).await);
    fence::admit_shared(&mut con, "old", token(6)).await.unwrap();
    stale(fence::admit(&mut con, "old", token(5)).await);
    assert_eq!(fence::mark(&mut con, "old").await.unwrap(), Some(token(5)));
}

#[tokio::test]
async fn a_command_that_fails_leaves_the_mark_raised_and_a_script_that_was_forgotten_is_sent_again() {
    let server = start().await;
    let mut con = server.plain().await;
    let () = server.command("SET r text").await;
    let increment = redis::cmd("INCR").arg("r").clone();
    let failed = fence::write::<Value>(&mut con, "r", token(5), &increment).await;
    assert!(matches!(failed, Err(FenceError::Redis(_))), "{failed:?}");
    let () = server.command("SCRIPT FLUSH").await;
    stale(fence::admit(&mut con, "r", token(4)).await);
}

#[tokio::test]
async fn a_mark_or_a_token_that_is_no_token_admits_no_holder_and_changes_nothing() {
    let server = start().await;
    let mut con = server.plain().await;
    const TOO_HIGH: &str = "99999999999999999999";
    for nonsense in ["x", "-1", "1.5", "1e3", "", "0x10", " 7", TOO_HIGH] {
        let set = redis::cmd("SET").arg(mark_key("r")).arg(nonsense).clone();
        let () = server.ask(&set).await;
        let refused = fence::admit(&mut con, "r", token(5)).await;
        assert!(
            matches!(refused, Err(FenceError::Mark { .. })),
            "{nonsense:?}: {refused:?}"
        );
        let mark = fence::mark(&mut con, "r").await;
        assert!(matches!(mark, Err(FenceError::Mark { .. })), "{nonsense:?}: {mark:?}");
        assert_eq!(server.command::<String>("GET r:fence").await, nonsense);
        // As the token of a client in another language, which may only be too high.
        if nonsense == TOO_HIGH {
            continue;
        }
        let mut admit = redis::cmd("EVAL");
        admit.arg(ADMIT_LUA).arg(1).arg(mark_key("other")).arg(nonsense);
        let refused: Result<Value, RedisError> = admit.query_async(&mut con).await;
        assert!(refused.is_err(), "{nonsense:?}: {refused:?}");
    }
    assert_eq!(fence::mark(&mut con, "other").await.unwrap(), None);
}
