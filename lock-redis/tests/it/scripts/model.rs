//! What the scripts are to do, for one name, in memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fastrand::Rng;

use super::step::{Ask, Renew, Reserve, Step};

pub(super) const CLIENTS: usize = 4;
pub(super) const OWNERS: usize = 8;

/// Longer than a run takes, in milliseconds.
pub(super) const TTL: u64 = 100_000;

/// What is left of the life of a waiter that has missed two refreshes, in percent.
pub(super) const FADED: u64 = 20;

/// What is left of the life of a hold that is about to end, in percent.
pub(super) const ABOUT_TO_END: u64 = 10;

/// An owner; the same one always asks through the same client.
pub(super) type Owner = usize;

/// What the owner is called on the server.
pub(super) fn name_of(owner: Owner) -> String {
    format!("o{owner}")
}

pub(super) fn client_of(owner: Owner) -> usize {
    owner % CLIENTS
}

/// How many tokens the owner wants: so many that each block begins right behind the last token, or few.
pub(super) fn tokens_wanted(owner: Owner) -> u64 {
    [1_000_000_000, 2][owner / CLIENTS]
}

/// What the scripts call a mode.
pub(super) type Mode = &'static str;

pub(super) const EXCLUSIVE: Mode = "x";
pub(super) const SHARED: Mode = "s";

/// The modes in which each owner asks: alike, readers and writers, or permits and others.
fn modes(random: &mut Rng) -> [Mode; OWNERS] {
    let some: &[Mode] = match random.u32(..4) {
        0 => &[EXCLUSIVE],
        1..3 => &[EXCLUSIVE, SHARED, SHARED],
        _ => &["p2", "p2", "p2", "p2", "p3", SHARED, EXCLUSIVE],
    };
    std::array::from_fn(|_| some[random.usize(..some.len())])
}

/// How many may hold in that mode. Two modes are of one kind if that is the same.
pub(super) fn permits(mode: Mode) -> Option<usize> {
    mode.strip_prefix('p').map(|of| of.parse().unwrap())
}

/// What a step came to, as the model says or as the server shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// The word of the answer.
    pub(super) answer: String,
    /// The first and the last token in the answer.
    pub(super) token: Option<(u64, u64)>,
    /// What each client was told, without numbers.
    pub(super) told: BTreeMap<usize, Vec<String>>,
    /// What the counter was set to.
    pub(super) counter: Option<u64>,
    /// The owners that were told that they hold, with their tokens.
    pub(super) tokens: Vec<(Owner, (u64, u64))>,
    /// Each hold, as its mode and owner, and how long its lease lasts, in percent of the ttl, rounded to tens.
    pub(super) holds: BTreeMap<String, u64>,
    pub(super) queue: Vec<Owner>,
}

#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub(super) owner: Owner,
    pub(super) mode: Mode,
    pub(super) lease: u64,
    /// Whether the holder has released the name, and it is only reserved.
    pub(super) reserved: bool,
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) modes: [Mode; OWNERS],
    pub(super) holds: Vec<Hold>,
    /// With how much life each came, in percent.
    pub(super) queue: VecDeque<(Owner, u64)>,
    pub(super) dead: BTreeSet<usize>,
    spoilt_counter: bool,
    spoilt_lock: bool,
    /// The counter is ahead of the clock: should it be lost, tokens would fall.
    pub(super) advanced: bool,
    /// The owner that asked in the last step for what it held.
    again: Option<Owner>,
    /// The owner whose hold, which did not exclude others, has ended by itself in the last step.
    pub(super) over: Option<Owner>,
    /// Those that were granted the name in the last step, in order, and whether they asked then.
    granted: Vec<(Owner, bool)>,
    last_token: u64,
    tokens: BTreeMap<Owner, u64>,
}

impl Model {
    pub(super) fn new(random: &mut Rng) -> Self {
        Self {
            modes: modes(random),
            holds: Vec::new(),
            queue: VecDeque::new(),
            dead: BTreeSet::new(),
            spoilt_counter: false,
            spoilt_lock: false,
            advanced: false,
            again: None,
            over: None,
            granted: Vec::new(),
            last_token: 0,
            tokens: BTreeMap::new(),
        }
    }

