//! What each step does to the whole.

use super::bounds::{Bounds, Bug};
use super::node::{Answer, Circumstances, Compare, Node, Request, Rules};
use super::state::{Acquisition, Link, Phase, State, number};

/// The model.
#[derive(Clone, Debug)]
pub struct Redlock<const N: usize, const A: usize> {
    /// How far the search goes.
    pub bounds: Bounds<N>,
    /// What is planted.
    pub bug: Option<Bug>,
}

/// A step.
#[expect(missing_docs, reason = "`owner` is an acquisition and `node` a node, by number")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A client begins an acquisition.
    Begin { owner: usize, proposal: u8 },
    /// ACQUIRE arrives at a node.
    Acquire {
        owner: usize,
        node: usize,
        clock_is_high: bool,
        replaces: bool,
    },
    /// The coordinator takes the grants of these nodes.
    Decide { owner: usize, nodes: u8 },
    /// CONFIRM arrives at a node.
    Confirm { owner: usize, node: usize },
    /// The coordinator has the confirmations that it needs.
    Give { owner: usize },
    /// The holder has renewed exactly these nodes.
    Renew { owner: usize, nodes: u8 },
    /// A grant is so old that the lease may end.
    Lapse { owner: usize, node: usize },
    /// The coordinator gives its attempt up: it sends RELEASE, and asks again for the same owner.
    Retry { owner: usize },
    /// ACQUIRE of the attempt that was given up arrives at a node.
    LateAcquire { owner: usize, node: usize },
    /// CONFIRM of the attempt that was given up arrives at a node.
    LateConfirm { owner: usize, node: usize },
    /// The acquisition ends.
    End { owner: usize },
    /// RELEASE arrives at a node.
    Release { owner: usize, node: usize, attempt: u8 },
    /// A lease ends.
    Expire { node: usize },
    /// A node loses its data.
    Empty { node: usize },
}

impl<const N: usize, const A: usize> Redlock<N, A> {
    pub(super) const MAJORITY: usize = N / 2 + 1;

    pub(super) fn rules(&self) -> Rules {
        let mut rules = Rules {
            restart_delay: self.bounds.restart_delay,
            ..Rules::default()
        };
        match self.bug {
            Some(Bug::UnconditionalWriteBack | Bug::NodesOutsideQ1) => rules.confirm = Compare::Nothing,
            Some(Bug::RetryWithoutStoredValue) => rules.confirm = Compare::Owner,
            Some(Bug::NoRestartDelay) => rules.restart_delay = false,
            Some(Bug::ReleaseWithoutAttempt) => rules.release_compares = false,
            _ => {}
        }
        rules
    }

    fn circumstances(&self, state: &State<N, A>, node: usize, clock_is_high: bool) -> Circumstances {
        let place = &state.places[node];
        let floor = match self.bug {
            Some(Bug::ClockBehindDrawnTokens) => state.given,
            _ => state.drawn,
        };
        let clock = match (place.node.counter, clock_is_high) {
            (None, _) => floor + 1,
            (Some(_), true) => u8::MAX,
            (Some(_), false) => 0,
        };
        Circumstances {
            clock,
            delay_over: place.forgotten.is_none_or(|owner| state.is_over(usize::from(owner))),
        }
    }

    fn request(&self, state: &mut State<N, A>, node: usize, request: Request, clock_is_high: bool) -> Answer {
        let circumstances = self.circumstances(state, node, clock_is_high);
        let place = &mut state.places[node];
        let before = place.node.lock;
        let answer = place.node.handle(&self.rules(), request, circumstances);
        if place.node.lock.map(|lock| lock.owner) != before.map(|lock| lock.owner) {
            place.overdue = false;
        }
        state.drawn = state.drawn.max(place.node.counter.unwrap_or(0));
        answer
    }

    /// The coordinator learns of a grant.
    fn learn(&self, state: &mut State<N, A>, node: usize, owner: usize, token: u8, replaces: bool) {
        let asking = state.acquisitions[owner].phase == Phase::Asking;
        let link = &mut state.places[node].links[owner];
        if asking && (link.granted.is_none() || replaces || link.stale) {
            let keeps = self.bug == Some(Bug::RetryWithoutStoredValue);
            link.granted = link.granted.filter(|_| keeps).or(Some(token));
            link.stale = false;
            state.places[node].overdue = false;
        }
    }

    /// The nodes that granted.
    fn q1(state: &State<N, A>, owner: usize) -> impl Iterator<Item = Link> {
        state
            .places
            .iter()
            .map(move |place| place.links[owner])
            .filter(|link| link.granted.is_some())
    }

    /// How many nodes have to be at the token.
    fn needed(&self, state: &State<N, A>, owner: usize) -> usize {
        match self.bug {
            Some(Bug::MajorityOfQ1) => Self::q1(state, owner).count() / 2 + 1,
            _ => Self::MAJORITY,
        }
    }

    pub(super) fn has_enough(&self, state: &State<N, A>, owner: usize, token: u8) -> bool {
        let counts = |link: &Link| link.granted == Some(token) || link.confirmed;
        let at_token = state
            .places
            .iter()
            .map(|place| &place.links[owner])
            .filter(|link| counts(link));
        at_token.count() >= self.needed(state, owner)
    }

    fn give(state: &mut State<N, A>, owner: usize, token: u8) {
        let acquisition = &mut state.acquisitions[owner];
        acquisition.phase = Phase::Holding;
        state.fell |= token <= state.given;
        state.fell_later |= token <= acquisition.before;
        state.given = state.given.max(token);
    }

