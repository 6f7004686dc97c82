//! What the scripts are to do, for one name, in memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fastrand::Rng;

pub(crate) const CLIENTS: usize = 4;
const OWNERS: usize = 8;

/// Longer than a run takes, in milliseconds.
pub(crate) const TTL: u64 = 100_000;

/// What is left of the life of a waiter that has missed two refreshes, in percent.
pub(crate) const FADED: u64 = 20;

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

#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Asks; waits if it is busy. `late` is how much of the ttl was over when the request arrived, in percent.
    Acquire {
        owner: Owner,
        wait: bool,
        late: u64,
    },
    /// `late` says whether it arrives when it is not wanted any more, `reserves` whether the name may be reserved.
    Renew {
        owner: Owner,
        late: bool,
        reserves: bool,
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
    /// The lease runs out.
    Expire,
    /// The lease is nearly over.
    Age,
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
    /// Tokens in what was told.
    pub(crate) tokens: Vec<(u64, u64)>,
    pub(crate) holder: Option<String>,
    /// How long the lease lasts, in percent of the ttl, rounded to tens.
    pub(crate) lease: Option<u64>,
    pub(crate) queue: Vec<Owner>,
}

#[derive(Debug, Default)]
pub(crate) struct Model {
    holder: Option<Owner>,
    /// Whether the holder has released the name, and it is only reserved.
    reserved: bool,
    lease: u64,
    /// With how much life each came, in percent.
    queue: VecDeque<(Owner, u64)>,
    dead: BTreeSet<usize>,
    spoilt_counter: bool,
    spoilt_lock: bool,
    /// The counter is ahead of the clock: should it be lost, tokens would fall.
    advanced: bool,
    /// The last step asked again for what was held.
    again: bool,
    last_token: u64,
    held_token: u64,
}

impl Step {
    pub(crate) fn random(random: &mut Rng, model: &Model) -> Self {
        let any = random.usize(..OWNERS);
        // Mostly what does something.
        let holder = model.holder.filter(|_| random.f32() < 0.8).unwrap_or(any);
        let waiter = match model.queue.len() {
            0 => any,
            n => model.queue[random.usize(..n)].0,
        };
        let first = model.queue.front().map_or(any, |(first, _)| *first);
        // An end that nobody was told of, until the first waiter asks again, or the old holder.
        if model.holder.is_none() && !model.queue.is_empty() {
            match random.u32(..10) {
                0..2 => {
                    return Self::Renew {
                        owner: any,
                        late: random.bool(),
                        reserves: random.bool(),
                    };
                }
                2..5 => {
                    return Self::Acquire {
                        owner: first,
                        wait: true,
                        late: 0,
                    };
                }
                _ => {}
            }
        }
        // What is reserved for longer than a lease, a renewal must not shorten.
        if model.holder.is_some() && model.lease > 100 && random.f32() < 0.3 {
            return Self::Renew {
                owner: holder,
                late: false,
                reserves: random.bool(),
            };
        }
        // A release passes over waiters that are gone.
        if model.queue.len() > 1 && model.dead.contains(&client_of(first)) && random.f32() < 0.6 {
            return Self::Release(holder);
        }
        match random.u32(..100) {
            0..30 => Self::Acquire {
                owner: if random.f32() < 0.1 { holder } else { any },
                wait: random.f32() < 0.8,
                late: [0, 0, 0, 0, 30, 40, 70][random.usize(..7)],
            },
            30..36 => Self::Renew {
                owner: if random.bool() { holder } else { any },
                late: random.f32() < 0.3,
                reserves: random.bool(),
            },
            36..46 => Self::Reserve {
                owner: holder,
                length: [40, 60, 150, 300][random.usize(..4)],
                late: random.f32() < 0.2,
                old: random.f32() < 0.2,
                ends: random.f32() < 0.4,
            },
            46..58 => Self::Release(holder),
            58..66 => Self::Release(waiter),
            66..70 => Self::ForceRelease,
            70..76 => Self::Expire,
            76..77 => Self::Age,
            77..81 => Self::Fade(first),
            81..83 if !model.advanced => Self::LoseCounter,
            83..84 => Self::AdvanceCounter,
            84..86 if !model.advanced => Self::SpoilCounter,
            86..88 => Self::SpoilLock,
            _ => Self::Kill(client_of([waiter, first, any][random.usize(..3)])),
        }
    }
}

