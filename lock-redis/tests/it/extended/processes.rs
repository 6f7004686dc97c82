//! Processes that are stopped, and how little a hundred waiters ask of the server.
//!
//! Whoever waits here would refresh its place after its deadline: what comes before that is by a push or by the end of a lease.

use std::time::{Duration, SystemTime};

use lock_core::DistributedLock;
use rustix::process::Signal;

use crate::process::Process;
use crate::processes::{Line, calls, contended, holder};
use crate::reservations::left;
use crate::server::{LONG, Server, claim, granted, until_queued};

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
    let lease = left(&line.server).await.unwrap();
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
