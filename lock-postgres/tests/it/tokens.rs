//! No token is ever equal to or below an earlier one, whatever happens to the server in the middle of many acquisitions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_core::{Attempt, DistributedLock, LockError, Released, Renewal};
use lock_postgres::{PostgresConfig, PostgresLock};
use rustix::process::Signal;
use tokio::sync::Mutex;

use crate::server::{self, Database, HANG_LIMIT, Server, claim};

pub(crate) const TTL: Duration = Duration::from_secs(30);

/// What the clock of the server says after the fault. When the first tokens were drawn it was right.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TheClock {
    IsRight,
    IsAnHourBehind,
}

/// What a fault is to the server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TheServer {
    IsStartedAgain,
    GoesOn,
}

/// How many locks are taken before anything is done to the server.
pub(crate) const MANY: usize = 1000;

/// Whoever does something to its server in the middle of that has the machine to itself.
pub(crate) static TURN: Mutex<()> = Mutex::const_new(());

/// One grant: between these moments that token was drawn.
pub(crate) struct Drawn {
    asked: Instant,
    answered: Instant,
    token: u64,
}

/// Clients that take and release locks as fast as they can.
pub(crate) struct Crowd {
    stop: Arc<AtomicBool>,
    grants: Arc<AtomicUsize>,
    tasks: Vec<tokio::task::JoinHandle<Vec<Drawn>>>,
}

impl Crowd {
    pub(crate) fn start(config: &PostgresConfig) -> Self {
        let (stop, grants) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let clients: Vec<PostgresLock> = (0..2).map(|_| config.clone().connect_lazy().unwrap()).collect();
        let tasks = (0..8).map(|number| {
            let (stop, grants) = (Arc::clone(&stop), Arc::clone(&grants));
            tokio::spawn(take(clients[number % 2].clone(), number, stop, grants))
        });
        Self {
            tasks: tasks.collect(),
            stop,
            grants,
        }
    }

    /// Waits until that many more have been granted.
    pub(crate) async fn grants(&self, more: usize) {
        let wanted = self.grants.load(Ordering::SeqCst) + more;
        let start = Instant::now();
        while self.grants.load(Ordering::SeqCst) < wanted {
            assert!(start.elapsed() < HANG_LIMIT, "nothing is granted");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub(crate) async fn end(self) -> Vec<Drawn> {
        self.stop.store(true, Ordering::SeqCst);
        let mut drawn = Vec::new();
        for task in self.tasks {
            drawn.extend(task.await.unwrap());
        }
        drawn
    }
}

async fn take(lock: PostgresLock, number: usize, stop: Arc<AtomicBool>, grants: Arc<AtomicUsize>) -> Vec<Drawn> {
    let mut drawn = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        let claim = claim(&format!("n {number}"), TTL);
        let asked = Instant::now();
        match lock.try_acquire(&claim).await {
            Ok(Attempt::Granted(grant)) => {
                drawn.push(Drawn {
                    asked,
                    answered: Instant::now(),
                    token: grant.token.get(),
                });
                grants.fetch_add(1, Ordering::SeqCst);
            }
            Ok(busy) => panic!("nobody else wants it: {busy:?}"),
            // There is no server at the moment.
            Err(error) => {
                let gone = error.is_retryable() || matches!(error, LockError::UnsafeConfiguration { .. });
                // While it is dropped and restored the schema is missing.
                assert!(gone || format!("{error:#}").contains("schema"), "{error}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        let _ = lock.release(&claim, None).await;
    }
    drawn
}

/// Whatever was drawn after another is higher, and no two are the same.
pub(crate) fn check(mut drawn: Vec<Drawn>) -> usize {
    drawn.sort_by_key(|drawn| drawn.asked);
    let mut answered: Vec<_> = drawn.iter().map(|drawn| (drawn.answered, drawn.token)).collect();
    answered.sort_unstable();
    let (mut next, mut highest) = (0, 0);
    for one in &drawn {
        while next < answered.len() && answered[next].0 < one.asked {
            highest = highest.max(answered[next].1);
            next += 1;
        }
        assert!(one.token > highest, "{} was drawn after {highest}", one.token);
    }
    let count = drawn.len();
    let mut tokens: Vec<_> = drawn.into_iter().map(|drawn| drawn.token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), count, "a token was drawn twice");
    count
}

pub(crate) async fn rise_across(clock: TheClock, server_is: TheServer, fault: impl AsyncFnOnce(&mut Server, &Crowd)) {
    let mut server = Server::start();
    let turn = TURN.lock().await;
    let crowd = Crowd::start(&server.config());
    crowd.grants(MANY).await;
    if clock == TheClock::IsAnHourBehind {
        server.set_clock_back();
        if server_is == TheServer::GoesOn {
            server.restart(Signal::INT);
            crowd.grants(MANY).await;
        }
    }
    fault(&mut server, &crowd).await;
    check_clock(&server, clock).await;
    crowd.grants(500).await;
    let drawn = crowd.end().await;
    drop(turn);
    println!("{} tokens, all rising", check(drawn));
}

pub(crate) async fn check_clock(server: &Server, clock: TheClock) {
    let behind = server.seconds_behind().await;
    let wanted = if clock == TheClock::IsRight { 0.0 } else { 3600.0 };
    assert!(
        (behind - wanted).abs() < 60.0,
        "the server's clock is {behind} s behind"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_across_a_crash_in_the_middle_of_many_acquisitions() {
    rise_across(
        TheClock::IsRight,
        TheServer::IsStartedAgain,
        async |server: &mut Server, _: &Crowd| {
            server.restart(Signal::KILL);
        },
    )
    .await;
}

#[tokio::test]
async fn a_sequence_that_was_set_back_by_hand_is_noticed_and_put_right() {
    let server = Database::new().await;
    let lock = server.client().await;
    let first = server::granted(&lock, &claim("a", TTL)).await;
    server.run_sql("SELECT setval('fencelock.token', 7)").await;
    let next = server::granted(&lock, &claim("b", TTL)).await;
    assert!(next.token > first.token);
}

#[tokio::test]
async fn a_schema_that_was_made_anew_is_found_by_the_next_claim_and_what_is_held_stays() {
    let server = Database::new().await;
    let lock = server.client().await;
    let kept = claim("kept", TTL);
    let first = server::granted(&lock, &kept).await;
    let schema = lock_postgres::schema_sql("fencelock", None).unwrap();
    server
        .run_sql(&format!("BEGIN; DROP SCHEMA fencelock CASCADE; {schema} COMMIT"))
        .await;
    let next = server::granted(&lock, &claim("b", TTL)).await;
    assert!(next.token > first.token);
    assert_eq!(server.locks().await, 2);
    assert_eq!(lock.renew(&first.lease).await.unwrap(), Renewal::Renewed);
    assert_eq!(lock.release(&kept, None).await.unwrap(), Released::Released);
}
