//! Runs every case and every planted bug as a trial of its own.

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use lock_core::{Capabilities, LockError};

use crate::broken::{BrokenHarness, Bug};
use crate::case::{Case, Findings};
use crate::cases::{Entry, GROUPS};
use crate::child;
use crate::harness::{Harness, Namespace};
use crate::outcome::{Outcome, Stop};
use crate::report;
use crate::summary::Summary;

/// How long a case may take.
const LIMIT: Duration = Duration::from_secs(240);
/// How many cases may take longer. After that there is something wrong with more than these cases, and the others are not
/// worth such patience: all of them would take hours.
const STUCK: usize = 4;
/// How long a case may take then.
const STUCK_LIMIT: Duration = Duration::from_secs(20);
/// How long a case may take to show a planted bug: then it counts as failed too. If it takes longer without the bug as well,
/// on a machine that is busy, both are given the second limit.
const BUG_LIMITS: [Duration; 2] = [Duration::from_secs(20), LIMIT];
/// Most cases wait for a lease to end, so there can be more of them at a time than there are processors.
const TRIALS_PER_PROCESSOR: usize = 4;

/// The case that keeps all processors busy for as long as it takes. It runs alone, and last so that nobody waits for that:
/// beside it, nothing that is measured against a ttl could be told from a fault.
const ALONE: &str = "no_write_is_accepted_below_a_token_that_was_seen";
/// Whoever runs has a part of it.
static MACHINE: RwLock<()> = RwLock::new(());

/// All of the machine for that case, a part of it for any other, until dropped.
fn turn(
    sentence: &str,
) -> (
    Option<RwLockWriteGuard<'static, ()>>,
    Option<RwLockReadGuard<'static, ()>>,
) {
    let alone = sentence == ALONE;
    (
        alone.then(|| MACHINE.write().unwrap_or_else(PoisonError::into_inner)),
        (!alone).then(|| MACHINE.read().unwrap_or_else(PoisonError::into_inner)),
    )
}

/// Runs the suite on that backend, as the arguments of the process say, and prints a summary.
///
/// Fails if a case fails or if a planted bug is not caught. In a child process that the suite started it does what the
/// parent says instead; so call it first thing in `main`.
pub fn run(harness: impl Harness) -> ExitCode {
    run_with(Arc::new(harness), Bug::ALL)
}

/// As [`run`], without the planted bugs: for one more version of a server on which they are shown already.
pub fn run_without_bugs(harness: impl Harness) -> ExitCode {
    run_with(Arc::new(harness), &[])
}

