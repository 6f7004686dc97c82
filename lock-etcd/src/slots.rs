//! The keys that a client puts its claims under, one claim after the other.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

use lock_core::{LockName, OwnerId};

/// Which keys of this client are in use.
///
/// **Invariant.** When a key is given out, nothing is on its way that could change it. So it is given out again only if every
/// request for its last claim was answered; if one was not, none of the keys that there were until then is given out any more.
/// That takes no memory for names that no claim is on.
pub(crate) struct Slots {
    /// Drawn at random: no other client has these keys.
    client: u64,
    /// How often they were given up.
    incarnation: u64,
    /// The numbers that are in use in this incarnation.
    taken: HashMap<LockName, BTreeSet<u32>>,
}

/// What tells a client's keys of the same name apart, as it stands in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    client: u64,
    incarnation: u64,
    number: u32,
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}.{}.{}", self.client, self.incarnation, self.number)
    }
}

impl Default for Slots {
    fn default() -> Self {
        let [.., a, b, c, d, e, f, g, h] = *OwnerId::random().as_bytes();
        Self {
            client: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            incarnation: 0,
            taken: HashMap::new(),
        }
    }
}

impl Slots {
    /// The lowest one that no claim of this client on that name has.
    pub(crate) fn take(&mut self, name: &LockName) -> Slot {
        let taken = self.taken.entry(name.clone()).or_default();
        let mut number = 0;
        while !taken.insert(number) {
            number += 1;
        }
        Slot {
            client: self.client,
            incarnation: self.incarnation,
            number,
        }
    }

    /// Its claim has gone, and every request for it was answered.
    pub(crate) fn give_back(&mut self, name: &LockName, slot: Slot) {
        if slot.incarnation != self.incarnation {
            return;
        }
        if let Some(taken) = self.taken.get_mut(name) {
            taken.remove(&slot.number);
            if taken.is_empty() {
                self.taken.remove(name);
            }
        }
    }

    /// A claim has gone, and what was sent for it can be carried out at any time.
    pub(crate) fn give_up(&mut self) {
        self.incarnation += 1;
        self.taken.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> LockName {
        text.parse().unwrap()
    }

    #[test]
    fn the_lowest_number_that_is_free_is_given_out() {
        let mut slots = Slots::default();
        let taken = [0; 3].map(|_| slots.take(&name("n")));
        assert_eq!(taken.map(|slot| slot.number), [0, 1, 2]);
        assert_eq!(slots.take(&name("m")).number, 0);
        slots.give_back(&name("n"), taken[1]);
        assert_eq!(slots.take(&name("n")), taken[1]);
        assert_eq!(slots.take(&name("n")).number, 3);
    }

    #[test]
    fn what_was_given_up_is_never_given_out_again() {
        let mut slots = Slots::default();
        let (given_up, held) = (slots.take(&name("n")), slots.take(&name("n")));
        slots.give_up();
        let next = slots.take(&name("n"));
        assert_eq!(next.number, 0);
        assert!(next != given_up && next != held);
        // Of an earlier incarnation, and none of this one's.
        slots.give_back(&name("n"), held);
        slots.give_back(&name("n"), given_up);
        assert_eq!(slots.take(&name("n")).number, 1);
    }

    #[test]
    fn nothing_is_kept_of_a_name_without_a_claim() {
        let mut slots = Slots::default();
        for number in 0..1000 {
            let name = name(&number.to_string());
            let slot = slots.take(&name);
            slots.give_back(&name, slot);
        }
        assert!(slots.taken.is_empty());
        slots.take(&name("n"));
        slots.give_up();
        assert!(slots.taken.is_empty());
    }

    #[test]
    fn clients_have_keys_of_their_own() {
        let (mut one, mut other) = (Slots::default(), Slots::default());
        assert_ne!(one.take(&name("n")).to_string(), other.take(&name("n")).to_string());
    }
}
