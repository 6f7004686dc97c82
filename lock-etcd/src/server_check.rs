//! Which servers locks are safe on.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};

use etcd_client::{MemberListResponse, ResponseHeader, StatusResponse};
use lock_core::{LockError, ServerInfo};

use crate::error::Failure;

/// The state of a member, from its status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// `None` if it is shown to root only.
    version: Option<String>,
    learner: bool,
    leader: bool,
}

impl Member {
    pub(crate) fn read(status: &StatusResponse) -> Self {
        Self {
            version: Some(status.version().to_owned()),
            learner: status.is_learner(),
            leader: status.leader() != 0,
        }
    }

    /// A member that shows its status to root only, as 3.5.28 and some versions since do, also of 3.6. If it is a learner or has no
    /// leader, the first request fails with that.
    pub(crate) fn reticent() -> Self {
        Self {
            version: None,
            learner: false,
            leader: true,
        }
    }

    /// For people.
    pub(crate) fn named(&self) -> ServerInfo {
        let version = self.version.as_deref();
        ServerInfo::new("etcd", version.unwrap_or("(version told to root only)"))
    }

    /// Refuses what locks are not safe on, or warns if that is wanted; another member may be better.
    pub(crate) fn check(&self, allow_unsafe: bool) -> Result<(), Failure> {
        if self.learner {
            return Err(Failure::Member(
                "it is a learner, which answers no questions".to_owned(),
            ));
        }
        if !self.leader {
            return Err(Failure::NoLeader);
        }
        let Some(message) = self.danger() else { return Ok(()) };
        if !allow_unsafe {
            return Err(Failure::Known(LockError::unsafe_configuration(format!(
                "{message}; allow_unsafe_configuration turns this refusal into a warning"
            ))));
        }
        tracing::warn!(target: "fencelock", "unsafe configuration of etcd: {message}");
        Ok(())
    }

    fn danger(&self) -> Option<String> {
        let told = self.version.as_ref()?;
        let least = match version(told) {
            Some((3, 4, patch)) if patch < 32 => "3.4.32",
            Some((3, 5, patch)) if patch < 14 => "3.5.14",
            Some((major, minor, _)) if (major, minor) < (3, 4) => "3.4.32",
            Some(_) => return None,
            None => {
                return Some(format!(
                    "this etcd says that its version is {told:?}, which is none that is known; locks need 3.4.32, 3.5.14 or later"
                ));
            }
        };
        Some(format!(
            "this etcd has version {told}, whose revisions can fall in a crash and fencing tokens with them; update it to \
             {least} or later"
        ))
    }
}

/// Refuses a way to the cluster that leads through etcd's own proxy, or warns if that is wanted.
///
/// `etcd grpc-proxy` keeps its clients' connections when the cluster behind it is exchanged, joins their watches and gives them numbers
/// of its own. It tells of itself where a member tells of the members of its cluster, without their numbers.
pub(crate) fn check_way(members: &MemberListResponse, allow_unsafe: bool) -> Result<(), Failure> {
    if members.members().iter().all(|member| member.id() != 0) {
        return Ok(());
    }
    let message = "this is etcd's grpc-proxy and no member of a cluster: locks get lost behind it and fencing tokens can fall; connect to \
                   the members, or through a proxy for TCP";
    if !allow_unsafe {
        return Err(Failure::Known(LockError::unsafe_configuration(format!(
            "{message}; allow_unsafe_configuration turns this refusal into a warning"
        ))));
    }
    tracing::warn!(target: "fencelock", "unsafe configuration of etcd: {message}");
    Ok(())
}

/// What the answers on a connection said of the state that they are of.
///
/// **Invariant.** All answers are those of one member of one cluster, and its revision never falls: a request that is sent after an answer
/// is carried out on the state of that answer or a later one. A connection on which that is not so leads through a proxy, behind
/// which the state can go back unseen.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// The numbers of cluster and member.
    of: OnceLock<(u64, u64)>,
    revision: AtomicI64,
}

impl Answers {
    /// The highest revision that was seen.
    pub(crate) fn revision(&self) -> i64 {
        self.revision.load(Ordering::Acquire)
    }

    /// Takes note of an answer to a request that was sent when the highest revision was `before`, or says why it is of another state.
    pub(crate) fn check(&self, header: &ResponseHeader, before: i64) -> Result<(), String> {
        self.goes_on((header.cluster_id(), header.member_id()), header.revision(), before)
    }

    fn goes_on(&self, of: (u64, u64), revision: i64, before: i64) -> Result<(), String> {
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
        Ok(())
    }
}

fn version(text: &str) -> Option<(u32, u32, u32)> {
    let mut parts = text.split(['-', '+']).next()?.split('.').map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(version: &str) -> Member {
        Member {
            version: Some(version.to_owned()),
            learner: false,
            leader: true,
        }
    }

    #[test]
    fn a_member_that_hides_its_status_is_accepted() {
        assert!(Member::reticent().check(false).is_ok());
    }

    #[test]
    fn versions_that_keep_their_revisions_are_accepted() {
        for good in [
            "3.4.32",
            "3.4.40",
            "3.5.14",
            "3.5.16",
            "3.6.0",
            "3.6.0-rc.1",
            "3.5.16+git",
            "4.0.0",
        ] {
            assert!(member(good).check(false).is_ok(), "{good}");
        }
    }

    #[test]
    fn versions_that_can_lose_revisions_are_refused_unless_that_is_allowed() {
        for (bad, least) in [
            ("3.4.31", "3.4.32"),
            ("3.4.23", "3.4.32"),
            ("3.5.13", "3.5.14"),
            ("3.5.0-alpha", "3.5.14"),
            ("3.3.99", "3.4.32"),
            ("2.3.8", "3.4.32"),
            ("new", "3.5.14"),
        ] {
            let Err(Failure::Known(refused)) = member(bad).check(false) else {
                panic!("{bad} is accepted");
            };
            assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused:?}");
            assert!(refused.to_string().contains(least), "{refused}");
            assert!(member(bad).check(true).is_ok(), "{bad}");
        }
    }

    #[test]
    fn members_that_can_do_nothing_are_passed_over_in_any_case() {
        let learner = Member {
            learner: true,
            ..member("3.5.16")
        };
        let alone = Member {
            leader: false,
            ..member("3.5.16")
        };
        assert!(matches!(learner.check(true), Err(Failure::Member(_))));
        assert!(matches!(alone.check(true), Err(Failure::NoLeader)));
    }

    #[test]
    fn answers_of_another_cluster_or_member_or_of_an_older_state_are_refused() {
        let answers = Answers::default();
        for revision in [10, 10, 11] {
            assert_eq!(answers.goes_on((1, 2), revision, answers.revision()), Ok(()));
        }
        for (of, revision, why) in [
            ((11, 2), 20, "as cluster b, and as 1 before"),
            ((1, 11), 20, "members 2 and b"),
            ((1, 2), 9, "went back from revision 11 to 9"),
        ] {
            let said = answers.goes_on(of, revision, answers.revision()).unwrap_err();
            assert!(said.contains(why), "{said}");
            assert_eq!(answers.revision(), 11);
        }
        // It was sent before the other answer was here.
        assert_eq!(answers.goes_on((1, 2), 9, 9), Ok(()));
    }
}
