//! Claims that share one server, with lost and late messages, and clients that end.
//!
//! Time is counted in ticks, [`TTL`] of which are a lease; a waiter refreshes its place when it likes. Once sent, a request arrives at
//! any later time or never, also after requests that were sent later, as over another connection. An answer or a push is there at once or
//! is lost.

use stateright::{Model, Property};

use super::server::{Acquire, Answer, Bug, Push, Renewal, Run, Server};
use super::state::{Claim, Phase, State, TTL, Wrong};

/// What is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// In the scripts.
    Server(Bug),
    /// The client counts a pushed grant from its last request, whichever request the push answers.
    PushCountsFromTheLastRequest,
}

/// The model, and how far the search goes.
#[derive(Clone, Debug)]
pub struct RedisQueue<const A: usize> {
    /// When time ends.
    pub ticks: u64,
    /// How often each claim sends ACQUIRE.
    pub requests: [u8; A],
    /// How often a holder renews.
    pub renewals: u8,
    /// How many clients end without a release.
    pub closes: u8,
    /// What is planted.
    pub planted: Option<Planted>,
}

/// A step.
#[expect(
    missing_docs,
    reason = "`claim` is a claim by number, `heard` says whether the answer or the push reaches its client"
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Time passes.
    Tick,
    /// A claim begins to wait.
    Begin { claim: usize },
    /// A waiter sends ACQUIRE again.
    Refresh { claim: usize },
    /// ACQUIRE arrives.
    Acquire { claim: usize, which: usize, heard: bool },
    /// A holder sends RENEW.
    SendRenewal { claim: usize },
    /// RENEW arrives.
    Renew { claim: usize, heard: bool },
    /// A waiter gives up, or a holder ends: RELEASE is sent.
    End { claim: usize },
    /// RELEASE arrives.
    Release { claim: usize, heard: bool },
    /// A client ends without a release.
    Close { claim: usize },
}

/// No two claims believe in the lock.
pub const EXCLUSION: &str = "no two valid holders";
/// Tokens rise.
pub const RISE: &str = "tokens rise";
/// The queue is in order.
pub const FIFO: &str = "no claim is granted the name before one that has waited longer";
/// A claim ends on the server.
pub const ENDS: &str = "what a claim has on the server ends one ttl after its last request was sent";
/// A push without a receiver is noticed.
pub const SKIPPED: &str = "a waiter whose connection is closed is not granted the name";
/// A release releases.
pub const RELEASED: &str = "a claim that was released has nothing on the server";
/// A grant is pushed.
pub const PUSHED: &str = "a waiter holds by a push";
/// A request that is late, but not too late.
pub const LATE_GRANT: &str = "a late request is granted the name after its claim has ended";
/// A push is lost.
pub const DEAF: &str = "a waiter that did not hear of its grant holds the name on the server";
/// A client ends while its claim is the first waiter.
pub const CLOSED_FIRST: &str = "the first waiter is closed";

impl<const A: usize> RedisQueue<A> {
    fn apply(&self, state: &mut State<A>, action: Action) {
        let now = state.now;
        match action {
            Action::Tick => {
                state.now += 1;
                for claim in &mut state.claims {
                    if let Phase::Holding { deadline } = claim.phase
                        && deadline <= state.now
                    {
                        claim.end();
                        claim.release = !claim.closed;
                    }
                }
            }
            Action::Begin { claim } => {
                state.claims[claim].phase = Phase::Waiting;
                state.claims[claim].send(now);
            }
            Action::Refresh { claim } => state.claims[claim].send(now),
            Action::Acquire { claim, which, heard } => {
                let Some(sent) = state.claims[claim].acquires[which].take() else {
                    return;
                };
                state.claims[claim].acquires.sort_unstable();
                let request = acquire(claim, sent);
                let (answer, push) = self.run(state, |server, run| server.acquire(run, &request));
                match answer {
                    Answer::Granted { token, life } if heard => state.holds(claim, token, sent + life, false),
                    Answer::Busy if heard && state.claims[claim].phase == Phase::Waiting => {
                        state.claims[claim].busy = state.claims[claim].busy.max(sent);
                    }
                    _ => {}
                }
                self.pushed(state, push, heard);
            }
            Action::SendRenewal { claim } => {
                let claim = &mut state.claims[claim];
                claim.renewals += 1;
                claim.renewal = Some(now);
                // What arrives after half a ttl does nothing.
                claim.end = claim.end.max(now + TTL / 2 + TTL);
            }
            Action::Renew { claim, heard } => {
                let Some(sent) = state.claims[claim].renewal.take() else {
                    return;
                };
                let owner = number(claim);
                let (renewal, push) = self.run(state, |server, run| server.renew(run, &owner, TTL, sent + TTL / 2));
                if let (Phase::Holding { deadline }, true) = (&mut state.claims[claim].phase, heard) {
                    match renewal {
                        Renewal::Renewed => *deadline = (*deadline).max(sent + TTL),
                        Renewal::Late => {}
                        Renewal::Lost => state.claims[claim].end(),
                    }
                }
                self.pushed(state, push, heard);
            }
            Action::End { claim } => {
                state.claims[claim].end();
                state.claims[claim].release = true;
            }
            Action::Release { claim, heard } => {
                state.claims[claim].release = false;
                let owner = number(claim);
                let (_, push) = self.run(state, |server, run| server.release(run, &owner));
                let queued = state.server.queue.iter().any(|entry| entry.owner == owner);
                state.wrong.left_after_release |= queued || state.holds_on_the_server(claim);
                self.pushed(state, push, heard);
            }
            Action::Close { claim } => {
                state.closes += 1;
                state.claims[claim].end();
                state.claims[claim].closed = true;
            }
        }
    }