    /// What the step is expected to come to.
    pub(super) fn take(&mut self, step: Step) -> Outcome {
        let mut outcome = Outcome::default();
        self.again = None;
        self.over = None;
        self.granted.clear();
        if let Step::Acquire(Ask { owner, .. })
        | Step::Renew(Renew { owner, .. })
        | Step::Reserve(Reserve { owner, .. })
        | Step::Release(owner) = step
        {
            self.dead.remove(&client_of(owner));
        }
        match step {
            Step::Acquire(ask) => outcome.answer = self.acquire(ask, &mut outcome),
            Step::Renew(renew) => outcome.answer = self.renew(renew),
            Step::Reserve(reserve) => outcome.answer = self.reserve(reserve, &mut outcome),
            Step::Release(owner) => outcome.answer = self.let_go(owner, &mut outcome),
            Step::ForceRelease => outcome.answer = self.force_release(&mut outcome),
            Step::Expire(owner) => {
                let shares = |at: &usize| self.holds[*at].mode != EXCLUSIVE;
                self.over = self.hold(owner).filter(shares).map(|_| owner);
                self.holds.retain(|hold| hold.mode != EXCLUSIVE && hold.owner != owner);
                self.spoilt_lock = false;
            }
            Step::Age(owner) => {
                let aged = |hold: &&mut Hold| hold.mode == EXCLUSIVE || hold.owner == owner;
                let aged = self.holds.iter_mut().filter(aged);
                aged.for_each(|hold| hold.lease = ABOUT_TO_END);
            }
            Step::Fade(owner) => {
                let place = self.queue.iter_mut().find(|(other, _)| *other == owner);
                place.into_iter().for_each(|place| place.1 = FADED);
            }
            Step::LoseCounter | Step::AdvanceCounter => {
                self.advanced |= matches!(step, Step::AdvanceCounter);
                self.spoilt_counter = false;
            }
            Step::SpoilCounter => self.spoilt_counter = true,
            Step::SpoilLock => self.spoilt_lock |= self.exclusive().is_none(),
            Step::Kill(client) => drop(self.dead.insert(client)),
        }
        for hold in &self.holds {
            let reserved = if hold.reserved { "reserved:" } else { "" };
            let shown = format!("{} {reserved}{}", hold.mode, name_of(hold.owner));
            outcome.holds.insert(shown, hold.lease);
        }
        if self.spoilt_lock {
            outcome.holds.insert("foreign".to_owned(), 0);
        }
        outcome.queue = self.queue.iter().map(|(owner, _)| *owner).collect();
        // What another program wrote there is cleared away after the look.
        self.spoilt_lock &= matches!(step, Step::SpoilLock);
        outcome
    }

    /// Whether the server did the same; takes note of the tokens that it drew.
    pub(super) fn compare(&mut self, expected: &Outcome, found: &Outcome) -> Result<(), String> {
        let words = Outcome {
            token: None,
            counter: None,
            tokens: Vec::new(),
            ..found.clone()
        };
        if words != *expected {
            return Err(format!("expected {expected:?}, found {words:?}"));
        }
        self.last_token = found.counter.unwrap_or(self.last_token);
        let mut told = found.tokens.clone();
        for (owner, asked) in std::mem::take(&mut self.granted) {
            let token = match asked {
                true => found.token,
                false => {
                    let at = told.iter().position(|(told, _)| *told == owner);
                    at.map(|at| told.remove(at).1)
                }
            };
            let (first, last) = token.unwrap_or_default();
            if first <= self.last_token || last < first {
                return Err(format!("tokens {first} to {last} came after {}", self.last_token));
            }
            self.last_token = last;
            self.tokens.insert(owner, last);
        }
        if let Some(owner) = self.again {
            let held = self.tokens[&owner];
            if found.token != Some((held, held)) {
                return Err(format!("asked again for token {held}, found {:?}", found.token));
            }
        }
        Ok(())
    }

