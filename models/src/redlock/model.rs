//! N nodes and A acquisitions, with lost, late and repeated messages, ends of leases, and loss of data.
//!
//! Every acquisition has an owner of its own, so two clients with a retry are three acquisitions. Nodes are interchangeable, so states
//! are compared with the nodes in sorted order.
//!
//! **Time.** There is no clock. An acquisition ends at any moment ([`Phase::Over`]): its deadline has passed, or it was released or
//! given up. A node's lease ends at any moment after that. It ends before that only if the holder does not rely on it: the holder has
//! renewed a majority without that node, or the grant is so old that the coordinator does not count it ([`Bounds::lapses`]).
//! A node without data may grant once no holder relies on a lease that the node has forgotten: that is what the restart delay waits for.
//! The clock of such a node is above every token that was drawn before.
//!
//! **Messages.** Once sent, a request may arrive at any later time, or never. RELEASE, CONFIRM and YIELD may arrive any number of times,
//! ACQUIRE once at each node, and of each acquisition [`Bounds::repeats`] times more. An answer is there at once, but the coordinator takes any majority of those that it has, and acts
//! whenever it likes: an answer that is lost or late is one that it does not take.

use std::hash::{Hash, Hasher};

use stateright::{Model, Property};

use super::node::{Answer, Born, Circumstances, Compare, Lock, Node, Request, Rules};

/// What is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A majority of the nodes that granted is enough, instead of a majority of all nodes.
    MajorityOfQ1,
    /// CONFIRM compares nothing.
    UnconditionalWriteBack,
    /// The highest token is taken without CONFIRM.
    MaxAlone,
    /// The coordinator keeps the first grant of a node that it asks again, and CONFIRM compares the owner alone.
    RetryWithoutStoredValue,
    /// An acquisition that was released is begun again with the same owner.
    OwnerUsedAgain,
    /// CONFIRM is sent to nodes that have not granted, and their answers count.
    NodesOutsideQ1,
    /// A node without data grants at once.
    NoRestartDelay,
    /// The clock of a node without data is above the tokens that were given, but not above those that were drawn.
    ClockBehindDrawnTokens,
    /// A renewal counts although less than a majority has answered.
    RenewedByMinority,
    /// YIELD compares the owner, and not what the node granted.
    YieldWithoutStoredValue,
    /// The coordinator counts a grant that it has yielded before.
    YieldedGrantCounts,
}

/// How far the search goes.
#[derive(Clone, Debug)]
pub struct Bounds<const N: usize> {
    /// The counters that the nodes may begin with.
    pub counters: Vec<[u8; N]>,
    /// The tokens that a client may propose.
    pub proposals: Vec<u8>,
    /// How often ACQUIRE arrives once more at a node, for each acquisition.
    pub repeats: u8,
    /// How many nodes lose their data.
    pub amnesias: u8,
    /// Whether ACQUIRE may arrive after its acquisition has ended.
    pub late_acquires: bool,
    /// Whether CONFIRM may arrive after its acquisition has ended.
    pub late_confirms: bool,
    /// Whether a node's lease may end while the acquisition goes on asking.
    pub lapses: bool,
    /// Whether a node without data waits before it grants. Without it, exclusion is not claimed.
    pub restart_delay: bool,
    /// Whether acquisitions wait in the queues.
    pub waits: bool,
    /// Whether coordinators yield.
    pub yields: bool,
    /// Whether holders renew.
    pub renewals: bool,
}

/// The model.
#[derive(Clone, Debug)]
pub struct Redlock<const N: usize, const A: usize> {
    /// How far the search goes.
    pub bounds: Bounds<N>,
    /// What is planted.
    pub bug: Option<Bug>,
}

/// A state of the whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State<const N: usize, const A: usize> {
    places: [Place<A>; N],
    acquisitions: [Acquisition; A],
    /// The highest token given.
    given: u8,
    /// The highest token drawn.
    drawn: u8,
    amnesias: u8,
    /// A token was given that is not above one given before.
    fell: bool,
    /// The same, and the lower one belongs to an acquisition that began after the higher one was given.
    fell_later: bool,
}

/// A node, and what the acquisitions know of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place<const A: usize> {
    node: Node<u8, u8>,
    /// The acquisition whose lease was lost with the data. The restart delay outlasts that lease.
    forgotten: Option<u8>,
    /// Whether the data was lost.
    emptied: bool,
    /// Whether the lease is none that the holder relies on.
    overdue: bool,
    links: [Link; A],
}

