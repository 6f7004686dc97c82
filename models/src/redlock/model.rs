//! N nodes and A acquisitions, with lost, late and repeated messages, ends of leases, and loss of data.
//!
//! Every acquisition has an owner of its own, and makes up to two attempts (`retries`): the coordinator gives the first one up, and its requests
//! are still on their way. Nodes are interchangeable, so states are compared with the nodes in sorted order.
//!
//! **Time.** There is no clock. An acquisition ends at any moment (it is *over*): its deadline has passed, or it was released or given up.
//! A node's lease ends at any moment after that. It ends before that only if the holder does not rely on it: the holder has renewed a
//! majority without that node, or the grant is so old that the coordinator does not count it (`lapses`).
//! A node without data may grant once no holder relies on a lease that the node has forgotten: that is what the restart delay waits for.
//! The clock of such a node is above every token that was drawn before.
//!
//! **Messages.** Once sent, a request may arrive at any later time, or never. RELEASE and CONFIRM may arrive any number of times,
//! ACQUIRE of each attempt once at each node, and of each acquisition `repeats` times more. An answer is there at once, but the coordinator takes any
//! majority of those that it has, and acts whenever it likes: an answer that is lost or late is one that it does not take.

use stateright::{Model, Property};

use super::bounds::Bug;
use super::node::{Born, Compare, Lock, Node};
use super::properties::{
    CONFIRMED, EXCLUSION, GRANT_AFTER_AMNESIA, LAPSED, RETRIED, RISE, RISE_LATER, SUCCESSOR, WITHOUT_ONE,
};
use super::state::{Acquisition, Link, Phase, Place, State, number, subsets};
use super::steps::{Action, Redlock};

impl<const N: usize, const A: usize> Model for Redlock<N, A> {
    type State = State<N, A>;
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        let state = |counters: &[u8; N]| State {
            places: counters.map(|counter| Place {
                node: Node::open(Some(counter)),
                forgotten: None,
                emptied: false,
                overdue: false,
                links: [Link::default(); A],
            }),
            acquisitions: [Acquisition {
                phase: Phase::Idle,
                proposal: 0,
                before: 0,
                attempt: 0,
                repeats: 0,
                confirming: None,
            }; A],
            given: 0,
            drawn: counters.iter().copied().max().unwrap_or(0),
            amnesias: 0,
            fell: false,
            fell_later: false,
        };
        self.bounds.counters.iter().map(state).collect()
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Self::Action>) {
        // Acquisitions are interchangeable until they begin.
        if let Some(owner) = (0..A).find(|owner| state.acquisitions[*owner].phase == Phase::Idle) {
            let begin = |proposal: &u8| Action::Begin {
                owner,
                proposal: *proposal,
            };
            actions.extend(self.bounds.proposals.iter().map(begin));
        }
        for owner in 0..A {
            let acquisition = &state.acquisitions[owner];
            match acquisition.phase {
                Phase::Asking => {
                    let counts = |link: &Link| link.granted.is_some() && !link.stale;
                    let granted = state.nodes(|place| counts(&place.links[owner]));
                    let sets = subsets::<N>(granted).filter(|nodes| nodes.count_ones() as usize >= Self::MAJORITY);
                    actions.extend(sets.map(|nodes| Action::Decide { owner, nodes }));
                }
                Phase::Confirming if self.has_enough(state, owner, acquisition.confirming.unwrap_or(0)) => {
                    actions.push(Action::Give { owner });
                }
                Phase::Holding if self.bounds.renewals => self.renewals(state, owner, actions),
                _ => {}
            }
            let retries = owner < self.bounds.retries && acquisition.attempt == 0;
            if matches!(acquisition.phase, Phase::Asking | Phase::Confirming) && retries {
                actions.push(Action::Retry { owner });
            }
            if !matches!(acquisition.phase, Phase::Idle | Phase::Over) {
                actions.push(Action::End { owner });
            }
            for node in 0..N {
                self.node_actions(state, owner, node, actions);
            }
        }
        for (node, place) in state.places.iter().enumerate() {
            if let Some(Lock { owner, .. }) = place.node.lock
                && (place.overdue || state.is_over(usize::from(owner)))
            {
                actions.push(Action::Expire { node });
            }
            if state.amnesias < self.bounds.amnesias && place.node.born == Born::Open {
                actions.push(Action::Empty { node });
            }
        }
    }

    fn next_state(&self, state: &Self::State, action: Self::Action) -> Option<Self::State> {
        let mut next = state.clone();
        self.apply(&mut next, action);
        next.tidy(&self.bounds, self.rules().confirm != Compare::Nothing);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let bounds = &self.bounds;
        let given = |is_in_bounds: bool, property| is_in_bounds.then_some(property);
        let properties = [
            given(
                true,
                Property::always(RISE_LATER, |_, state: &Self::State| !state.fell_later),
            ),
            given(
                bounds.restart_delay,
                Property::always(EXCLUSION, |_, state: &Self::State| state.holders().count() <= 1),
            ),
            given(
                bounds.amnesias == 0,
                Property::always(RISE, |_, state: &Self::State| !state.fell),
            ),
            given(
                true,
                Property::sometimes(SUCCESSOR, |_, state: &Self::State| state.has_a_successor()),
            ),
            given(
                true,
                Property::sometimes(CONFIRMED, |_, state: &Self::State| state.has_confirmed()),
            ),
            given(
                bounds.amnesias > 0,
                Property::sometimes(GRANT_AFTER_AMNESIA, |_, state: &Self::State| {
                    state.counts_an_emptied_node()
                }),
            ),
            given(
                bounds.lapses,
                Property::sometimes(LAPSED, |_, state: &Self::State| state.has_lapsed()),
            ),
            given(
                bounds.retries > 0,
                Property::sometimes(RETRIED, |_, state: &Self::State| state.has_retried()),
            ),
            given(
                bounds.renewals,
                Property::sometimes(WITHOUT_ONE, |_, state: &Self::State| state.holds_without_one()),
            ),
        ];
        properties.into_iter().flatten().collect()
    }
}