    fn acquire(&mut self, ask: Ask, outcome: &mut Outcome) -> String {
        let (owner, life) = (ask.owner, 100 - ask.late);
        if ask.late > 50 {
            return "late".to_owned();
        }
        let word = self
            .attempt(owner, ask.mode, life, outcome)
            .unwrap_or_else(|error| error);
        if word != "busy" || !ask.wait {
            return word;
        }
        match self.queue.iter_mut().find(|(other, _)| *other == owner) {
            Some(place) => place.1 = life,
            None => self.queue.push_back((owner, life)),
        }
        let is_first = self.queue.front().is_some_and(|(first, _)| *first == owner);
        if is_first { "busy, first" } else { "busy" }.to_owned()
    }

    fn renew(&mut self, renew: Renew) -> String {
        let hold = self.hold(renew.owner).map(|at| &mut self.holds[at]);
        let word = match hold.filter(|hold| (hold.mode != EXCLUSIVE) == renew.shares) {
            Some(_) if renew.late => "late",
            Some(hold) => {
                let keeps = renew.reserves && !renew.shares;
                hold.lease = if keeps { hold.lease.max(100) } else { 100 };
                "renewed"
            }
            None => "lost",
        };
        word.to_owned()
    }

    /// The answer to a claim that asks for the lock, without waiting.
    fn attempt(&mut self, owner: Owner, mode: Mode, life: u64, outcome: &mut Outcome) -> Result<String, String> {
        if self.spoilt_lock {
            return Err("foreign".to_owned());
        }
        if let Some(at) = self.hold(owner) {
            return self.again(at, mode, life, outcome);
        }
        let may = match self.exclusive() {
            Some(_) => false,
            None => self.grant_next(Some(owner), None, outcome)? && self.has_room(mode),
        };
        if self
            .holds
            .first()
            .is_some_and(|hold| permits(hold.mode) != permits(mode))
        {
            return Ok(format!("mode {}", self.holds[0].mode));
        }
        if !may {
            return Ok("busy".to_owned());
        }
        if self.spoilt_counter {
            return Err("foreign".to_owned());
        }
        self.granted.push((owner, true));
        self.hold_by(owner, mode, life);
        if self.queue.front().is_some_and(|(first, _)| *first == owner) {
            self.queue.pop_front();
            self.try_grant_next(outcome);
        }
        Ok("granted".to_owned())
    }

    /// The answer to the holder that asks again.
    fn again(&mut self, at: usize, mode: Mode, life: u64, outcome: &mut Outcome) -> Result<String, String> {
        let hold = &mut self.holds[at];
        let becomes_shared = hold.mode == EXCLUSIVE && mode == SHARED;
        if hold.mode != mode && !becomes_shared {
            return Ok(format!("mode {}", hold.mode));
        }
        hold.lease = hold.lease.max(life);
        hold.mode = mode;
        self.again = Some(hold.owner);
        if becomes_shared {
            self.try_grant_next(outcome);
        }
        Ok("granted".to_owned())
    }

    fn hold_by(&mut self, owner: Owner, mode: Mode, lease: u64) {
        self.holds.push(Hold {
            owner,
            mode,
            lease,
            reserved: false,
        });
    }

    /// The hold of the owner.
    pub(super) fn hold(&self, owner: Owner) -> Option<usize> {
        self.holds.iter().position(|hold| hold.owner == owner && !hold.reserved)
    }

    /// The exclusive hold.
    pub(super) fn exclusive(&self) -> Option<usize> {
        self.holds.iter().position(|hold| hold.mode == EXCLUSIVE)
    }

    fn has_room(&self, mode: Mode) -> bool {
        match permits(mode) {
            _ if mode == SHARED => self.exclusive().is_none(),
            of => self.exclusive().is_none() && self.holds.len() < of.unwrap_or(1),
        }
    }

