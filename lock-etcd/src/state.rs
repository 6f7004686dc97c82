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
        let of = (header.cluster_id(), header.member_id());
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
        let revision = header.revision();
        if revision < before {
            return Err(format!(
                "the state of etcd went back from revision {before} to {revision}"
            ));
        }
        self.revision.fetch_max(revision, Ordering::AcqRel);
        self.saw_term(header.raft_term());
        Ok(())
    }
}
