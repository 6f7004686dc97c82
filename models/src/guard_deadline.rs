//! The deadline of a guard, against the lease on the server.
//!
//! The server counts a lease from when a request *arrived*; the client counts from when the request was *sent* that was acknowledged, and
//! ends earlier by an allowance for drift. There are three clocks: that of the server, that of the client, which may fall behind by one
//! tick for each [`TTL`] ticks of the server, and the stamps of requests. Requests and answers are late, are lost, and overtake each other.
//! The client's machine may be suspended; its clock goes on, and nothing runs.

use stateright::{Model, Property};

/// How many ticks a lease lasts.
pub const TTL: u8 = 5;

/// By how many ticks the client's deadline is earlier.
pub const DRIFT: u8 = 1;

/// What is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The deadline counts from the arrival of the answer.
    CountsFromTheAnswer,
    /// The client's clock stands still while the machine is suspended.
    ClockStopsInSuspend,
    /// There is no allowance for drift.
    NoDriftAllowance,
    /// An answer counts for the renewal that was sent last.
    AnswerTakenForTheLastRenewal,
    /// The deadline is that of the answer that came last, whichever was sent last.
    OlderAnswerMovesBack,
    /// An answer that comes after the deadline counts.
    LateAnswerRevives,
}

/// The model, and how far the search goes.
#[derive(Clone, Debug)]
pub struct GuardDeadline {
    /// When the server's time ends.
    pub ticks: u8,
    /// How many renewals are sent.
    pub renewals: u8,
    /// What is planted.
    pub bug: Option<Bug>,
}

/// A state of the whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    server_clock: u8,
    client_clock: u8,
    /// Ticks of the server since the client's clock fell behind, as far as they count.
    since_slip: u8,
    suspended: bool,
    /// When the lease ends on the server, once it was granted.
    end: Option<u8>,
    /// Stamps of requests that have not arrived. The first one of all is the acquisition.
    requests: Vec<u8>,
    /// Stamps of requests that were acknowledged, of which the client does not know yet.
    answers: Vec<u8>,
    sent: u8,
    last_sent: u8,
    deadline: Option<u8>,
    /// The client has found its deadline passed.
    lost: bool,
    /// The deadline was moved back.
    moved_back: bool,
    /// The deadline has passed, whether or not the client has looked.
    passed: bool,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A tick of both clocks.
    Tick,
    /// A tick of the server's clock alone.
    Slip,
    /// The client's machine is suspended.
    Suspend,
    /// The client's machine goes on.
    Resume,
    /// The client sends a renewal.
    Send,
    /// The request with that stamp arrives.
    Arrive(u8),
    /// The answer to the request with that stamp arrives.
    Answer(u8),
    /// The client looks at its clock.
    Look,
}

/// The client stops first.
pub const ENDS_FIRST: &str = "the guard is held only while the server keeps the lease";
/// Losses are final.
pub const FINAL: &str = "a guard that was lost is not held again";
/// Answers only help.
pub const NEVER_BACK: &str = "an acknowledgement does not move the deadline back";
/// A renewal was acknowledged.
pub const RENEWED: &str = "a guard is held for longer than the first lease";
/// A guard is lost.
pub const LOSS: &str = "a guard is lost";
/// The lease ends on the server.
pub const FREED: &str = "the server frees the lock after the guard was lost";
/// The machine is suspended for longer than the lease.
pub const OVERSLEPT: &str = "the machine goes on after its lease has ended, and nothing has looked at the clock";
/// Answers overtake each other.
pub const OUT_OF_ORDER: &str = "the answer to an older renewal is still on its way";

impl GuardDeadline {
    fn drift(&self) -> u8 {
        if self.bug == Some(Bug::NoDriftAllowance) {
            0
        } else {
            DRIFT
        }
    }

