//! Whether the answers of a connection are all of one state.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use etcd_client::ResponseHeader;

/// What the answers on a connection said of the state that they are of.
///
/// **Invariant.** All answers are those of one member of one cluster, and its revision never falls: a request that is sent after an answer
/// is carried out on the state of that answer or a later one. A connection on which that is not so leads through a proxy, behind
/// which the state can go back unseen.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// The numbers of cluster and member.
    of: OnceLock<(u64, u64)>,
    revision: AtomicI64,
    /// The highest term of Raft; zero until one is known.
    term: AtomicU64,
    /// How often the leader was seen to have changed, or to be missing.
    leader_changes: AtomicU64,
}

/// What an answer says of the state that it is of.
#[derive(Clone, Copy)]
struct Told {
    /// The numbers of cluster and member.
    of: (u64, u64),
    revision: i64,
    term: u64,
}

impl State {
    /// The highest revision that was seen.
    pub(crate) fn revision(&self) -> i64 {
        self.revision.load(Ordering::Acquire)
    }

    /// Records the term that the member is in. Each leader has another, higher one.
    pub(crate) fn saw_term(&self, term: u64) {
        let before = self.term.fetch_max(term, Ordering::AcqRel);
        if before != 0 && before < term {
            self.saw_leader_change();
        }
    }

    /// Records that the member has no leader, or a new one.
    pub(crate) fn saw_leader_change(&self) {
        self.leader_changes.fetch_add(1, Ordering::AcqRel);
    }

    /// How often the leader was seen to have changed, or to be missing.
    pub(crate) fn leader_changes(&self) -> u64 {
        self.leader_changes.load(Ordering::Acquire)
    }

    /// Takes note of an answer to a request that was sent when the highest revision was `before`, or says why it is of another state.
    pub(crate) fn goes_on(&self, header: &ResponseHeader, before: i64) -> Result<(), String> {
        self.goes_on_with(
            Told {
                of: (header.cluster_id(), header.member_id()),
                revision: header.revision(),
                term: header.raft_term(),
            },
            before,
        )
    }

    fn goes_on_with(&self, told: Told, before: i64) -> Result<(), String> {
        let Told { of, revision, term } = told;
        let first = *self.of.get_or_init(|| of);
        if of.0 != first.0 {
            return Err(format!(
                "etcd answered as cluster {:x}, and as {:x} before",
                of.0, first.0
            ));
        }
        if of.1 != first.1 {
            return Err(format!(
                "members {:x} and {:x} of etcd answered on one connection: it leads through a proxy for HTTP/2 or gRPC, which locks \
                 cannot work with; connect to the members, or through a proxy for TCP",
                first.1, of.1
            ));
        }
        if revision < before {
            return Err(format!(
                "the state of etcd went back from revision {before} to {revision}"
            ));
        }
        self.revision.fetch_max(revision, Ordering::AcqRel);
        self.saw_term(term);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Told = Told {
        of: (1, 2),
        revision: 10,
        term: 3,
    };

    /// What is said of an answer that comes after the first and was asked for after it.
    fn after_first(told: Told) -> (Result<(), String>, State) {
        let state = State::default();
        state.goes_on_with(FIRST, 0).unwrap();
        let before = state.revision();
        (state.goes_on_with(told, before), state)
    }

    #[test]
    fn answers_of_one_member_whose_revision_does_not_fall_are_of_one_state() {
        for revision in [10, 11] {
            let (goes_on, state) = after_first(Told { revision, ..FIRST });
            assert_eq!(goes_on, Ok(()));
            assert_eq!(state.revision(), revision);
        }
    }

    #[test]
    fn an_answer_of_another_cluster_is_refused() {
        let (goes_on, state) = after_first(Told {
            of: (11, 2),
            revision: 20,
            term: 4,
        });
        let why = goes_on.unwrap_err();
        assert!(why.contains("as cluster b, and as 1 before"), "{why}");
        assert_eq!((state.revision(), state.leader_changes()), (10, 0));
    }

    #[test]
    fn an_answer_of_another_member_is_refused() {
        let (goes_on, state) = after_first(Told {
            of: (1, 11),
            revision: 20,
            ..FIRST
        });
        let why = goes_on.unwrap_err();
        assert!(why.contains("members 2 and b"), "{why}");
        assert_eq!(state.revision(), 10);
    }

    #[test]
    fn a_revision_that_fell_is_refused_unless_the_request_may_have_been_overtaken() {
        let fallen = Told { revision: 9, ..FIRST };
        let (goes_on, state) = after_first(fallen);
        let why = goes_on.unwrap_err();
        assert!(why.contains("went back from revision 10 to 9"), "{why}");
        // Sent before the first answer was here.
        assert_eq!(state.goes_on_with(fallen, 9), Ok(()));
        assert_eq!(state.revision(), 10);
    }

    #[test]
    fn only_a_higher_term_than_a_known_one_is_a_change_of_the_leader() {
        for (term, changes) in [(2, 0), (3, 0), (4, 1)] {
            let (goes_on, state) = after_first(Told { term, ..FIRST });
            assert_eq!((goes_on, state.leader_changes()), (Ok(()), changes));
        }
    }
}
