//! A state of the whole.

use std::hash::{Hash, Hasher};

use super::bounds::Bounds;
use super::node::Node;

/// A state of the whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State<const N: usize, const A: usize> {
    pub(super) places: [Place<A>; N],
    pub(super) acquisitions: [Acquisition; A],
    /// The highest token given.
    pub(super) given: u8,
    /// The highest token drawn.
    pub(super) drawn: u8,
    pub(super) amnesias: u8,
    /// A token was given that is not above one given before.
    pub(super) fell: bool,
    /// The same, and the lower one belongs to an acquisition that began after the higher one was given.
    pub(super) fell_later: bool,
}

/// A node, and what the acquisitions know of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place<const A: usize> {
    pub(super) node: Node,
    /// The acquisition whose lease was lost with the data. The restart delay outlasts that lease.
    pub(super) forgotten: Option<u8>,
    /// Whether the data was lost.
    pub(super) emptied: bool,
    /// Whether the lease is none that the holder relies on.
    pub(super) overdue: bool,
    pub(super) links: [Link; A],
}

/// In a few words instead of a byte at a time: half of the time goes into this.
impl<const A: usize> Hash for Place<A> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let option = |value: Option<u8>| value.map_or(0, |value| u64::from(value) + 1);
        let lock = self
            .node
            .lock
            .map_or([0, 0, 0], |lock| [lock.owner + 1, lock.token, lock.attempt]);
        let [owner, token, attempt] = lock.map(u64::from);
        let flags = u64::from(self.emptied) | u64::from(self.overdue) << 1 | (self.node.born as u64) << 2;
        let node = owner | token << 8 | option(self.node.counter) << 16 | option(self.forgotten) << 25 | flags << 34;
        state.write_u64(node | attempt << 40);
        for link in &self.links {
            let flags = [link.asked, link.first_asked, link.stale, link.confirmed];
            let flags = flags.iter().fold(0, |all, flag| all << 1 | u64::from(*flag));
            let late = link.late_confirm.map_or(0, |[presented, token]| {
                u64::from(presented) | u64::from(token) << 8 | 1 << 16
            });
            state.write_u64(option(link.granted) | flags << 9 | late << 16);
        }
    }
}

/// What an acquisition knows of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Link {
    pub(super) asked: bool,
    /// ACQUIRE of the first attempt has arrived, or will not any more.
    pub(super) first_asked: bool,
    pub(super) granted: Option<u8>,
    /// The grant is too old to count, until the node is asked again.
    pub(super) stale: bool,
    pub(super) confirmed: bool,
    /// CONFIRM of the first attempt: what it presents, and the token.
    pub(super) late_confirm: Option<[u8; 2]>,
}

/// An acquisition, as its coordinator knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Acquisition {
    pub(super) phase: Phase,
    pub(super) proposal: u8,
    /// The highest token given before this acquisition began.
    pub(super) before: u8,
    /// The number of the attempt. After the first one, a RELEASE is on its way although the acquisition goes on.
    pub(super) attempt: u8,
    pub(super) repeats: u8,
    /// What CONFIRM carries, once it was sent.
    pub(super) confirming: Option<u8>,
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

impl<const N: usize, const A: usize> State<N, A> {
    pub(super) fn is_over(&self, owner: usize) -> bool {
        self.acquisitions[owner].phase == Phase::Over
    }

    pub(super) fn forget_links(&mut self, owner: usize) {
        for place in &mut self.places {
            place.links[owner] = Link {
                asked: place.links[owner].asked,
                first_asked: place.links[owner].first_asked,
                late_confirm: place.links[owner].late_confirm,
                ..Link::default()
            };
        }
    }

    /// The nodes for which that is so, a bit each.
    pub(super) fn nodes(&self, is: impl Fn(&Place<A>) -> bool) -> u8 {
        let nodes = self.places.iter().enumerate();
        nodes.filter(|(_, place)| is(place)).map(|(at, _)| 1 << at).sum()
    }

    /// Clears what nothing depends on any more.
    pub(super) fn tidy(&mut self, bounds: &Bounds<N>, compares: bool) {
        for place in &mut self.places {
            for (owner, link) in place.links.iter_mut().enumerate() {
                let acquisition = &self.acquisitions[owner];
                let over = acquisition.phase == Phase::Over;
                let asked = !bounds.late_acquires || link.asked && acquisition.repeats == bounds.repeats;
                if over && !bounds.late_acquires {
                    link.asked = false;
                    link.first_asked = false;
                }
                if over && !bounds.late_confirms {
                    link.late_confirm = None;
                }
                let changes_nothing = asked && compares && !place.node.is_held_by(number(owner));
                if over && (changes_nothing || !bounds.late_confirms) {
                    link.granted = None;
                }
            }
        }
        self.places.sort_unstable();
    }

    pub(super) fn holders(&self) -> impl Iterator<Item = usize> {
        (0..A).filter(|owner| self.acquisitions[*owner].phase == Phase::Holding)
    }
}

/// The sets of nodes that are part of that one.
pub(super) fn subsets<const N: usize>(of: u8) -> impl Iterator<Item = u8> {
    (1..1_u8 << N).filter(move |nodes| nodes & !of == 0)
}

pub(super) fn number(owner: usize) -> u8 {
    // There are at most 255.
    owner as u8
}
