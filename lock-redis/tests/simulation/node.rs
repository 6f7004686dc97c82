//! What a node of several servers stores and answers, in memory: what `redlock.lua` is to do.
//!
//! Both the simulation of the coordinator and the test of the script include this.

#![allow(dead_code, reason = "the one needs what the other does not")]

use std::collections::HashMap;

use lock_core::{Mode, OwnerId};

/// For how long a node without its data grants nothing, and for how long it keeps counters, in microseconds.
pub(crate) const MAX_TTL: u64 = 5_000_000;
pub(crate) const RETENTION: u64 = 600_000_000;

/// How old a proposed token may be, in microseconds.
const FRESH: u64 = 500_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// The confirmation round changes nothing.
    ConfirmsNothing,
    /// A node grants as soon as it is back.
    NoSilence,
    /// A release ends what a later attempt was granted.
    ReleaseIgnoresAttempt,
    /// A node grants a shared claim beside an exclusive one.
    SharesWhatIsExclusive,
    /// A node grants an exclusive claim beside shared ones.
    ExcludesNoShared,
    /// What an attempt has left of a shared claim keeps its token.
    LeftoverKeepsToken,
    /// The confirmation round gives a token that the node has drawn for another claim.
    ConfirmsWhatIsDrawn,
}

/// Everything on the node about one name. Times are in milliseconds of its clock, unless something else is said.
#[derive(Debug)]
pub(crate) struct Stored {
    /// An exclusive hold, or shared ones.
    pub(crate) locks: Vec<Lock>,
    /// The exclusive claims that wait, and until when they keep shared ones out.
    pub(crate) announced: HashMap<OwnerId, u64>,
    pub(crate) counter: Option<u64>,
    /// Since when it has its data (us), and whether it may grant at once.
    pub(crate) since: u64,
    pub(crate) is_open: bool,
    bug: Option<Bug>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lock {
    pub(crate) owner: OwnerId,
    pub(crate) mode: Mode,
    pub(crate) client: u64,
    pub(crate) attempt: u64,
    pub(crate) token: u64,
    pub(crate) until: u64,
}

/// A request for the lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acquire {
    pub(crate) owner: OwnerId,
    pub(crate) mode: Mode,
    pub(crate) client: u64,
    pub(crate) attempt: u64,
    pub(crate) ttl: u64,
    /// When the claim must have ended.
    pub(crate) stop: u64,
    /// The proposed token, or 0.
    pub(crate) proposal: u64,
    /// The token with which the claim holds the name, or 0.
    pub(crate) known: u64,
    /// For how long it keeps shared claims out that come after it, should shared ones have the node.
    pub(crate) announced: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Granted {
        token: u64,
        life: u64,
    },
    /// Another claim has the name, if it is known.
    Busy(Option<OwnerId>),
    /// The node grants nothing for that long.
    Young(u64),
    Late,
    Confirmed,
    /// The node has drawn that token already. This is its last one.
    Passed(u64),
    Renewed,
    Released,
    Lost,
}

