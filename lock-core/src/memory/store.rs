//! The state of the in-memory backend: holds and queues of names, leases, and the token counter.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use crate::{
    Attempt, Busy, Claim, Clock, FencingToken, Grant, Holder, Lease, LeaseId, LockError, LockName, LossReason, Mode,
    Released, Renewal, Revoker, Stamp,
};

pub(super) struct Store {
    pub(super) clock: Clock,
    pub(super) is_out_of_reach: AtomicBool,
    state: Mutex<State>,
}

/// A client of the store.
#[derive(Clone, Copy)]
pub(super) struct Client {
    serial: u64,
    pub(super) shares_leases: bool,
}

#[derive(Default)]
pub(super) struct State {
    /// In boxes, as nodes of the map have room for more names than they hold.
    names: BTreeMap<LockName, Box<Name>>,
    ledger: Ledger,
}

/// What names have in common.
#[derive(Default)]
struct Ledger {
    /// The highest token drawn; zero before the first.
    token: u64,
    sessions: Vec<Session>,
    /// How many sessions were ever opened.
    opened: u64,
    /// Losses that are to be told.
    lost: Vec<(Revoker, LossReason)>,
}

#[derive(Default)]
struct Name {
    /// One, or several that do not exclude each other.
    holds: Vec<Hold>,
    queue: Vec<Waiter>,
}

struct Hold {
    grant: Grant,
    /// The serial of its client.
    client: u64,
    acquired_at: SystemTime,
    kept: KeptUntil,
    /// Zero if it is not reserved.
    reserved_until: Stamp,
    /// Whether it is only reserved.
    is_released: bool,
}

/// Until when the store keeps a lease. All holds of a lease have the same.
#[derive(Clone)]
enum KeptUntil {
    Own(Stamp),
    Shared(Arc<AtomicU64>),
}

/// A lease that locks of one client and one ttl share.
struct Session {
    client: u64,
    lease: Lease,
    kept: KeptUntil,
}

struct Waiter {
    claim: Claim,
    client: Client,
    reply: oneshot::Sender<Grant>,
}

impl Store {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            clock,
            is_out_of_reach: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    /// Reads or changes the state, and tells holders what they have lost. That is not done under the mutex: a task that is woken may call the
    /// store at once.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut State, Stamp) -> T) -> T {
        // Nothing here panics while holding the mutex.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let done = work(&mut state, self.clock.now());
        let lost = std::mem::take(&mut state.ledger.lost);
        drop(state);
        for (revoker, reason) in lost {
            revoker.revoke(reason);
        }
        done
    }
}

impl Client {
    pub(super) fn new(shares_leases: bool) -> Self {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        Self { serial, shares_leases }
    }
}

impl State {
    /// Works on a name. Holds whose leases are over have ended before, and those in the queue for whom there is room are served.
    fn at<T>(&mut self, name: &LockName, now: Stamp, work: impl FnOnce(&mut Name, &mut Ledger) -> T) -> T {
        let entry = self.names.entry(name.clone()).or_default();
        entry.holds.retain(|hold| now < hold.until());
        entry.serve_queue(&mut self.ledger, now);
        let done = work(entry, &mut self.ledger);
        entry.serve_queue(&mut self.ledger, now);
        if entry.is_empty() {
            self.names.remove(name);
        }
        done
    }

    /// Busy for a name that is held, and for one that others wait for.
    pub(super) fn try_acquire(&mut self, client: Client, claim: &Claim, now: Stamp) -> Result<Attempt, LockError> {
        self.at(claim.name(), now, |name, ledger| {
            if let Some(hold) = name.hold_of(claim) {
                return hold.grant_again(claim, now).map(Attempt::Granted);
            }
            name.check_kind(claim)?;
            if name.queue.is_empty() && name.admits(claim.mode()) {
                return Ok(Attempt::Granted(name.grant(client, claim, ledger, now)));
            }
            Ok(name.busy(now).into())
        })
    }