    fn answered(&self, state: &mut State, sent: u8) {
        let from = match self.bug {
            Some(Bug::CountsFromTheAnswer) => state.client_clock,
            Some(Bug::AnswerTakenForTheLastRenewal) => state.last_sent,
            _ => sent,
        };
        let new = from + TTL - self.drift();
        match state.deadline {
            // A grant without validity counts as none.
            None if new > state.client_clock && !state.lost => state.deadline = Some(new),
            None => state.lost = true,
            Some(deadline) if deadline > state.client_clock && !state.lost => {
                let back = self.bug == Some(Bug::OlderAnswerMovesBack);
                let kept = if back { new } else { deadline.max(new) };
                state.moved_back |= kept < deadline;
                state.deadline = Some(kept);
            }
            Some(deadline) if self.bug == Some(Bug::LateAnswerRevives) => {
                state.deadline = Some(deadline.max(new));
            }
            Some(_) => state.lost = true,
        }
    }
}

impl State {
    /// Whether code that runs now finds the guard held.
    fn is_held(&self) -> bool {
        !self.suspended && !self.lost && self.deadline.is_some_and(|deadline| self.client_clock < deadline)
    }

    fn is_freed(&self) -> bool {
        self.end.is_some_and(|end| self.server_clock >= end)
    }
}

impl Model for GuardDeadline {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        vec![State {
            server_clock: 0,
            client_clock: 0,
            since_slip: TTL,
            suspended: false,
            end: None,
            requests: vec![0],
            answers: Vec::new(),
            sent: 0,
            last_sent: 0,
            deadline: None,
            lost: false,
            moved_back: false,
            passed: false,
        }]
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Self::Action>) {
        if state.server_clock < self.ticks {
            actions.push(Action::Tick);
            if state.since_slip >= TTL {
                actions.push(Action::Slip);
            }
        }
        actions.extend(state.requests.iter().map(|sent| Action::Arrive(*sent)));
        if state.suspended {
            actions.push(Action::Resume);
            return;
        }
        actions.push(Action::Suspend);
        if state.is_held() && state.sent < self.renewals && state.last_sent < state.client_clock {
            actions.push(Action::Send);
        }
        actions.extend(state.answers.iter().map(|sent| Action::Answer(*sent)));
        if state.deadline.is_some() && !state.lost && !state.is_held() {
            actions.push(Action::Look);
        }
    }

    fn next_state(&self, state: &Self::State, action: Self::Action) -> Option<Self::State> {
        let mut next = state.clone();
        match action {
            Action::Tick => {
                next.server_clock += 1;
                next.since_slip = TTL.min(next.since_slip + 1);
                let stands = next.suspended && self.bug == Some(Bug::ClockStopsInSuspend);
                next.client_clock += u8::from(!stands);
                next.passed |= next.deadline.is_some_and(|deadline| next.client_clock >= deadline);
            }
            Action::Slip => {
                next.server_clock += 1;
                next.since_slip = 0;
            }
            Action::Suspend => next.suspended = true,
            Action::Resume => next.suspended = false,
            Action::Send => {
                next.sent += 1;
                next.last_sent = next.client_clock;
                next.requests.push(next.client_clock);
            }
            Action::Arrive(sent) => {
                next.requests.retain(|other| *other != sent);
                let is_first = next.end.is_none();
                if is_first && sent > 0 {
                    return None;
                }
                if is_first || !next.is_freed() {
                    next.end = Some(next.server_clock + TTL);
                    next.answers.push(sent);
                }
            }
            Action::Answer(sent) => {
                next.answers.retain(|other| *other != sent);
                self.answered(&mut next, sent);
            }
            Action::Look => next.lost = true,
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ENDS_FIRST, |_, state: &State| !(state.is_held() && state.is_freed())),
            Property::always(FINAL, |_, state: &State| !(state.passed && state.is_held())),
            Property::always(NEVER_BACK, |_, state: &State| !state.moved_back),
            Property::sometimes(RENEWED, |_, state: &State| state.is_held() && state.client_clock >= TTL),
            Property::sometimes(LOSS, |_, state: &State| state.lost && state.deadline.is_some()),
            Property::sometimes(FREED, |_, state: &State| state.lost && state.is_freed()),
            Property::sometimes(OVERSLEPT, |_, state: &State| {
                !state.suspended && !state.lost && state.deadline.is_some() && state.is_freed()
            }),
            Property::sometimes(OUT_OF_ORDER, |_, state: &State| {
                let deadline = state.deadline.unwrap_or(0);
                state
                    .answers
                    .iter()
                    .any(|sent| *sent > 0 && sent + TTL - DRIFT < deadline)
            }),
        ]
    }
}
