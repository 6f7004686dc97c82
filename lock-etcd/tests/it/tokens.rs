//! Tokens when what they come from is lowered, deleted or exchanged under clients that are connected.

use std::num::NonZeroU32;

use crate::server::{
    Etcd, LONG, Plain, claim, client, config, config_behind, granted, plain, queue, shared, start_kind, until,
    until_queued, waiting,
};
use conformance_tests::faults::Proxy;
use lock_core::{Claim, DistributedLock, FencingToken, Grant, LockError};
use lock_etcd::EtcdLock;
use test_servers::Kind;

const DAY: u64 = 86_400_000_000;

/// How the base of tokens comes to be lower.
#[derive(Clone, Copy, Debug)]
enum Lowered {
    /// An older value is written over it.
    PutBack,
    /// It is deleted, and a client makes it anew whose clock is a day behind.
    MadeAnew,
    /// It is deleted.
    Deleted,
}

const LOWERED: [Lowered; 3] = [Lowered::PutBack, Lowered::MadeAnew, Lowered::Deleted];

/// The base, once there is one.
async fn base(etcd: &Plain) -> u64 {
    let mut base = None;
    until(async || {
        let found = etcd.kv_client().get(etcd.base_key(), None).await.unwrap();
        base = found.kvs().first().map(|kv| kv.value_str().unwrap().parse().unwrap());
        base.is_some()
    })
    .await;
    base.unwrap()
}

async fn lower(etcd: &Plain, how: Lowered) {
    let older = (base(etcd).await - DAY).to_string();
    let mut kv = etcd.kv_client();
    match how {
        Lowered::PutBack => kv.put(etcd.base_key(), older, None).await.map(drop).unwrap(),
        Lowered::MadeAnew => {
            kv.delete(etcd.base_key(), None).await.unwrap();
            kv.put(etcd.base_key(), older, None).await.unwrap();
        }
        Lowered::Deleted => kv.delete(etcd.base_key(), None).await.map(drop).unwrap(),
    }
}

pub(crate) fn claim_of(name: &str, tokens: u32) -> Claim {
    claim(name, LONG).with_tokens_wanted(NonZeroU32::new(tokens).unwrap())
}

/// The first and the last token of a grant that has all tokens of its revision.
pub(crate) async fn taken(lock: &EtcdLock, name: &str) -> (FencingToken, FencingToken) {
    let held = claim_of(name, 16);
    let grant = granted(lock, &held).await;
    lock.release(&held, None).await.unwrap();
    tokens(&grant)
}

fn tokens(grant: &Grant) -> (FencingToken, FencingToken) {
    (grant.first_token(), grant.token)
}

#[tokio::test]
async fn a_claim_has_a_block_of_tokens_above_all_before_while_others_draw() {
    let server = shared().await;
    let (etcd, one, two) = (plain(&server).await, client(&server).await, client(&server).await);
    let others = tokio::spawn({
        let lock = client(&server).await;
        async move {
            loop {
                taken(&lock, "m").await;
            }
        }
    });
    let mut before = None;
    for (wanted, count) in [(1, 1), (2, 2), (16, 16), (17, 16), (u32::MAX, 16)].repeat(3) {
        let claims = [0; 3].map(|_| claim_of("n", wanted));
        let first = granted(&one, &claims[0]).await;
        assert_eq!(tokens(&granted(&one, &claims[0]).await), tokens(&first));
        one.release(&claims[0], None).await.unwrap();
        let second = granted(&one, &claims[1]).await;
        let waiting = waiting(&two, &claims[2]);
        until_queued(&etcd, "n", 1).await;
        one.release(&claims[1], None).await.unwrap();
        let waited = waiting.await.unwrap();
        two.release(&claims[2], None).await.unwrap();
        for grant in [first, second, waited] {
            let (first, last) = tokens(&grant);
            assert!(Some(first) > before, "{first} after {before:?}");
            assert_eq!(last.get() - first.get() + 1, count);
            before = Some(last);
        }
    }
    others.abort();
    // What another client was granted, it may have used up to the last token.
    let held = claim_of("n", 16).with_own_lease();
    let (_, last) = tokens(&granted(&one, &held).await);
    assert!(tokens(&granted(&two, &held).await).0 > last);
}

#[tokio::test]
async fn a_connected_client_draws_no_lower_token_when_the_base_was_lowered() {
    for how in LOWERED {
        let server = shared().await;
        let (lock, etcd) = (client(&server).await, plain(&server).await);
        let mut last = taken(&lock, "n").await.1;
        for round in 0..3 {
            lower(&etcd, how).await;
            let (next, end) = taken(&lock, "n").await;
            assert!(next > last, "{next} after {last} in round {round}, {how:?}");
            last = end;
        }
        // Whoever comes now has higher ones, too.
        let (other, _) = taken(&client(&server).await, "n").await;
        assert!(other > last, "{other} after {last}, {how:?}");
    }
}

