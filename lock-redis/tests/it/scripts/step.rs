//! What clients, servers and strangers may do next.

use fastrand::Rng;

use super::model::{ABOUT_TO_END, EXCLUSIVE, Mode, Model, OWNERS, Owner, SHARED, client_of, permits, tokens_wanted};

#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Acquire(Ask),
    Renew(Renew),
    Reserve(Reserve),
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
    /// Another program writes to the key of the lock, if it is free.
    SpoilLock,
    /// The client's connection closes; it comes back with its next request.
    Kill(usize),
}

/// A request for the lock, which waits if it is busy. `late` is how much of the ttl was over when it arrived, in percent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) owner: Owner,
    pub(super) mode: Mode,
    pub(super) wait: bool,
    pub(super) late: u64,
}

/// A renewal. `late` says whether it arrives when it is not wanted any more, `reserves` whether the name may be reserved, `shares` whether it is
/// for a hold that does not exclude others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Renew {
    pub(super) owner: Owner,
    pub(super) late: bool,
    pub(super) reserves: bool,
    pub(super) shares: bool,
}

/// Reserves the name for that long, in percent of the ttl, by the grant at present or an old one, or ends the hold so.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reserve {
    pub(super) owner: Owner,
    pub(super) length: u64,
    pub(super) late: bool,
    pub(super) old: bool,
    pub(super) ends: bool,
}

fn ask(owner: Owner, mode: Mode, wait: bool, late: u64) -> Step {
    let ask = Ask {
        owner,
        mode,
        wait,
        late,
    };
    Step::Acquire(ask)
}

fn reserve(random: &mut Rng, owner: Owner) -> Step {
    Step::Reserve(Reserve {
        owner,
        length: [40, 60, 150, 300][random.usize(..4)],
        late: random.f32() < 0.2,
        old: random.f32() < 0.2,
        ends: random.f32() < 0.4,
    })
}

impl Step {
    pub(super) fn random(random: &mut Rng, model: &Model) -> Self {
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
        let asks = |owner: Owner, wait, late| ask(owner, model.modes[owner], wait, late);
        let renews = |owner: Owner, late, reserves| {
            let shares = model.hold(owner).map_or(model.modes[owner], |at| model.holds[at].mode) != EXCLUSIVE;
            Self::Renew(Renew {
                owner,
                late,
                reserves,
                shares,
            })
        };
        // An end that no client was told of, until the first waiter asks again, or the old holder.
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
            36..42 => reserve(random, holder),
            42..46 => {
                // Readers and writers do not go together with permits.
                let mode = permits(model.modes[holder]).map_or(SHARED, |_| model.modes[holder]);
                ask(holder, mode, false, 0)
            }
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

    /// A step that leads on to what chance alone seldom comes to, or `None`.
    fn rare(random: &mut Rng, model: &Model) -> Option<Self> {
        let mut chance = |of: f32| random.f32() < of;
        // A hold that is over is still stored: its own renewal comes, or the end of another hold.
        if let Some(over) = model.over.filter(|_| chance(0.6)) {
            let other = model.holds.first().map_or(over, |hold| hold.owner);
            return Some(match chance(0.3) {
                true => Self::Renew(Renew {
                    owner: over,
                    late: false,
                    reserves: false,
                    shares: true,
                }),
                false => Self::Release(other),
            });
        }
        let (first, queue) = (model.queue.front().map(|(first, _)| *first), model.queue.len());
        // Only exclusive holds have reservations, and become shared.
        if let Some(hold) = model.exclusive().map(|at| &model.holds[at]) {
            let reader = first.filter(|first| model.modes[*first] == SHARED);
            match hold.reserved {
                true if chance(0.2) => return Some(Self::ForceRelease),
                false if reader.is_some() && chance(0.2) => return Some(ask(hold.owner, SHARED, false, 0)),
                false if queue > 1 && chance(0.15) => return Some(Self::Expire(hold.owner)),
                false if chance(0.15) => return Some(reserve(random, hold.owner)),
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
            return is_new.then(|| ask(owner, model.modes[owner], true, 0));
        }
        let second = model.queue.get(1).map(|(second, _)| *second);
        let wants_less = second.filter(|second| tokens_wanted(*second) < tokens_wanted(first));
        let other = wants_less.filter(|second| client_of(*second) != client_of(first));
        other.filter(|_| chance(0.2)).map(|_| Self::Kill(client_of(first)))
    }
}