/// In a few words instead of a byte at a time: half of the time goes into this.
impl<const A: usize> Hash for Place<A> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let option = |value: Option<u8>| value.map_or(0, |value| u64::from(value) + 1);
        let (owner, token) = self
            .node
            .lock
            .map_or((0, 0), |lock| (u64::from(lock.owner) + 1, u64::from(lock.token)));
        let flags = u64::from(self.emptied) | u64::from(self.overdue) << 1 | (self.node.born as u64) << 2;
        let node = owner | token << 8 | option(self.node.counter) << 16 | option(self.forgotten) << 25 | flags << 34;
        state.write_u64(node | (self.node.queue.len() as u64) << 40);
        for waiter in &self.node.queue {
            state.write_u16(u16::from_le_bytes([waiter.stamp, waiter.owner]));
        }
        for link in &self.links {
            let flags = [link.asked, link.stale, link.confirmed, link.pushed];
            let flags = flags.iter().fold(0, |all, flag| all << 1 | u64::from(*flag));
            state.write_u64(option(link.granted) | option(link.yielded) << 9 | flags << 18);
        }
    }
}

/// What an acquisition knows of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Link {
    asked: bool,
    granted: Option<u8>,
    /// The grant is too old to count, until the node is asked again.
    stale: bool,
    confirmed: bool,
    pushed: bool,
    yielded: Option<u8>,
}

/// An acquisition, as its coordinator knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Acquisition {
    phase: Phase,
    proposal: u8,
    /// The highest token given before this acquisition began.
    before: u8,
    /// A RELEASE is on its way although the acquisition goes on.
    begun_again: bool,
    repeats: u8,
    /// What CONFIRM carries, once it was sent.
    confirming: Option<u8>,
}

/// How far an acquisition is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// It has not begun.
    Idle,
    /// ACQUIRE was sent.
    Asking,
    /// CONFIRM was sent.
    Confirming,
    /// The token was given, and the deadline has not passed.
    Holding,
    /// It was released or given up, or its deadline has passed.
    Over,
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
    /// The coordinator gives a grant back, and waits.
    Yield { owner: usize, node: usize },
    /// YIELD arrives at a node.
    YieldArrives { owner: usize, node: usize },
    /// The coordinator sends RELEASE, and asks again for the same owner.
    Retry { owner: usize },
    /// The acquisition ends.
    End { owner: usize },
    /// RELEASE arrives at a node.
    Release { owner: usize, node: usize },
    /// A lease ends.
    Expire { node: usize },
    /// A node loses its data.
    Empty { node: usize },
}

/// No two holders at once.
pub const EXCLUSION: &str = "no two valid holders";
/// Tokens rise in the order in which they are given.
pub const RISE: &str = "tokens rise in the order in which they are given";
/// Tokens rise in real time.
pub const RISE_LATER: &str = "a token is above all that were given before its acquisition began";
/// Two acquisitions, one after the other, are given tokens.
pub const SUCCESSOR: &str = "a token is given after another one";
/// A token is given after CONFIRM.
pub const CONFIRMED: &str = "a token is given by confirmation";
/// A node without data counts.
pub const GRANT_AFTER_AMNESIA: &str = "a node that lost its data counts for a token";
/// A grant counts that was pushed.
pub const PUSHED: &str = "a grant that was pushed counts for a token";
/// A lease ends while its acquisition goes on.
pub const LAPSED: &str = "a node grants to another acquisition while the one before still asks";
/// A grant counts at a node that was yielded before.
pub const YIELDED: &str = "a token is given to an acquisition that has yielded";
/// A lease ends under a holder that has renewed the others.
pub const WITHOUT_ONE: &str = "a holder goes on without a node that has granted to another";

impl<const N: usize, const A: usize> Redlock<N, A> {
    const MAJORITY: usize = N / 2 + 1;

    fn rules(&self) -> Rules {
        let mut rules = Rules {
            restart_delay: self.bounds.restart_delay,
            ..Rules::default()
        };
        match self.bug {
            Some(Bug::UnconditionalWriteBack | Bug::NodesOutsideQ1) => rules.confirm = Compare::Nothing,
            Some(Bug::RetryWithoutStoredValue) => rules.confirm = Compare::Owner,
            Some(Bug::NoRestartDelay) => rules.restart_delay = false,
            Some(Bug::YieldWithoutStoredValue) => rules.yields = Compare::Owner,
            _ => {}
        }
        rules
    }