    /// Runs a script, and looks whom it served.
    fn run<T>(
        &self,
        state: &mut State<A>,
        script: impl FnOnce(&mut Server<u8>, &Run<'_, u8>) -> (T, Option<Push<u8>>),
    ) -> (T, Option<Push<u8>>) {
        let claims = state.claims;
        let hears = |owner: &u8| !claims[usize::from(*owner)].closed;
        let bug = match self.planted {
            Some(Planted::Server(bug)) => Some(bug),
            _ => None,
        };
        let run = Run {
            now_us: state.now * 1000,
            hears: &hears,
            keeps: 0,
            bug,
        };
        let before = state.server.held(state.now).cloned();
        let queue = state.server.queue.clone();
        let (answer, push) = script(&mut state.server, &run);
        let after = state.server.held(state.now).cloned();
        if let Some(lock) = after.filter(|lock| before.as_ref().is_none_or(|before| before.owner != lock.owner)) {
            let turn = claims[usize::from(lock.owner)].turn.unwrap_or(u8::MAX);
            let waits = |owner: u8| {
                queue
                    .iter()
                    .any(|entry| entry.owner == owner && entry.is_live(state.now))
            };
            let still = |owner: u8| state.server.queue.iter().any(|entry| entry.owner == owner);
            let is_before = |owner: &u8| {
                let claim = &claims[usize::from(*owner)];
                !claim.closed && claim.turn.is_some_and(|other| other < turn) && waits(*owner) && still(*owner)
            };
            state.wrong.overtaken |= (0..number(A)).any(|owner| is_before(&owner));
            let closed = push.as_ref().is_some_and(|push| claims[usize::from(push.owner)].closed);
            state.wrong.granted_to_closed |= closed;
        }
        self.count_turns(state);
        (answer, push)
    }

    /// Who has come into the queue, and who has left it.
    fn count_turns(&self, state: &mut State<A>) {
        for owner in 0..A {
            let queued = state.server.queue.iter().any(|entry| entry.owner == number(owner));
            let last = state.claims.iter().filter_map(|claim| claim.turn).max();
            let turn = &mut state.claims[owner].turn;
            *turn = match (queued, *turn) {
                (true, None) => Some(last.map_or(0, |last| last + 1)),
                (true, turn) => turn,
                (false, _) => None,
            };
        }
        // Only their order counts.
        let mut turns: Vec<_> = state.claims.iter().filter_map(|claim| claim.turn).collect();
        turns.sort_unstable();
        for claim in &mut state.claims {
            claim.turn = claim
                .turn
                .map(|turn| number(turns.partition_point(|other| *other < turn)));
        }
    }

    fn pushed(&self, state: &mut State<A>, push: Option<Push<u8>>, heard: bool) {
        let Some(Push {
            owner,
            token,
            sent,
            life,
        }) = push.filter(|_| heard)
        else {
            return;
        };
        let claim = usize::from(owner);
        if state.claims[claim].closed {
            return;
        }
        if self.planted == Some(Planted::PushCountsFromTheLastRequest) {
            state.holds(claim, token, state.claims[claim].sent + life, true);
        } else if sent >= state.claims[claim].busy {
            state.holds(claim, token, sent + life, true);
        }
    }

    fn claim_actions(&self, state: &State<A>, number: usize, actions: &mut Vec<Action>) {
        let claim = &state.claims[number];
        let somebody_waits = !state.server.queue.is_empty();
        let deaf_too: &[bool] = &[true, false];
        let heard: &[bool] = if claim.phase == Phase::Gone && !somebody_waits {
            &[true]
        } else {
            deaf_too
        };
        match claim.phase {
            Phase::Waiting => {
                if claim.requests < self.requests[number] && claim.acquires[0].is_none() && claim.sent < state.now {
                    actions.push(Action::Refresh { claim: number });
                }
                actions.push(Action::End { claim: number });
            }
            Phase::Holding { .. } => {
                actions.push(Action::End { claim: number });
                if claim.renewals < self.renewals && claim.renewal.is_none() {
                    actions.push(Action::SendRenewal { claim: number });
                }
            }
            _ => {}
        }
        for (which, sent) in claim.acquires.iter().enumerate() {
            if sent.is_some() && (which == 0 || claim.acquires[0] != *sent) {
                actions.extend(heard.iter().map(|heard| Action::Acquire {
                    claim: number,
                    which,
                    heard: *heard,
                }));
            }
        }
        if claim.renewal.is_some() {
            actions.extend(heard.iter().map(|heard| Action::Renew {
                claim: number,
                heard: *heard,
            }));
        }
        let pushes: &[bool] = if somebody_waits { deaf_too } else { &[true] };
        if claim.release {
            actions.extend(pushes.iter().map(|heard| Action::Release {
                claim: number,
                heard: *heard,
            }));
        }
        if state.closes < self.closes && matches!(claim.phase, Phase::Waiting | Phase::Holding { .. }) {
            actions.push(Action::Close { claim: number });
        }
    }
}

fn acquire(claim: usize, sent: u64) -> Acquire<u8> {
    Acquire {
        owner: number(claim),
        ttl: TTL,
        stop: sent + TTL,
        sent,
        waits: true,
    }
}

fn number(claim: usize) -> u8 {
    // There are at most 255.
    claim as u8
}

impl<const A: usize> Model for RedisQueue<A> {
    type State = State<A>;
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        vec![State {
            now: 0,
            server: Server::new(),
            claims: [Claim::IDLE; A],
            closes: 0,
            given: 0,
            wrong: Wrong::default(),
        }]
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Self::Action>) {
        if state.now < self.ticks {
            actions.push(Action::Tick);
        }
        // Claims are interchangeable until they begin.
        if let Some(claim) = state.claims.iter().position(|claim| claim.phase == Phase::Idle) {
            actions.push(Action::Begin { claim });
        }
        for claim in 0..A {
            self.claim_actions(state, claim, actions);
        }
    }

