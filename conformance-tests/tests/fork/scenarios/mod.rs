//! The scenarios: what a parent does before it forks, what its child finds, and what the parent has afterwards.

mod child;
mod parent;
mod under_load;

use std::fmt::Debug;
use std::future::Future;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fencelock::backend::DistributedLock;
use fencelock::{EtcdLock, LockError, Locks, MemoryLock, Options, PostgresLock, RedisLock, SqliteLock};
use tokio::runtime::{Builder, Runtime};

/// The ttl of all locks here: the shortest of etcd with its usual settings, and one more.
pub(crate) const TTL: Duration = Duration::from_secs(3);

/// How long an inherited client may take to say what it is.
pub(crate) const AT_ONCE: Duration = Duration::from_secs(3);

/// How long anything may take that has a server to ask.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// What one test plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scenario {
    name: &'static str,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// A fork while a lock is held.
    Held(Place, Ending),
    /// Forks while other threads take and release locks.
    UnderLoad,
    /// Forks while another thread makes the first client of its process.
    FirstConnect,
    /// A fork after the client was shut down.
    ShutDownBefore,
}

/// Where the client of the parent does its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Background,
    Threads,
    CurrentThread,
}

/// How the child ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// `main` returns, with all that runs at the end of a program.
    Returns,
    /// Nothing runs at the end.
    Killed,
}

impl Scenario {
    pub(crate) const ALL: &[Self] = &[
        Self::held("background_thread", Place::Background, Ending::Returns),
        Self::held(
            "background_thread_and_the_child_is_killed",
            Place::Background,
            Ending::Killed,
        ),
        Self::held("own_runtime_of_threads", Place::Threads, Ending::Returns),
        Self::held(
            "own_runtime_of_the_current_thread",
            Place::CurrentThread,
            Ending::Returns,
        ),
        Self {
            name: "twenty_forks_under_load",
            what: What::UnderLoad,
        },
        Self {
            name: "twenty_forks_during_the_first_connect",
            what: What::FirstConnect,
        },
        Self {
            name: "shut_down_before_the_fork",
            what: What::ShutDownBefore,
        },
    ];

    const fn held(name: &'static str, place: Place, ending: Ending) -> Self {
        Self {
            name,
            what: What::Held(place, ending),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|scenario| scenario.name == name)
    }

    pub(crate) fn is_for(&self, backend: &str) -> bool {
        match self.what {
            What::ShutDownBefore => backend == "sqlite",
            // It refuses the child in the middle of a connect.
            What::FirstConnect => backend != "sqlite",
            What::Held(..) | What::UnderLoad => true,
        }
    }

    pub(crate) fn play(self, url: &str) -> ExitCode {
        match self.what {
            What::Held(place, ending) => parent::forks(url, place, ending),
            What::UnderLoad => under_load::forks(url),
            What::FirstConnect => under_load::forks_during_the_first_connect(url),
            What::ShutDownBefore => parent::forks_after_shutdown(url),
        }
    }
}

/// Tells what comes next, so that a hang has a name.
pub(crate) fn step(what: &str) {
    eprintln!("{} {what}", std::process::id());
}

pub(crate) fn is_memory(url: &str) -> bool {
    url.starts_with("memory:")
}

pub(crate) fn is_sqlite(url: &str) -> bool {
    url.starts_with("sqlite:")
}

pub(crate) fn connect(url: &str, options: Options) -> Result<Locks, LockError> {
    futures_executor::block_on(fencelock::connect_with(
        url,
        options.ttl(TTL).op_timeout(Duration::from_secs(5)),
    ))
}

/// The backend alone, as a caller has it who makes the client later.
pub(crate) async fn backend(url: &str) -> Result<Arc<dyn DistributedLock>, LockError> {
    let (scheme, rest) = url.split_once(':').unwrap();
    Ok(match scheme {
        "memory" => Arc::new(MemoryLock::new()),
        "sqlite" => Arc::new(SqliteLock::open(rest).await?),
        "redis" => Arc::new(RedisLock::connect(url).await?),
        "etcd" => Arc::new(EtcdLock::connect(url).await?),
        _ => Arc::new(PostgresLock::connect(url).await?),
    })
}

/// The names of one run, on a server that others use, too.
pub(crate) fn scope(of: u32) -> String {
    format!("fork-{of}")
}

/// Waits until `done`, which is to happen within `limit`.
pub(crate) fn until(what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < limit, "{what}: not within {limit:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The error of an inherited client: at once, with the name if there is one, and not worth a retry.
pub(crate) fn assert_inherited<T: Debug>(what: &str, name: Option<&str>, ask: impl FnOnce() -> Result<T, LockError>) {
    step(what);
    let began = Instant::now();
    let error = ask().expect_err(what);
    let took = began.elapsed();
    assert!(took < AT_ONCE, "{what} took {took:?}");
    assert!(matches!(error, LockError::Configuration { .. }), "{what}: {error:?}");
    assert!(!error.is_retryable(), "{what}: {error:?}");
    let text = error.to_string();
    assert!(
        text.contains("fork") && text.contains("connect a new client"),
        "{what}: {text}"
    );
    assert_eq!(error.name().map(ToString::to_string).as_deref(), name, "{what}");
}

/// The runtime of the parent's client.
pub(crate) enum Driver {
    Background,
    Threads(Runtime),
    CurrentThread(Runtime),
}

impl Driver {
    pub(crate) fn new(place: Place) -> Self {
        match place {
            Place::Background => Self::Background,
            Place::Threads => Self::Threads(
                Builder::new_multi_thread()
                    .worker_threads(2)
                    .enable_all()
                    .build()
                    .unwrap(),
            ),
            Place::CurrentThread => Self::CurrentThread(Builder::new_current_thread().enable_all().build().unwrap()),
        }
    }

    pub(crate) fn options(&self) -> Options {
        match self {
            Self::Background => Options::new(),
            Self::Threads(runtime) | Self::CurrentThread(runtime) => Options::new().runtime(runtime.handle().clone()),
        }
    }

    pub(crate) fn run<F: Future>(&self, work: F) -> F::Output {
        match self {
            Self::Background => futures_executor::block_on(work),
            Self::Threads(runtime) | Self::CurrentThread(runtime) => runtime.block_on(work),
        }
    }

    /// How many tasks the runtime has.
    pub(crate) fn tasks(&self) -> Option<usize> {
        match self {
            Self::Background => None,
            Self::Threads(runtime) | Self::CurrentThread(runtime) => Some(runtime.metrics().num_alive_tasks()),
        }
    }

    /// Lets time pass, in which the runtime works.
    pub(crate) fn pass(&self, time: Duration) {
        match self {
            Self::CurrentThread(runtime) => runtime.block_on(async { tokio::time::sleep(time).await }),
            Self::Background | Self::Threads(_) => thread::sleep(time),
        }
    }
}