    /// Puts a claim that is busy into the queue. Returns what receives its grant.
    pub(super) fn enter_queue(&mut self, client: Client, claim: &Claim) -> oneshot::Receiver<Grant> {
        let (reply, granted) = oneshot::channel();
        let claim = claim.clone();
        let name = self.names.entry(claim.name().clone()).or_default();
        name.queue.push(Waiter { claim, client, reply });
        granted
    }

    /// Returns whether the claim was in the queue.
    pub(super) fn leave_queue(&mut self, claim: &Claim, now: Stamp) -> bool {
        self.at(claim.name(), now, |name, _| name.leave_queue(claim))
    }

    /// What is known about a name that is held.
    pub(super) fn busy(&mut self, name: &LockName, now: Stamp) -> Busy {
        self.at(name, now, |name, _| name.busy(now))
    }

    pub(super) fn renew(&mut self, lease: &Lease, now: Stamp) -> Renewal {
        let until = now + lease.ttl();
        let kept = match lease.id() {
            LeaseId::Claim(claim) => self.at(claim.name(), now, |name, _| {
                name.hold_of(claim).map(|hold| hold.kept.set(until))
            }),
            id @ LeaseId::Shared(_) => {
                let mut sessions = self.ledger.sessions.iter_mut();
                let session = sessions.find(|session| session.lease.id() == id && now < session.kept.get());
                session.map(|session| session.kept.set(until))
            }
        };
        renewal(kept)
    }

    /// Ends the hold of that claim, and with it what is reserved, unless that is to stay until `keep`.
    pub(super) fn release(&mut self, claim: &Claim, keep: Option<Stamp>, now: Stamp) -> Released {
        let is_released = self.at(claim.name(), now, |name, _| {
            name.leave_queue(claim);
            if keep.is_none() {
                let held = name.holds.len();
                name.holds.retain(|hold| hold.grant.claim.owner() != claim.owner());
                return name.holds.len() < held;
            }
            let hold = name.hold_of(claim);
            hold.map(|hold| (hold.reserved_until, hold.is_released) = (keep.unwrap_or(Stamp::ZERO), true))
                .is_some()
        });
        if is_released {
            Released::Released
        } else {
            Released::NotHeld
        }
    }

    pub(super) fn reserve(&mut self, claim: &Claim, until: Stamp, now: Stamp) -> Renewal {
        renewal(self.at(claim.name(), now, |name, _| {
            name.hold_of(claim).map(|hold| hold.reserved_until = until)
        }))
    }

    pub(super) fn holders(&mut self, name: &LockName, now: Stamp) -> Vec<Holder> {
        self.at(name, now, |name, _| name.holders(now))
    }

    /// The holders of all names that start with `prefix`.
    pub(super) fn list(&self, prefix: &str, now: Stamp) -> Vec<Holder> {
        let named = self.names.iter().filter(|(name, _)| name.as_str().starts_with(prefix));
        named.flat_map(|(_, name)| name.holders(now)).collect()
    }

    /// Ends all holds of a name. Returns whose they were.
    pub(super) fn free(&mut self, name: &LockName, reason: LossReason, now: Stamp) -> Vec<Holder> {
        self.at(name, now, |name, ledger| {
            let holders = name.holders(now);
            name.end(ledger, reason);
            holders
        })
    }

    /// Ends all holds of a name, and gives it to a stranger in the same mode.
    pub(super) fn steal(&mut self, name: &LockName, now: Stamp) -> Option<FencingToken> {
        self.at(name, now, |name, ledger| {
            let robbed = &name.holds.first()?.grant.claim;
            let stranger = Claim::new(robbed.name().clone(), robbed.ttl());
            let stranger = stranger.with_label("a stranger").with_mode(robbed.mode());
            name.end(ledger, LossReason::NotHeld);
            Some(name.grant(Client::new(false), &stranger, ledger, now).token)
        })
    }

