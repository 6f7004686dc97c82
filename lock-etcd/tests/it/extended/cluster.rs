//! What happens to locks when members of a cluster fall away, under load: nobody believes in the lock of another, tokens only
//! rise, and those who wait get through.

mod load;
mod peers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::server::{HANG_LIMIT, LONG, Plain, claim, config_at, granted, lost, until, until_queued, waited, waiting};
use load::Load;
use lock_core::{DistributedLock, Locks, ReleaseOutcome};
use lock_etcd::EtcdConfig;
use lock_etcd::etcd_client::Client;
use peers::Peers;
use test_servers::{Data, EtcdCluster};
use tokio::task::JoinSet;

const MEMBERS: usize = 3;

/// Members that wait for no disk, with relays between them.
struct World {
    peers: Peers,
    cluster: EtcdCluster,
}

impl World {
    async fn start() -> Self {
        let peers = Peers::start(MEMBERS).await;
        let cluster = EtcdCluster::start_at(peers.all(), &["--unsafe-no-fsync"])
            .await
            .unwrap();
        Self { peers, cluster }
    }

    /// All members, beginning with one of them.
    fn from(&self, first: usize) -> EtcdConfig {
        let mut members: Vec<_> = self.cluster.members().iter().map(|member| member.authority()).collect();
        let turn = first % members.len();
        members.rotate_left(turn);
        config_at(&members.join(","))
    }

    async fn plain(&self, at: usize) -> Plain {
        Plain::connect(self.cluster.members()[at].authority()).await
    }

    /// The place of the member that leads in the eyes of another, and its number.
    async fn leader(&self, asked: usize) -> (usize, u64) {
        let client = self.plain(asked).await;
        let leader = client.maintenance_client().status().await.unwrap().leader();
        let known = client.cluster_client().member_list().await.unwrap();
        let clients = known
            .members()
            .iter()
            .find(|member| member.id() == leader)
            .unwrap()
            .client_urls()
            .to_vec();
        let mut members = self.cluster.members().iter();
        let at = members.position(|member| clients.iter().any(|url| url.ends_with(member.authority())));
        (at.unwrap(), leader)
    }

