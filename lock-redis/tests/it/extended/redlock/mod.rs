//! Locks on several independent servers: what fails with a minority of them, what does not, and what is refused.

mod access;
mod releases;

use std::time::Duration;

use futures_util::future::join_all;
use lock_core::fence::Fence;
use lock_core::{Attempt, Claim, DistributedLock, Grant, LockError, Locks, Mode, Released, Renewal};
use lock_redis::{RedlockConfig, RedlockLock, redis};
use rustix::process::Signal;

use crate::server::{self, HANG_LIMIT, LONG, Server, claim, name};

const TTL: Duration = Duration::from_secs(30);

fn nodes(count: usize) -> Vec<Server> {
    at_once(count, Server::start)
}

/// Servers that start at once: one after the other, they may not be new together on a busy machine.
fn at_once<T: Send>(count: usize, start: impl Fn() -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let starting: Vec<_> = (0..count).map(|_| scope.spawn(&start)).collect();
        starting.into_iter().map(|server| server.join().unwrap()).collect()
    })
}

fn config(nodes: &[Server]) -> RedlockConfig {
    RedlockConfig::new(nodes.iter().map(Server::config)).op_timeout(Duration::from_secs(2))
}

async fn client(nodes: &[Server]) -> RedlockLock {
    config(nodes).connect().await.unwrap()
}

async fn granted(lock: &RedlockLock, claim: &Claim) -> Grant {
    match lock.try_acquire(claim).await.unwrap() {
        Attempt::Granted(grant) => grant,
        other => panic!("{other:?}"),
    }
}

async fn is_busy(lock: &RedlockLock, claim: &Claim) -> bool {
    matches!(lock.try_acquire(claim).await.unwrap(), Attempt::Busy(_))
}

/// What the node says of itself under that key.
async fn info(node: &Server, section: &str, key: &str) -> Option<String> {
    let told: String = node.command(&format!("INFO {section}")).await;
    let line = told.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.map(str::to_owned)
}

/// With a short `max_ttl`, a busy machine may start servers too far apart for them to be new together: they grant locks when it is over.
async fn granted_when_open(lock: &RedlockLock, claim: &Claim) -> Grant {
    let mut grant = None;
    server::until("the nodes are open", async || {
        grant = lock.try_acquire(claim).await.ok().and_then(Attempt::granted);
        grant.is_some()
    })
    .await;
    grant.unwrap()
}

/// How often scripts were run on the node.
async fn scripts_run(node: &Server) -> u64 {
    let stats = info(node, "commandstats", "cmdstat_evalsha").await;
    let calls = stats.and_then(|stats| stats.strip_prefix("calls=")?.split(',').next()?.parse().ok());
    calls.unwrap_or_default()
}

#[tokio::test]
async fn any_minority_can_be_down_paused_or_empty() {
    let mut nodes = nodes(5);
    let (one, other) = (client(&nodes).await, client(&nodes).await);
    let mut last = granted(&one, &claim("n", TTL)).await;
    for (down, paused) in [(0, 1), (4, 2), (3, 0)] {
        assert_eq!(one.release(&last.claim, None).await.unwrap(), Released::Released);
        nodes[down].kill();
        nodes[paused].signal(Signal::STOP);
        let next = granted(&other, &claim("n", TTL)).await;
        assert!(next.token > last.token);
        assert!(is_busy(&one, &claim("n", TTL)).await);
        assert_eq!(other.renew(&next.lease).await.unwrap(), Renewal::Renewed);
        assert_eq!(
            other.holders(&name("n")).await.unwrap().pop().unwrap().token,
            Some(next.token)
        );
        assert_eq!(other.list("").await.unwrap().len(), 1);
        assert_eq!(other.release(&next.claim, None).await.unwrap(), Released::Released);
        last = granted(&one, &claim("n", TTL)).await;
        nodes[paused].signal(Signal::CONT);
        nodes[down].revive();
        // It has lost its data, and takes no part for a minute. Here it is let as an administrator would.
        let process = info(&nodes[down], "server", "run_id").await.unwrap();
        let let_in = format!("open 1 {process} 5 60000");
        let _: String = nodes[down]
            .ask(lock_redis::redis::cmd("SET").arg("{fencelock:}:born").arg(let_in))
            .await;
    }
}

