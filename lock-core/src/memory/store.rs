//! What the in-memory backend keeps: locks, queues, leases, and the token counter.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use crate::{
    Attempt, Busy, Claim, Clock, FencingToken, Grant, Holder, Lease, LeaseId, LockError, LockName, LossReason, Mode,
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

    /// Ends all holds of a name. Their holders are told at once. Returns who they were.
    pub(super) fn free(&self, name: &LockName, reason: LossReason) -> Vec<Holder> {
        let now = self.clock.now();
        let mut state = self.lock();
        state.settle(name, now);
        let holders = state.holders(name, now);
        let ended = state.take(name, |_| true);
        state.grant_next(name, now);
        drop(state);
        for entry in &ended {
            entry.tell(reason);
        }
        holders
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
pub(super) struct State {
    /// The holds of each name: one, or several that do not exclude each other.
    pub(super) locks: BTreeMap<LockName, Vec<Entry>>,
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

    /// When it ends at the store.
    fn until(&self, sessions: &[Session]) -> Option<Stamp> {
        let kept = match &self.keeps {
            _ if self.released => None,
            Keeps::Until(until) => Some(*until),
            Keeps::Session(id) => sessions.iter().find(|s| s.id == *id).map(|s| s.until),
        };
        kept.max(self.reserved_until)
    }

    /// Tells the holder. Not under the store's mutex: the task that is woken may call the store at once.
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
        entry.until(&self.sessions)
    }

    /// Ends the holds whose leases are over, and serves the queue.
    pub(super) fn settle(&mut self, name: &LockName, now: Stamp) {
        if let Some(entries) = self.locks.get_mut(name) {
            entries.retain(|entry| entry.until(&self.sessions).is_some_and(|until| now < until));
            if entries.is_empty() {
                self.locks.remove(name);
            }
        }
        self.grant_next(name, now);
    }

    /// The holds of a name.
    pub(super) fn holds(&self, name: &LockName) -> &[Entry] {
        self.locks.get(name).map_or(&[], Vec::as_slice)
    }

    /// The hold of that claim.
    fn hold_of(&mut self, claim: &Claim) -> Option<&mut Entry> {
        let entries = self.locks.get_mut(claim.name())?;
        entries.iter_mut().find(|entry| entry.is_held_by(claim))
    }

    /// Takes out the holds of a name that `ends` is true for.
    pub(super) fn take(&mut self, name: &LockName, ends: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let Some(entries) = self.locks.get_mut(name) else {
            return Vec::new();
        };
        let ended = entries.extract_if(.., |entry| ends(entry)).collect();
        if entries.is_empty() {
            self.locks.remove(name);
        }
        ended
    }

    /// Whether a claim in that mode can hold the name beside those that do.
    fn admits(&self, name: &LockName, mode: Mode) -> bool {
        let holds = self.holds(name);
        match mode {
            Mode::Exclusive => holds.is_empty(),
            Mode::Shared => holds.iter().all(|entry| entry.claim.mode() == mode),
            Mode::Permit { of } => holds.len() < of as usize,
        }
    }

    /// Fails if the name is used in a way that never goes together with that claim.
    fn check_kind(&self, claim: &Claim) -> Result<(), LockError> {
        let name = claim.name();
        let held = self.holds(name).first().map(|entry| entry.claim.mode());
        let waiting = || self.queues.get(name)?.front().map(|waiter| waiter.claim.mode());
        match held.or_else(waiting).filter(|found| !found.is_same_kind(claim.mode())) {
            Some(found) => Err(LockError::invalid_mode(name, claim.mode(), found)),
            None => Ok(()),
        }
    }

    /// Serves those at the head of the queue for whom there is room. The first one for whom there is none blocks those behind it.
    pub(super) fn grant_next(&mut self, name: &LockName, now: Stamp) {
        while let Some(waiter) = self.queues.get(name).and_then(VecDeque::front) {
            if !waiter.reply.is_closed() && !self.admits(name, waiter.claim.mode()) {
                break;
            }
            let Some(waiter) = self.queues.get_mut(name).and_then(VecDeque::pop_front) else {
                break;
            };
            if waiter.reply.is_closed() {
                continue;
            }
            let grant = self.grant(&waiter.client, &waiter.claim, now);
            if waiter.reply.send(grant).is_err() {
                self.take(name, |entry| entry.claim.owner() == waiter.claim.owner());
            }
        }
        if self.queues.get(name).is_some_and(VecDeque::is_empty) {
            self.queues.remove(name);
        }
    }

    pub(super) fn grant(&mut self, client: &Client, claim: &Claim, now: Stamp) -> Grant {
        let (first, token) = self.draw(claim.tokens_wanted());
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
        // Mostly it is the only one.
        let one = || Vec::with_capacity(1);
        self.locks.entry(claim.name().clone()).or_insert_with(one).push(entry);
        grant
    }

    /// The first and last token of a block. The last one is no lower than the wall clock, so that a new store outranks every older one, and
    /// the others are those for which the time has passed since the last block.
    fn draw(&mut self, wanted: NonZeroU32) -> (FencingToken, FencingToken) {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since_epoch.as_micros()).unwrap_or(0);
        let least = if self.token == 0 { now.max(1) } else { self.token + 1 };
        self.token = least.max(now);
        let first = least.max(self.token - u64::from(wanted.get() - 1).min(self.token));
        // The clock reaches the last one in the year 2255.
        let token = |value| FencingToken::new(value).unwrap_or(FencingToken::MAX);
        (token(first), token(self.token))
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

    pub(super) fn holders(&self, name: &LockName, now: Stamp) -> Vec<Holder> {
        let holds = self.holds(name).iter();
        holds.map(|entry| self.holder(entry, now)).collect()
    }

    pub(super) fn holder(&self, entry: &Entry, now: Stamp) -> Holder {
        let mut holder = Holder::of(&entry.claim);
        holder.token = Some(entry.token);
        holder.acquired_at = Some(entry.acquired_at);
        holder.remaining = self.until(entry).map(|until| until.since(now));
        holder.is_reserved = entry.released;
        holder
    }

    /// Busy for a name that is held, and for one that others wait for.
    pub(super) fn try_acquire(&mut self, client: &Client, claim: &Claim, now: Stamp) -> Result<Attempt, LockError> {
        let name = claim.name();
        self.settle(name, now);
        if let Some(grant) = self.rearm(claim, now)? {
            self.grant_next(name, now);
            return Ok(Attempt::Granted(grant));
        }
        self.check_kind(claim)?;
        if self.admits(name, claim.mode()) && !self.queues.contains_key(name) {
            return Ok(Attempt::Granted(self.grant(client, claim, now)));
        }
        let holders = self.holds(name).iter().map(|entry| self.holder(entry, now));
        // The one that ends first is who makes room.
        let Some(holder) = holders.min_by_key(|holder| holder.remaining) else {
            return Ok(Attempt::busy());
        };
        let busy = Busy::default().with_retry_after(holder.remaining.unwrap_or_default());
        Ok(busy.with_holder(holder).into())
    }

    /// The same owner asks again: the same token, and a full ttl. A writer that asks as a reader becomes one. `None` if it holds nothing.
    fn rearm(&mut self, claim: &Claim, now: Stamp) -> Result<Option<Grant>, LockError> {
        let entries = self.locks.get_mut(claim.name()).into_iter().flatten();
        let Some(entry) = entries.into_iter().find(|entry| entry.is_held_by(claim)) else {
            return Ok(None);
        };
        match (entry.claim.mode(), claim.mode()) {
            (held, asked) if held == asked => {}
            (Mode::Exclusive, Mode::Shared) => entry.claim = claim.clone(),
            (held, asked) => return Err(LockError::invalid_mode(claim.name(), asked, held)),
        }
        match &mut entry.keeps {
            Keeps::Until(until) => {
                *until = now + entry.claim.ttl();
                entry.lease = Lease::for_claim(&entry.claim, now);
            }
            Keeps::Session(id) => {
                if let Some(session) = self.sessions.iter_mut().find(|s| s.id == *id) {
                    session.until = now + session.lease.ttl();
                    session.lease.refreshed(now, now);
                }
            }
        }
        let grant = Grant::new(entry.claim.clone(), entry.token, entry.lease.clone());
        entry.revoker = grant.revoker();
        Ok(Some(grant))
    }

    /// Returns whether the claim was in the queue.
    pub(super) fn leave_queue(&mut self, claim: &Claim) -> bool {
        let Some(queue) = self.queues.get_mut(claim.name()) else {
            return false;
        };
        let before = queue.len();
        queue.retain(|waiter| waiter.claim.owner() != claim.owner());
        let left = queue.len() < before;
        if queue.is_empty() {
            self.queues.remove(claim.name());
        }
        left
    }

    /// Ends the hold of that claim, and with it what is reserved, unless that is to stay until `keep`.
    pub(super) fn release(&mut self, claim: &Claim, keep: Option<Stamp>, now: Stamp) -> Released {
        self.leave_queue(claim);
        self.settle(claim.name(), now);
        let is_released = match (keep, self.hold_of(claim)) {
            (None, _) => !self
                .take(claim.name(), |entry| entry.claim.owner() == claim.owner())
                .is_empty(),
            (Some(_), None) => false,
            (until, Some(entry)) => {
                (entry.reserved_until, entry.released) = (until, true);
                true
            }
        };
        self.grant_next(claim.name(), now);
        if is_released {
            Released::Released
        } else {
            Released::NotHeld
        }
    }

    pub(super) fn reserve(&mut self, claim: &Claim, until: Stamp, now: Stamp) -> Renewal {
        self.settle(claim.name(), now);
        match self.hold_of(claim) {
            Some(entry) => {
                entry.reserved_until = Some(until);
                Renewal::Renewed
            }
            None => Renewal::NotHeld,
        }
    }

    /// Ends all holds of a client that has ended. What is reserved stays taken. Returns the revokers of the holds.
    pub(super) fn end(&mut self, client: u64, now: Stamp) -> Vec<Revoker> {
        let mut revokers = Vec::new();
        let mut names = Vec::new();
        for (name, entries) in &mut self.locks {
            entries.retain_mut(|entry| {
                if entry.client != client {
                    return true;
                }
                revokers.push(entry.revoker.clone());
                names.push(name.clone());
                entry.released = entry.reserved_until.is_some_and(|until| until > now);
                entry.released
            });
        }
        self.locks.retain(|_, entries| !entries.is_empty());
        for name in names {
            self.grant_next(&name, now);
        }
        revokers
    }

    pub(super) fn renew(&mut self, lease: &Lease, now: Stamp) -> Renewal {
        let until = match lease.id() {
            LeaseId::Claim(claim) => {
                self.settle(claim.name(), now);
                self.hold_of(claim).and_then(|entry| match &mut entry.keeps {
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
