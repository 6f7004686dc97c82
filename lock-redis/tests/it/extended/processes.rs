//! Processes that are killed or stopped, and how little a hundred waiters ask of the server.
//!
//! Whoever waits here would refresh its place after its deadline: what comes before that is by a push or by the end of a lease.

use std::time::{Duration, SystemTime};

use lock_core::{DistributedLock, Grant};
use lock_redis::{RedisConfig, RedisLock};
use rustix::process::Signal;
use tokio::task::JoinHandle;

use crate::process::Process;
use crate::processes::{Line, calls, contended, holder, until_gone, wait};
use crate::server::{LONG, Proxy, Server, claim, granted, until, until_queued};

/// The lease of a process that stays silent.
const TTL: Duration = Duration::from_secs(3);

#[tokio::test]
async fn a_hundred_waiters_in_ten_processes_take_at_most_three_scripts_each_and_their_turns_in_order() {
    contended(10, 10, 20).await;
}

#[tokio::test]
async fn ten_processes_that_wait_send_nothing_between_refreshes() {
    const PROCESSES: usize = 10;
    let server = Server::start();
    let holder = server.client().await;
    let held = claim("n", LONG);
    granted(&holder, &held).await;
    let mut players: Vec<_> = (0..PROCESSES).map(|_| Process::start("take turns", &server)).collect();
    for player in &mut players {
        player.say("10 20");
    }
    // One for each process; the others wait in it.
    until_queued(&server, "n", PROCESSES).await;
    let mut con = server.plain().await;
    let before = calls(&mut con).await;
    // Far less than a third of the ttl.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(calls(&mut con).await, before);
    holder.release(&held, None).await.unwrap();
    players.into_iter().for_each(|player| drop(player.finish()));
}

#[tokio::test]
async fn a_stopped_waiter_delays_the_next_by_no_more_than_its_ttl() {
    let mut line = Line::form(TTL).await;
    line.process.stop();
    let released = SystemTime::now();
    line.release().await;
    let (stopped, _) = holder(&line.server).await;
    let lease = left(&line.server).await;
    assert!(lease <= TTL, "{lease:?}");
    let (grant, lock) = line.next.await.unwrap();
    assert_ne!(
        grant.claim.owner(),
        stopped,
        "the stopped one was granted the lock first"
    );
    let delay = holder(&line.server).await.1.duration_since(released).unwrap();
    println!("a stopped waiter delays the next by {delay:?}, with a ttl of {TTL:?}");
    // It wakes to a grant that is over, and asks again.
    line.process.signal(Signal::CONT);
    until_queued(&line.server, "n", 1).await;
    let token = grant.token;
    lock.release(&grant.claim, None).await.unwrap();
    assert!(line.process.line().parse::<u64>().unwrap() > token.get());
    assert_eq!(line.process.ask("held"), "true");
    line.process.finish();
}

#[tokio::test]
async fn a_waiter_that_has_been_stopped_for_long_is_passed_over_within_the_release() {
    let line = Line::form(TTL).await;
    line.process.stop();
    // Until its place has less than a third of its ttl to go.
    tokio::time::sleep(TTL * 7 / 10).await;
    line.release().await;
    let (owner, _) = holder(&line.server).await;
    let (grant, _lock) = line.next.await.unwrap();
    assert_eq!(grant.claim.owner(), owner, "granted within the release");
}

#[tokio::test]
async fn a_killed_holder_is_followed_when_its_lease_has_run_out() {
    let server = Server::start();
    let mut process = Process::start("lock", &server);
    let token = process.ask(&TTL.as_millis().to_string()).parse::<u64>().unwrap();
    let next = wait(server.client().await);
    until_queued(&server, "n", 1).await;
    let mut con = server.plain().await;
    let before = calls(&mut con).await;
    until("it has renewed its lease", async || {
        calls(&mut con).await["evalsha"] > before["evalsha"]
    })
    .await;
    process.signal(Signal::KILL);
    followed(&server, next, token).await;
}

#[tokio::test]
async fn a_holder_killed_after_the_first_in_line_is_followed_as_soon() {
    const BRIEF: Duration = Duration::from_millis(1500);
    let server = Server::start();
    let mut process = Process::start("lock", &server);
    let token = process.ask(&TTL.as_millis().to_string()).parse::<u64>().unwrap();
    let mut first = Process::start("lock", &server);
    first.say(&BRIEF.as_millis().to_string());
    until_queued(&server, "n", 1).await;
    let proxy = Proxy::to(server.port()).await;
    let next = RedisConfig::new("127.0.0.1", proxy.port());
    let next = wait(next.connect().await.unwrap());
    until_queued(&server, "n", 2).await;
    first.signal(Signal::KILL);
    until_gone(&server, 2).await;
    // Its place is kept for it for a while.
    tokio::time::sleep(BRIEF).await;
    // With its next connection the next one refreshes its place, and finds out that it is the first.
    proxy.cut();
    until_queued(&server, "n", 1).await;
    process.signal(Signal::KILL);
    followed(&server, next, token).await;
}

/// For how long `n` is still held.
async fn left(server: &Server) -> Duration {
    Duration::from_millis(server.command("PTTL {fencelock:n}:lock").await)
}

/// The holder of `n` has just been killed: the next one has it when the lease has run out.
async fn followed(server: &Server, next: JoinHandle<(Grant, RedisLock)>, token: u64) {
    let killed = SystemTime::now();
    let lease = left(server).await;
    let (grant, _lock) = next.await.unwrap();
    let delay = holder(server).await.1.duration_since(killed).unwrap();
    println!("a killed holder is followed after {delay:?}, its lease had {lease:?} to go");
    assert!(lease <= TTL, "{lease:?}");
    assert!(grant.token.get() > token);
}
