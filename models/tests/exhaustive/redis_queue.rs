//! The queue of one Redis server.

use libtest_mimic::Trial;
use models::redis_queue::model::{ENDS, EXCLUSION, FIFO, Planted, RELEASED, RedisQueue, SKIPPED};
use models::redis_queue::server::Bug;

use crate::report::{holds, violates};

/// The second claim refreshes its place.
fn three() -> RedisQueue<3> {
    RedisQueue {
        ticks: 3,
        requests: [1, 2, 1],
        renewals: 0,
        closes: 0,
        planted: None,
    }
}

/// None refreshes its place.
fn three_once() -> RedisQueue<3> {
    RedisQueue {
        requests: [1; 3],
        ..three()
    }
}

fn two() -> RedisQueue<2> {
    RedisQueue {
        ticks: 4,
        requests: [2; 2],
        renewals: 1,
        closes: 1,
        planted: None,
    }
}

fn with<const A: usize>(bug: Bug, model: RedisQueue<A>) -> RedisQueue<A> {
    RedisQueue {
        planted: Some(Planted::Server(bug)),
        ..model
    }
}

fn sound() -> Vec<Trial> {
    let name = "redis_queue";
    vec![
        holds(name, "3 claims, 1 refresh, 3 ticks", three),
        holds(name, "3 claims, 5 ticks", || RedisQueue {
            ticks: 5,
            ..three_once()
        }),
        holds(name, "3 claims, 1 close, 4 ticks", || RedisQueue {
            closes: 1,
            ticks: 4,
            ..three_once()
        }),
        holds(name, "2 claims, 1 refresh each, renewals, 1 close, 4 ticks", two),
    ]
}

fn planted() -> Vec<Trial> {
    vec![
        violates("redis_queue: a late request counts", "2 claims", ENDS, || {
            with(Bug::LateRequestCounts, two())
        }),
        violates("redis_queue: a newcomer overtakes", "3 claims", FIFO, || {
            with(Bug::NewcomerOvertakes, three_once())
        }),
        violates("redis_queue: a refresh loses the place", "3 claims", FIFO, || {
            with(Bug::RefreshLosesThePlace, three())
        }),
        violates(
            "redis_queue: giving up only leaves the queue",
            "2 claims",
            RELEASED,
            || with(Bug::GivingUpOnlyLeavesTheQueue, two()),
        ),
        violates(
            "redis_queue: receivers of a push are not counted",
            "2 claims",
            SKIPPED,
            || with(Bug::ReceiversNotCounted, two()),
        ),
        violates("redis_queue: a pushed lock has no end", "2 claims", ENDS, || {
            with(Bug::PushedLockHasNoEnd, two())
        }),
        violates("redis_queue: a renewal takes the name again", "2 claims", FIFO, || {
            with(Bug::RenewalTakesAgain, two())
        }),
        violates(
            "redis_queue: a push counts from the last request",
            "3 claims",
            EXCLUSION,
            || RedisQueue {
                planted: Some(Planted::PushCountsFromTheLastRequest),
                ..three()
            },
        ),
    ]
}

pub(crate) fn trials() -> Vec<Trial> {
    sound().into_iter().chain(planted()).collect()
}