#[tokio::test]
async fn a_name_is_not_busy_because_a_minority_says_so_and_the_majority_fails() {
    let nodes = nodes(5);
    let (one, other) = (client(&nodes).await, client(&nodes).await);
    granted(&one, &claim("n", TTL)).await;
    for node in &nodes[2..] {
        let _: String = node.command("FLUSHALL").await;
    }
    let error = other.try_acquire(&claim("n", TTL)).await.unwrap_err();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("has lost its data"), "{error}");
}

#[tokio::test]
async fn a_node_that_lost_its_data_grants_nothing_that_it_may_have_granted_before() {
    let nodes = nodes(3);
    let (one, other) = (client(&nodes).await, client(&nodes).await);
    nodes[2].signal(Signal::STOP);
    let held = granted(&one, &claim("n", TTL)).await;
    nodes[2].signal(Signal::CONT);
    // The third node may have got the request while it was stopped.
    let _: u64 = nodes[2].command("DEL {fencelock:n}:lock").await;
    let _: String = nodes[1].command("FLUSHALL").await;
    // Only the first node knows of the holder.
    let refused = other.try_acquire(&claim("n", TTL)).await;
    assert!(!matches!(refused, Ok(Attempt::Granted(_))), "{refused:?}");
    assert!(
        one.holders(&name("n"))
            .await
            .unwrap()
            .pop()
            .is_none_or(|holder| holder.token == Some(held.token))
    );
}

#[tokio::test]
async fn a_node_that_restarts_with_an_older_copy_of_its_data_grants_nothing_that_it_may_have_granted_since() {
    let mut nodes = at_once(3, || Server::with(&["--dbfilename", "copy.rdb"]));
    let (one, other) = (client(&nodes).await, client(&nodes).await);
    granted(&one, &claim("earlier", TTL)).await;
    let _: String = nodes[1].command("SAVE").await;
    granted(&one, &claim("n", TTL)).await;
    // As if the third node had not been reached.
    let _: u64 = nodes[2].command("DEL {fencelock:n}:lock").await;
    nodes[1].kill();
    nodes[1].revive();
    assert!(nodes[1].command::<bool>("EXISTS {fencelock:earlier}:lock").await);
    assert!(!nodes[1].command::<bool>("EXISTS {fencelock:n}:lock").await);
    // Only the first node knows of the holder.
    let refused = other.try_acquire(&claim("n", TTL)).await;
    assert!(!matches!(refused, Ok(Attempt::Granted(_))), "{refused:?}");
}

#[tokio::test]
async fn nodes_that_lost_their_data_take_part_after_the_longest_ttl() {
    let nodes = nodes(3);
    let short = || config(&nodes).max_ttl(Duration::from_secs(2));
    let locks = short().connect().await.unwrap();
    let first = granted_when_open(&locks, &claim("n", Duration::from_secs(1))).await;
    locks.release(&first.claim, None).await.unwrap();
    for node in &nodes[..2] {
        let _: String = node.command("FLUSHALL").await;
    }
    let error = locks
        .try_acquire(&claim("n", Duration::from_secs(1)))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("has lost its data"), "{error}");
    server::until("the nodes take part", async || {
        let attempt = locks.try_acquire(&claim("n", Duration::from_secs(1))).await;
        matches!(attempt, Ok(Attempt::Granted(next)) if next.token > first.token)
    })
    .await;
}