impl<const N: usize, const A: usize> Redlock<N, A> {
    fn node_actions(&self, state: &State<N, A>, owner: usize, node: usize, actions: &mut Vec<Action>) {
        let acquisition = &state.acquisitions[owner];
        let place = &state.places[node];
        let link = &place.links[owner];
        let over = acquisition.phase == Phase::Over;
        let begun = acquisition.phase != Phase::Idle;
        if begun && (self.bounds.late_acquires || !over) && (!link.asked || acquisition.repeats < self.bounds.repeats) {
            let clocks: &[bool] = match (place.node.counter, acquisition.proposal) {
                (Some(_), 1..) => &[false, true],
                _ => &[false],
            };
            let new = link.granted.is_some() && !link.stale && !place.node.is_held_by(number(owner));
            let replacing: &[bool] = if new { &[false, true] } else { &[false] };
            for clock_is_high in clocks {
                actions.extend(replacing.iter().map(|replaces| Action::Acquire {
                    owner,
                    node,
                    clock_is_high: *clock_is_high,
                    replaces: *replaces,
                }));
            }
        }
        let is_asked = link.granted.is_some_and(|token| acquisition.confirming != Some(token));
        let outside = link.granted.is_none() && self.bug == Some(Bug::NodesOutsideQ1);
        if (self.bounds.late_confirms || !over) && acquisition.confirming.is_some() && (is_asked || outside) {
            actions.push(Action::Confirm { owner, node });
        }
        if self.bounds.lapses && acquisition.phase == Phase::Asking && link.granted.is_some() && !link.stale {
            actions.push(Action::Lapse { owner, node });
        }
        if acquisition.attempt > 0 {
            if self.bounds.late_acquires && !link.first_asked {
                actions.push(Action::LateAcquire { owner, node });
            }
            if link.late_confirm.is_some() {
                actions.push(Action::LateConfirm { owner, node });
            }
            // After the end of the acquisition, the end of a lease does the same.
            if !over && place.node.is_held_by(number(owner)) {
                let attempt = 0;
                actions.push(Action::Release { owner, node, attempt });
            }
        }
    }

    /// A smaller set of renewed nodes allows more, so sets above a bare majority add nothing.
    fn renewals(&self, state: &State<N, A>, owner: usize, actions: &mut Vec<Action>) {
        let needed = match self.bug {
            Some(Bug::RenewedByMinority) => Self::MAJORITY - 1,
            _ => Self::MAJORITY,
        };
        let held = state.nodes(|place| place.node.is_held_by(number(owner)));
        let sets = subsets::<N>(held).filter(|nodes| nodes.count_ones() as usize == needed);
        actions.extend(sets.map(|nodes| Action::Renew { owner, nodes }));
    }
}