    /// Ends the sessions and holds of a client. What is reserved stays taken.
    pub(super) fn close(&mut self, client: Client, now: Stamp) {
        let ledger = &mut self.ledger;
        self.names.retain(|_, name| {
            name.holds.retain_mut(|hold| {
                if hold.client != client.serial || hold.is_released {
                    return true;
                }
                ledger.lost.push((hold.grant.revoker(), LossReason::Revoked));
                hold.is_released = now < hold.reserved_until;
                hold.is_released
            });
            name.serve_queue(ledger, now);
            !name.is_empty()
        });
        ledger.sessions.retain(|session| session.client != client.serial);
    }

    /// How many claims wait.
    pub(super) fn waiters(&self) -> usize {
        self.names.values().map(|name| name.queue.len()).sum()
    }
}

fn renewal(done: Option<()>) -> Renewal {
    done.map_or(Renewal::NotHeld, |()| Renewal::Renewed)
}

impl Name {
    fn is_empty(&self) -> bool {
        self.holds.is_empty() && self.queue.is_empty()
    }

    /// The hold of that claim.
    fn hold_of(&mut self, claim: &Claim) -> Option<&mut Hold> {
        let is_own = |hold: &&mut Hold| !hold.is_released && hold.grant.claim.owner() == claim.owner();
        self.holds.iter_mut().find(is_own)
    }

    /// Whether a claim in that mode can hold the name beside those that do.
    fn admits(&self, mode: Mode) -> bool {
        match mode {
            Mode::Exclusive => self.holds.is_empty(),
            Mode::Shared => self.holds.iter().all(|hold| hold.grant.claim.mode() == mode),
            Mode::Permit { of } => self.holds.len() < of as usize,
        }
    }

    /// Fails if the name is used in a way that never goes together with that claim.
    fn check_kind(&self, claim: &Claim) -> Result<(), LockError> {
        let held = self.holds.first().map(|hold| &hold.grant.claim);
        let found = held.or_else(|| self.queue.first().map(|waiter| &waiter.claim));
        match found.map(Claim::mode).filter(|found| !found.is_same_kind(claim.mode())) {
            Some(found) => Err(LockError::invalid_mode(claim.name(), claim.mode(), found)),
            None => Ok(()),
        }
    }

    fn grant(&mut self, client: Client, claim: &Claim, ledger: &mut Ledger, now: Stamp) -> Grant {
        let [first, token] = ledger.draw(claim.tokens_wanted());
        let (lease, kept) = if client.shares_leases && !claim.own_lease() {
            ledger.shared_lease(client, claim.ttl(), now)
        } else {
            (Lease::for_claim(claim, now), KeptUntil::Own(now + claim.ttl()))
        };
        let grant = Grant::new(claim.clone(), token, lease).with_first_token(first);
        if self.holds.is_empty() {
            // Mostly it is the only one.
            self.holds.reserve_exact(1);
        }
        self.holds.push(Hold {
            grant: grant.clone(),
            client: client.serial,
            acquired_at: SystemTime::now(),
            kept,
            reserved_until: Stamp::ZERO,
            is_released: false,
        });
        grant
    }

    /// Serves those at the head of the queue for whom there is room. The first one for whom there is none blocks those behind it.
    fn serve_queue(&mut self, ledger: &mut Ledger, now: Stamp) {
        while self.queue.first().is_some_and(|first| self.admits(first.claim.mode())) {
            let waiter = self.queue.remove(0);
            // A waiter leaves the queue before it stops listening.
            let _ = waiter.reply.send(self.grant(waiter.client, &waiter.claim, ledger, now));
        }
    }

    fn leave_queue(&mut self, claim: &Claim) -> bool {
        let before = self.queue.len();
        self.queue.retain(|waiter| waiter.claim.owner() != claim.owner());
        self.queue.len() < before
    }

    /// Ends all holds.
    fn end(&mut self, ledger: &mut Ledger, reason: LossReason) {
        let ended = self.holds.drain(..);
        ledger.lost.extend(ended.map(|hold| (hold.grant.revoker(), reason)));
    }

