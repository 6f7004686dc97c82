//! The suite on one backend, or on several side by side in one program.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Conclusion, Failed, Trial};

use crate::broken::Bug;
use crate::child;
use crate::harness::Harness;
use crate::row::{Phase, Row};
use crate::run_case::Limits;

/// Most cases wait for a lease to end, so more of them run at a time than there are processors.
const TRIALS_PER_PROCESSOR: usize = 4;
/// The same where several backends are under the suite.
const TRIALS_OF_SEVERAL: usize = 10;

/// Runs the suite on that backend, as the arguments of the process say, and prints a summary.
///
/// Fails if a case fails, if a planted bug is not caught, if either could not be judged, and if what is skipped is not what
/// the harness [knows to be skipped](Harness::known_skips). In a child process that the suite started it does what the
/// parent says instead; so call it first thing in `main`.
pub fn run(harness: impl Harness) -> ExitCode {
    let suite = Suite::new().row("the", harness);
    suite.run_rows(&[], false)
}

/// As [`run`], without the planted bugs: for one more version of a server on which they are shown already.
pub fn run_without_bugs(harness: impl Harness) -> ExitCode {
    let mut suite = Suite::new();
    suite.rows.push(Row::new("the", Arc::new(harness)));
    suite.run_rows(&[], false)
}

/// Several backends, or one with several kinds of servers, under the suite in one program.
///
/// Each is a row with a key, and the names of its trials begin with that: `redis::tokens::...`.
#[derive(Default)]
pub struct Suite {
    rows: Vec<Row>,
}

impl fmt::Debug for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.rows.iter().map(|row| &row.key)).finish()
    }
}

impl Suite {
    /// Without a row.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A row with every case and every planted bug.
    #[must_use]
    pub fn row(mut self, key: &str, harness: impl Harness) -> Self {
        let mut row = Row::new(key, Arc::new(harness));
        row.bugs = Bug::all().collect();
        self.rows.push(row);
        self
    }

    /// A row with every case, and the planted bugs with these names.
    ///
    /// # Panics
    ///
    /// If there is no planted bug of such a name.
    #[must_use]
    pub fn backend_row(mut self, key: &str, harness: impl Harness, bugs: &[&str]) -> Self {
        let mut row = Row::new(key, Arc::new(harness));
        for name in bugs {
            let bug = Bug::all().find(|bug| bug.words() == *name);
            assert!(bug.is_some(), "there is no planted bug that is called {name:?}");
            row.bugs.extend(bug);
        }
        self.rows.push(row);
        self
    }

    /// Runs the rows with these keys, or all of them if there are none, side by side, as [`run`] does, with the arguments of the process.
    pub fn run(self, keys: &[&str]) -> ExitCode {
        self.run_rows(keys, true)
    }

    fn run_rows(mut self, keys: &[&str], prefixed: bool) -> ExitCode {
        if let Some(folder) = std::env::var_os(child::NAMESPACE) {
            let key = std::env::var(child::ROW).unwrap_or_default();
            let row = self.rows.iter().find(|row| *row.key == *key);
            return match row {
                Some(row) => child::obey(&row.harness, folder.into()),
                None => failed(&format!("there is no row {key:?}")),
            };
        }
        if prefixed {
            if let Some(unknown) = keys.iter().find(|key| self.rows.iter().all(|row| *row.key != ***key)) {
                let known: Vec<_> = self.rows.iter().map(|row| &*row.key).collect();
                return failed(&format!("there is no row {unknown:?}; there are {}", known.join(", ")));
            }
            self.rows.retain(|row| keys.is_empty() || keys.contains(&&*row.key));
        }
        let rows: Vec<_> = self.rows.into_iter().map(Arc::new).collect();
        let mut arguments = Arguments::from_args();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let each = if prefixed {
            TRIALS_OF_SEVERAL
        } else {
            TRIALS_PER_PROCESSOR
        };
        let threads = *arguments.test_threads.get_or_insert(processors * each);
        let (many, few) = match phases(&rows, &arguments, prefixed) {
            Ok(phases) => phases,
            Err(reason) => return failed(&reason),
        };
        if arguments.list {
            let all = many.into_iter().chain(few).collect();
            return libtest_mimic::run(&arguments, all).exit_code();
        }
        let first = libtest_mimic::run(&arguments, many);
        arguments.test_threads = Some(threads.min(processors));
        let second = libtest_mimic::run(&arguments, few);
        for row in &rows {
            // Of a part of the suite nothing may look as if it were the whole.
            let mut trials = row.trials(prefixed).into_iter();
            let whole = trials.all(|(_, name, _)| is_wanted(&arguments, &name));
            if let Err(error) = row.tell(whole) {
                return failed(&format!("{}: the report was not written: {error}", row.harness.name()));
            }
        }
        let is_good = |conclusion: &Conclusion| !conclusion.has_failed();
        if is_good(&first) && is_good(&second) {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

/// The trials that wait and those that keep the processors busy, of the rows whose servers are there.
fn phases(rows: &[Arc<Row>], arguments: &Arguments, prefixed: bool) -> Result<(Vec<Trial>, Vec<Trial>), String> {
    let (mut many, mut few) = (Vec::new(), Vec::new());
    let mut trials: Vec<_> = rows.iter().map(|row| (row, row.trials(prefixed))).collect();
    if !arguments.list {
        trials.retain(|(_, trials)| trials.iter().any(|(_, name, _)| is_wanted(arguments, name)));
        for (row, _) in &trials {
            let unknown = row.unknown_skips();
            if !unknown.is_empty() {
                let (name, unknown) = (row.harness.name(), unknown.join(", "));
                return Err(format!(
                    "{name}: the list of skips names what is neither a case nor a planted bug: {unknown}"
                ));
            }
        }
        let begun: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = trials
                .iter()
                .map(|(row, _)| scope.spawn(|| begin(&row.harness)))
                .collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<_, _>>| {
                thread.join().unwrap_or_else(|_| Err("it panicked".to_owned()))
            };
            threads.into_iter().map(join).collect()
        });
        for ((row, trials), begun) in trials.iter_mut().zip(begun) {
            match begun {
                Ok(Some(setting)) => {
                    println!("{} on {setting}", row.harness.name());
                    *row.setting() = Some(setting);
                }
                Ok(None) => {}
                Err(reason) => {
                    // One failure with the reason, not as many as there are trials; whatever filter is set.
                    let all = trials.len();
                    let name = trials
                        .iter()
                        .map(|(_, name, _)| name)
                        .find(|name| is_wanted(arguments, name))
                        .cloned()
                        .unwrap_or_default();
                    let reason = format!("{} was not run, {all} trials: {reason}", row.harness.name());
                    row.summary().not_run(all, &reason);
                    let trial = Trial::test(name.clone(), move || Err(Failed::from(reason)));
                    *trials = vec![(Phase::Many, name, trial)];
                }
            }
        }
    }
    // One of each row after the other, so that no server has to do everything at once.
    let mut queues: Vec<_> = trials.into_iter().map(|(_, trials)| trials.into_iter()).collect();
    while !queues.is_empty() {
        queues.retain_mut(|queue| match queue.next() {
            Some((Phase::Many, _, trial)) => {
                many.push(trial);
                true
            }
            Some((Phase::Few, _, trial)) => {
                few.push(trial);
                true
            }
            None => false,
        });
    }
    Ok((many, few))
}

/// As the test runner decides it.
fn is_wanted(arguments: &Arguments, name: &str) -> bool {
    let fits = |pattern: &String| match arguments.exact {
        true => name == pattern,
        false => name.contains(pattern.as_str()),
    };
    arguments.filter.as_ref().is_none_or(fits) && !arguments.skip.iter().any(fits)
}

fn begin(harness: &Arc<dyn Harness>) -> Result<Option<String>, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let limit = Limits::GENEROUS.case;
    match runtime.block_on(async { tokio::time::timeout(limit, harness.begin()).await }) {
        Ok(begun) => begun.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no server was there within {limit:?}")),
    }
}

