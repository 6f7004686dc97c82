//! Who of this client hears what the server pushes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{Claim, FencingToken, Grant, LossReason, OwnerId, Revoker, Stamp};
use tokio::sync::watch;

/// The claims that wait or hold.
#[derive(Clone, Default)]
pub(crate) struct Listeners {
    claims: Arc<Mutex<HashMap<OwnerId, Listener>>>,
}

enum Listener {
    Waiting(watch::Sender<Option<Push>>),
    Holding(Holding),
}

struct Holding {
    claim: Claim,
    token: FencingToken,
    revoker: Revoker,
    reserved_until: Option<Stamp>,
}

/// What a waiter is told.
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
    /// It is the first in line; the holder's lease ends after that time unless it is renewed.
    First(Duration),
}

impl Listeners {
    /// Listens for a claim that waits, until the ticket is dropped.
    pub(crate) fn wait(&self, owner: OwnerId) -> Ticket {
        // Every acquisition has one, and few are told anything. The last word makes void what was told before it: a refresh
        // finds out whatever was missed.
        let (tell, told) = watch::channel(None);
        self.lock().insert(owner, Listener::Waiting(tell));
        Ticket {
            listeners: self.clone(),
            owner,
            told,
        }
    }

    /// Listens for a claim that holds, until it is forgotten.
    pub(crate) fn hold(&self, grant: &Grant) {
        let holding = Listener::Holding(Holding {
            claim: grant.claim.clone(),
            token: grant.token,
            revoker: grant.revoker(),
            reserved_until: None,
        });
        self.lock().insert(grant.claim.owner(), holding);
    }

    /// The token of the claim that holds.
    pub(crate) fn token(&self, owner: OwnerId) -> Option<FencingToken> {
        match self.lock().get(&owner)? {
            Listener::Holding(holding) => Some(holding.token),
            Listener::Waiting(_) => None,
        }
    }

    /// Takes note of a reservation by the claim that holds.
    pub(crate) fn reserved(&self, owner: OwnerId, until: Stamp) {
        if let Some(Listener::Holding(holding)) = self.lock().get_mut(&owner) {
            holding.reserved_until = Some(until);
        }
    }

    /// Ends whatever the claim does here. A wait of its own hears of it.
    pub(crate) fn forget(&self, owner: OwnerId) {
        self.lock().remove(&owner);
    }

    /// Every claim that holds, as far as known, and until when its name is reserved.
    pub(crate) fn holding(&self) -> Vec<(Claim, Option<Stamp>)> {
        let holding = |listener: &Listener| match listener {
            Listener::Holding(holding) => Some((holding.claim.clone(), holding.reserved_until)),
            Listener::Waiting(_) => None,
        };
        self.lock().values().filter_map(holding).collect()
    }

    /// Passes on what came over the channel. What nobody listens for is void: whoever gave up releases.
    pub(crate) fn hear(&self, message: &[u8]) {
        let Some((owner, told)) = std::str::from_utf8(message).ok().and_then(read) else {
            tracing::warn!(target: "fencelock", "a message on the client's channel could not be read");
            return;
        };
        let mut listeners = self.lock();
        match (listeners.get(&owner), told) {
            (Some(Listener::Waiting(tell)), Told::Push(push)) => {
                tell.send_replace(Some(push));
            }
            (Some(Listener::Holding(holding)), Told::Taken) => {
                holding.revoker.revoke(LossReason::NotHeld);
                listeners.remove(&owner);
            }
            _ => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<OwnerId, Listener>> {
        // Nothing here panics while holding the mutex.
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pushes for a waiter, until it is dropped.
pub(crate) struct Ticket {
    listeners: Listeners,
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
        let mut listeners = self.listeners.lock();
        // Another may listen for the same owner by now.
        if let Some(Listener::Waiting(tell)) = listeners.get(&self.owner)
            && tell.subscribe().same_channel(&self.told)
        {
            listeners.remove(&self.owner);
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Told {
    Push(Push),
    Taken,
}

fn read(message: &str) -> Option<(OwnerId, Told)> {
    let mut words = message.split(' ');
    let kind = words.next()?;
    let owner = words.next()?.parse().ok()?;
    let mut number = || words.next()?.parse::<i64>().ok();
    let millis = |number: i64| Duration::from_millis(u64::try_from(number).unwrap_or_default());
    let told = match kind {
        "granted" => Told::Push(Push::Granted {
            token: FencingToken::try_from(number()?).ok()?,
            sent: u64::try_from(number()?).ok()?,
            life: millis(number()?),
            // A script of an earlier version does not say.
            tokens: number().and_then(|tokens| u64::try_from(tokens).ok()).unwrap_or(1),
        }),
        "first" => Told::Push(Push::First(millis(number()?))),
        "taken" => Told::Taken,
        _ => return None,
    };
    Some((owner, told))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_and_nonsense_is_not() {
        let owner = OwnerId::random();
        for (end, tokens) in [("", 1), (" 64", 64)] {
            let granted = Told::Push(Push::Granted {
                token: FencingToken::new(1_700_000_000_000_001).unwrap(),
                sent: 77,
                life: Duration::from_millis(5000),
                tokens,
            });
            let message = format!("granted {owner} 1700000000000001 77 5000{end}");
            assert_eq!(read(&message), Some((owner, granted)));
        }
        let first = Told::Push(Push::First(Duration::from_millis(250)));
        assert_eq!(read(&format!("first {owner} 250")), Some((owner, first)));
        assert_eq!(read(&format!("taken {owner}")), Some((owner, Told::Taken)));
        for nonsense in [
            "",
            "granted",
            "granted x 1 2 3",
            &format!("granted {owner} 0 1 1"),
            "first",
        ] {
            assert_eq!(read(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn a_dropped_ticket_takes_no_later_one_along() {
        let listeners = Listeners::default();
        let owner = OwnerId::random();
        let first = listeners.wait(owner);
        let mut second = listeners.wait(owner);
        drop(first);
        listeners.hear(format!("first {owner} 9").as_bytes());
        let told = *second.told.borrow_and_update();
        assert_eq!(told, Some(Push::First(Duration::from_millis(9))));
        drop(second);
        assert!(listeners.lock().is_empty());
    }
}
