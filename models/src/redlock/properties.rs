//! What must hold in every state, and what must be reached.

use super::state::{Link, Place, State, number};

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
/// A lease ends while its acquisition goes on.
pub const LAPSED: &str = "a node grants to another acquisition while the one before still asks";
/// A second attempt is given a token.
pub const RETRIED: &str = "a token is given to an acquisition whose first attempt was given up";
/// A lease ends under a holder that has renewed the others.
pub const WITHOUT_ONE: &str = "a holder goes on without a node that has granted to another";

impl<const N: usize, const A: usize> State<N, A> {
    /// Whether a holder began after another token had been given.
    pub(super) fn has_a_successor(&self) -> bool {
        self.holders().any(|owner| self.acquisitions[owner].before > 0)
    }

    /// Whether a holder needed a second attempt.
    pub(super) fn has_retried(&self) -> bool {
        self.holders().any(|owner| self.acquisitions[owner].attempt > 0)
    }

    /// Whether a holder needed CONFIRM.
    pub(super) fn has_confirmed(&self) -> bool {
        self.holders()
            .any(|owner| self.acquisitions[owner].confirming.is_some())
    }

    /// Whether a holder counts what a node granted after it had lost its data.
    pub(super) fn counts_an_emptied_node(&self) -> bool {
        let counts = |owner: usize, place: &Place<A>| {
            let token = place.node.lock.map(|lock| lock.token);
            place.emptied && place.node.is_held_by(number(owner)) && token == place.links[owner].granted
        };
        self.holders()
            .any(|owner| self.places.iter().any(|place| counts(owner, place)))
    }

    /// Whether a node that had granted to an acquisition that still asks has granted to another one.
    pub(super) fn has_lapsed(&self) -> bool {
        let lapsed = |place: &Place<A>| (0..A).any(|owner| place.links[owner].stale && place.is_held_by_another(owner));
        self.places.iter().any(lapsed)
    }

    /// Whether a node that had granted to the holder has granted to another one.
    pub(super) fn holds_without_one(&self) -> bool {
        self.holds_by(|owner, place, link| link.granted.is_some() && place.is_held_by_another(owner))
    }

    /// Whether a holder has a node for which that is so.
    pub(super) fn holds_by(&self, is: impl Fn(usize, &Place<A>, &Link) -> bool) -> bool {
        let any = |owner: usize| self.places.iter().any(|place| is(owner, place, &place.links[owner]));
        self.holders().any(any)
    }
}

impl<const A: usize> Place<A> {
    fn is_held_by_another(&self, owner: usize) -> bool {
        self.node.lock.is_some_and(|lock| lock.owner != number(owner))
    }
}