impl Model {
    /// What the step is expected to come to.
    pub(crate) fn take(&mut self, step: &Step) -> Outcome {
        let mut outcome = Outcome::default();
        self.again = false;
        outcome.answer = match step {
            Step::Acquire { owner, wait, late } => self.acquire(*owner, *wait, *late, &mut outcome),
            Step::Renew { owner, late, reserves } => {
                self.connect(*owner);
                if self.holds(*owner) && *late {
                    vec!["late".to_owned()]
                } else if self.holds(*owner) {
                    self.lease = if *reserves { self.lease.max(100) } else { 100 };
                    vec!["renewed".to_owned()]
                } else {
                    vec!["lost".to_owned()]
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
            Step::Expire => {
                self.free();
                self.spoilt_lock = false;
                Vec::new()
            }
            Step::Age => {
                self.lease = 10;
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
                self.spoilt_lock |= self.holder.is_none();
                Vec::new()
            }
            Step::Kill(client) => {
                self.dead.insert(*client);
                Vec::new()
            }
        };
        // What somebody else wrote there is cleared away after the look.
        let reserved = if self.reserved { "reserved:" } else { "" };
        outcome.holder = self.holder.map(|owner| format!("{reserved}{}", name_of(owner)));
        if self.spoilt_lock {
            outcome.holder = Some("foreign".to_owned());
        } else if self.holder.is_some() {
            outcome.lease = Some(self.lease);
        }
        outcome.queue = self.queue.iter().map(|(owner, _)| *owner).collect();
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
        for &(first, last) in found.tokens.iter().chain(found.token.iter().filter(|_| !self.again)) {
            if first <= self.last_token || last < first {
                return Err(format!("tokens {first} to {last} came after {}", self.last_token));
            }
            (self.last_token, self.held_token) = (last, last);
        }
        if self.again && found.token != Some((self.held_token, self.held_token)) {
            return Err(format!(
                "asked again for token {}, found {:?}",
                self.held_token, found.token
            ));
        }
        Ok(())
    }

    fn acquire(&mut self, owner: Owner, wait: bool, late: u64, outcome: &mut Outcome) -> Vec<String> {
        self.connect(owner);
        if late > 50 {
            return vec!["late".to_owned()];
        }
        match self.attempt(owner, 100 - late, outcome) {
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
    fn attempt(&mut self, owner: Owner, life: u64, outcome: &mut Outcome) -> Result<String, String> {
        if self.spoilt_lock {
            return Err("foreign".to_owned());
        }
        if self.holds(owner) {
            self.lease = self.lease.max(life);
            self.again = true;
            return Ok("granted".to_owned());
        }
        if self.holder.is_some() {
            return Ok("busy".to_owned());
        }
        if !self.grant_next(Some(owner), outcome)? {
            return Ok("busy".to_owned());
        }
        if self.spoilt_counter {
            return Err("foreign".to_owned());
        }
        (self.holder, self.lease) = (Some(owner), life);
        if self.queue.front().is_some_and(|(first, _)| *first == owner) {
            self.queue.pop_front();
        }
        Ok("granted".to_owned())
    }

    fn holds(&self, owner: Owner) -> bool {
        self.holder == Some(owner) && !self.reserved
    }

    fn free(&mut self) -> Option<Owner> {
        self.reserved = false;
        self.holder.take()
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
        if !self.holds(owner) && ends {
            return self.let_go(owner, outcome);
        }
        if !self.holds(owner) || old && !ends {
            return "lost".to_owned();
        }
        if late {
            return "late".to_owned();
        }
        if !ends {
            self.lease = self.lease.max(length);
            return "renewed".to_owned();
        }
        (self.lease, self.reserved) = (length, true);
        self.tell_first(outcome);
        "released".to_owned()
    }

    fn let_go(&mut self, owner: Owner, outcome: &mut Outcome) -> String {
        let released = self.holds(owner);
        if released {
            self.free();
        }
        self.queue.retain(|(other, _)| *other != owner);
        if self.holder.is_none() && !self.spoilt_lock {
            self.try_grant_next(outcome);
        }
        if released { "released" } else { "lost" }.to_owned()
    }

    fn force_release(&mut self, outcome: &mut Outcome) -> Vec<String> {
        if self.spoilt_lock {
            return vec!["foreign".to_owned()];
        }
        let held = !self.reserved;
        let Some(victim) = self.free() else {
            self.try_grant_next(outcome);
            return vec!["free".to_owned()];
        };
        if held {
            self.tell(victim, "taken", outcome);
        }
        self.try_grant_next(outcome);
        vec!["released".to_owned()]
    }

    /// Where an error ends the giving on, but not the step.
    fn try_grant_next(&mut self, outcome: &mut Outcome) {
        let _ = self.grant_next(None, outcome);
    }

    fn grant_next(&mut self, me: Option<Owner>, outcome: &mut Outcome) -> Result<bool, String> {
        while let Some(&(owner, life)) = self.queue.front() {
            if me == Some(owner) {
                return Ok(true);
            }
            if self.spoilt_counter && life != FADED {
                return Err("foreign".to_owned());
            }
            self.queue.pop_front();
            if life != FADED && self.tell(owner, "granted", outcome) {
                (self.holder, self.lease) = (Some(owner), life);
                self.tell_first(outcome);
                return Ok(false);
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
