//! Blocks of tokens, and the holders of one client that are served from one.
//!
//! A server grants a claim with a block of tokens that ends at its clock, and counts on from the end of the block. The client passes the
//! claim from one of its holders to the next, each with the next token. Holders write to a resource that is fenced; those that have let
//! go, or whose lease has ended without their knowing, write late. The server may lose its data, but not its clock. An answer may be lost.
//!
//! Clocks agree here, and a tick is as short as a grant takes: there is one at most in each.

use stateright::{Model, Property};

/// How many ticks a lease lasts.
pub const TTL: u8 = 3;

/// How many tokens a block has at most.
pub const BLOCK: u8 = 3;

/// What the clock is at first. No lower than [`BLOCK`].
const START: u8 = 4;

const CLIENTS: usize = 2;

/// What is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The server counts on from the first token of a block.
    CountsTheFirst,
    /// A block begins at the counter, wherever the clock is.
    BlockAheadOfTheClock,
    /// A server that has no counter grants a block, not one token.
    BlockWithoutACounter,
    /// The client goes on after the last token of its block.
    PastTheLast,
    /// The client gives its next holder the token of the one before.
    SameToken,
    /// The client passes on a claim whose lease has ended.
    LeaseHasEnded,
    /// The client passes its claim on for as long as it has tokens.
    WithoutEnd,
    /// A renewal gives the run its time anew.
    RenewalBeginsTheRunAnew,
}

/// The model, and how far the search goes.
#[derive(Clone, Debug)]
pub struct LocalRuns {
    /// When time ends.
    pub ticks: u8,
    /// For how many ticks after a grant a client passes it on. Longer than a lease, so that its end is what ends a run, or shorter.
    pub longest: u8,
    /// How many claims are granted.
    pub claims: u8,
    /// How many holders there are.
    pub holds: u8,
    /// How often the server loses its data.
    pub losses: u8,
    /// What is planted.
    pub bug: Option<Bug>,
}

/// A state of the whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    clock: u8,
    server: Server,
    clients: [Option<Run>; CLIENTS],
    /// Holders that have let go or been lost, and write late. In the order of their numbers.
    late: Vec<Hold>,
    /// The holder whose write was accepted last.
    written: Option<Hold>,
    claims: u8,
    holds: u8,
    losses: u8,
    /// The highest token of all blocks.
    highest: u8,
    seen: Seen,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Server {
    /// None once the data was lost.
    counter: Option<u8>,
    /// Which claim holds, and until when.
    holder: Option<(u8, u8)>,
    granted_at: u8,
}

/// A claim that a client has, and its holder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Run {
    claim: u8,
    granted_at: u8,
    last: u8,
    until: u8,
    deadline: u8,
    hold: Hold,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Hold {
    /// Holders are numbered as they begin.
    number: u8,
    claim: u8,
    token: u8,
}

/// What has happened at least once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Seen {
    lower: bool,
    repeated: bool,
    overlap: bool,
    too_long: bool,
    stale_accepted: bool,
    stale_refused: bool,
    three_of_a_block: bool,
    granted_after_a_loss: bool,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A tick.
    Tick,
    /// The client with that number is granted a claim.
    Grant(usize),
    /// The server grants a claim, and the answer is lost.
    Unheard,
    /// The client passes its claim on to its next holder.
    HandOn(usize),
    /// The client's renewal is acknowledged, or it is told that it does not hold.
    Renew(usize),
    /// The client gives its claim back.
    Release(usize),
    /// The client finds its deadline passed.
    Look(usize),
    /// The client's holder writes.
    Write(usize),
    /// The holder at that place among those that are late writes.
    WriteLate(usize),
    /// The server loses its data.
    LoseData,
}

