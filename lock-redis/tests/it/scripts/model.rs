//! What the scripts are to do, for one name, in memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fastrand::Rng;

pub(crate) const CLIENTS: usize = 4;
const OWNERS: usize = 8;

/// Longer than a run takes, in milliseconds.
pub(crate) const TTL: u64 = 100_000;

/// What is left of the life of a waiter that has missed two refreshes, in percent.
pub(crate) const FADED: u64 = 20;

/// What is left of the life of a hold that is about to end, in percent.
const ABOUT_TO_END: u64 = 10;

/// An owner; the same one always asks through the same client.
pub(crate) type Owner = usize;

/// What the owner is called on the server.
pub(crate) fn name_of(owner: Owner) -> String {
    format!("o{owner}")
}

pub(crate) fn client_of(owner: Owner) -> usize {
    owner % CLIENTS
}

/// How many tokens the owner wants: so many that each block begins right behind the last token, or few.
pub(crate) fn tokens_wanted(owner: Owner) -> u64 {
    [1_000_000_000, 2][owner / CLIENTS]
}

/// What the scripts call a mode.
pub(crate) type Mode = &'static str;

const EXCLUSIVE: Mode = "x";
const SHARED: Mode = "s";

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
fn permits(mode: Mode) -> Option<usize> {
    mode.strip_prefix('p').map(|of| of.parse().unwrap())
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Asks; waits if it is busy. `late` is how much of the ttl was over when the request arrived, in percent.
    Acquire {
        owner: Owner,
        mode: Mode,
        wait: bool,
        late: u64,
    },
    /// `late` says whether it arrives when it is not wanted any more, `reserves` whether the name may be reserved, `shares` whether it is for a
    /// hold that does not exclude others.
    Renew {
        owner: Owner,
        late: bool,
        reserves: bool,
        shares: bool,
    },
    /// Reserves the name for that long, in percent of the ttl, by the grant at present or an old one, or ends the hold so.
    Reserve {
        owner: Owner,
        length: u64,
        late: bool,
        old: bool,
        ends: bool,
    },
    Release(Owner),
    ForceRelease,
    /// The lease runs out: of an exclusive hold, and of that of the owner.
    Expire(Owner),
    /// The lease is nearly over.
    Age(Owner),
    /// The waiter has not been heard of for most of its ttl.
    Fade(Owner),
    /// The counter is deleted, or set ahead of the clock, or to something else.
    LoseCounter,
    AdvanceCounter,
    SpoilCounter,
    /// Somebody else writes to the key of the lock, if it is free.
    SpoilLock,
    /// The client's connection closes; it comes back with its next request.
    Kill(usize),
}

/// What a step came to, as the model says or as the server shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The words of the answer.
    pub(crate) answer: Vec<String>,
    /// The first and the last token in the answer.
    pub(crate) token: Option<(u64, u64)>,
    /// What each client was told, without numbers.
    pub(crate) told: BTreeMap<usize, Vec<String>>,
    /// What the counter was set to.
    pub(crate) counter: Option<u64>,
    /// The owners that were told that they hold, with their tokens.
    pub(crate) tokens: Vec<(Owner, (u64, u64))>,
    /// Each hold, as its mode and owner, and how long its lease lasts, in percent of the ttl, rounded to tens.
    pub(crate) holds: BTreeMap<String, u64>,
    pub(crate) queue: Vec<Owner>,
}

#[derive(Clone, Debug)]
struct Hold {
    owner: Owner,
    mode: Mode,
    lease: u64,
    /// Whether the holder has released the name, and it is only reserved.
    reserved: bool,
}

#[derive(Debug)]
pub(crate) struct Model {
    modes: [Mode; OWNERS],
    holds: Vec<Hold>,
    /// With how much life each came, in percent.
    queue: VecDeque<(Owner, u64)>,
    dead: BTreeSet<usize>,
    spoilt_counter: bool,
    spoilt_lock: bool,
    /// The counter is ahead of the clock: should it be lost, tokens would fall.
    advanced: bool,
    /// The owner that asked in the last step for what it held.
    again: Option<Owner>,
    /// The owner whose hold, which did not exclude others, has ended by itself in the last step.
    over: Option<Owner>,
    /// Those that were granted the name in the last step, in order, and whether they asked then.
    granted: Vec<(Owner, bool)>,
    last_token: u64,
    tokens: BTreeMap<Owner, u64>,
}

