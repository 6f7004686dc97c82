//! The queue alone, under every schedule of a few tasks.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use shuttle::future::{block_on, spawn};

use super::{Time, exhaust, explore, once_in};
use crate::queue::{Entered, LocalQueue, Next, Ticket, Turn};
use crate::request::Wish;
use crate::{Busy, LockError};

/// A queue for one key.
#[derive(Clone)]
struct One {
    queue: Arc<LocalQueue>,
    key: Arc<str>,
    wish: Arc<Wish>,
    /// How many have the turn.
    turns: Arc<AtomicUsize>,
}

impl One {
    fn new() -> Self {
        Self {
            queue: Arc::default(),
            key: "a".into(),
            wish: Arc::new(Wish::of("a".parse().unwrap())),
            turns: Arc::default(),
        }
    }

    fn enter(&self, patient: bool) -> Entered {
        self.queue.enter(Arc::clone(&self.key), &self.wish, patient)
    }

    fn turn(&self) -> Turn {
        match self.enter(true) {
            Entered::Turn(turn) => turn,
            _ => panic!("the queue is new"),
        }
    }

    fn ticket(&self, patient: bool) -> Ticket {
        match self.enter(patient) {
            Entered::Queued(ticket) => ticket,
            _ => panic!("the turn is taken"),
        }
    }

    /// Has the turn to itself, and passes it on.
    fn takes(&self, turn: Turn) {
        assert_eq!(self.turns.fetch_add(1, Ordering::SeqCst), 0, "two have the turn");
        // Another task may run in between, as here is a mutex.
        turn.releasing();
        assert_eq!(self.turns.fetch_sub(1, Ordering::SeqCst), 1, "two have the turn");
        drop(turn);
    }

    /// Waits for the turn, which has to come: if it never does, the checker reports a deadlock.
    async fn waits(&self, mut ticket: Ticket) {
        match ticket.next().await {
            Some(Next::Turn { turn, .. }) => self.takes(turn),
            _ => panic!("it was promised a turn"),
        }
    }
}

/// Passes the turn on in that way while one of the two that wait goes away: the other one has to get it.
fn one_of_two_leaves(pass: fn(Turn)) {
    exhaust(move || {
        let one = One::new();
        let turn = one.turn();
        let (leaves, stays) = (one.ticket(true), one.ticket(true));
        block_on(async {
            let stays = spawn({
                let one = one.clone();
                async move { one.waits(stays).await }
            });
            let leaves = spawn(async move { drop(leaves) });
            pass(turn);
            stays.await.unwrap();
            leaves.await.unwrap();
        });
        assert!(one.queue.is_idle());
    });
}

// A pass that loses a turn which the waiter refused fails the 49th schedule.
#[test]
fn a_turn_that_is_passed_on_gets_by_a_waiter_that_goes_away() {
    one_of_two_leaves(drop);
}

#[test]
fn a_hand_over_to_a_waiter_that_goes_away_comes_back() {
    // As a release does it, which has the server in between.
    one_of_two_leaves(|turn| match turn.take_next() {
        Some(waiter) => drop(waiter.reply.send(Next::Turn { turn, told_busy: false })),
        None => drop(turn),
    });
}

// A pass that looks for waiters and ends the queue in two steps fails the 5th schedule.
#[test]
fn a_newcomer_is_not_forgotten_when_the_queue_ends() {
    for patient in [true, false] {
        exhaust(move || {
            let one = One::new();
            let turn = one.turn();
            block_on(async {
                let newcomer = spawn({
                    let one = one.clone();
                    async move {
                        match one.enter(patient) {
                            Entered::Turn(turn) => one.takes(turn),
                            Entered::Queued(ticket) => one.waits(ticket).await,
                            Entered::Busy(_) => panic!("the server was not asked"),
                        }
                    }
                });
                one.takes(turn);
                newcomer.await.unwrap();
            });
            assert!(one.queue.is_idle());
        });
    }
}

// A queue that takes out its last waiter fails the first schedule; one that prefers patient waiters, the second.
#[test]
fn waiters_that_stay_get_their_turn_in_the_order_they_came() {
    explore(6_000, Time::WhenIdle, |_, _| async {
        let one = One::new();
        let turn = one.turn();
        let served = Arc::new(Mutex::new(Vec::new()));
        let (mut tasks, mut stay) = (Vec::new(), Vec::new());
        for number in 0..5 {
            let mut ticket = one.ticket(once_in(2));
            if once_in(3) {
                tasks.push(spawn(async move { drop(ticket) }));
                continue;
            }
            stay.push(number);
            let (one, served) = (one.clone(), Arc::clone(&served));
            tasks.push(spawn(async move {
                let Some(Next::Turn { turn, .. }) = ticket.next().await else {
                    panic!("it was promised a turn");
                };
                served.lock().unwrap().push(number);
                one.takes(turn);
            }));
        }
        one.takes(turn);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*served.lock().unwrap(), stay);
        assert!(one.queue.is_idle());
    });
}

#[test]
fn an_impatient_waiter_gets_one_answer() {
    exhaust(|| {
        let one = One::new();
        let turn = one.turn();
        block_on(async {
            let asks = spawn({
                let one = one.clone();
                async move {
                    let mut ticket = match one.enter(false) {
                        Entered::Queued(ticket) => ticket,
                        Entered::Busy(_) => return,
                        Entered::Turn(turn) => return one.takes(turn),
                    };
                    match ticket.next().await {
                        Some(Next::Refused(_) | Next::Failed(_)) => {}
                        Some(Next::Turn { turn, .. }) => one.takes(turn),
                        _ => panic!("no answer"),
                    }
                }
            });
            turn.busy(&Busy::default());
            turn.failed(&LockError::closed(), true);
            drop(turn);
            asks.await.unwrap();
        });
        assert!(one.queue.is_idle());
    });
}