/// Writes a base that no clock raises.
async fn put_base(etcd: &Plain, value: u64) {
    etcd.kv_client()
        .put(etcd.base_key(), value.to_string(), None)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_base_ahead_of_the_clock_that_is_put_back_by_less_than_was_drawn_since_lowers_no_token() {
    const OTHERS: u64 = 20;
    let server = shared().await;
    let etcd = plain(&server).await;
    client(&server).await;
    // The clock is of no help.
    let ahead = base(&etcd).await + DAY;
    for reconnects in [false, true] {
        for how in [Lowered::PutBack, Lowered::Deleted] {
            put_base(&etcd, ahead).await;
            let proxy = Proxy::start(server.authority()).await.unwrap();
            let one = config_behind(&server, &proxy).connect().await.unwrap();
            let other = client(&server).await;
            taken(&one, "n").await;
            let mut last = taken(&other, "n").await.1;
            for _ in 0..OTHERS {
                last = taken(&other, "n").await.1;
            }
            match how {
                Lowered::Deleted => etcd.kv_client().delete(etcd.base_key(), None).await.map(drop).unwrap(),
                _ => put_base(&etcd, ahead - 16 * OTHERS).await,
            }
            if reconnects {
                proxy.cut();
            }
            let (next, _) = taken(&one, "n").await;
            assert!(next > last, "{next} after {last}, {how:?}, reconnects: {reconnects}");
        }
    }
}

#[tokio::test]
async fn a_waiter_is_granted_no_lower_token_when_the_base_was_lowered() {
    for how in LOWERED {
        let server = shared().await;
        let (one, other, etcd) = (client(&server).await, client(&server).await, plain(&server).await);
        // Both know the base.
        taken(&one, "m").await;
        taken(&other, "m").await;
        let held = claim("n", LONG);
        let first = granted(&one, &held).await.token;
        let before = base(&etcd).await;
        lower(&etcd, how).await;
        let wanted = claim("n", LONG);
        let waiting = waiting(&other, &wanted);
        // It stands there with its token.
        until(async || queue(&etcd, "n").await.len() == 2 && base(&etcd).await > before - DAY / 2).await;
        one.release(&held, None).await.unwrap();
        let second = waiting.await.unwrap().token;
        assert!(second > first, "{second} after {first}, {how:?}");
        other.release(&wanted, None).await.unwrap();
        let (third, _) = taken(&one, "n").await;
        assert!(third > second, "{third} after {second}, {how:?}");
    }
}

#[tokio::test]
async fn a_key_tells_its_token_also_if_the_base_was_raised_just_before() {
    let server = shared().await;
    let (lock, etcd) = (client(&server).await, plain(&server).await);
    let (_, before) = taken(&lock, "n").await;
    let raised = (base(&etcd).await + DAY).to_string();
    etcd.kv_client().put(etcd.base_key(), raised, None).await.unwrap();
    let held = claim("n", LONG);
    let grant = granted(&lock, &held).await;
    assert!(grant.token.get() > before.get() + DAY, "{}", grant.token);
    let seen = client(&server).await.holders(held.name()).await.unwrap().pop().unwrap();
    assert_eq!(seen.token, Some(grant.token));
    // Also that of a waiter.
    let raised = (base(&etcd).await + DAY).to_string();
    etcd.kv_client().put(etcd.base_key(), raised, None).await.unwrap();
    let next = claim("n", LONG);
    let waiting = waiting(&lock, &next);
    until_queued(&etcd, "n", 1).await;
    lock.release(&held, None).await.unwrap();
    let token = waiting.await.unwrap().token;
    assert!(token.get() > grant.token.get() + DAY, "{token}");
    let seen = lock.holders(next.name()).await.unwrap().pop().unwrap();
    assert_eq!(seen.token, Some(token));
}

/// The proxy of etcd in front of a server, which says that it is one, or not.
pub(crate) async fn proxy(server: &Etcd, says_so: bool) -> Etcd {
    let endpoints = format!("--endpoints={}", server.authority());
    let advertised = if says_so { "127.0.0.1:23790" } else { "" };
    let advertised = format!("--advertise-client-url={advertised}");
    start_kind(&Kind::ETCD_PROXY, &[&endpoints, &advertised]).await
}

#[tokio::test]
async fn the_proxy_of_etcd_is_refused() {
    let server = shared().await;
    let proxy = proxy(&server, true).await;
    let refused = config(&proxy).connect().await.unwrap_err();
    assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused:?}");
    assert!(format!("{refused:#}").contains("grpc-proxy"), "{refused}");
    config(&proxy).allow_unsafe_configuration(true).connect().await.unwrap();
}