impl Step {
    pub(crate) fn random(random: &mut Rng, model: &Model) -> Self {
        let any = random.usize(..OWNERS);
        // Mostly what does something.
        let one_of = |random: &mut Rng| match model.holds.len() {
            0 => any,
            n => model.holds[random.usize(..n)].owner,
        };
        let holder = if random.f32() < 0.8 { one_of(random) } else { any };
        let waiter = match model.queue.len() {
            0 => any,
            n => model.queue[random.usize(..n)].0,
        };
        let first = model.queue.front().map_or(any, |(first, _)| *first);
        let asks = |owner: Owner, wait, late| Self::Acquire {
            owner,
            mode: model.modes[owner],
            wait,
            late,
        };
        let renews = |owner: Owner, late, reserves| Self::Renew {
            owner,
            late,
            reserves,
            shares: model.hold(owner).map_or(model.modes[owner], |at| model.holds[at].mode) != EXCLUSIVE,
        };
        // An end that nobody was told of, until the first waiter asks again, or the old holder.
        if model.holds.is_empty() && !model.queue.is_empty() {
            match random.u32(..10) {
                0..2 => return renews(any, random.bool(), random.bool()),
                2..5 => return asks(first, true, 0),
                // It is served, and those behind it.
                5..9 if model.queue.len() > 1 => return asks(first, true, 0),
                _ => {}
            }
        }
        // What is reserved for longer than a lease, a renewal must not shorten.
        if model.holds.iter().any(|hold| hold.lease > 100) && random.f32() < 0.3 {
            return renews(holder, false, random.bool());
        }
        // A release passes over waiters that are gone.
        if model.queue.len() > 1 && model.dead.contains(&client_of(first)) && random.f32() < 0.6 {
            return Self::Release(holder);
        }
        if let Some(step) = Self::rare(random, model) {
            return step;
        }
        match random.u32(..100) {
            0..30 => {
                let owner = if random.f32() < 0.1 { holder } else { any };
                asks(owner, random.f32() < 0.8, [0, 0, 0, 0, 30, 40, 70][random.usize(..7)])
            }
            30..36 => {
                let owner = if random.bool() { holder } else { any };
                renews(owner, random.f32() < 0.3, random.bool())
            }
            36..42 => Self::reserve(random, holder),
            42..46 => Self::Acquire {
                owner: holder,
                // Readers and writers do not go together with permits.
                mode: permits(model.modes[holder]).map_or(SHARED, |_| model.modes[holder]),
                wait: false,
                late: 0,
            },
            46..58 => Self::Release(holder),
            58..66 => Self::Release(waiter),
            66..70 => Self::ForceRelease,
            70..76 => Self::Expire(holder),
            76..77 => Self::Age(holder),
            77..81 => Self::Fade(first),
            81..83 if !model.advanced => Self::LoseCounter,
            83..84 => Self::AdvanceCounter,
            84..86 if !model.advanced => Self::SpoilCounter,
            86..88 => Self::SpoilLock,
            _ => Self::Kill(client_of([waiter, first, any][random.usize(..3)])),
        }
    }

    fn reserve(random: &mut Rng, owner: Owner) -> Self {
        Self::Reserve {
            owner,
            length: [40, 60, 150, 300][random.usize(..4)],
            late: random.f32() < 0.2,
            old: random.f32() < 0.2,
            ends: random.f32() < 0.4,
        }
    }

