//! How a case ends.

use lock_core::LockError;

/// Why a case ended before its end.
#[derive(Clone, Debug)]
pub(crate) enum Stop {
    /// The backend did not do what is expected of it.
    Failed(String),
    /// The case says nothing about this backend, for that reason.
    NotApplicable(String),
}

pub(crate) type Outcome<T = ()> = Result<T, Stop>;

impl Stop {
    pub(crate) fn not_applicable(reason: impl Into<String>) -> Self {
        Self::NotApplicable(reason.into())
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

/// Ends the case as failed unless the condition holds: of whom what is expected, then what was seen instead.
macro_rules! ensure {
    ($condition:expr, $whom:literal, $($what:tt)+) => {
        if !$condition {
            return Err($crate::outcome::Stop::Failed(format!(
                concat!("expected of ", $whom, ": {}"),
                format_args!($($what)+)
            )));
        }
    };
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
