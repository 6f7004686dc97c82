//! Locks on several independent servers: what takes real servers to show. The coordinator is in `tests/simulation`, the script of a node in
//! `scripts`, and a minority that fails in the suite.

use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use lock_core::{Attempt, DistributedLock, LockError, Mode, Released, Renewal};
use lock_redis::{RedisConfig, RedisLock};

use crate::server::{
    Ask, Data, Direction, HANG_LIMIT, Kind, LONG, Proxy, Server, Traffic, busy, claim, granted, name, rights, until,
};

const TTL: Duration = Duration::from_secs(30);

/// Servers that start at once: one after the other, they may not be new together on a busy machine.
async fn nodes(kind: &'static Kind, count: usize) -> Vec<Server> {
    let starting = (0..count).map(|_| Server::start_own(kind, &[]));
    try_join_all(starting).await.unwrap()
}

async fn plain_nodes(count: usize) -> Vec<Server> {
    nodes(&Kind::LOCAL_REDIS, count).await
}

fn config(nodes: &[Server]) -> RedisConfig {
    RedisConfig::redlock(nodes.iter().map(Server::config)).op_timeout(Duration::from_secs(15))
}

async fn client(nodes: &[Server]) -> RedisLock {
    config(nodes).connect().await.unwrap()
}

/// With a short `max_ttl`, a busy machine may start servers too far apart for them to be new together: they grant locks when it is over.
async fn token_when_open(lock: &RedisLock, ttl: Duration) -> u64 {
    let claim = claim("n", ttl);
    let mut grant = None;
    until("the nodes are open", async || {
        grant = lock.try_acquire(&claim).await.ok().and_then(Attempt::granted);
        grant.is_some()
    })
    .await;
    lock.release(&claim, None).await.unwrap();
    grant.unwrap().token.get()
}

#[tokio::test]
async fn nodes_that_lost_their_data_take_part_after_the_longest_ttl() {
    let nodes = plain_nodes(3).await;
    let ttl = Duration::from_secs(1);
    let locks = config(&nodes).max_ttl(2 * ttl).connect().await.unwrap();
    let first = token_when_open(&locks, ttl).await;
    // The first node has an earlier claim, and the others have nothing.
    let earlier = claim("n", ttl);
    granted(&locks, &earlier).await;
    for node in &nodes[1..] {
        let _: String = node.command("FLUSHALL").await;
    }
    let error = locks.try_acquire(&claim("n", ttl)).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("has lost its data"), "{error}");
    assert!(token_when_open(&locks, ttl).await > first);
}

#[tokio::test]
async fn nodes_that_were_restarted_one_after_another_are_not_new_together_although_no_request_came_between() {
    let nodes = plain_nodes(3).await;
    let short = || config(&nodes).max_ttl(Duration::from_secs(3));
    let (one, other) = (short().connect().await.unwrap(), short().connect_lazy().unwrap());
    token_when_open(&one, Duration::from_secs(3)).await;
    drop(one);
    for node in &nodes {
        node.restart(Data::Lost).await.unwrap();
        // Their starts are further apart than those of servers that are new together.
        tokio::time::sleep(Duration::from_millis(2_100)).await;
    }
    let error = other
        .try_acquire(&claim("n", Duration::from_secs(3)))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("was restarted or has lost its data"),
        "{error}"
    );
}

#[tokio::test]
async fn without_contention_a_grant_takes_one_round_trip() {
    const PAIRS: u64 = 200;
    let nodes = plain_nodes(5).await;
    let locks = client(&nodes).await;
    let mut before = 0;
    // In the first pairs the counter begins, and the scripts become known.
    for pair in 0..PAIRS + 2 {
        if pair == 2 {
            before = join_all(nodes.iter().map(Server::scripts)).await.into_iter().sum();
        }
        let grant = granted(&locks, &claim("n", TTL)).await;
        assert_eq!(locks.release(&grant.claim, None).await.unwrap(), Released::Released);
    }
    let after: u64 = join_all(nodes.iter().map(Server::scripts)).await.into_iter().sum();
    let more = (after - before).saturating_sub(5 * 2 * PAIRS);
    println!("{more} confirmations in {PAIRS} pairs on 5 nodes");
    assert!(more * 20 <= PAIRS, "{more} confirmations in {PAIRS} pairs");
}

