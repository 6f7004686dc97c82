//! No token is ever equal to or below an earlier one, whatever happens to the server in the middle of many acquisitions.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_core::{Attempt, Claim, DistributedLock, Grant, LockError, Released, Renewal};
use lock_postgres::{PostgresConfig, PostgresLock};
use rustix::process::Signal;
use tokio::sync::Mutex;

use crate::server::{self, Database, Server, claim, until};

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

/// One grant: between these moments its tokens were drawn.
pub(crate) struct Drawn {
    asked: Instant,
    answered: Instant,
    first: u64,
    last: u64,
}

/// A claim that wants that many tokens.
pub(crate) fn claim_of(name: &str, tokens: u32) -> Claim {
    claim(name, TTL).with_tokens_wanted(NonZeroU32::new(tokens).unwrap())
}

pub(crate) fn count(grant: &Grant) -> u64 {
    grant.token.get() - grant.first_token().get() + 1
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
        until("locks are granted", async || {
            self.grants.load(Ordering::SeqCst) >= wanted
        })
        .await;
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
        let claim = claim_of(&format!("n {number}"), [1, 16][number % 2]);
        let asked = Instant::now();
        match lock.try_acquire(&claim).await {
            Ok(Attempt::Granted(grant)) => {
                drawn.push(Drawn {
                    asked,
                    answered: Instant::now(),
                    first: grant.first_token().get(),
                    last: grant.token.get(),
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

/// Whatever was drawn after another is higher, and no two grants have the same last token.
pub(crate) fn check(mut drawn: Vec<Drawn>) -> usize {
    drawn.sort_by_key(|drawn| drawn.asked);
    let mut answered: Vec<_> = drawn.iter().map(|drawn| (drawn.answered, drawn.last)).collect();
    answered.sort_unstable();
    let (mut next, mut highest) = (0, 0);
    for one in &drawn {
        while next < answered.len() && answered[next].0 < one.asked {
            highest = highest.max(answered[next].1);
            next += 1;
        }
        assert!(one.first > highest, "{} was drawn after {highest}", one.first);
    }
    let count = drawn.len();
    let mut tokens: Vec<_> = drawn.into_iter().map(|drawn| drawn.last).collect();
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_has_a_block_of_tokens_above_all_before_while_others_draw() {
    let server = Database::new().await;
    let crowd = Crowd::start(&server.config());
    let locks = [server.client().await, server.client().await];
    let mut last = 0;
    for round in 0..20 {
        for (wanted, tokens) in [(1, 1), (2, 2), (16, 16), (17, 16), (u32::MAX, 16)] {
            let (lock, from, to) = (&locks[round % 2], claim_of("n", wanted), claim_of("n", wanted));
            let grant = server::granted(lock, &from).await;
            assert!(grant.first_token().get() > last && count(&grant) == tokens, "{grant:?}");
            let again = server::granted(lock, &from).await;
            let both = [&grant, &again].map(|grant| (grant.first_token(), grant.token));
            assert_eq!(both[0], both[1]);
            lock.release(&from, None).await.unwrap();
            let next = server::granted(lock, &to).await;
            assert!(next.first_token() > grant.token && count(&next) == tokens, "{next:?}");
            lock.release(&to, None).await.unwrap();
            last = next.token.get();
        }
    }
    check(crowd.end().await);
}

#[tokio::test]
async fn a_block_that_crosses_the_ceiling_is_handed_out_once_all_of_it_is_below_a_higher_one() {
    let server = Database::new().await;
    let lock = server.client().await;
    server
        .run_sql("SELECT setval('fencelock.token', ceiling - 8) FROM fencelock.counter")
        .await;
    let before: i64 = server.value("SELECT ceiling FROM fencelock.counter").await;
    let grant = server::granted(&lock, &claim_of("n", 16)).await;
    let after: i64 = server.value("SELECT ceiling FROM fencelock.counter").await;
    let tokens = [grant.first_token(), grant.token].map(lock_core::FencingToken::as_i64);
    assert!(
        tokens[0] <= before && before < tokens[1] && tokens[1] <= after,
        "{tokens:?}, {before}, {after}"
    );
}

#[tokio::test]
async fn a_sequence_that_was_set_back_by_hand_is_noticed_and_put_right() {
    let server = Database::new().await;
    let lock = server.client().await;
    let first = server::granted(&lock, &claim_of("a", 16)).await;
    let before = server.locks().await;
    // So that only the highest of the next tokens is above what was seen.
    server
        .run_sql(&format!("SELECT setval('fencelock.token', {} - 15)", first.token))
        .await;
    let next = server::granted(&lock, &claim_of("b", 16)).await;
    assert!(next.first_token() > first.token);
    assert_eq!(server.locks().await, before + 1, "what was held stays");
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