    fn circumstances(&self, state: &State<N, A>, node: usize, clock_is_high: bool) -> Circumstances<u8> {
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

    fn request(&self, state: &mut State<N, A>, node: usize, request: Request<u8, u8>, clock_is_high: bool) -> Granted {
        let circumstances = self.circumstances(state, node, clock_is_high);
        let place = &mut state.places[node];
        let before = place.node.lock;
        let outcome = place.node.handle(&self.rules(), request, circumstances);
        if place.node.lock.map(|lock| lock.owner) != before.map(|lock| lock.owner) {
            place.overdue = false;
        }
        state.drawn = state.drawn.max(place.node.counter.unwrap_or(0));
        let answered = match outcome.answer {
            Answer::Granted(token) => Some(token),
            _ => None,
        };
        Granted {
            answered,
            confirmed: outcome.answer == Answer::Confirmed,
            pushed: outcome.pushed,
        }
    }

    /// The coordinator learns of a grant.
    fn learn(&self, state: &mut State<N, A>, node: usize, owner: usize, token: u8, pushed: bool, replaces: bool) {
        let asking = state.acquisitions[owner].phase == Phase::Asking;
        let link = &mut state.places[node].links[owner];
        let given_back = link.yielded == Some(token) && self.bug != Some(Bug::YieldedGrantCounts);
        if asking && (link.granted.is_none() || replaces || link.stale) && !given_back {
            let keeps = self.bug == Some(Bug::RetryWithoutStoredValue);
            link.granted = link.granted.filter(|_| keeps).or(Some(token));
            link.stale = false;
            link.pushed = pushed;
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

    fn has_enough(&self, state: &State<N, A>, owner: usize, token: u8) -> bool {
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

    fn apply(&self, state: &mut State<N, A>, action: Action) {
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
                    proposal: state.acquisitions[owner].proposal,
                    waits: self.bounds.waits.then_some(number(owner)),
                };
                let granted = self.request(state, node, request, clock_is_high);
                if let Some(token) = granted.answered {
                    self.learn(state, node, owner, token, false, replaces);
                }
                self.push(state, node, granted);
            }
            Action::Decide { owner, nodes } => {
                for (at, place) in state.places.iter_mut().enumerate() {
                    if nodes & 1 << at == 0 {
                        let link = &mut place.links[owner];
                        (link.granted, link.stale, link.pushed) = (None, false, false);
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
                let confirmed = self.request(state, node, request, false).confirmed;
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
            Action::Yield { owner, node } => {
                let link = &mut state.places[node].links[owner];
                link.yielded = link.granted.take();
                link.pushed = false;
            }
            Action::YieldArrives { owner, node } => {
                let request = Request::Yield {
                    owner: number(owner),
                    presented: state.places[node].links[owner].yielded.unwrap_or(0),
                    stamp: number(owner),
                };
                let granted = self.request(state, node, request, false);
                self.push(state, node, granted);
            }
            Action::Retry { owner } => {
                let acquisition = &mut state.acquisitions[owner];
                acquisition.phase = Phase::Asking;
                acquisition.begun_again = true;
                acquisition.before = state.given;
                acquisition.confirming = None;
                state.forget_links(owner);
                for place in &mut state.places {
                    place.links[owner].asked = false;
                }
            }
            Action::End { owner } => {
                state.acquisitions[owner].phase = Phase::Over;
                state.acquisitions[owner].before = 0;
                for place in &mut state.places {
                    let link = &mut place.links[owner];
                    (link.stale, link.confirmed, link.pushed) = (false, false, false);
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
            Action::Release { owner, node } => {
                let request = Request::Release { owner: number(owner) };
                let granted = self.request(state, node, request, false);
                self.push(state, node, granted);
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

    fn push(&self, state: &mut State<N, A>, node: usize, granted: Granted) {
        if let Some((owner, token)) = granted.pushed {
            self.learn(state, node, usize::from(owner), token, true, false);
        }
    }

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
        if self.bounds.yields {
            if acquisition.phase == Phase::Asking && link.granted.is_some() && link.yielded.is_none() {
                actions.push(Action::Yield { owner, node });
            }
            if link.yielded.is_some() {
                actions.push(Action::YieldArrives { owner, node });
            }
        }
        let queued = place.node.queue.iter().any(|waiter| waiter.owner == number(owner));
        let held = place.node.is_held_by(number(owner));
        // Where nobody waits, the end of a lease does the same.
        let frees = held && (acquisition.begun_again || !place.node.queue.is_empty());
        if (over || acquisition.begun_again) && (frees || queued) {
            actions.push(Action::Release { owner, node });
        }
    }
}

/// What a request came to.
struct Granted {
    answered: Option<u8>,
    confirmed: bool,
    pushed: Option<(u8, u8)>,
}

impl<const N: usize, const A: usize> State<N, A> {
    fn is_over(&self, owner: usize) -> bool {
        self.acquisitions[owner].phase == Phase::Over
    }

    fn forget_links(&mut self, owner: usize) {
        for place in &mut self.places {
            place.links[owner] = Link {
                asked: place.links[owner].asked,
                yielded: place.links[owner].yielded,
                ..Link::default()
            };
        }
    }

    /// The nodes for which that is so, a bit each.
    fn nodes(&self, is: impl Fn(&Place<A>) -> bool) -> u8 {
        let nodes = self.places.iter().enumerate();
        nodes.filter(|(_, place)| is(place)).map(|(at, _)| 1 << at).sum()
    }

    /// Clears what nothing depends on any more.
    fn tidy(&mut self, bounds: &Bounds<N>, compares: bool) {
        for place in &mut self.places {
            for (owner, link) in place.links.iter_mut().enumerate() {
                let acquisition = &self.acquisitions[owner];
                let over = acquisition.phase == Phase::Over;
                let asked = !bounds.late_acquires || link.asked && acquisition.repeats == bounds.repeats;
                if over && !bounds.late_acquires {
                    link.asked = false;
                }
                let changes_nothing = asked && compares && !place.node.is_held_by(number(owner));
                if over && (changes_nothing || !bounds.late_confirms) {
                    link.granted = None;
                }
            }
        }
        self.places.sort_unstable();
    }

    fn holders(&self) -> impl Iterator<Item = usize> {
        (0..A).filter(|owner| self.acquisitions[*owner].phase == Phase::Holding)
    }

    /// Whether a holder has a link for which that is so.
    fn holds_by(&self, is: impl Fn(&Place<A>, &Link) -> bool) -> bool {
        let any = |owner: usize| self.places.iter().any(|place| is(place, &place.links[owner]));
        self.holders().any(any)
    }
}

fn subsets<const N: usize>(of: u8) -> impl Iterator<Item = u8> {
    (1..1_u8 << N).filter(move |nodes| nodes & !of == 0)
}

fn number(owner: usize) -> u8 {
    // There are at most 255.
    owner as u8
}

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
                begun_again: false,
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
            let begins_again = self.bug == Some(Bug::OwnerUsedAgain) && !acquisition.begun_again;
            if matches!(acquisition.phase, Phase::Asking | Phase::Confirming) && begins_again {
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
        let mut properties = vec![
            Property::always(RISE_LATER, |_, state: &Self::State| !state.fell_later),
            Property::sometimes(SUCCESSOR, |_, state: &Self::State| {
                state.holders().any(|owner| state.acquisitions[owner].before > 0)
            }),
            Property::sometimes(CONFIRMED, |_, state: &Self::State| {
                state
                    .holders()
                    .any(|owner| state.acquisitions[owner].confirming.is_some())
            }),
        ];
        if bounds.restart_delay {
            properties.push(Property::always(EXCLUSION, |_, state: &Self::State| {
                state.holders().count() <= 1
            }));
        }
        if bounds.amnesias == 0 {
            properties.push(Property::always(RISE, |_, state: &Self::State| !state.fell));
        } else {
            properties.push(Property::sometimes(GRANT_AFTER_AMNESIA, |_, state: &Self::State| {
                let counts = |owner: usize, place: &Place<A>| {
                    let granted = place.links[owner].granted;
                    place.emptied
                        && place.node.is_held_by(number(owner))
                        && place.node.lock.map(|lock| lock.token) == granted
                };
                let any = |owner| state.places.iter().any(|place| counts(owner, place));
                state.holders().any(any)
            }));
        }
        if bounds.lapses {
            properties.push(Property::sometimes(LAPSED, |_, state: &Self::State| {
                let other =
                    |place: &Place<A>, owner| place.node.lock.is_some_and(|lock| usize::from(lock.owner) != owner);
                let lapsed = |place: &Place<A>| (0..A).any(|owner| place.links[owner].stale && other(place, owner));
                state.places.iter().any(lapsed)
            }));
        }
        if bounds.waits {
            properties.push(Property::sometimes(PUSHED, |_, state: &Self::State| {
                state.holds_by(|_, link| link.pushed)
            }));
        }
        if bounds.yields {
            properties.push(Property::sometimes(YIELDED, |_, state: &Self::State| {
                state.holds_by(|_, link| link.yielded.is_some() && link.granted.is_some())
            }));
        }
        if bounds.renewals {
            properties.push(Property::sometimes(WITHOUT_ONE, |_, state: &Self::State| {
                state.holders().any(|holder| {
                    let other =
                        |place: &Place<A>| place.node.lock.is_some_and(|lock| usize::from(lock.owner) != holder);
                    state
                        .places
                        .iter()
                        .any(|place| place.links[holder].granted.is_some() && other(place))
                })
            }));
        }
        properties
    }
}

impl<const N: usize, const A: usize> Redlock<N, A> {
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