fn run_with(harness: Arc<dyn Harness>, bugs: &'static [Bug]) -> ExitCode {
    if let Some(folder) = std::env::var_os(child::NAMESPACE) {
        return child::obey(&harness, folder.into());
    }
    let mut arguments = Arguments::from_args();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    arguments.test_threads.get_or_insert(processors * TRIALS_PER_PROCESSOR);
    let summary = Arc::new(Mutex::new(Summary::default()));
    let trials = trials(&harness, &summary, bugs);
    if arguments.list {
        return libtest_mimic::run(&arguments, trials).exit_code();
    }
    let setting = match begin(&harness) {
        Ok(setting) => setting,
        Err(Stop::Failed(reason) | Stop::NotApplicable(reason)) => {
            eprintln!("{} was not run: {reason}", harness.name());
            return ExitCode::FAILURE;
        }
    };
    if let Some(setting) = &setting {
        println!("{} on {setting}", harness.name());
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    let summary = locked(&summary);
    println!("{}", summary.render(harness.name(), setting.as_deref()));
    // Of a part of the suite nobody wants to read that it is all there is.
    if arguments.filter.is_none()
        && arguments.skip.is_empty()
        && let Err(error) = report::write(harness.name(), &summary.report(harness.name(), setting.as_deref()))
    {
        eprintln!("{}: the report could not be written: {error}", harness.name());
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

fn begin(harness: &Arc<dyn Harness>) -> Outcome<Option<String>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let begun = runtime.block_on(PATIENCE.within(LIMIT, harness.begin()));
    let begun = begun.ok_or_else(|| Stop::Failed(format!("no server was there within {LIMIT:?}")))?;
    begun.map_err(|error| Stop::Failed(error.to_string()))
}

fn trials(harness: &Arc<dyn Harness>, summary: &Arc<Mutex<Summary>>, bugs: &'static [Bug]) -> Vec<Trial> {
    let (mut trials, mut last) = (Vec::new(), Vec::new());
    for group in GROUPS {
        for &entry in group.cases {
            let trials = if entry.sentence == ALONE {
                &mut last
            } else {
                &mut trials
            };
            let name = format!("{}::{}", group.name, entry.sentence);
            let (harness, summary, reported) = (Arc::clone(harness), Arc::clone(summary), name.clone());
            trials.push(Trial::ignorable_test(name, move || {
                let _turn = turn(entry.sentence);
                let ran = run_case(harness, entry, LIMIT);
                locked(&summary).case(&reported, &ran);
                match ran.outcome {
                    Ok(()) => Ok(Completion::Completed),
                    Err(Stop::NotApplicable(reason)) => {
                        Ok(Completion::ignored_with(format!("not applicable: {reason}")))
                    }
                    Err(Stop::Failed(message)) => Err(Failed::from(format!("{message}\n{}", ran.history))),
                }
            }));
        }
    }
    for &bug in bugs {
        let (harness, summary) = (Arc::clone(harness), Arc::clone(summary));
        trials.push(Trial::ignorable_test(
            format!("planted_bugs::{}", bug.name()),
            move || {
                let _turn = turn(&bug.name());
                let hunt = hunt(&harness, bug);
                locked(&summary).bug(bug, &hunt);
                match hunt {
                    Hunt::Caught { .. } => Ok(Completion::Completed),
                    Hunt::NotApplicable(reason) => Ok(Completion::ignored_with(format!("not applicable: {reason}"))),
                    Hunt::Escaped(why) => Err(Failed::from(format!("the bug was not found out: {why}"))),
                }
            },
        ));
    }
    trials.append(&mut last);
    trials
}

/// One run of one case.
pub(crate) struct Ran {
    pub(crate) outcome: Outcome,
    pub(crate) findings: Findings,
    pub(crate) history: String,
    pub(crate) took: Duration,
    needs_own_server: bool,
    timed_out: bool,
}

impl Ran {
    fn without_case(stop: Stop) -> Self {
        Self {
            outcome: Err(stop),
            findings: Findings::default(),
            history: String::new(),
            took: Duration::ZERO,
            needs_own_server: false,
            timed_out: false,
        }
    }
}

/// What became of a planted bug.
pub(crate) enum Hunt {
    /// That case failed, and passes without the bug.
    Caught { by: String },
    /// It was not shown, for that reason.
    Escaped(String),
    /// It cannot be planted here, for that reason.
    NotApplicable(String),
}

/// Runs the case beside others, or alone if it turns out that it must be.
fn run_case(harness: Arc<dyn Harness>, entry: Entry, limit: Duration) -> Ran {
    let ran = run_once(Arc::clone(&harness), entry, limit, false);
    if ran.needs_own_server {
        return run_once(harness, entry, limit, true);
    }
    ran
}

/// With all that is run here.
static PATIENCE: Patience = Patience(AtomicUsize::new(0));

/// How long things may take; counts what took longer than [`LIMIT`].
struct Patience(AtomicUsize);

impl Patience {
    fn limit(&self, wanted: Duration) -> Duration {
        let stuck = self.0.load(Ordering::Relaxed) >= STUCK;
        if stuck { wanted.min(STUCK_LIMIT) } else { wanted }
    }

    /// What that comes to, or `None` when the time is up.
    async fn within<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        let output = tokio::time::timeout(limit, work).await.ok();
        if output.is_none() && limit >= LIMIT {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        output
    }
}

fn run_once(harness: Arc<dyn Harness>, entry: Entry, limit: Duration, own_server: bool) -> Ran {
    let limit = PATIENCE.limit(limit);
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return Ran::without_case(error.into()),
    };
    let began = Instant::now();
    let ran = runtime.block_on(async {
        let case = match PATIENCE.within(limit, Case::new(harness, own_server)).await {
            Some(Ok(case)) => case,
            Some(Err(stop)) => return Ran::without_case(stop),
            None => return Ran::without_case(Stop::Failed(format!("no client was made within {limit:?}"))),
        };
        // As a task, so that a panic is a failure with a history.
        let mut body = tokio::spawn((entry.run)(Arc::clone(&case)));
        let mut timed_out = false;
        let mut outcome = match PATIENCE.within(limit, &mut body).await {
            Some(Ok(outcome)) => outcome,
            Some(Err(panicked)) => Err(panicked.into()),
            None => {
                body.abort();
                timed_out = true;
                Err(Stop::Failed(format!("the case did not end within {limit:?}")))
            }
        };
        if outcome.is_ok() {
            outcome = match PATIENCE.within(limit, case.finish()).await {
                Some(outcome) => outcome,
                None => Err(Stop::Failed(format!("the clients did not close within {limit:?}"))),
            };
        } else {
            // The verdict stands; this only leaves less behind.
            let _ = tokio::time::timeout(Duration::from_secs(2), case.close()).await;
        }
        PATIENCE.within(limit, case.over()).await;
        Ran {
            outcome,
            findings: case.findings(),
            history: case.history(),
            took: began.elapsed(),
            needs_own_server: case.needs_own_server(),
            timed_out,
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(2));
    ran
}

fn hunt(harness: &Arc<dyn Harness>, bug: Bug) -> Hunt {
    match capabilities(harness).map(|capabilities| bug.plantable(&capabilities, &**harness)) {
        Ok(Ok(())) => {}
        Ok(Err(reason)) => return Hunt::NotApplicable(reason.to_owned()),
        Err(Stop::Failed(reason) | Stop::NotApplicable(reason)) => return Hunt::NotApplicable(reason),
    }
    let mut reasons = Vec::new();
    for &entry in bug.cases() {
        match hunt_in(harness, bug, entry) {
            None => {}
            Some(Hunt::NotApplicable(reason)) => reasons.push(reason),
            Some(hunt) => return hunt,
        }
    }
    if reasons.len() == bug.cases().len() {
        return Hunt::NotApplicable(reasons.join("; "));
    }
    Hunt::Escaped("every case passed".to_owned())
}

/// What one case says of a bug; `None` if it passes with it.
fn hunt_in(harness: &Arc<dyn Harness>, bug: Bug, entry: Entry) -> Option<Hunt> {
    let run = |bug, limit| {
        let broken = BrokenHarness::new(Arc::clone(harness), bug);
        run_case(Arc::new(broken), entry, limit)
    };
    let mut escaped = None;
    for limit in BUG_LIMITS {
        match run(bug, limit).outcome {
            Ok(()) => return None,
            Err(Stop::NotApplicable(reason)) => return Some(Hunt::NotApplicable(reason)),
            Err(Stop::Failed(_)) => {}
        }
        let control = run(Bug::Nothing, limit);
        let Err(Stop::Failed(why)) = control.outcome else {
            return Some(Hunt::Caught { by: full_name(entry) });
        };
        escaped = Some(Hunt::Escaped(format!(
            "{} fails without it too: {why}",
            full_name(entry)
        )));
        if !control.timed_out {
            break;
        }
    }
    escaped
}

fn full_name(entry: Entry) -> String {
    let mine = |case: &Entry| case.sentence == entry.sentence;
    let group = GROUPS.iter().find(|group| group.cases.iter().any(mine));
    format!("{}::{}", group.map_or("?", |group| group.name), entry.sentence)
}

fn capabilities(harness: &Arc<dyn Harness>) -> Outcome<Capabilities> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let namespace = Namespace::fresh(false)?;
    let capabilities = runtime.block_on(PATIENCE.within(LIMIT, async {
        let client = harness.client(&namespace).await?;
        let capabilities = client.capabilities();
        client.close().await?;
        harness.over(&namespace).await;
        Ok::<_, LockError>(capabilities)
    }));
    Ok(capabilities.ok_or_else(|| Stop::Failed(format!("no client was made within {LIMIT:?}")))??)
}

fn locked(summary: &Mutex<Summary>) -> MutexGuard<'_, Summary> {
    summary.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use lock_core::{DistributedLock, LockError, MemoryLock};

    use super::*;
    use crate::harness::{Fault, Injection};

    /// Restarts a server only if nobody else uses it.
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

    #[tokio::test(start_paused = true)]
    async fn when_several_cases_have_not_ended_the_others_are_given_less_time() {
        let patience = Patience(AtomicUsize::new(0));
        for limit in [STUCK_LIMIT; STUCK].into_iter().chain([LIMIT; STUCK]) {
            assert_eq!(patience.limit(LIMIT), LIMIT);
            assert!(patience.within(limit, std::future::pending::<()>()).await.is_none());
        }
        assert_eq!(patience.limit(LIMIT), STUCK_LIMIT);
        assert_eq!(patience.limit(STUCK_LIMIT / 2), STUCK_LIMIT / 2);
    }

    fn tokens_across_a_restart(shared: Shared) -> (Outcome, Vec<(bool, Injection)>) {
        let shared = Arc::new(shared);
        let case = GROUPS.iter().flat_map(|group| group.cases);
        let case = case
            .into_iter()
            .find(|case| case.sentence == "tokens_rise_across_a_restart");
        let ran = run_case(Arc::clone(&shared) as _, *case.unwrap(), LIMIT);
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
