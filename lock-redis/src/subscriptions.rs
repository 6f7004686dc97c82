//! The claims of this client that the server sends messages about.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{Claim, FencingToken, Grant, LossReason, OwnerId, Renewal, Revoker, Stamp};
use tokio::sync::watch;

/// The claims that wait or hold.
#[derive(Clone, Default)]
pub(crate) struct Subscriptions {
    claims: Arc<Mutex<HashMap<OwnerId, Subscription>>>,
}

enum Subscription {
    Waiting(watch::Sender<Option<Push>>),
    Holding {
        claim: Claim,
        token: FencingToken,
        revoker: Revoker,
        reserved_until: Option<Stamp>,
    },
}

/// A message for a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Push {
    /// It holds the lock, by its request with that send stamp (in microseconds since the session began), which gave it
    /// that much life, with that many tokens, the last of which is `token`.
    Granted {
        token: FencingToken,
        sent: u64,
        life: Duration,
        tokens: u64,
    },
    /// It is the first in line; the lock ends after that time.
    First(Duration),
    /// Another client has released its grant with that token by force.
    Taken(FencingToken),
}

impl Subscriptions {
    /// Listens for a claim that waits, until the ticket is dropped.
    pub(crate) fn wait(&self, owner: OwnerId) -> Ticket {
        // Every acquisition has one, and few get a message. The last message replaces earlier ones: a refresh finds what was missed.
        let (tell, told) = watch::channel(None);
        self.lock().insert(owner, Subscription::Waiting(tell));
        Ticket {
            subscriptions: self.clone(),
            owner,
            told,
        }
    }

    /// Listens for a claim that holds, until it is forgotten. If this grant has been released by force meanwhile, it is lost.
    pub(crate) fn hold(&self, grant: &Grant) {
        let holding = Subscription::Holding {
            claim: grant.claim.clone(),
            token: grant.token,
            revoker: grant.revoker(),
            reserved_until: None,
        };
        if let Some(Subscription::Waiting(tell)) = self.lock().insert(grant.claim.owner(), holding)
            && *tell.borrow() == Some(Push::Taken(grant.token))
        {
            grant.revoker().revoke(LossReason::NotHeld);
        }
    }

    /// The token of the claim that holds.
    pub(crate) fn token(&self, owner: OwnerId) -> Option<FencingToken> {
        match self.lock().get(&owner)? {
            Subscription::Holding { token, .. } => Some(*token),
            Subscription::Waiting(_) => None,
        }
    }

    /// Takes note of the answer to a reservation of the claim that holds. One that does not hold is forgotten.
    pub(crate) fn reserved(&self, owner: OwnerId, renewal: Renewal, until: Stamp) {
        let mut subscriptions = self.lock();
        match subscriptions.get_mut(&owner) {
            Some(Subscription::Holding { reserved_until, .. }) if renewal == Renewal::Renewed => {
                *reserved_until = Some(until);
            }
            _ if renewal == Renewal::Renewed => {}
            _ => drop(subscriptions.remove(&owner)),
        }
    }

    /// Ends whatever the claim does here. A wait of its own hears of it.
    pub(crate) fn forget(&self, owner: OwnerId) {
        self.lock().remove(&owner);
    }

    /// Every claim that holds, as far as known, and for how long its name is still reserved.
    pub(crate) fn holding(&self, now: Stamp) -> Vec<(Claim, Option<Duration>)> {
        let holding = |subscription: &Subscription| match subscription {
            Subscription::Holding {
                claim, reserved_until, ..
            } => {
                let keep = reserved_until.map(|until| until.since(now));
                Some((claim.clone(), keep.filter(|keep| !keep.is_zero())))
            }
            Subscription::Waiting(_) => None,
        };
        self.lock().values().filter_map(holding).collect()
    }

