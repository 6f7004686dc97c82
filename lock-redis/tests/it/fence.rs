//! The resource's side on a real server.

use lock_core::FencingToken;
use lock_core::fence::StaleToken;
use lock_redis::fence::{self, ADMIT_LUA, FenceError, mark_key};
use lock_redis::redis::{self, RedisError, Value};

use crate::server::Server;

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
async fn a_lower_token_is_refused_and_its_command_is_not_carried_out() {
    let server = Server::start();
    let mut con = server.plain().await;
    let set = |value: u64| redis::cmd("SET").arg("r").arg(value).clone();
    for value in [5, 5, 9] {
        let () = fence::write(&mut con, "r", token(value), &set(value)).await.unwrap();
    }
    let refused = fence::write(&mut con, "r", token(8), &set(8)).await;
    assert_eq!(stale(refused), StaleToken::new("r", token(8), token(9)));
    assert_eq!(server.command::<u64>("GET r").await, 9);
    assert_eq!(fence::mark(&mut con, "r").await.unwrap(), Some(token(9)));
    assert_eq!(fence::mark(&mut con, "another").await.unwrap(), None);
    fence::admit(&mut con, "another", token(1)).await.unwrap();
}

#[tokio::test]
async fn tokens_that_differ_in_the_last_digit_alone_are_told_apart_up_to_the_highest() {
    let server = Server::start();
    let mut con = server.plain().await;
    fence::admit(&mut con, "r", FencingToken::MAX).await.unwrap();
    let below = token(FencingToken::MAX.get() - 1);
    assert_eq!(
        stale(fence::admit(&mut con, "r", below).await),
        StaleToken::new("r", below, FencingToken::MAX)
    );
    // In order of numbers, not of letters.
    fence::admit(&mut con, "digits", token(9)).await.unwrap();
    fence::admit(&mut con, "digits", token(10)).await.unwrap();
    stale(fence::admit(&mut con, "digits", token(9)).await);
}

#[tokio::test]
async fn the_mark_is_that_of_holders_that_do_not_share_and_a_refusal_names_the_one_that_refused() {
    let server = Server::start();
    let mut con = server.plain().await;
    for value in [7, 5] {
        fence::admit_shared(&mut con, "r", token(value)).await.unwrap();
    }
    assert_eq!(fence::mark(&mut con, "r").await.unwrap(), None);
    let refused = fence::admit(&mut con, "r", token(6)).await;
    assert_eq!(stale(refused), StaleToken::new("r", token(6), token(7)));
    fence::admit(&mut con, "r", token(9)).await.unwrap();
    assert_eq!(fence::mark(&mut con, "r").await.unwrap(), Some(token(9)));
    let refused = fence::admit_shared(&mut con, "r", token(8)).await;
    assert_eq!(stale(refused), StaleToken::new("r", token(8), token(9)));
    // A mark of an earlier version.
    let () = server.command("SET old:fence 5").await;
    stale(fence::admit_shared(&mut con, "old", token(4)).await);
    fence::admit_shared(&mut con, "old", token(6)).await.unwrap();
    stale(fence::admit(&mut con, "old", token(5)).await);
    assert_eq!(fence::mark(&mut con, "old").await.unwrap(), Some(token(5)));
}

#[tokio::test]
async fn a_command_that_fails_leaves_the_mark_raised() {
    let server = Server::start();
    let mut con = server.plain().await;
    let () = server.command("SET r text").await;
    let increment = redis::cmd("INCR").arg("r").clone();
    let failed = fence::write::<Value>(&mut con, "r", token(5), &increment).await;
    assert!(matches!(failed, Err(FenceError::Redis(_))), "{failed:?}");
    stale(fence::admit(&mut con, "r", token(4)).await);
}

#[tokio::test]
async fn a_script_that_the_server_forgot_is_sent_again() {
    let server = Server::start();
    let mut con = server.plain().await;
    fence::admit(&mut con, "r", token(5)).await.unwrap();
    let () = server.command("SCRIPT FLUSH").await;
    fence::admit(&mut con, "r", token(5)).await.unwrap();
    stale(fence::admit(&mut con, "r", token(4)).await);
}

#[tokio::test]
async fn nonsense_under_the_key_of_the_mark_admits_nobody() {
    let server = Server::start();
    let mut con = server.plain().await;
    for nonsense in ["x", "-1", "1.5", "1e3", "99999999999999999999", ""] {
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
    }
}

#[tokio::test]
async fn another_client_cannot_store_a_mark_that_is_no_token() {
    let server = Server::start();
    let mut con = server.plain().await;
    for nonsense in ["x", "", "-1", "1.5", "1e3", "0x10", " 7"] {
        let mut admit = redis::cmd("EVAL");
        admit.arg(ADMIT_LUA).arg(1).arg(mark_key("r")).arg(nonsense);
        let refused: Result<Value, RedisError> = admit.query_async(&mut con).await;
        assert!(refused.is_err(), "{nonsense:?}: {refused:?}");
    }
    assert_eq!(fence::mark(&mut con, "r").await.unwrap(), None);
}
