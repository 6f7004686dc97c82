//! Plants a bug into a backend, and finds the case that catches it.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Capabilities, LockError};

use crate::broken::Bug;
use crate::cases::full_name;
use crate::harness::{Harness, Namespace};
use crate::outcome::{Outcome, Stop};
use crate::run_case::{Limits, run_case};

/// How long a case may take to fail because of a planted bug, or to pass without it. Where a machine is too busy for the
/// first limits, so that the case does not pass without the bug either, the second ones count.
const LIMITS: [Limits; 2] = [
    Limits {
        case: Duration::from_secs(60),
        hang: Duration::from_secs(8),
    },
    Limits::GENEROUS,
];

/// What became of a planted bug.
pub(crate) enum Hunt {
    /// That case failed with that message, which the bug leads to, and passes without the bug.
    Caught { by: String, why: String },
    /// No case failed, or one failed with a message that the bug does not lead to.
    Escaped(String),
    /// It cannot be planted here, for that reason.
    NotApplicable(String),
    /// Nothing can be said, for that reason: no server answers, or a case fails without the bug too.
    NotJudged(String),
}

/// Plants the bug, and runs the case that is to catch it. A failure counts if its message is one that the bug leads to, and if the case
/// passes without the bug right after it, and so on a server that answers.
pub(crate) fn hunt(row: &Arc<str>, harness: &Arc<dyn Harness>, bug: Bug) -> Hunt {
    match capabilities(harness).map(|capabilities| bug.plantable(&capabilities, &**harness)) {
        Ok(Ok(())) => {}
        Ok(Err(reason)) => return Hunt::NotApplicable(reason.to_owned()),
        Err(stop) => return Hunt::NotJudged(format!("no client can be made: {}", stop.reason())),
    }
    let Some(entry) = bug.case() else {
        return Hunt::Escaped("no case is to catch it".to_owned());
    };
    let run = |bug, limits| run_case(row, harness, entry, limits, Some(bug));
    let case = full_name(entry);
    let mut hunted = Hunt::NotJudged(format!("{case} was not run"));
    for limits in LIMITS {
        let ran = run(bug, limits);
        let why = match ran.outcome {
            Ok(()) if ran.findings.too_slow.is_empty() => return Hunt::Escaped(format!("{case} passed")),
            // It might have been caught on a machine that is less busy.
            Ok(()) => {
                let slow = ran.findings.too_slow.join("; ");
                hunted = Hunt::NotJudged(format!("{case} was too slow to judge: {slow}"));
                continue;
            }
            Err(Stop::NotApplicable(reason)) => return Hunt::NotApplicable(reason),
            Err(Stop::Failed(why) | Stop::NotJudged(why)) => why,
        };
        match run(Bug::Nothing, limits).outcome {
            Ok(()) if bug.leads_to(&why) => return Hunt::Caught { by: case, why },
            Ok(()) => return Hunt::Escaped(format!("{case} failed for another reason: {why}")),
            Err(stop) => {
                hunted = Hunt::NotJudged(format!("{case} does not pass without it: {}", stop.reason()));
            }
        }
    }
    hunted
}

/// What clients of the backend say that they can do, if one can be made.
pub(crate) fn capabilities(harness: &Arc<dyn Harness>) -> Outcome<Capabilities> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let namespace = Namespace::fresh(false)?;
    let limit = Limits::GENEROUS.hang;
    let capabilities = runtime.block_on(async {
        let made = async {
            let client = harness.client(&namespace).await?;
            let capabilities = client.capabilities();
            client.close().await?;
            harness.over(&namespace).await;
            Ok::<_, LockError>(capabilities)
        };
        tokio::time::timeout(limit, made).await
    });
    match capabilities {
        Ok(capabilities) => Ok(capabilities?),
        Err(_) => Err(Stop::Failed(format!("no client was made within {limit:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use lock_core::{DistributedLock, MemoryLock};

    use super::*;

    /// Some of its clients find no server.
    struct Failing {
        store: MemoryLock,
        made: AtomicUsize,
        fails: fn(usize) -> bool,
    }

    #[async_trait]
    impl Harness for Failing {
        fn name(&self) -> &str {
            "failing"
        }

        async fn client(&self, _: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
            if (self.fails)(self.made.fetch_add(1, Ordering::Relaxed)) {
                return Err(LockError::unavailable("connecting", "nothing listens there".to_owned()));
            }
            Ok(Arc::new(self.store.client()))
        }
    }

    fn hunted(fails: fn(usize) -> bool) -> Hunt {
        let (store, made) = (MemoryLock::new(), AtomicUsize::new(0));
        let harness: Arc<dyn Harness> = Arc::new(Failing { store, made, fails });
        hunt(&"failing".into(), &harness, Bug::TokensAreRandom)
    }

    #[test]
    fn a_case_that_fails_because_of_the_bug_alone_catches_it() {
        assert!(matches!(hunted(|_| false), Hunt::Caught { .. }));
    }

    #[test]
    fn where_no_server_answers_nothing_is_judged() {
        assert!(matches!(hunted(|_| true), Hunt::NotJudged(_)));
        // It answers to the question what it can do, and not any more after that.
        assert!(matches!(hunted(|made| made > 0), Hunt::NotJudged(_)));
        // It does not answer any more when the case is run without the bug.
        assert!(matches!(hunted(|made| made > 4), Hunt::NotJudged(_)));
    }

    #[test]
    fn a_case_that_fails_for_another_reason_does_not_catch_the_bug() {
        let Hunt::Escaped(why) = hunted(|made| made == 1) else {
            panic!("one client that found no server is no sign of the bug");
        };
        assert!(why.contains("nothing listens there"), "{why}");
    }
}
