//! What the in-memory backend keeps: locks, queues, leases, and the token counter.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use crate::sync::{Mutex, MutexGuard};
use crate::{
    Attempt, Busy, Claim, Clock, FencingToken, Grant, Holder, Lease, LeaseId, LockError, LockName, LossReason,
    Released, Renewal, Revoker, Stamp,
};

pub(super) struct Client {
    pub(super) serial: u64,
    pub(super) store: Arc<Store>,
    pub(super) shares: bool,
}

impl Client {
    pub(super) fn of(store: Arc<Store>, shares: bool) -> Arc<Self> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { serial, store, shares })
    }
}

pub(super) struct Store {
    pub(super) out_of_reach: AtomicBool,
    pub(super) state: Mutex<State>,
    pub(super) clock: Clock,
}

impl Store {
    /// Fails if a test has said so.
    pub(super) fn reach(&self, operation: &'static str) -> Result<(), LockError> {
        if self.out_of_reach.load(Ordering::SeqCst) {
            return Err(
                LockError::unavailable(operation, "the store is out of reach: MemoryLock::set_reachable").unsent(),
            );
        }
        Ok(())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) locks: BTreeMap<LockName, Entry>,
    pub(super) queues: BTreeMap<LockName, VecDeque<Waiter>>,
    /// Leases that many locks share, each for one client and ttl.
    pub(super) sessions: Vec<Session>,
    /// The highest token drawn; zero before the first.
    token: u64,
    /// How many sessions were ever opened.
    opened: u64,
}

pub(super) struct Entry {
    pub(super) claim: Claim,
    token: FencingToken,
    pub(super) client: u64,
    acquired_at: SystemTime,
    lease: Lease,
    keeps: Keeps,
    revoker: Revoker,
    reserved_until: Option<Stamp>,
    /// Whether it is only reserved.
    released: bool,
}

impl Entry {
    fn is_held_by(&self, claim: &Claim) -> bool {
        !self.released && self.claim.owner() == claim.owner()
    }

    /// Tells the holder. Not under the store's mutex: whoever is woken may come right back.
    pub(super) fn tell(&self, reason: LossReason) {
        self.revoker.revoke(reason);
    }
}

/// Until when the store keeps a lock.
enum Keeps {
    Until(Stamp),
    Session(Arc<str>),
}

pub(super) struct Session {
    id: Arc<str>,
    pub(super) client: u64,
    lease: Lease,
    until: Stamp,
}

pub(super) struct Waiter {
    pub(super) claim: Claim,
    pub(super) client: Arc<Client>,
    pub(super) reply: oneshot::Sender<Grant>,
}

impl State {
    pub(super) fn until(&self, entry: &Entry) -> Option<Stamp> {
        let kept = match &entry.keeps {
            _ if entry.released => None,
            Keeps::Until(until) => Some(*until),
            Keeps::Session(id) => self.sessions.iter().find(|s| s.id == *id).map(|s| s.until),
        };
        kept.max(entry.reserved_until)
    }

    /// Lets go of a lock whose lease is over, and serves its queue.
    pub(super) fn settle(&mut self, name: &LockName, now: Stamp) {
        let over = self
            .locks
            .get(name)
            .is_some_and(|entry| self.until(entry).is_none_or(|until| now >= until));
        if over {
            self.locks.remove(name);
        }
        self.grant_next(name, now);
    }

    /// Gives a free lock to the first who waits for it.
    pub(super) fn grant_next(&mut self, name: &LockName, now: Stamp) {
        while !self.locks.contains_key(name) {
            let Some(waiter) = self.queues.get_mut(name).and_then(VecDeque::pop_front) else {
                break;
            };
            if waiter.reply.is_closed() {
                continue;
            }
            match self.grant(&waiter.client, &waiter.claim, now) {
                Ok(grant) => {
                    if waiter.reply.send(grant).is_err() {
                        self.locks.remove(name);
                    }
                }
                Err(error) => {
                    tracing::error!(target: "fencelock", error = format_args!("{error:#}"), "a waiter is left without a lock")
                }
            }
        }
        if self.queues.get(name).is_some_and(VecDeque::is_empty) {
            self.queues.remove(name);
        }
    }

    pub(super) fn grant(&mut self, client: &Client, claim: &Claim, now: Stamp) -> Result<Grant, LockError> {
        let (first, token) = self.draw(claim.tokens_wanted())?;
        let (lease, keeps) = if client.shares && !claim.own_lease() {
            self.session(client, claim.ttl(), now)
        } else {
            (Lease::for_claim(claim, now), Keeps::Until(now + claim.ttl()))
        };
        let grant = Grant::new(claim.clone(), token, lease.clone()).with_first_token(first);
        let entry = Entry {
            claim: claim.clone(),
            token,
            client: client.serial,
            acquired_at: SystemTime::now(),
            lease,
            keeps,
            revoker: grant.revoker(),
            reserved_until: None,
            released: false,
        };
        self.locks.insert(claim.name().clone(), entry);
        Ok(grant)
    }

