//! A guard that is lost while it is renewed, released and looked at.

use std::sync::Arc;
use std::time::Duration;

use shuttle::future::{spawn, yield_now};
use shuttle::rand::{Rng, thread_rng};

use super::server::Client;
use super::{Time, dawdle, explore, once_in};
use crate::sync::checked::time;
use crate::{LossReason, MemoryLock, ReleaseOutcome};

const TTL: Duration = Duration::from_secs(30);

// A later reason that replaces the first one fails the first schedule. These fail one of the first 2000, not always the same, as the
// addresses and owners of an execution are not the checker's: a late acknowledgement that revives a lease, a signal that looks before it
// listens, and a signal that tells the lease's reason where the guard has another one.
#[test]
fn a_guard_is_lost_once_and_for_one_reason() {
    explore(4_000, Time::OnceIn(60), |clock, hand| async move {
        let memory = MemoryLock::with_clock(clock);
        let memory = if once_in(2) { memory.sharing_leases() } else { memory };
        let client = Client::of(&memory);
        let guard = client.locks.lock("a").ttl(TTL).await.unwrap();
        time::let_pass();
        let held = client.locks.core.watchdog.everything().remove(0);
        let watching: Vec<_> = (0..2)
            .map(|_| {
                let signal = guard.lost();
                spawn(async move { signal.wait().await })
            })
            .collect();
        let mut others = Vec::new();
        let looks = Arc::clone(&held);
        others.push(spawn(async move {
            let mut was_held = true;
            for _ in 0..12 {
                let is_held = looks.is_held();
                assert!(was_held || !is_held, "a lost guard came back");
                was_held = is_held;
                yield_now().await;
            }
        }));
        let (core, lease) = (Arc::clone(&client.locks.core), held.lease().clone());
        others.push(spawn(async move {
            dawdle(4).await;
            let _ = core.renew(&lease).await;
        }));
        // What ends the hold, beside its owner.
        let thief = spawn(async move {
            dawdle(12).await;
            match thread_rng().gen_range(0..4) {
                0 => memory.steal(&"a".parse().unwrap()).is_some(),
                1 => memory.expire(&"a".parse().unwrap()),
                2 => {
                    // Just before that the server still has it, and the client believes in it no more.
                    hand.advance(if once_in(2) {
                        TTL
                    } else {
                        TTL - Duration::from_millis(100)
                    });
                    false
                }
                _ => false,
            }
        });
        dawdle(12).await;
        let outcome = if once_in(2) {
            Some(guard.release().await)
        } else {
            drop(guard);
            None
        };
        let stolen = thief.await.unwrap();
        let mut told = Vec::new();
        for watching in watching {
            told.push(watching.await.unwrap());
        }
        for other in others {
            other.await.unwrap();
        }
        client.settle().await;
        let reason = held.grant().revocation().reason().unwrap();
        assert!(
            told.iter().all(|told| *told == reason),
            "{told:?}, and the reason is {reason}"
        );
        let lost = u64::from(reason != LossReason::Released);
        assert_eq!(client.locks.stats().lost, lost, "{reason}");
        if let Some(Ok(ReleaseOutcome::Released)) = outcome {
            assert_eq!(reason, LossReason::Released);
            assert!(!stolen, "the release ended what another one had taken");
        }
        assert!(!held.is_held());
        client.is_idle();
    });
}

// A release that is counted only after the turn was taken fails the 3rd schedule with few preemptions.
#[test]
fn a_drain_after_a_drop_waits_for_the_release_that_the_loss_began() {
    explore(2_000, Time::WhenIdle, |clock, _| async {
        let memory = MemoryLock::with_clock(clock);
        let client = Client::of(&memory);
        let guard = client.locks.lock("a").await.unwrap();
        let thief = spawn(async move { memory.expire(&"a".parse().unwrap()) });
        dawdle(4).await;
        drop(guard);
        client.locks.drain().await;
        client.is_idle();
        client.sent_one_claim_at_a_time();
        thief.await.unwrap();
    });
}