    /// The hold that ends first is the one that makes room.
    fn busy(&self, now: Stamp) -> Busy {
        let first = self.holds.iter().min_by_key(|hold| hold.until());
        first.map_or_else(Busy::default, |hold| {
            let busy = Busy::default().with_holder(hold.holder(now));
            busy.with_retry_after(hold.until().since(now))
        })
    }

    fn holders(&self, now: Stamp) -> Vec<Holder> {
        let holds = self.holds.iter().filter(|hold| now < hold.until());
        holds.map(|hold| hold.holder(now)).collect()
    }
}

impl Hold {
    fn until(&self) -> Stamp {
        match self.is_released {
            true => self.reserved_until,
            false => self.reserved_until.max(self.kept.get()),
        }
    }

    /// The same owner asks again: the same token, and a full ttl. A writer that asks as a reader becomes one.
    fn grant_again(&mut self, claim: &Claim, now: Stamp) -> Result<Grant, LockError> {
        let (held, asked) = (self.grant.claim.mode(), claim.mode());
        if held != asked && (held, asked) != (Mode::Exclusive, Mode::Shared) {
            return Err(LockError::invalid_mode(claim.name(), asked, held));
        }
        let mut lease = self.grant.lease.clone();
        if lease.claim().is_some() {
            lease = Lease::for_claim(claim, now);
        } else {
            lease.refreshed(now, now);
        }
        self.kept.set(now + lease.ttl());
        self.grant = Grant::new(claim.clone(), self.grant.token, lease);
        Ok(self.grant.clone())
    }

    fn holder(&self, now: Stamp) -> Holder {
        let mut holder = Holder::of(&self.grant.claim);
        holder.token = Some(self.grant.token);
        holder.acquired_at = Some(self.acquired_at);
        holder.remaining = Some(self.until().since(now));
        holder.is_reserved = self.is_released;
        holder
    }
}

impl KeptUntil {
    fn shared(until: Stamp) -> Self {
        Self::Shared(Arc::new(AtomicU64::new(until.as_nanos())))
    }

    // The mutex of the store orders these.
    fn get(&self) -> Stamp {
        match self {
            Self::Own(until) => *until,
            Self::Shared(until) => Stamp::from_nanos(until.load(Ordering::Relaxed)),
        }
    }

    fn set(&mut self, until: Stamp) {
        match self {
            Self::Own(own) => *own = until,
            Self::Shared(shared) => shared.store(until.as_nanos(), Ordering::Relaxed),
        }
    }
}

impl Ledger {
    /// The first and last token of a block. The last one is no lower than the wall clock, so that a new store outranks every older one, and
    /// the others are those for which the time has passed since the last block.
    fn draw(&mut self, wanted: NonZeroU32) -> [FencingToken; 2] {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since_epoch.as_micros()).unwrap_or(0);
        let least = if self.token == 0 { now.max(1) } else { self.token + 1 };
        self.token = least.max(now);
        let first = least.max(self.token.saturating_sub(u64::from(wanted.get() - 1)));
        // The clock reaches the last one in the year 2255.
        [first, self.token].map(|token| FencingToken::new(token).unwrap_or(FencingToken::MAX))
    }

    /// The client's lease for that ttl; a new one if the last was not kept alive.
    fn shared_lease(&mut self, client: Client, ttl: Duration, now: Stamp) -> (Lease, KeptUntil) {
        self.sessions.retain(|session| now < session.kept.get());
        let is_usable = |Session { client: of, lease, .. }: &&Session| {
            let is_fresh = lease.is_valid(now) && lease.deadline().since(now) >= ttl / 2;
            *of == client.serial && lease.ttl() == ttl && is_fresh
        };
        if let Some(Session { lease, kept, .. }) = self.sessions.iter().find(is_usable) {
            return (lease.clone(), kept.clone());
        }
        self.opened += 1;
        let lease = Lease::shared(format!("session-{}", self.opened), ttl, now);
        let kept = KeptUntil::shared(now + ttl);
        self.sessions.push(Session {
            client: client.serial,
            lease: lease.clone(),
            kept: kept.clone(),
        });
        (lease, kept)
    }
}