/// A later grant has higher tokens.
pub const RISE: &str = "all tokens of a grant are above all tokens of the grants before it";
/// No two holders of a claim have the same token.
pub const DIFFER: &str = "each holder of a claim has a higher token than the one before it";
/// One at a time.
pub const ONE: &str = "while no data was lost, one client at a time believes that it holds";
/// Others wait for so long at most.
pub const BRIEF: &str = "no holder begins without the server later than the longest run";
/// The fence decides.
pub const FENCED: &str = "once a holder of a later claim, or a later holder of the same one, has written, no write of an earlier one is accepted";
/// A block is used.
pub const SERVED: &str = "three holders have a token of one block";
/// The fence is needed.
pub const REFUSED: &str = "a late write is refused";
/// Data is lost, and there is a later grant.
pub const LOST: &str = "a claim is granted after a loss of data, while an earlier one is still believed in";

impl LocalRuns {
    fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// The block that the server draws now.
    fn draw(&self, state: &mut State) -> (u8, u8) {
        let now = state.clock;
        let (first, last) = match state.server.counter {
            None if self.is(Bug::BlockWithoutACounter) => (now + 1 - BLOCK, now),
            None => (now, now),
            Some(counter) if self.is(Bug::BlockAheadOfTheClock) => (counter + 1, counter + BLOCK),
            Some(counter) => {
                let first = (counter + 1).max(now + 1 - BLOCK);
                (first, first.max(now))
            }
        };
        let counted = if self.is(Bug::CountsTheFirst) { first } else { last };
        state.server.counter = Some(counted);
        state.seen.lower |= first <= state.highest;
        state.highest = state.highest.max(last);
        (first, last)
    }

    /// The server grants the name to a new claim: its number, and its block.
    fn grant(&self, state: &mut State) -> (u8, (u8, u8)) {
        let block = self.draw(state);
        state.claims += 1;
        state.server.holder = Some((state.claims, state.clock + TTL));
        state.server.granted_at = state.clock;
        (state.claims, block)
    }

    fn may_hand_on(&self, state: &State, run: &Run) -> bool {
        state.holds < self.holds
            && (run.hold.token < run.last || self.is(Bug::PastTheLast))
            && (state.clock < run.until || self.is(Bug::WithoutEnd))
            && (state.clock < run.deadline || self.is(Bug::LeaseHasEnded))
    }
}

impl State {
    fn is_free(&self) -> bool {
        self.server.holder.is_none_or(|(_, end)| self.clock >= end)
    }

    fn holds_at_server(&self, claim: u8) -> bool {
        self.server.holder.is_some_and(|(holder, _)| holder == claim) && !self.is_free()
    }

    /// How many believe that they hold.
    fn believing(&self) -> usize {
        let believes = |run: &&Run| self.clock < run.deadline;
        self.clients.iter().flatten().filter(believes).count()
    }

    fn begin(&mut self, claim: u8, token: u8) -> Hold {
        self.holds += 1;
        Hold {
            number: self.holds,
            claim,
            token,
        }
    }

    /// The holder has let go, or was lost. Whether it knows is another matter.
    fn leave(&mut self, client: usize) {
        if let Some(run) = self.clients[client].take() {
            self.late.push(run.hold);
            self.late.sort_unstable();
        }
    }

    /// A write, which the resource accepts unless it has seen a higher token.
    fn write(&mut self, hold: Hold) {
        let is_accepted = self.written.is_none_or(|written| hold.token >= written.token);
        // Holders of an older claim are earlier, though one of them may have begun later, after a loss of data.
        let earlier = |written: Hold| (hold.claim, hold.number) < (written.claim, written.number);
        let is_stale = self.written.is_some_and(earlier);
        self.seen.stale_accepted |= is_stale && is_accepted;
        self.seen.stale_refused |= is_stale && !is_accepted;
        if is_accepted {
            self.written = Some(hold);
        }
    }
}