    /// Waits until all members agree on who leads.
    async fn agreed(&self) -> (usize, u64) {
        let leaders = async || {
            let mut leaders = Vec::new();
            for member in self.cluster.members() {
                let client = Client::connect([member.authority()], None).await.ok()?;
                let status = tokio::time::timeout(Duration::from_secs(1), async {
                    client.maintenance_client().status().await
                });
                leaders.push(status.await.ok()?.ok()?.leader());
            }
            Some(leaders)
        };
        until(async || {
            let leaders = leaders().await;
            leaders.is_some_and(|leaders| leaders[0] != 0 && leaders.iter().all(|one| *one == leaders[0]))
        })
        .await;
        self.leader(0).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_is_killed_paused_or_cut_off_under_load_lets_nobody_overlap() {
    let world = World::start().await;
    let mut load = Load::start(|number| world.from(number)).await;
    load.goes_on("the start").await;

    let (leader, _) = world.agreed().await;
    world.cluster.members()[leader].kill().await.unwrap();
    load.goes_on("the leader was killed").await;
    world.cluster.members()[leader].restart(Data::Kept).await.unwrap();
    load.goes_on("it came back").await;

    let (leader, _) = world.agreed().await;
    world.cluster.members()[leader].pause().await.unwrap();
    load.goes_on("the leader was stopped").await;
    load.stale_leader(true);
    world.cluster.members()[leader].resume().await.unwrap();
    load.goes_on("it went on").await;

    let (leader, id) = world.agreed().await;
    load.stale_leader(false);
    world.peers.cut_off(leader, id);
    let other = (leader + 1) % MEMBERS;
    until(async || {
        world
            .plain(other)
            .await
            .maintenance_client()
            .status()
            .await
            .unwrap()
            .leader()
            != id
    })
    .await;
    load.goes_on("the leader was cut off").await;
    world.peers.heal();
    world.agreed().await;
    load.goes_on("it was back").await;
    load.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_are_replaced_under_load() {
    let mut world = World::start().await;
    let mut load = Load::start(|number| world.from(number)).await;
    load.goes_on("the start").await;
    let (leader, id) = world.agreed().await;
    let other = (leader + 1) % MEMBERS;
    let client = world.plain(other).await;
    // Members must have known each other for some time.
    until(async || client.cluster_client().member_remove(id).await.is_ok()).await;
    load.goes_on("the leader was removed").await;
    let removed = world.cluster.remove(leader);
    tokio::task::spawn_blocking(move || drop(removed)).await.unwrap();

    let peer = world.peers.add().await;
    let urls = [format!("http://{}", peer.reached)];
    // A cluster that has just changed may want some time.
    until(async || client.cluster_client().member_add(urls.clone(), None).await.is_ok()).await;
    world.cluster.add(peer).await.unwrap();
    load.goes_on("another took its place").await;
    let fresh = world.from(MEMBERS - 1);
    granted(&fresh.connect().await.unwrap(), &claim("fresh", LONG)).await;
    load.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_nothing_is_granted_and_what_is_held_is_lost_in_time() {
    const TTL: Duration = Duration::from_secs(4);
    let world = World::start().await;
    let config = |first| world.from(first).op_timeout(Duration::from_secs(2));
    let locks = Locks::new(config(0).connect().await.unwrap());
    let guard = locks.lock("n").ttl(TTL).await.unwrap();
    for member in &world.cluster.members()[1..] {
        member.kill().await.unwrap();
    }
    let other = config(0).connect_lazy().unwrap();
    // The member that is left believes in its leader for an election timeout, and leaves requests without an answer until then.
    let began = Instant::now();
    loop {
        let refused = other.try_acquire(&claim("m", TTL)).await.unwrap_err();
        assert!(matches!(refused, lock_core::LockError::Unavailable { .. }), "{refused}");
        let said = format!("{refused:#}");
        assert!(!said.contains("TLS") && began.elapsed() < HANG_LIMIT, "{said}");
        if said.contains("most members") {
            break;
        }
    }
    lost(&guard).await;
    assert!(!guard.is_held());
    for member in &world.cluster.members()[1..] {
        member.restart(Data::Kept).await.unwrap();
    }
    // The members elect a leader first.
    let wanted = claim("m", TTL);
    until(async || {
        other
            .try_acquire(&wanted)
            .await
            .is_ok_and(|attempt| attempt.granted().is_some())
    })
    .await;
}

/// Whether a lock with a short ttl outlives the stop of a member, or is lost because the others had no leader in time.
async fn stop_under_a_lock(world: &World, at: usize, leader: (usize, u64), ttl: Duration) -> bool {
    // The first of its endpoints is the one that it is connected to.
    let locks = Locks::new(world.from(at).connect().await.unwrap());
    let held = locks.lock("held").ttl(ttl).await.unwrap();
    let released = locks.lock("released").ttl(ttl).await.unwrap();
    world.cluster.members()[at].pause().await.unwrap();
    let stopped = Instant::now();
    let watched = world.plain((at + 1) % MEMBERS).await;
    let election = tokio::spawn(async move {
        let mut pending = at == leader.0;
        while pending {
            let status = watched.maintenance_client().status().await;
            pending = !status.is_ok_and(|status| status.leader() != leader.1 && status.leader() != 0);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Instant::now()
    });
    let mut left = Some(ttl);
    while stopped.elapsed() < ttl * 2 && left.is_some() {
        left = held.is_held().then(|| left.unwrap_or(ttl).min(held.remaining()));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let lost = Instant::now();
    let elected = election.await.unwrap();
    println!(
        "{at} stopped, {} led: {left:?} left; elected after {:?}",
        leader.0,
        elected - stopped
    );
    if left.is_some() {
        assert_eq!(released.release().await.unwrap(), ReleaseOutcome::Released);
    }
    world.cluster.members()[at].resume().await.unwrap();
    drop(held);
    locks.shutdown().await.unwrap();
    left.is_some() || elected + ttl / 4 > lost
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_lock_survives_the_stop_of_any_one_member() {
    const TTL: Duration = Duration::from_secs(3);
    /// A machine that stalls for most of a second looks like a second member that has stopped.
    const TRIES: usize = 4;
    let world = World::start().await;
    // And last the one that leads then.
    for at in (0..MEMBERS).map(Some).chain([None]) {
        for tries in 1.. {
            let leader = world.agreed().await;
            let at = at.unwrap_or(leader.0);
            if stop_under_a_lock(&world, at, leader, TTL).await {
                break;
            }
            assert!(tries < TRIES, "the lock was lost {tries} times when {at} was stopped");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_go_to_another_member_when_the_one_that_is_used_stops() {
    let world = World::start().await;
    let (leader, _) = world.agreed().await;
    let at = (leader + 1) % MEMBERS;
    // One half of it is for the member that has stopped, and one for the next.
    let limit = Duration::from_secs(10);
    let connected = async || Locks::new(world.from(at).op_timeout(limit).connect().await.unwrap());
    let (short, usual) = (connected().await, connected().await);
    let (trying, waiting) = (connected().await, connected().await);
    let guards = [(&short, "short", 12), (&usual, "usual", 30)]
        .map(|(locks, name, ttl)| locks.lock(name).ttl(Duration::from_secs(ttl)).into_future());
    let [short, usual] = guards.map(tokio::spawn);
    let (short, usual) = (short.await.unwrap().unwrap(), usual.await.unwrap().unwrap());
    world.cluster.members()[at].pause().await.unwrap();
    let began = Instant::now();
    // Each of them is the first request of its client that the member does not answer; the last two have no lease.
    let (short, usual, trying, waiting) = tokio::join!(
        short.release(),
        usual.release(),
        trying.try_lock("trying"),
        waiting.lock("waiting").into_future()
    );
    println!("all done after {:?}", began.elapsed());
    assert_eq!(short.unwrap(), ReleaseOutcome::Released);
    assert_eq!(usual.unwrap(), ReleaseOutcome::Released);
    assert!(trying.unwrap().is_some());
    assert!(waiting.unwrap().is_held());
    world.cluster.members()[at].resume().await.unwrap();
}

/// Takes and releases a lock until `over` is set, and returns how long the slowest request took.
async fn take_own_turns(locks: Locks, name: String, turns: Arc<AtomicUsize>, over: Arc<AtomicBool>) -> Duration {
    let mut slowest = Duration::ZERO;
    while !over.load(Ordering::SeqCst) {
        let asked = Instant::now();
        let guard = locks.lock(&name).ttl(LONG).wait_for(HANG_LIMIT).await;
        let guard = guard.unwrap_or_else(|error| panic!("{name} is acquired after {:?}: {error:#}", asked.elapsed()));
        slowest = slowest.max(asked.elapsed());
        let asked = Instant::now();
        // If the leader died with the answer, it is not known whether the lock was held to the end.
        let outcome = guard.release().await;
        assert!(
            !matches!(outcome, Ok(ReleaseOutcome::AlreadyLost)),
            "{name}: {outcome:?}"
        );
        slowest = slowest.max(asked.elapsed());
        turns.fetch_add(1, Ordering::SeqCst);
    }
    slowest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_under_way_when_the_leader_is_killed_is_done_by_its_successor() {
    const CLIENTS: usize = 8;
    /// After which a follower itself gives up a request that it has passed on to a leader that is dead.
    const GIVEN_UP: Duration = Duration::from_secs(7);
    /// More than the default by a stall of this machine, and less than that.
    const LIMIT: Duration = Duration::from_millis(6500);
    let world = World::start().await;
    for is_back_at_once in [false, true] {
        let (leader, _) = world.agreed().await;
        let over = Arc::new(AtomicBool::new(false));
        let turns: [Arc<AtomicUsize>; CLIENTS] = Default::default();
        let mut clients = JoinSet::new();
        for (number, turns) in turns.iter().enumerate() {
            let config = world.from(leader + number).op_timeout(LIMIT);
            let locks = Locks::new(config.connect_lazy().unwrap());
            let (turns, over) = (Arc::clone(turns), Arc::clone(&over));
            clients.spawn(take_own_turns(locks, format!("own/{number}"), turns, over));
        }
        let counts = || turns.each_ref().map(|turns| turns.load(Ordering::SeqCst));
        let mut more = async || {
            let before = counts();
            until(async || {
                if let Some(ended) = clients.try_join_next() {
                    ended.unwrap();
                }
                counts().iter().zip(before).all(|(now, before)| *now > before + 1)
            })
            .await;
        };
        more().await;
        let member = &world.cluster.members()[leader];
        member.kill().await.unwrap();
        if is_back_at_once {
            // Before the others notice.
            member.restart(Data::Kept).await.unwrap();
        }
        more().await;
        over.store(true, Ordering::SeqCst);
        let slowest = clients.join_all().await.into_iter().max();
        println!("the slowest request took {slowest:?}, with a leader that is back at once: {is_back_at_once}");
        assert!(slowest < Some(GIVEN_UP), "{slowest:?}");
        if !is_back_at_once {
            member.restart(Data::Kept).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_stays_reserved_when_the_leader_is_killed_and_counts_anew_from_there() {
    const LENGTH: Duration = Duration::from_secs(5);
    let world = World::start().await;
    let (leader, _) = world.agreed().await;
    let locks = Locks::new(world.from(leader).connect().await.unwrap());
    let other = world.from((leader + 1) % MEMBERS).connect().await.unwrap();
    let guard = locks.lock("n").ttl(LONG).at_least(LENGTH).await.unwrap();
    let asked = Instant::now();
    world.cluster.members()[leader].kill().await.unwrap();
    // It was released, or its answer died with the leader.
    let _ = guard.release().await;
    waited(&other, &claim("n", LONG)).await;
    assert!(asked.elapsed() >= LENGTH, "{:?}", asked.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_holder_s_lock_is_free_one_ttl_after_the_last_change_of_the_leader() {
    const TTL: Duration = Duration::from_secs(4);
    /// Half of it is for a look at each member.
    const LOOKING: Duration = Duration::from_secs(12);
    let world = World::start().await;
    let (leader, _) = world.agreed().await;
    let other = world.from((leader + 1) % MEMBERS).op_timeout(LOOKING);
    let other = other.connect().await.unwrap();
    let warnings = other.server_info().await.unwrap().warnings;
    let told = |text: &str| warnings.iter().any(|warning| warning.contains(text));
    assert!(
        warnings.len() == 1 && told("3 members") && told("1.3 s"),
        "{warnings:?}"
    );
    let dead = world.from((leader + 2) % MEMBERS).connect().await.unwrap();
    // Nobody renews it.
    granted(&dead, &claim("n", TTL)).await;
    let began = Instant::now();
    let waiting = waiting(&other, &claim("n", LONG));
    let etcd = world.plain((leader + 1) % MEMBERS).await;
    until_queued(&etcd, "n", 1).await;
    tokio::time::sleep((TTL / 4).saturating_sub(began.elapsed())).await;
    world.cluster.members()[leader].kill().await.unwrap();
    let killed = Instant::now();
    waiting.await.unwrap();
    let (after, since) = (began.elapsed(), killed.elapsed());
    println!(
        "free {after:?} after its last sign of life, {since:?} after the end of the leader, with a ttl of {TTL:?}"
    );
    assert!(since > TTL, "the new leader gives it a full ttl: {since:?}");
    drop(dead);
}