    fn next_state(&self, state: &Self::State, action: Self::Action) -> Option<Self::State> {
        let mut next = state.clone();
        self.apply(&mut next, action);
        // A lock that has ended is none, and an entry that is not live is none.
        if next.server.held(next.now).is_none() {
            next.server.lock = None;
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let properties = [
            Some(Property::always(EXCLUSION, |_, state: &Self::State| {
                state.holders().count() <= 1
            })),
            Some(Property::always(RISE, |_, state: &Self::State| !state.wrong.fell)),
            Some(Property::always(FIFO, |_, state: &Self::State| !state.wrong.overtaken)),
            Some(Property::always(ENDS, |_, state: &Self::State| !state.outlives())),
            Some(Property::always(SKIPPED, |_, state: &Self::State| {
                !state.wrong.granted_to_closed
            })),
            Some(Property::always(RELEASED, |_, state: &Self::State| {
                !state.wrong.left_after_release
            })),
            Some(Property::sometimes(PUSHED, |_, state: &Self::State| {
                state.holders().any(|claim| state.claims[claim].pushed)
            })),
            Some(Property::sometimes(LATE_GRANT, |_, state: &Self::State| {
                (0..A).any(|claim| {
                    let of = &state.claims[claim];
                    state.holds_on_the_server(claim) && of.phase == Phase::Gone && !of.closed && !of.release
                })
            })),
            Some(Property::sometimes(DEAF, |_, state: &Self::State| {
                (0..A).any(|claim| state.holds_on_the_server(claim) && state.claims[claim].phase == Phase::Waiting)
            })),
            (self.closes > 0).then_some(Property::sometimes(CLOSED_FIRST, |_, state: &Self::State| {
                let first = state.server.queue.first();
                first.is_some_and(|first| state.claims[usize::from(first.owner)].closed)
            })),
        ];
        properties.into_iter().flatten().collect()
    }
}