#[tokio::test]
async fn nodes_that_were_restarted_one_after_another_are_not_new_together_although_no_request_came_between() {
    let mut nodes = nodes(3);
    let short = || config(&nodes).max_ttl(Duration::from_secs(3));
    let (one, other) = (short().connect().await.unwrap(), short().connect_lazy().unwrap());
    granted_when_open(&one, &claim("n", Duration::from_secs(3))).await;
    drop(one);
    for node in &mut nodes {
        node.kill();
        node.revive();
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

/// The one case in which two may hold: all nodes lose their data within a ttl, so none of them knows what it had granted.
#[tokio::test]
async fn a_holder_whose_lock_all_nodes_have_lost_is_refused_by_the_fence() {
    let nodes = nodes(5);
    let (one, other) = (Locks::new(client(&nodes).await), Locks::new(client(&nodes).await));
    let resource = Fence::new("stock", 0);
    let first = one.lock("n").ttl(TTL).await.unwrap();
    resource.write(first.token(), |stock| *stock = 1).unwrap();
    for node in &nodes {
        let _: String = node.command("FLUSHALL").await;
    }
    let second = other.lock("n").ttl(TTL).no_wait().await.unwrap();
    assert!(
        first.is_held() && second.is_held(),
        "both believe until the next renewal of the first"
    );
    assert!(second.token() > first.token());
    resource.write(second.token(), |stock| *stock = 2).unwrap();
    resource.write(first.token(), |stock| *stock = 3).unwrap_err();
    first.lost().await;
    assert!(second.is_held());
}

#[tokio::test]
async fn without_contention_a_grant_takes_one_round_trip() {
    const PAIRS: u64 = 200;
    let nodes = nodes(5);
    let locks = client(&nodes).await;
    let pair = async || {
        let grant = granted(&locks, &claim("n", TTL)).await;
        assert_eq!(locks.release(&grant.claim, None).await.unwrap(), Released::Released);
    };
    // The counter begins, and the scripts become known.
    pair().await;
    let mut before = Vec::new();
    for node in &nodes {
        before.push(scripts_run(node).await);
    }
    for _ in 0..PAIRS {
        pair().await;
    }
    let mut more = 0;
    for (node, before) in nodes.iter().zip(before) {
        more += scripts_run(node).await.saturating_sub(before + 2 * PAIRS);
    }
    println!("{more} confirmations in {PAIRS} pairs on 5 nodes");
    assert!(more * 20 <= PAIRS, "{more} confirmations in {PAIRS} pairs");
}

#[tokio::test]
async fn a_token_is_known_to_a_majority_before_it_is_given() {
    let nodes = nodes(3);
    let (one, other) = (client(&nodes).await, client(&nodes).await);
    let first = granted(&one, &claim("n", TTL)).await;
    one.release(&first.claim, None).await.unwrap();
    server::until("every node is free", async || {
        let mut locks = 0;
        for node in &nodes {
            locks += node.command::<u64>("EXISTS {fencelock:n}:lock").await;
        }
        locks == 0
    })
    .await;
    // The second node alone is far ahead, and the third one is down.
    let ahead = first.token.get() + 3_600_000_000;
    let _: String = nodes[1].command(&format!("SET {{fencelock:n}}:fence {ahead}")).await;
    nodes[2].signal(Signal::STOP);
    let high = granted(&one, &claim("n", TTL)).await;
    assert!(high.token.get() > ahead);
    one.release(&high.claim, None).await.unwrap();
    // Then the second one is down: the first one must know the token.
    nodes[1].signal(Signal::STOP);
    nodes[2].signal(Signal::CONT);
    let mut next = None;
    server::until("a majority of the other two", async || {
        next = other
            .try_acquire(&claim("n", TTL))
            .await
            .ok()
            .and_then(Attempt::granted);
        next.is_some()
    })
    .await;
    let next = next.unwrap();
    assert!(next.token > high.token, "{} came after {}", next.token, high.token);
    nodes[1].signal(Signal::CONT);
}

#[tokio::test]
async fn holders_that_share_have_tokens_of_their_own_and_are_all_told_and_ended() {
    const HOLDERS: usize = 12;
    let nodes = nodes(3);
    let clients = [client(&nodes).await, client(&nodes).await];
    let claims: Vec<_> = (0..HOLDERS).map(|_| claim("n", TTL).with_mode(Mode::Shared)).collect();
    let asking = claims.iter().enumerate();
    let grants = join_all(asking.map(|(at, claim)| granted(&clients[at % 2], claim))).await;
    let mut tokens: Vec<_> = grants.iter().map(|grant| grant.token).collect();
    tokens.sort_unstable();
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
    // Nodes that are not needed for a majority get the token later.
    let mut told = Vec::new();
    server::until("all holders are told", async || {
        told = clients[0].holders(&name("n")).await.unwrap();
        told.len() == HOLDERS
    })
    .await;
    let listed = clients[1].list("").await.unwrap();
    for found in [&told, &listed] {
        let found: Vec<_> = found
            .iter()
            .map(|holder| (holder.token.unwrap(), holder.mode))
            .collect();
        let wanted: Vec<_> = tokens.iter().map(|token| (*token, Mode::Shared)).collect();
        assert_eq!(found, wanted);
    }
    let ended = clients[1].force_release(&name("n")).await.unwrap();
    assert_eq!(ended.len(), HOLDERS);
    for (at, grant) in grants.iter().enumerate() {
        server::until("the holder is told", async || grant.revoked().is_some()).await;
        assert_eq!(clients[at % 2].renew(&grant.lease).await.unwrap(), Renewal::NotHeld);
    }
    let alone = granted(&clients[0], &claim("n", TTL)).await;
    assert!(alone.token > *tokens.last().unwrap());
}

#[tokio::test]
async fn what_an_earlier_attempt_has_left_of_a_shared_claim_keeps_no_token_for_a_later_one() {
    let nodes = nodes(3);
    let (one, other) = (client(&nodes).await, client(&nodes).await);
    let reader = claim("n", TTL).with_mode(Mode::Shared);
    let (owner, first) = (reader.owner(), granted(&one, &reader).await);
    let holders = async |wanted: u64| {
        server::until("every node is as it will be", async || {
            let mut nodes_with_holders = 0;
            for node in &nodes {
                nodes_with_holders += node.command::<u64>("EXISTS {fencelock:n}:holders").await;
            }
            nodes_with_holders == wanted
        })
        .await;
    };
    holders(3).await;
    let record: String = nodes[0].command(&format!("HGET {{fencelock:n}}:records {owner}")).await;
    assert_eq!(one.release(&reader, None).await.unwrap(), Released::Released);
    holders(0).await;
    let later = granted(&other, &claim("n", TTL).with_mode(Mode::Shared)).await;
    holders(3).await;
    // As if the release had not reached a majority.
    for node in &nodes[..2] {
        let put = redis::cmd("HSET")
            .arg("{fencelock:n}:records")
            .arg(owner.to_string())
            .arg(&record)
            .clone();
        let _: u64 = node.ask(&put).await;
        let _: u64 = node
            .command(&format!("ZADD {{fencelock:n}}:holders 9999999999999 {owner}"))
            .await;
    }
    // The two agree, and no other answer comes.
    nodes[2].signal(Signal::STOP);
    let again = granted(&one, &reader).await;
    nodes[2].signal(Signal::CONT);
    assert!(first.token < later.token);
    assert!(later.token < again.token, "{} came after {}", again.token, later.token);
}

#[tokio::test]
async fn new_names_are_granted_while_a_minority_is_silent() {
    let nodes = nodes(5);
    // So long that waiting for the silent nodes would be noticed.
    let locks = config(&nodes).op_timeout(LONG).connect().await.unwrap();
    nodes[0].signal(Signal::STOP);
    nodes[1].signal(Signal::STOP);
    let names = async {
        for number in 0..20 {
            // The counters of new names begin at the clocks of the nodes, which differ, so a second round trip is needed.
            let grant = granted(&locks, &claim(&format!("new {number}"), TTL)).await;
            assert_eq!(locks.release(&grant.claim, None).await.unwrap(), Released::Released);
        }
    };
    tokio::time::timeout(HANG_LIMIT, names)
        .await
        .expect("no wait for silent nodes");
    nodes[0].signal(Signal::CONT);
    nodes[1].signal(Signal::CONT);
}

#[tokio::test]
async fn clocks_that_differ_by_hours_change_neither_exclusion_nor_the_order_of_tokens() {
    let nodes = at_once(3, Server::with_wall_clock);
    let (one, other) = (client(&nodes).await, client(&nodes).await);
    let mut last = None;
    for (ahead, behind) in [(0, 1), (1, 2), (2, 0)] {
        nodes[ahead].set_clock(7200);
        nodes[behind].set_clock(-7200);
        for (locks, loser) in [(&one, &other), (&other, &one)] {
            let grant = granted(locks, &claim("n", TTL)).await;
            assert!(last < Some(grant.token), "{} came after {last:?}", grant.token);
            last = Some(grant.token);
            assert!(is_busy(loser, &claim("n", TTL)).await);
            locks.release(&grant.claim, None).await.unwrap();
        }
        nodes[ahead].set_clock(0);
        nodes[behind].set_clock(0);
    }
}