fn failed(reason: &str) -> ExitCode {
    eprintln!("{reason}");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use lock_core::{DistributedLock, LockError, MemoryLock};

    use super::*;
    use crate::harness::Namespace;

    /// Its server does not answer any more after that many clients.
    struct Gone(MemoryLock, AtomicUsize);

    #[async_trait]
    impl Harness for Gone {
        fn name(&self) -> &str {
            "gone"
        }

        async fn client(&self, _: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
            let left = self
                .1
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            match left {
                Ok(_) => Ok(Arc::new(self.0.client())),
                Err(_) => Err(LockError::unavailable("connecting", "nothing listens there".to_owned())),
            }
        }

        fn known_skips(&self) -> Option<&str> {
            Some("loss::a_restart_loses_no_lock_without_telling: the harness cannot bring about a restart")
        }
    }

    fn run_of(filter: &str, clients: usize) -> (Conclusion, String) {
        let mut row = Row::new("gone", Arc::new(Gone(MemoryLock::new(), AtomicUsize::new(clients))));
        row.bugs = Bug::all().collect();
        let row = Arc::new(row);
        let mut arguments = Arguments::from_iter(["suite", "--quiet", filter]);
        arguments.test_threads = Some(1);
        // What it prints is no result of these tests.
        let printed = tempfile::NamedTempFile::new().unwrap();
        arguments.logfile = Some(printed.path().display().to_string());
        let (many, few) = phases(&[Arc::clone(&row)], &arguments, false).unwrap();
        let conclusion = libtest_mimic::run(&arguments, many.into_iter().chain(few).collect());
        let rendered = row.summary().render("gone", None);
        (conclusion, rendered)
    }

    #[test]
    fn when_the_server_is_gone_the_run_fails_and_says_what_it_could_not_judge() {
        let (conclusion, summary) = run_of("renewal_leaves_the_token_as_it_is", 1);
        assert!(conclusion.has_failed());
        assert!(
            summary.starts_with("gone: 0 passed, 0 failed, 0 not applicable, 1 NOT JUDGED"),
            "{summary}"
        );
        let (conclusion, summary) = run_of("planted_bugs::random_tokens", 0);
        assert!(conclusion.has_failed());
        assert!(
            summary.contains("planted bugs 0 of 1 caught, 1 NOT JUDGED"),
            "{summary}"
        );
    }

    #[test]
    fn only_what_is_known_to_be_skipped_is_skipped() {
        let (conclusion, _) = run_of("a_restart_loses_no_lock_without_telling", usize::MAX);
        assert!(!conclusion.has_failed());
        assert_eq!(conclusion.num_ignored, 1);
        let (conclusion, summary) = run_of("tokens_rise_across_a_restart_without_data", usize::MAX);
        assert!(conclusion.has_failed(), "{summary}");
    }
}
