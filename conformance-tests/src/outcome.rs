//! How a case ends.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lock_core::LockError;

/// Why a case ended before its end.
#[derive(Clone, Debug)]
pub(crate) enum Stop {
    /// The backend did not do what is expected of it.
    Failed(String),
    /// The case says nothing about this backend, for that reason.
    NotApplicable(String),
    /// Nothing can be said, for that reason: the server did not answer, for example. The run fails.
    NotJudged(String),
}

pub(crate) type Outcome<T = ()> = Result<T, Stop>;

impl Stop {
    pub(crate) fn not_applicable(reason: impl Into<String>) -> Self {
        Self::NotApplicable(reason.into())
    }

    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::Failed(reason) | Self::NotApplicable(reason) | Self::NotJudged(reason) => reason,
        }
    }
}

impl From<LockError> for Stop {
    fn from(error: LockError) -> Self {
        Self::Failed(format!("an operation failed that should work: {error:#} ({error:?})"))
    }
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(format!("the system failed: {error}"))
    }
}

impl From<tokio::task::JoinError> for Stop {
    fn from(error: tokio::task::JoinError) -> Self {
        Self::Failed(format!("a task failed: {error}"))
    }
}

/// How many expectations a case has checked. Each case has threads of its own, which know the counter of theirs.
#[derive(Clone, Default)]
pub(crate) struct Checks(Arc<AtomicUsize>);

thread_local! {
    static CHECKS: RefCell<Option<Checks>> = const { RefCell::new(None) };
}

impl Checks {
    /// From now on this thread's checks count here.
    pub(crate) fn count_here(&self) {
        CHECKS.set(Some(self.clone()));
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// An expectation is about to be checked.
pub(crate) fn checked() {
    CHECKS.with_borrow(|checks| {
        if let Some(Checks(checks)) = checks {
            checks.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// Ends the case as failed unless the condition holds: of whom what is expected, then what was seen instead.
macro_rules! ensure {
    ($condition:expr, $whom:literal, $($what:tt)+) => {{
        $crate::outcome::checked();
        if !$condition {
            return Err($crate::outcome::Stop::Failed(format!(
                concat!("expected of ", $whom, ": {}"),
                format_args!($($what)+)
            )));
        }
    }};
}
pub(crate) use ensure;

/// Ends the case as failed: of whom what is expected, then what was seen instead.
macro_rules! fail {
    ($whom:literal, $($what:tt)+) => {
        return Err($crate::outcome::Stop::Failed(format!(
            concat!("expected of ", $whom, ": {}"),
            format_args!($($what)+)
        )))
    };
}
pub(crate) use fail;