    /// When there is room for that mode, if nothing ends before its time.
    fn room_in(&self, mode: Mode) -> u64 {
        let mut leases: Vec<_> = self.holds.iter().map(|hold| hold.lease).collect();
        leases.sort_unstable();
        let beside = match self.exclusive() {
            None => permits(mode).unwrap_or(1),
            Some(_) => 1,
        };
        leases[leases.len() - beside]
    }

    /// The answer to a reservation, or to a release that keeps one.
    fn reserve(&mut self, reserve: Reserve, outcome: &mut Outcome) -> String {
        let Reserve { owner, ends, .. } = reserve;
        if self.spoilt_lock && ends {
            return "foreign".to_owned();
        }
        let at = self.hold(owner).filter(|at| self.holds[*at].mode == EXCLUSIVE);
        let Some(at) = at.filter(|_| ends || !reserve.old) else {
            return match ends {
                true => self.let_go(owner, outcome),
                false => "lost".to_owned(),
            };
        };
        if reserve.late {
            return "late".to_owned();
        }
        let hold = &mut self.holds[at];
        if !ends {
            hold.lease = hold.lease.max(reserve.length);
            return "renewed".to_owned();
        }
        (hold.lease, hold.reserved) = (reserve.length, true);
        self.tell_first(outcome);
        "released".to_owned()
    }

    fn let_go(&mut self, owner: Owner, outcome: &mut Outcome) -> String {
        let held = self.hold(owner).map(|at| self.holds.remove(at));
        self.queue.retain(|(other, _)| *other != owner);
        let shared = held.as_ref().filter(|hold| hold.mode != EXCLUSIVE);
        let _ = self.grant_next(None, shared.map(|hold| hold.lease), outcome);
        if held.is_some() { "released" } else { "lost" }.to_owned()
    }

    fn force_release(&mut self, outcome: &mut Outcome) -> String {
        if self.spoilt_lock {
            return "foreign".to_owned();
        }
        let ended = std::mem::take(&mut self.holds);
        for hold in ended.iter().filter(|hold| !hold.reserved) {
            self.tell(hold.owner, "taken", outcome);
        }
        outcome.told.values_mut().for_each(|told| told.sort_unstable());
        self.try_grant_next(outcome);
        if ended.is_empty() { "free" } else { "released" }.to_owned()
    }

    /// Where an error ends the giving on, but not the step.
    fn try_grant_next(&mut self, outcome: &mut Outcome) {
        let _ = self.grant_next(None, None, outcome);
    }

    /// Whether no claim comes before `me`. `ended` is what was left of a hold that has ended.
    fn grant_next(&mut self, me: Option<Owner>, ended: Option<u64>, outcome: &mut Outcome) -> Result<bool, String> {
        let mut has_granted = false;
        while let Some(&(owner, life)) = self.queue.front() {
            if me == Some(owner) {
                return Ok(true);
            }
            if life == FADED {
                self.queue.pop_front();
                continue;
            }
            if self.spoilt_lock {
                return Err("foreign".to_owned());
            }
            let mode = self.modes[owner];
            if !self.has_room(mode) {
                let left = self.room_in(mode);
                if has_granted || ended.is_some_and(|ended| left * 2 <= ended) {
                    self.tell_first(outcome);
                }
                return Ok(false);
            }
            if self.spoilt_counter {
                return Err("foreign".to_owned());
            }
            self.queue.pop_front();
            if self.tell(owner, "granted", outcome) {
                has_granted = true;
                self.granted.push((owner, false));
                self.hold_by(owner, mode, life);
            }
        }
        Ok(true)
    }

    fn tell_first(&self, outcome: &mut Outcome) {
        if let Some(&(owner, _)) = self.queue.front() {
            self.tell(owner, "first", outcome);
        }
    }

    fn tell(&self, owner: Owner, word: &str, outcome: &mut Outcome) -> bool {
        let client = client_of(owner);
        if self.dead.contains(&client) {
            return false;
        }
        let told = outcome.told.entry(client).or_default();
        told.push(format!("{word} {}", name_of(owner)));
        true
    }
}
