//! Tokens and reservations as the client gets them from the scripts, and keys that another program wrote.

use std::num::NonZeroU32;
use std::pin::pin;
use std::time::Duration;

use lock_core::{Claim, DistributedLock, Grant, LockError, Released, Renewal, Wait};

use crate::server::{Ask, LONG, busy, claim, granted, name, soon, start};

#[tokio::test]
async fn a_counter_is_kept_for_as_long_as_is_configured() {
    let server = start().await;
    let hours = Duration::from_secs(2 * 60 * 60);
    let longer = server.config().counter_retention(hours);
    for (config, time) in [(server.config(), Duration::from_secs(10 * 60)), (longer, hours)] {
        let (lock, claim) = (config.connect().await.unwrap(), claim("n", LONG));
        granted(&lock, &claim).await;
        lock.release(&claim, None).await.unwrap();
        let kept: u64 = server.command("PTTL {fencelock:n}:fence").await;
        let all = time.as_millis() as u64;
        assert!(kept <= all && kept > all - 60_000, "{kept}");
    }
}

fn wants(tokens: u32) -> Claim {
    claim("n", LONG).with_tokens_wanted(NonZeroU32::new(tokens).unwrap())
}

fn block(grant: &Grant) -> (u64, u64) {
    (grant.first_token().get(), grant.token.get())
}

#[tokio::test]
async fn a_block_comes_with_the_answer_or_the_push_and_has_at_most_64_tokens() {
    let server = start().await;
    let (one, other) = (server.client().await, server.client().await);
    let first = wants(u32::MAX);
    let (from, to) = block(&granted(&one, &first).await);
    assert_eq!(from, to, "without a last token none is known to be unused");
    one.release(&first, None).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let (from, last) = block(&granted(&one, &first).await);
    assert!(from > to && last - from + 1 == 64, "{from}..={last}");
    assert_eq!(block(&granted(&one, &first).await), (last, last), "asked again");
    let wanted = wants(8);
    let mut wait = pin!(other.acquire(&wanted, Wait::until(None)));
    tokio::select! {
        _ = &mut wait => panic!("the lock is held"),
        () = server.until_queued("n", 1) => {}
    }
    one.release(&first, None).await.unwrap();
    let (from, to) = block(&wait.await.unwrap().granted().unwrap());
    assert!(from > last && to - from + 1 == 8, "{from}..={to}");
}

#[tokio::test]
async fn a_reservation_counts_for_the_grant_that_its_client_knows() {
    let server = start().await;
    let (lock, other) = (server.client().await, server.client().await);
    let mine = claim("n", LONG).with_at_least(2 * LONG);
    granted(&lock, &mine).await;
    assert_eq!(lock.reserve(&mine, 2 * LONG).await.unwrap(), Renewal::Renewed);
    // An acquire that the network held back arrives after the release.
    other.release(&mine, None).await.unwrap();
    granted(&other, &mine).await;
    assert_eq!(lock.reserve(&mine, 2 * LONG).await.unwrap(), Renewal::NotHeld);
    let left: u64 = server.command("PTTL {fencelock:n}:lock").await;
    assert!(Duration::from_millis(left) <= LONG);
}

fn assert_foreign(error: &LockError, name: &str) {
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    assert!(error.to_string().contains("did not write"), "{error}");
    assert!(error.to_string().contains(&format!("{{fencelock:{name}}}:")), "{error}");
}

#[tokio::test]
async fn a_key_that_another_program_has_written_is_neither_touched_nor_passed_by() {
    let server = start().await;
    let lock = server.client().await;
    let mut keys = Vec::new();
    for kind in ["lock", "fence", "order", "holders"] {
        // No counter goes above the last one.
        for (of, foreign) in [
            ("list", "RPUSH KEY x"),
            ("text", "SET KEY x"),
            ("end", "SET KEY 9007199254740991"),
        ] {
            let name = format!("{kind}-{of}");
            keys.push(format!("{{fencelock:{name}}}:{kind}"));
            let _: () = server.command(&foreign.replace("KEY", &keys[keys.len() - 1])).await;
            for attempt in [
                lock.try_acquire(&claim(&name, LONG)).await,
                lock.acquire(&claim(&name, LONG), Wait::until(soon())).await,
            ] {
                assert_foreign(&attempt.unwrap_err(), &name);
            }
        }
    }
    keys.sort();
    let mut left: Vec<String> = server.command("KEYS *").await;
    left.sort();
    assert_eq!(left, keys, "no lock without a token, and nothing deleted");
    // Other names are as free as ever. The order in which the server lists its keys is by chance, and the foreign ones must not be the last.
    let names: Vec<_> = (100..120).map(|number| name(&format!("n{number}"))).collect();
    for name in &names {
        granted(&lock, &claim(name.as_str(), LONG)).await;
    }
    let listed = lock.list("").await.unwrap();
    let listed: Vec<_> = listed.into_iter().filter_map(|holder| holder.name).collect();
    assert!(listed.ends_with(&names), "{listed:?}");
    assert_foreign(&lock.holders(&name("lock-list")).await.unwrap_err(), "lock-list");
}

#[tokio::test]
async fn what_another_program_has_written_leaves_a_claim_without_a_place_and_keeps_no_holder_from_its_release() {
    let server = start().await;
    let lock = server.client().await;
    let held = claim("n", LONG);
    granted(&lock, &held).await;
    // This key is read by claims that wait alone.
    let _: () = server.command("SET {fencelock:n}:waiters x").await;
    let error = lock.acquire(&claim("n", LONG), Wait::until(soon())).await.unwrap_err();
    assert_foreign(&error, "n");
    assert!(!server.command::<bool>("EXISTS {fencelock:n}:order").await);
    busy(&lock, &claim("n", LONG)).await;
    for key in ["fence", "order", "waiters"] {
        let _: () = server.command(&format!("DEL {{fencelock:n}}:{key}")).await;
        let _: () = server.command(&format!("RPUSH {{fencelock:n}}:{key} x")).await;
    }
    assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
    server.until_locked("n", false).await;
}