impl Stored {
    pub(crate) fn new(now: u64, is_open: bool, bug: Option<Bug>) -> Self {
        Self {
            locks: Vec::new(),
            announced: HashMap::new(),
            counter: None,
            since: now,
            is_open,
            bug,
        }
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// The process has begun at `now` (us), or has lost its data then.
    pub(crate) fn restart(&mut self, now: u64, loses_data: bool) {
        if loses_data {
            (self.locks, self.announced, self.counter) = Default::default();
        }
        (self.since, self.is_open) = (now, self.has(Bug::NoSilence));
    }

    /// Removes what is over at `now` (us), which is what all requests begin with. Returns the time in ms.
    pub(crate) fn tick(&mut self, now: u64) -> u64 {
        let now = now / 1000;
        self.locks.retain(|lock| lock.until > now);
        now
    }

    fn hold(&mut self, owner: OwnerId) -> Option<&mut Lock> {
        self.locks.iter_mut().find(|lock| lock.owner == owner)
    }

    pub(crate) fn acquire(&mut self, now: u64, ask: &Acquire) -> Answer {
        let (us, now) = (now, self.tick(now));
        let age = us.saturating_sub(self.since);
        if !self.is_open && age < MAX_TTL {
            return Answer::Young((MAX_TTL - age).div_ceil(1000));
        }
        let life = ask.ttl.min(ask.stop.saturating_sub(now));
        if life * 2 < ask.ttl {
            return Answer::Late;
        }
        let keeps_token = self.has(Bug::LeftoverKeepsToken);
        let mine = |lock: &&mut Lock| lock.mode == Mode::Exclusive || ask.mode == Mode::Shared;
        if let Some(lock) = self.hold(ask.owner).filter(mine) {
            // A request that the network held back does not undo a later one.
            let is_later = lock.client != ask.client || lock.attempt < ask.attempt;
            let is_leftover = ask.mode == Mode::Shared && lock.token != ask.known && !keeps_token;
            lock.until = lock.until.max(now + life);
            lock.mode = ask.mode;
            let mut token = lock.token;
            self.announced.remove(&ask.owner);
            if is_later {
                if is_leftover {
                    token = self.draw(us, ask.proposal);
                }
                let lock = self.hold(ask.owner);
                lock.into_iter().for_each(|lock| {
                    (lock.client, lock.attempt, lock.token) = (ask.client, ask.attempt, token);
                });
            }
            return Answer::Granted { token, life };
        }
        if let Some(holder) = self.blocker(ask.mode, now) {
            let shared = self.locks.iter().any(|lock| lock.mode == Mode::Shared);
            if ask.mode == Mode::Exclusive && shared && ask.announced > 0 {
                self.announced.retain(|_, until| *until > now);
                self.announced.insert(ask.owner, now + ask.announced.min(life));
            }
            return Answer::Busy(holder);
        }
        let token = self.draw(us, ask.proposal);
        self.locks.push(Lock {
            owner: ask.owner,
            mode: ask.mode,
            client: ask.client,
            attempt: ask.attempt,
            token,
            until: now + life,
        });
        Answer::Granted { token, life }
    }

    /// The owner that keeps a claim in that mode out, if it is known: of several, the one that holds longest.
    fn blocker(&self, mode: Mode, now: u64) -> Option<Option<OwnerId>> {
        let excludes = |lock: &&Lock| match (lock.mode, mode) {
            (Mode::Exclusive, Mode::Shared) => !self.has(Bug::SharesWhatIsExclusive),
            (Mode::Shared, Mode::Exclusive) => !self.has(Bug::ExcludesNoShared),
            (Mode::Shared, Mode::Shared) => false,
            _ => true,
        };
        let longest = |lock: &&Lock| (lock.until, lock.owner.to_string());
        let holder = self.locks.iter().filter(excludes).max_by_key(longest);
        let waits = mode == Mode::Shared && self.announced.values().any(|until| *until > now);
        holder.map(|lock| Some(lock.owner)).or_else(|| waits.then_some(None))
    }

    /// Draws a token at `now` (us): higher than the last one, and the proposal if that is possible.
    fn draw(&mut self, now: u64, proposal: u64) -> u64 {
        let is_known = self.counter.is_some() || now.saturating_sub(self.since) >= RETENTION;
        let usable = is_known && proposal <= now && now - proposal < FRESH;
        let token = (self.counter.unwrap_or(0) + 1).max(if usable { proposal } else { now });
        self.counter = Some(token);
        token
    }

    pub(crate) fn confirm(&mut self, now: u64, owner: OwnerId, presented: u64, token: u64, is_agreed: bool) -> Answer {
        self.tick(now);
        let (last, bug) = (self.counter.unwrap_or(0), self.bug);
        let granted = |lock: &&mut Lock| [presented, token].contains(&lock.token);
        let Some(lock) = self.hold(owner).filter(granted) else {
            return Answer::Lost;
        };
        if lock.token != token && last >= token && !is_agreed && bug != Some(Bug::ConfirmsWhatIsDrawn) {
            return Answer::Passed(last);
        }
        if bug != Some(Bug::ConfirmsNothing) {
            lock.token = token;
            self.counter = Some(last.max(token));
        }
        Answer::Confirmed
    }

    pub(crate) fn renew(&mut self, now: u64, owner: OwnerId, ttl: u64, stop: u64) -> Answer {
        let now = self.tick(now);
        match self.hold(owner) {
            Some(_) if now > stop => Answer::Late,
            Some(lock) => {
                lock.until = now + ttl;
                Answer::Renewed
            }
            None => Answer::Lost,
        }
    }

    /// Ends what the claim was granted by attempts of the client up to the number `last`.
    pub(crate) fn release(&mut self, now: u64, owner: OwnerId, client: u64, last: u64, goes_on: bool) -> Answer {
        self.tick(now);
        let (before, compares) = (self.locks.len(), !self.has(Bug::ReleaseIgnoresAttempt));
        self.locks.retain(|lock| {
            let is_later = compares && lock.client == client && lock.attempt > last;
            lock.owner != owner || is_later
        });
        if !goes_on {
            self.announced.remove(&owner);
        }
        match self.locks.len() < before {
            true => Answer::Released,
            false => Answer::Lost,
        }
    }
}