#[tokio::test]
async fn holders_that_share_are_all_told_and_ended() {
    const HOLDERS: usize = 12;
    let nodes = plain_nodes(3).await;
    let clients = [client(&nodes).await, client(&nodes).await];
    let claims: Vec<_> = (0..HOLDERS).map(|_| claim("n", TTL).with_mode(Mode::Shared)).collect();
    let asking = claims.iter().enumerate();
    let grants = join_all(asking.map(|(at, claim)| granted(&clients[at % 2], claim))).await;
    let mut tokens: Vec<_> = grants.iter().map(|grant| grant.token).collect();
    tokens.sort_unstable();
    // Nodes that are not needed for a majority get the token later.
    let mut told = Vec::new();
    until("all holders are told", async || {
        told = clients[0].holders(&name("n")).await.unwrap();
        told.len() == HOLDERS
    })
    .await;
    for found in [told, clients[1].list("").await.unwrap()] {
        let found: Vec<_> = found
            .iter()
            .map(|holder| (holder.token.unwrap(), holder.mode))
            .collect();
        let wanted: Vec<_> = tokens.iter().map(|token| (*token, Mode::Shared)).collect();
        assert_eq!(found, wanted);
    }
    assert_eq!(clients[1].force_release(&name("n")).await.unwrap().len(), HOLDERS);
    for (at, grant) in grants.iter().enumerate() {
        until("the holder is told", async || grant.revoked().is_some()).await;
        assert_eq!(clients[at % 2].renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    }
}

#[tokio::test]
async fn new_names_are_granted_while_a_minority_is_silent() {
    let nodes = plain_nodes(5).await;
    // So long that waiting for the silent nodes would be noticed.
    let locks = config(&nodes).op_timeout(LONG).connect().await.unwrap();
    for node in &nodes[..2] {
        node.pause().await.unwrap();
    }
    for number in 0..5 {
        // The counters of new names begin at the clocks of the nodes, which differ, so a second round trip is needed. On a busy machine one of
        // the other nodes may fail, too: such an attempt waits for the silent ones, and the next one does not.
        let claim = claim(&format!("new {number}"), TTL);
        until("the lock is granted without the silent nodes", async || {
            let attempt = tokio::time::timeout(HANG_LIMIT / 10, locks.try_acquire(&claim)).await;
            matches!(attempt, Ok(Ok(Attempt::Granted(_))))
        })
        .await;
    }
    for node in &nodes[..2] {
        node.resume().await.unwrap();
    }
}

#[tokio::test]
async fn what_was_to_be_asked_for_a_claim_is_not_asked_after_its_end() {
    let nodes = plain_nodes(3).await;
    // It lets the nodes grant.
    client(&nodes).await;
    let proxy = Proxy::start(nodes[2].authority()).await.unwrap();
    let hosts = format!("{},{},{}", nodes[0].authority(), nodes[1].authority(), proxy.address());
    let config = RedisConfig::from_url(&format!("redlock://{hosts}")).unwrap();
    let locks = config.op_timeout(TTL).connect_lazy().unwrap();
    // There is no connection to the third node before this passes.
    proxy.set(Direction::ToServer, Traffic::Stalled);
    let (ended, held) = (claim("ended", TTL), claim("held", TTL));
    for claim in [&ended, &held] {
        // On a busy machine the two nodes may grant it too far apart.
        until("the lock is granted", async || {
            let attempt = locks.try_acquire(claim).await.ok();
            attempt.and_then(Attempt::granted).is_some()
        })
        .await;
    }
    assert_eq!(locks.release(&ended, None).await.unwrap(), Released::Released);
    proxy.set(Direction::Both, Traffic::Flows);
    let knows = async |name: &str| {
        let key = format!("EXISTS {{fencelock:{name}}}:fence");
        nodes[2].command::<bool>(&key).await
    };
    until("the third node is asked", async || knows("held").await).await;
    assert!(!knows("ended").await);
}

#[tokio::test]
async fn clocks_that_differ_by_hours_change_neither_exclusion_nor_the_order_of_tokens() {
    let nodes = nodes(&Kind::CLOCKED_REDIS, 3).await;
    let (one, other) = (client(&nodes).await, client(&nodes).await);
    let mut last = None;
    for (ahead, behind) in [(0, 1), (1, 2), (2, 0)] {
        nodes[ahead].set_clock(7200).await.unwrap();
        nodes[behind].set_clock(-7200).await.unwrap();
        for (locks, loser) in [(&one, &other), (&other, &one)] {
            let grant = granted(locks, &claim("n", TTL)).await;
            assert!(last < Some(grant.token), "{} came after {last:?}", grant.token);
            last = Some(grant.token);
            busy(loser, &claim("n", TTL)).await;
            locks.release(&grant.claim, None).await.unwrap();
        }
        nodes[ahead].set_clock(0).await.unwrap();
        nodes[behind].set_clock(0).await.unwrap();
    }
}

#[tokio::test]
async fn clients_that_disagree_about_the_nodes_are_refused_however_late_that_is_found_out() {
    let nodes = plain_nodes(5).await;
    // The first client of new nodes is one that may not let them grant.
    for node in &nodes {
        let _: () = node.command(&rights("ACL SETUSER look")).await;
    }
    let look = config(&nodes).credentials("look", "hunter2").connect().await.unwrap();
    assert_eq!(look.holders(&name("n")).await.unwrap().len(), 0);
    let error = look.try_acquire(&claim("n", TTL)).await.unwrap_err();
    assert!(error.to_string().contains("lacks a right"), "{error}");
    let locks = client(&nodes).await;
    let grant = granted(&locks, &claim("n", TTL)).await;
    assert_eq!(look.holders(&name("n")).await.unwrap()[0].token, Some(grant.token));
    assert_eq!(look.list("").await.unwrap().len(), 1);
    let fewer = RedisConfig::redlock(nodes[..3].iter().map(Server::config));
    let longer = config(&nodes).max_ttl(LONG);
    for (config, words) in [(fewer.clone(), "use 5 nodes"), (longer, "max_ttl of 60s")] {
        let error = config.connect().await.unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    }
    let error = fewer
        .connect_lazy()
        .unwrap()
        .try_acquire(&claim("m", TTL))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("use 5 nodes"), "{error}");
    // A server that is two of the nodes is no majority.
    let [a, b] = [0, 1].map(|node| nodes[node].port());
    let url = format!("redlock://127.0.0.1:{a},127.0.0.1:{b},localhost:{a}");
    let twice = RedisConfig::from_url(&url).unwrap().connect_lazy().unwrap();
    nodes[1].kill().await.unwrap();
    let error = twice.try_acquire(&claim("n", TTL)).await.unwrap_err();
    assert!(error.to_string().contains("are the same server"), "{error}");
}