    /// A step that leads on to what chance alone seldom comes to, or `None`.
    fn rare(random: &mut Rng, model: &Model) -> Option<Self> {
        let mut chance = |of: f32| random.f32() < of;
        // A hold that is over is still stored: its own renewal comes, or the end of another hold.
        if let Some(over) = model.over.filter(|_| chance(0.6)) {
            let other = model.holds.first().map_or(over, |hold| hold.owner);
            return Some(match chance(0.3) {
                true => Self::Renew {
                    owner: over,
                    late: false,
                    reserves: false,
                    shares: true,
                },
                false => Self::Release(other),
            });
        }
        let (first, queue) = (model.queue.front().map(|(first, _)| *first), model.queue.len());
        let acquire = |owner: Owner, mode, wait| Self::Acquire {
            owner,
            mode,
            wait,
            late: 0,
        };
        // Only exclusive holds have reservations, and become shared.
        if let Some(hold) = model.exclusive().map(|at| &model.holds[at]) {
            let reader = first.filter(|first| model.modes[*first] == SHARED);
            match hold.reserved {
                true if chance(0.2) => return Some(Self::ForceRelease),
                false if reader.is_some() && chance(0.2) => return Some(acquire(hold.owner, SHARED, false)),
                false if queue > 1 && chance(0.15) => return Some(Self::Expire(hold.owner)),
                false if chance(0.15) => return Some(Self::reserve(random, hold.owner)),
                _ => {}
            }
        }
        let first = first.filter(|_| !model.holds.is_empty())?;
        // Of two that share the name, one is about to end, and the other one ends before it.
        if let [one, other] = &model.holds[..] {
            let (one, other) = if one.lease < other.lease {
                (one, other)
            } else {
                (other, one)
            };
            match one.lease == ABOUT_TO_END {
                _ if one.mode == EXCLUSIVE => {}
                _ if chance(0.25) => return Some(Self::Expire(one.owner)),
                true if chance(0.5) => return Some(Self::Release(other.owner)),
                false if chance(0.3) => return Some(Self::Age(one.owner)),
                _ => {}
            }
        }
        // Several wait that are granted the name together, or the first of them cannot hear of it.
        if queue < 3 && chance(0.2) {
            let owner = random.usize(..OWNERS);
            let is_new = model.queue.iter().all(|(other, _)| *other != owner) && model.hold(owner).is_none();
            return is_new.then(|| acquire(owner, model.modes[owner], true));
        }
        let second = model.queue.get(1).map(|(second, _)| *second);
        let wants_less = second.filter(|second| tokens_wanted(*second) < tokens_wanted(first));
        let other = wants_less.filter(|second| client_of(*second) != client_of(first));
        other.filter(|_| chance(0.2)).map(|_| Self::Kill(client_of(first)))
    }
}