impl Model for LocalRuns {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        vec![State {
            clock: START,
            server: Server {
                counter: Some(0),
                holder: None,
                granted_at: 0,
            },
            clients: [None, None],
            late: Vec::new(),
            written: None,
            claims: 0,
            holds: 0,
            losses: 0,
            highest: 0,
            seen: Seen::default(),
        }]
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Self::Action>) {
        if state.clock < START + self.ticks {
            actions.push(Action::Tick);
        }
        if state.losses < self.losses {
            actions.push(Action::LoseData);
        }
        let is_granted = state.is_free() && state.server.granted_at < state.clock && state.claims < self.claims;
        if is_granted {
            actions.push(Action::Unheard);
        }
        for (client, run) in state.clients.iter().enumerate() {
            let Some(run) = run else {
                if is_granted && state.holds < self.holds {
                    actions.push(Action::Grant(client));
                }
                continue;
            };
            if self.may_hand_on(state, run) {
                actions.push(Action::HandOn(client));
            }
            if state.clock < run.deadline {
                actions.extend([Action::Renew(client), Action::Release(client)]);
            } else {
                actions.push(Action::Look(client));
            }
            actions.push(Action::Write(client));
        }
        actions.extend((0..state.late.len()).map(Action::WriteLate));
    }

    fn next_state(&self, state: &Self::State, action: Self::Action) -> Option<Self::State> {
        let mut next = state.clone();
        match action {
            Action::Tick => next.clock += 1,
            Action::Grant(client) => {
                next.seen.granted_after_a_loss |= next.losses > 0 && next.believing() > 0;
                let (claim, (first, last)) = self.grant(&mut next);
                let hold = next.begin(claim, first);
                next.clients[client] = Some(Run {
                    claim,
                    granted_at: next.clock,
                    last,
                    until: next.clock + self.longest,
                    deadline: next.clock + TTL,
                    hold,
                });
                next.seen.overlap |= next.losses == 0 && next.believing() > 1;
            }
            Action::Unheard => {
                self.grant(&mut next);
            }
            Action::HandOn(client) => {
                let run = next.clients[client].clone()?;
                let token = if self.is(Bug::SameToken) {
                    run.hold.token
                } else {
                    run.hold.token + 1
                };
                next.seen.repeated |= token <= run.hold.token;
                next.seen.too_long |= next.clock >= run.granted_at + self.longest;
                next.seen.overlap |= next.losses == 0 && !next.holds_at_server(run.claim);
                next.leave(client);
                let hold = next.begin(run.claim, token);
                next.seen.three_of_a_block |= next.late.iter().filter(|other| other.claim == run.claim).count() == 2;
                next.clients[client] = Some(Run { hold, ..run });
            }
            Action::Renew(client) => {
                let run = next.clients[client].clone()?;
                if !next.holds_at_server(run.claim) {
                    next.leave(client);
                    return Some(next);
                }
                next.server.holder = Some((run.claim, next.clock + TTL));
                let renewed = next.clients[client].as_mut()?;
                renewed.deadline = state.clock + TTL;
                if self.is(Bug::RenewalBeginsTheRunAnew) {
                    renewed.until = state.clock + self.longest;
                }
            }
            Action::Release(client) => {
                let claim = next.clients[client].as_ref()?.claim;
                if next.holds_at_server(claim) {
                    next.server.holder = None;
                }
                next.leave(client);
            }
            Action::Look(client) => next.leave(client),
            Action::Write(client) => {
                let hold = next.clients[client].as_ref()?.hold;
                next.write(hold);
            }
            Action::WriteLate(place) => {
                let hold = *next.late.get(place)?;
                next.write(hold);
            }
            Action::LoseData => {
                next.losses += 1;
                next.server.counter = None;
                next.server.holder = None;
            }
        }
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(RISE, |_, state: &State| !state.seen.lower),
            Property::always(DIFFER, |_, state: &State| !state.seen.repeated),
            Property::always(ONE, |_, state: &State| !state.seen.overlap),
            Property::always(BRIEF, |_, state: &State| !state.seen.too_long),
            Property::always(FENCED, |_, state: &State| !state.seen.stale_accepted),
            Property::sometimes(SERVED, |_, state: &State| state.seen.three_of_a_block),
            Property::sometimes(REFUSED, |_, state: &State| state.seen.stale_refused),
            Property::sometimes(LOST, |_, state: &State| state.seen.granted_after_a_loss),
        ]
    }
}