    pub(super) fn apply(&self, state: &mut State<N, A>, action: Action) {
        match action {
            Action::Begin { owner, proposal } => {
                let before = state.given;
                let acquisition = &mut state.acquisitions[owner];
                *acquisition = Acquisition {
                    phase: Phase::Asking,
                    proposal,
                    before,
                    ..*acquisition
                };
            }
            Action::Acquire {
                owner,
                node,
                clock_is_high,
                replaces,
            } => {
                let link = &mut state.places[node].links[owner];
                state.acquisitions[owner].repeats += u8::from(link.asked);
                link.asked = true;
                let request = Request::Acquire {
                    owner: number(owner),
                    attempt: state.acquisitions[owner].attempt,
                    proposal: state.acquisitions[owner].proposal,
                };
                if let Answer::Granted(token) = self.request(state, node, request, clock_is_high) {
                    self.learn(state, node, owner, token, replaces);
                }
            }
            Action::Decide { owner, nodes } => {
                for (at, place) in state.places.iter_mut().enumerate() {
                    if nodes & 1 << at == 0 {
                        let link = &mut place.links[owner];
                        (link.granted, link.stale) = (None, false);
                        // The deadline is that of the nodes that count.
                        place.overdue |= self.bounds.lapses && place.node.is_held_by(number(owner));
                    }
                }
                let token = Self::q1(state, owner)
                    .filter_map(|link| link.granted)
                    .max()
                    .unwrap_or(0);
                if self.bug == Some(Bug::MaxAlone) || self.has_enough(state, owner, token) {
                    Self::give(state, owner, token);
                } else {
                    let acquisition = &mut state.acquisitions[owner];
                    acquisition.phase = Phase::Confirming;
                    acquisition.confirming = Some(token);
                }
            }
            Action::Confirm { owner, node } => {
                let token = state.acquisitions[owner].confirming.unwrap_or(0);
                let request = Request::Confirm {
                    owner: number(owner),
                    presented: state.places[node].links[owner].granted.unwrap_or(token),
                    token,
                };
                let confirmed = self.request(state, node, request, false) == Answer::Confirmed;
                if state.acquisitions[owner].phase == Phase::Confirming && confirmed {
                    state.places[node].links[owner].confirmed = true;
                }
            }
            Action::Give { owner } => {
                let token = state.acquisitions[owner].confirming.unwrap_or(0);
                Self::give(state, owner, token);
            }
            Action::Renew { owner, nodes } => {
                for (at, place) in state.places.iter_mut().enumerate() {
                    let renewed = nodes & 1 << at != 0;
                    if place.node.is_held_by(number(owner)) {
                        place.overdue = !renewed;
                    }
                    if place.forgotten == Some(number(owner)) {
                        place.forgotten = None;
                    }
                }
            }
            Action::Lapse { owner, node } => {
                let place = &mut state.places[node];
                place.links[owner].stale = true;
                place.overdue |= place.node.is_held_by(number(owner));
            }
            Action::Retry { owner } => {
                let acquisition = &mut state.acquisitions[owner];
                let late = acquisition.confirming.filter(|_| self.bounds.late_confirms);
                acquisition.phase = Phase::Asking;
                acquisition.attempt += 1;
                acquisition.before = state.given;
                acquisition.confirming = None;
                for place in &mut state.places {
                    let link = &mut place.links[owner];
                    let confirmed = link.granted.zip(late).filter(|(granted, token)| granted != token);
                    link.late_confirm = confirmed.map(|(granted, token)| [granted, token]);
                    link.first_asked = link.asked || !self.bounds.late_acquires;
                    link.asked = false;
                }
                state.forget_links(owner);
            }
            Action::LateAcquire { owner, node } => {
                state.places[node].links[owner].first_asked = true;
                let request = Request::Acquire {
                    owner: number(owner),
                    attempt: 0,
                    proposal: state.acquisitions[owner].proposal,
                };
                self.request(state, node, request, false);
            }
            Action::LateConfirm { owner, node } => {
                if let Some([presented, token]) = state.places[node].links[owner].late_confirm {
                    let request = Request::Confirm {
                        owner: number(owner),
                        presented,
                        token,
                    };
                    self.request(state, node, request, false);
                }
            }
            Action::End { owner } => {
                state.acquisitions[owner].phase = Phase::Over;
                state.acquisitions[owner].before = 0;
                for place in &mut state.places {
                    let link = &mut place.links[owner];
                    (link.stale, link.confirmed) = (false, false);
                }
                if state.acquisitions[owner].confirming.is_none() {
                    state.forget_links(owner);
                }
                for place in &mut state.places {
                    if place.forgotten == Some(number(owner)) {
                        place.forgotten = None;
                    }
                }
            }
            Action::Release { owner, node, attempt } => {
                let owner = number(owner);
                self.request(state, node, Request::Release { owner, attempt }, false);
            }
            Action::Expire { node } => {
                state.places[node].node.expire();
                state.places[node].overdue = false;
            }
            Action::Empty { node } => {
                state.amnesias += 1;
                let place = &mut state.places[node];
                let owner = place.node.lock.map(|lock| lock.owner);
                place.node = Node::emptied();
                place.emptied = true;
                place.overdue = false;
                place.forgotten = owner.filter(|owner| state.acquisitions[usize::from(*owner)].phase != Phase::Over);
            }
        }
    }
}