    /// Passes on a message of the channel. One for a claim that is not known is ignored: a claim that was given up is released.
    pub(crate) fn hear(&self, message: &[u8]) {
        let Some((owner, push)) = std::str::from_utf8(message).ok().and_then(read) else {
            tracing::warn!(target: "fencelock", "a message on the client's channel could not be read");
            return;
        };
        let mut subscriptions = self.lock();
        match (subscriptions.get(&owner), push) {
            (Some(Subscription::Waiting(tell)), push) => {
                tell.send_replace(Some(push));
            }
            // That of an earlier grant to the same claim may come late.
            (Some(Subscription::Holding { token, revoker, .. }), Push::Taken(taken)) if taken == *token => {
                revoker.revoke(LossReason::NotHeld);
                subscriptions.remove(&owner);
            }
            _ => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<OwnerId, Subscription>> {
        // Nothing here panics while holding the mutex.
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pushes for a waiter, until it is dropped.
pub(crate) struct Ticket {
    subscriptions: Subscriptions,
    owner: OwnerId,
    told: watch::Receiver<Option<Push>>,
}

impl Ticket {
    /// The last push that was not seen yet; `None` if the claim was forgotten. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Option<Push> {
        self.told.changed().await.ok()?;
        *self.told.borrow_and_update()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut subscriptions = self.subscriptions.lock();
        // Another may listen for the same owner by now.
        if let Some(Subscription::Waiting(tell)) = subscriptions.get(&self.owner)
            && tell.subscribe().same_channel(&self.told)
        {
            subscriptions.remove(&self.owner);
        }
    }
}

fn read(message: &str) -> Option<(OwnerId, Push)> {
    let mut words = message.split(' ');
    let kind = words.next()?;
    let owner = words.next()?.parse().ok()?;
    let mut number = || words.next()?.parse::<i64>().ok();
    let token = |number| FencingToken::try_from(number).ok();
    let millis = |number: i64| Duration::from_millis(u64::try_from(number).unwrap_or_default());
    let push = match kind {
        "granted" => Push::Granted {
            token: token(number()?)?,
            sent: u64::try_from(number()?).ok()?,
            life: millis(number()?),
            tokens: u64::try_from(number()?).ok()?,
        },
        "first" => Push::First(millis(number()?)),
        "taken" => Push::Taken(token(number()?)?),
        _ => return None,
    };
    Some((owner, push))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_and_nonsense_is_not() {
        let owner = OwnerId::random();
        let granted = Push::Granted {
            token: FencingToken::new(1_700_000_000_000_001).unwrap(),
            sent: 77,
            life: Duration::from_millis(5000),
            tokens: 64,
        };
        for (message, push) in [
            (format!("granted {owner} 1700000000000001 77 5000 64"), Some(granted)),
            (
                format!("first {owner} 250"),
                Some(Push::First(Duration::from_millis(250))),
            ),
            (
                format!("taken {owner} 42"),
                Some(Push::Taken(FencingToken::new(42).unwrap())),
            ),
            (String::new(), None),
            ("taken x 1".to_owned(), None),
            (format!("granted {owner} 0 1 1 1"), None),
            (format!("taken {owner}"), None),
        ] {
            assert_eq!(read(&message), push.map(|push| (owner, push)), "{message}");
        }
    }

    #[test]
    fn a_grant_that_is_taken_before_its_waiter_runs_is_lost_and_a_later_one_is_not() {
        let claim = Claim::new("n".parse().unwrap(), Duration::from_secs(9));
        let owner = claim.owner();
        let now = lock_core::Clock::system().now();
        for (token, lost) in [(7, Some(LossReason::NotHeld)), (8, None)] {
            let subscriptions = Subscriptions::default();
            let ticket = subscriptions.wait(owner);
            for message in [format!("granted {owner} 7 77 5000 1"), format!("taken {owner} 7")] {
                subscriptions.hear(message.as_bytes());
            }
            // The waiter that has read the first one already, or has asked again.
            let lease = lock_core::Lease::for_claim(&claim, now);
            let grant = Grant::new(claim.clone(), FencingToken::new(token).unwrap(), lease);
            subscriptions.hold(&grant);
            assert!(matches!(*ticket.told.borrow(), Some(Push::Taken(_))));
            assert_eq!(grant.revoked(), lost);
            // The message may also come late.
            subscriptions.hear(format!("taken {owner} 7").as_bytes());
            assert_eq!(grant.revoked(), lost);
            assert_eq!(subscriptions.token(owner).is_some(), lost.is_none());
        }
    }

    #[test]
    fn a_dropped_ticket_takes_no_later_one_along() {
        let subscriptions = Subscriptions::default();
        let owner = OwnerId::random();
        let first = subscriptions.wait(owner);
        let mut second = subscriptions.wait(owner);
        drop(first);
        subscriptions.hear(format!("taken {owner} 7").as_bytes());
        assert!(second.told.borrow_and_update().is_some());
        drop(second);
        assert!(subscriptions.lock().is_empty());
    }
}
