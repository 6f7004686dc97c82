//! Runs one case once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::broken::Bug;
use crate::case::{Case, Findings, Terms};
use crate::cases::Entry;
use crate::harness::Harness;
use crate::outcome::{Checks, Outcome, Stop};

/// How long a case may take, and what it waits for in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The whole case.
    pub(crate) case: Duration,
    /// One thing that the case waits for.
    pub(crate) hang: Duration,
}

impl Limits {
    /// No backend is judged by these: whatever takes longer hangs.
    pub(crate) const GENEROUS: Self = Self {
        case: Duration::from_secs(300),
        hang: Duration::from_secs(60),
    };
}

/// One run of one case.
pub(crate) struct Ran {
    pub(crate) outcome: Outcome,
    pub(crate) findings: Findings,
    pub(crate) history: String,
    pub(crate) took: Duration,
    needs_own_server: bool,
}

impl Ran {
    fn without_case(stop: Stop) -> Self {
        Self {
            outcome: Err(stop),
            findings: Findings::default(),
            history: String::new(),
            took: Duration::ZERO,
            needs_own_server: false,
        }
    }
}

/// Runs the case beside others, and then on a server of its own if it turns out to need one.
pub(crate) fn run_case(
    row: &Arc<str>,
    harness: &Arc<dyn Harness>,
    entry: Entry,
    limits: Limits,
    bug: Option<Bug>,
) -> Ran {
    let terms = Terms {
        row: Arc::clone(row),
        bug,
        own_server: false,
        hang_limit: limits.hang,
    };
    let ran = run_once(harness, entry, limits, terms.clone());
    if ran.needs_own_server {
        let own_server = true;
        return run_once(harness, entry, limits, Terms { own_server, ..terms });
    }
    ran
}

fn run_once(harness: &Arc<dyn Harness>, entry: Entry, limits: Limits, terms: Terms) -> Ran {
    let checks = Checks::default();
    let counted = checks.clone();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .on_thread_start(move || counted.count_here())
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return Ran::without_case(error.into()),
    };
    let limit = limits.case;
    let began = Instant::now();
    let ran = runtime.block_on(async {
        let case = match tokio::time::timeout(limit, Case::new(Arc::clone(harness), terms)).await {
            Ok(Ok(case)) => case,
            Ok(Err(stop)) => return Ran::without_case(stop),
            Err(_) => return Ran::without_case(Stop::Failed(format!("no client was made within {limit:?}"))),
        };
        // As a task, so that a panic is a failure with a history.
        let mut body = tokio::spawn((entry.run)(Arc::clone(&case)));
        let mut outcome = match tokio::time::timeout(limit, &mut body).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(panicked)) => Err(panicked.into()),
            Err(_) => {
                body.abort();
                Err(Stop::Failed(format!("the case did not end within {limit:?}")))
            }
        };
        if outcome.is_ok() && checks.count() == 0 {
            outcome = Err(Stop::Failed("the case ended and had checked nothing".to_owned()));
        }
        if outcome.is_ok() {
            outcome = match tokio::time::timeout(limit, case.finish()).await {
                Ok(outcome) => outcome,
                Err(_) => Err(Stop::Failed(format!("the clients did not close within {limit:?}"))),
            };
        } else {
            // The verdict stands; this only leaves less behind.
            let _ = tokio::time::timeout(Duration::from_secs(2), case.close()).await;
        }
        let _ = tokio::time::timeout(limit, case.over()).await;
        Ran {
            outcome,
            findings: case.findings(),
            history: case.history(),
            took: began.elapsed(),
            needs_own_server: case.needs_own_server(),
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(2));
    ran
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use lock_core::{DistributedLock, LockError, MemoryLock};

    use super::*;
    use crate::cases::GROUPS;
    use crate::harness::{Fault, Injection, Namespace};

    /// Restarts a server only if no other case uses it.
    #[derive(Default)]
    struct Shared {
        store: MemoryLock,
        faults: Mutex<Vec<(bool, Injection)>>,
        never: bool,
    }

    #[async_trait]
    impl Harness for Shared {
        fn name(&self) -> &str {
            "shared"
        }

        async fn client(&self, _: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
            Ok(Arc::new(self.store.client()))
        }

        async fn inject(&self, namespace: &Namespace, _: &Fault) -> Result<Injection, LockError> {
            let own = namespace.wants_own_server();
            let injection = if own && !self.never {
                Injection::Done
            } else {
                Injection::NeedsOwnServer
            };
            self.faults.lock().unwrap().push((own, injection));
            Ok(injection)
        }
    }

    fn tokens_across_a_restart(shared: Shared) -> (Outcome, Vec<(bool, Injection)>) {
        let shared = Arc::new(shared);
        let case = GROUPS.iter().flat_map(|group| group.cases);
        let case = case
            .into_iter()
            .find(|case| case.sentence == "tokens_rise_across_a_restart");
        let harness: Arc<dyn Harness> = Arc::clone(&shared) as _;
        let ran = run_case(&"shared".into(), &harness, *case.unwrap(), Limits::GENEROUS, None);
        let faults = shared.faults.lock().unwrap().clone();
        (ran.outcome, faults)
    }

    #[test]
    fn a_case_that_disturbs_others_is_run_again_on_a_server_of_its_own() {
        let (outcome, faults) = tokens_across_a_restart(Shared::default());
        assert!(outcome.is_ok());
        assert_eq!(faults, [(false, Injection::NeedsOwnServer), (true, Injection::Done)]);
    }

    #[test]
    fn a_case_that_cannot_have_a_server_of_its_own_is_not_applicable() {
        let shared = Shared {
            never: true,
            ..Shared::default()
        };
        let (outcome, faults) = tokens_across_a_restart(shared);
        assert!(matches!(outcome, Err(Stop::NotApplicable(_))));
        assert_eq!(faults.len(), 2);
    }
}