    /// The first and last token of a block. The last one is no lower than the wall clock, so that a new store outranks every older one, and
    /// the others are those for which the time has passed since the last block.
    fn draw(&mut self, wanted: NonZeroU32) -> Result<(FencingToken, FencingToken), LockError> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since_epoch.as_micros()).unwrap_or(0);
        let least = if self.token == 0 { now.max(1) } else { self.token + 1 };
        self.token = least.max(now);
        let first = least.max(self.token - u64::from(wanted.get() - 1).min(self.token));
        let token = |value| FencingToken::new(value).map_err(|e| LockError::failed("drawing a token", e));
        Ok((token(first)?, token(self.token)?))
    }

    /// The client's lease for that ttl; a new one if the last was not kept alive.
    fn session(&mut self, client: &Client, ttl: Duration, now: Stamp) -> (Lease, Keeps) {
        let fresh = |s: &&Session| s.lease.is_valid(now) && s.lease.deadline().since(now) >= ttl / 2;
        let mine = self
            .sessions
            .iter()
            .filter(|s| s.client == client.serial && s.lease.ttl() == ttl);
        if let Some(session) = mine.into_iter().find(fresh) {
            return (session.lease.clone(), Keeps::Session(Arc::clone(&session.id)));
        }
        self.sessions.retain(|session| session.until > now);
        self.opened += 1;
        let id: Arc<str> = format!("session-{}", self.opened).into();
        let lease = Lease::shared(Arc::clone(&id), ttl, now);
        self.sessions.push(Session {
            id: Arc::clone(&id),
            client: client.serial,
            lease: lease.clone(),
            until: now + ttl,
        });
        (lease, Keeps::Session(id))
    }

    pub(super) fn holder(&self, entry: &Entry, now: Stamp) -> Holder {
        let mut holder = Holder::of(&entry.claim);
        holder.token = Some(entry.token);
        holder.acquired_at = Some(entry.acquired_at);
        holder.remaining = self.until(entry).map(|until| until.since(now));
        holder.is_reserved = entry.released;
        holder
    }

    pub(super) fn try_acquire(&mut self, client: &Client, claim: &Claim, now: Stamp) -> Result<Attempt, LockError> {
        self.settle(claim.name(), now);
        let Some(entry) = self.locks.get(claim.name()) else {
            return self.grant(client, claim, now).map(Attempt::Granted);
        };
        if entry.is_held_by(claim) {
            return Ok(Attempt::Granted(self.rearm(claim.name(), now)?));
        }
        let holder = self.holder(entry, now);
        let busy = Busy::default().with_retry_after(holder.remaining.unwrap_or_default());
        Ok(busy.with_holder(holder).into())
    }

    /// The same owner asks again: the same token, and a full ttl.
    fn rearm(&mut self, name: &LockName, now: Stamp) -> Result<Grant, LockError> {
        let gone = || LockError::unavailable("acquire", "the lock is gone");
        let entry = self.locks.get_mut(name).ok_or_else(gone)?;
        match &mut entry.keeps {
            Keeps::Until(until) => {
                *until = now + entry.claim.ttl();
                entry.lease = Lease::for_claim(&entry.claim, now);
            }
            Keeps::Session(id) => {
                let session = self.sessions.iter_mut().find(|s| s.id == *id).ok_or_else(gone)?;
                session.until = now + session.lease.ttl();
                session.lease.refreshed(now, now);
            }
        }
        let grant = Grant::new(entry.claim.clone(), entry.token, entry.lease.clone());
        entry.revoker = grant.revoker();
        Ok(grant)
    }

    pub(super) fn leave_queue(&mut self, claim: &Claim) {
        if let Some(queue) = self.queues.get_mut(claim.name()) {
            queue.retain(|waiter| waiter.claim.owner() != claim.owner());
            if queue.is_empty() {
                self.queues.remove(claim.name());
            }
        }
    }

    pub(super) fn release(&mut self, claim: &Claim, now: Stamp) -> Released {
        self.leave_queue(claim);
        self.settle(claim.name(), now);
        if self
            .locks
            .get(claim.name())
            .is_none_or(|entry| entry.claim.owner() != claim.owner())
        {
            return Released::NotHeld;
        }
        self.locks.remove(claim.name());
        Released::Released
    }

    pub(super) fn reserve(&mut self, claim: &Claim, until: Stamp, now: Stamp) -> Renewal {
        self.settle(claim.name(), now);
        match self.locks.get_mut(claim.name()) {
            Some(entry) if entry.is_held_by(claim) => {
                entry.reserved_until = Some(until);
                Renewal::Renewed
            }
            _ => Renewal::NotHeld,
        }
    }

    pub(super) fn release_reserved(&mut self, claim: &Claim, until: Stamp, now: Stamp) -> Released {
        match self.reserve(claim, until, now) {
            Renewal::Renewed => {
                if let Some(entry) = self.locks.get_mut(claim.name()) {
                    entry.released = true;
                }
                Released::Released
            }
            Renewal::NotHeld => Released::NotHeld,
        }
    }

    /// Ends a hold whose client has ended. A name that is reserved stays taken. Returns the revoker of the hold.
    pub(super) fn end(&mut self, name: &LockName, now: Stamp) -> Option<Revoker> {
        let entry = self.locks.get_mut(name)?;
        let revoker = entry.revoker.clone();
        if entry.reserved_until.is_some_and(|until| until > now) {
            entry.released = true;
        } else {
            self.locks.remove(name);
        }
        Some(revoker)
    }

    pub(super) fn renew(&mut self, lease: &Lease, now: Stamp) -> Renewal {
        let until = match lease.id() {
            LeaseId::Claim(claim) => {
                self.settle(claim.name(), now);
                let mine = |entry: &&mut Entry| entry.is_held_by(claim);
                self.locks
                    .get_mut(claim.name())
                    .filter(mine)
                    .and_then(|entry| match &mut entry.keeps {
                        Keeps::Until(until) => Some(until),
                        Keeps::Session(_) => None,
                    })
            }
            LeaseId::Shared(id) => self
                .sessions
                .iter_mut()
                .find(|s| s.id == *id && s.until > now)
                .map(|s| &mut s.until),
        };
        match until {
            Some(until) => {
                *until = now + lease.ttl();
                Renewal::Renewed
            }
            None => Renewal::NotHeld,
        }
    }
}