impl Model {
    pub(crate) fn new(random: &mut Rng) -> Self {
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
    pub(crate) fn take(&mut self, step: &Step) -> Outcome {
        let mut outcome = Outcome::default();
        self.again = None;
        self.over = None;
        self.granted.clear();
        outcome.answer = match step {
            Step::Acquire {
                owner,
                mode,
                wait,
                late,
            } => self.acquire(*owner, mode, *wait, *late, &mut outcome),
            Step::Renew {
                owner,
                late,
                reserves,
                shares,
            } => {
                self.connect(*owner);
                let hold = self.hold(*owner).map(|at| &mut self.holds[at]);
                match hold.filter(|hold| (hold.mode != EXCLUSIVE) == *shares) {
                    Some(_) if *late => vec!["late".to_owned()],
                    Some(hold) => {
                        hold.lease = if *reserves && !shares { hold.lease.max(100) } else { 100 };
                        vec!["renewed".to_owned()]
                    }
                    None => vec!["lost".to_owned()],
                }
            }
            Step::Reserve {
                owner,
                length,
                late,
                old,
                ends,
            } => {
                self.connect(*owner);
                vec![self.reserve(*owner, *length, *late, *old, *ends, &mut outcome)]
            }
            Step::Release(owner) => {
                self.connect(*owner);
                vec![self.let_go(*owner, &mut outcome)]
            }
            Step::ForceRelease => self.force_release(&mut outcome),
            Step::Expire(owner) => {
                self.over = self
                    .hold(*owner)
                    .filter(|at| self.holds[*at].mode != EXCLUSIVE)
                    .map(|_| *owner);
                self.holds.retain(|hold| hold.mode != EXCLUSIVE && hold.owner != *owner);
                self.spoilt_lock = false;
                Vec::new()
            }
            Step::Age(owner) => {
                let aged = |hold: &&mut Hold| hold.mode == EXCLUSIVE || hold.owner == *owner;
                self.holds
                    .iter_mut()
                    .filter(aged)
                    .for_each(|hold| hold.lease = ABOUT_TO_END);
                Vec::new()
            }
            Step::Fade(owner) => {
                if let Some(place) = self.queue.iter_mut().find(|(other, _)| other == owner) {
                    place.1 = FADED;
                }
                Vec::new()
            }
            Step::LoseCounter | Step::AdvanceCounter => {
                self.advanced |= matches!(step, Step::AdvanceCounter);
                self.spoilt_counter = false;
                Vec::new()
            }
            Step::SpoilCounter => {
                self.spoilt_counter = true;
                Vec::new()
            }
            Step::SpoilLock => {
                self.spoilt_lock |= self.exclusive().is_none();
                Vec::new()
            }
            Step::Kill(client) => {
                self.dead.insert(*client);
                Vec::new()
            }
        };
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
        if !matches!(step, Step::SpoilLock) {
            self.spoilt_lock = false;
        }
        outcome
    }

    /// Whether the server did the same; takes note of the tokens that it drew.
    pub(crate) fn compare(&mut self, expected: &Outcome, found: &Outcome) -> Result<(), String> {
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

    fn acquire(&mut self, owner: Owner, mode: Mode, wait: bool, late: u64, outcome: &mut Outcome) -> Vec<String> {
        self.connect(owner);
        if late > 50 {
            return vec!["late".to_owned()];
        }
        match self.attempt(owner, mode, 100 - late, outcome) {
            Ok(word) if word == "busy" && wait => {
                match self.queue.iter_mut().find(|(other, _)| *other == owner) {
                    Some(place) => place.1 = 100 - late,
                    None => self.queue.push_back((owner, 100 - late)),
                }
                let first = self.queue.front().is_some_and(|(first, _)| *first == owner);
                vec![if first { "busy, first" } else { "busy" }.to_owned()]
            }
            Ok(word) => vec![word],
            Err(error) => vec![error],
        }
    }

    /// The answer to whoever asks for the lock, without waiting.
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
    fn hold(&self, owner: Owner) -> Option<usize> {
        self.holds.iter().position(|hold| hold.owner == owner && !hold.reserved)
    }

    /// The exclusive hold.
    fn exclusive(&self) -> Option<usize> {
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
    fn reserve(
        &mut self,
        owner: Owner,
        length: u64,
        late: bool,
        old: bool,
        ends: bool,
        outcome: &mut Outcome,
    ) -> String {
        if self.spoilt_lock && ends {
            return "foreign".to_owned();
        }
        let at = self.hold(owner).filter(|at| self.holds[*at].mode == EXCLUSIVE);
        let Some(at) = at.filter(|_| ends || !old) else {
            return match ends {
                true => self.let_go(owner, outcome),
                false => "lost".to_owned(),
            };
        };
        if late {
            return "late".to_owned();
        }
        let hold = &mut self.holds[at];
        if !ends {
            hold.lease = hold.lease.max(length);
            return "renewed".to_owned();
        }
        (hold.lease, hold.reserved) = (length, true);
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

    fn force_release(&mut self, outcome: &mut Outcome) -> Vec<String> {
        if self.spoilt_lock {
            return vec!["foreign".to_owned()];
        }
        let ended = std::mem::take(&mut self.holds);
        for hold in ended.iter().filter(|hold| !hold.reserved) {
            self.tell(hold.owner, "taken", outcome);
        }
        outcome.told.values_mut().for_each(|told| told.sort_unstable());
        self.try_grant_next(outcome);
        vec![if ended.is_empty() { "free" } else { "released" }.to_owned()]
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
        outcome
            .told
            .entry(client)
            .or_default()
            .push(format!("{word} {}", name_of(owner)));
        true
    }

    fn connect(&mut self, owner: Owner) {
        self.dead.remove(&client_of(owner));
    }
}
