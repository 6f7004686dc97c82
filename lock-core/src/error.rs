//! Errors.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::{Holder, InvalidName, LockName, LossReason, Mode};

/// The cause of an error, as the constructors of [`LockError`] take it.
pub type Source = Box<dyn Error + Send + Sync>;

/// Why a lock operation failed.
///
/// A lock that another client held to the end of the wait is [`TimedOut`](Self::TimedOut); a server that did not respond is
/// [`Unavailable`](Self::Unavailable).
///
/// # Display
///
/// `{}` is one line that names the lock, without the cause ([`source`](Error::source)) and without the [`holder`](Self::holder), so that a
/// handler may show it to strangers. `{:#}` adds all causes, as `anyhow` prints them. `{:?}`, which `main`, `unwrap` and `expect` print, also
/// adds the holder, if it is known.
///
/// ```
/// # use fencelock::LockError;
/// let refused = std::io::Error::other("connection refused");
/// let error = LockError::failed("acquire", refused).of(&"stock/1".parse()?);
/// assert_eq!(error.to_string(), "lock \"stock/1\": acquire failed");
/// assert_eq!(format!("{error:#}"), "lock \"stock/1\": acquire failed: connection refused");
/// # Ok::<(), LockError>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub enum LockError {
    /// The lock stayed busy until the wait was over. See [`is_busy`](Self::is_busy).
    #[non_exhaustive]
    TimedOut {
        /// The lock.
        name: LockName,
        /// The length of the wait; zero if the request did not wait.
        waited: Duration,
        /// The holder, if it is known.
        holder: Option<Box<Holder>>,
    },

    /// The lock was lost while it was held.
    #[non_exhaustive]
    Lost {
        /// The lock.
        name: LockName,
        /// Why.
        reason: LossReason,
    },

    /// The name cannot be used.
    InvalidName(InvalidName),

    /// The ttl is outside of what the backend can keep.
    #[non_exhaustive]
    InvalidTtl {
        /// The lock.
        name: LockName,
        /// The requested ttl.
        ttl: Duration,
        /// The shortest possible.
        min: Duration,
        /// The longest possible.
        max: Duration,
    },

    /// The name is in use as another kind: as a lock, as a semaphore, or as a semaphore with another number of permits.
    #[non_exhaustive]
    InvalidMode {
        /// The lock.
        name: LockName,
        /// What was asked for.
        asked: Mode,
        /// What it is.
        found: Mode,
    },

    /// The backend could not be reached, or did not respond in time. Worth a retry. The server may have done what was requested: a lock that was
    /// requested is released in the background, and one that was to be renewed stays held until its deadline.
    Unavailable(ErrorInfo),

    /// The server found a deadlock between this wait and another.
    Deadlock(ErrorInfo),

    /// The server has settings with which locks would not exclude.
    UnsafeConfiguration(ErrorInfo),

    /// The address, the credentials, the permissions or the file are wrong, or the client is that of the parent of a forked child. A retry does
    /// not help.
    Configuration(ErrorInfo),

    /// This backend cannot do that.
    NotSupported(ErrorInfo),

    /// The client was shut down.
    Closed(ErrorInfo),
}

/// What is known about a [`LockError`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ErrorInfo {
    /// The lock, unless the operation is about all or none.
    pub name: Option<LockName>,
    /// What failed, or is not supported. May be empty.
    pub operation: &'static str,
    /// What happened, and what to change. May be empty.
    pub message: String,
    /// The cause. Shared, as several waiters may fail with one request.
    pub source: Option<Arc<dyn Error + Send + Sync>>,
    /// There was no connection for the request, so that it cannot have reached the server.
    is_unsent: bool,
    /// There was no connection for it or for one that belongs to it.
    is_refused: bool,
    /// It cannot pass with the settings of this client.
    is_lasting: bool,
}

impl ErrorInfo {
    fn new(operation: &'static str, message: impl Into<String>) -> Self {
        Self {
            operation,
            message: message.into(),
            ..Self::default()
        }
    }
}

/// What is known about that error, shared or mutable as it is.
macro_rules! info_of {
    ($error:expr) => {
        match $error {
            LockError::Unavailable(info)
            | LockError::Deadlock(info)
            | LockError::UnsafeConfiguration(info)
            | LockError::Configuration(info)
            | LockError::NotSupported(info)
            | LockError::Closed(info) => Some(info),
            _ => None,
        }
    };
}

impl LockError {
    /// The lock stayed busy for `waited`.
    pub fn timed_out(name: &LockName, waited: Duration, holder: Option<Holder>) -> Self {
        let (name, holder) = (name.clone(), holder.map(Box::new));
        Self::TimedOut { name, waited, holder }
    }

    /// The name is in use as `found`, and was requested as another kind.
    pub fn invalid_mode(name: &LockName, asked: Mode, found: Mode) -> Self {
        let name = name.clone();
        Self::InvalidMode { name, asked, found }
    }

    /// The backend failed to do `operation` because of `source`.
    pub fn failed(operation: &'static str, source: impl Into<Source>) -> Self {
        Self::unavailable(operation, "").with_source(source)
    }

    /// The backend failed to do `operation`; `message` says why, and what to do.
    pub fn unavailable(operation: &'static str, message: impl Into<String>) -> Self {
        Self::Unavailable(ErrorInfo::new(operation, message))
    }

    /// The backend did not answer `operation` within `limit`.
    pub fn no_answer(operation: &'static str, limit: Duration) -> Self {
        // Rounded for display.
        let step = if limit < Duration::from_secs(1) { 1 } else { 100 };
        let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX - step);
        let limit = Duration::from_millis((millis + step / 2) / step * step);
        Self::unavailable(operation, format!("no answer within {limit:?}"))
    }

    /// A configuration that a person must change; `message` says how.
    pub fn configuration(message: impl Into<String>) -> Self {
        Self::Configuration(ErrorInfo::new("", message))
    }

    /// A configuration under which locks would not exclude; `message` says what to change.
    pub fn unsafe_configuration(message: impl Into<String>) -> Self {
        Self::UnsafeConfiguration(ErrorInfo::new("", message))
    }

    /// The server found a deadlock and reported `source`.
    pub fn deadlock(source: impl Into<Source>) -> Self {
        Self::Deadlock(ErrorInfo::default()).with_source(source)
    }

    /// The backend cannot do `operation`.
    pub fn not_supported(operation: &'static str) -> Self {
        Self::NotSupported(ErrorInfo::new(operation, ""))
    }

    /// The client was shut down.
    pub fn closed() -> Self {
        Self::Closed(ErrorInfo::default())
    }

    /// Adds the cause. Its text should not be in the message, as it is printed behind it. Errors without an [`ErrorInfo`] have no cause, and
    /// stay as they are.
    pub fn with_source(self, cause: impl Into<Source>) -> Self {
        self.with_info(|info| info.source = Some(cause.into().into()))
    }

    /// Adds that there was no connection, so that the request cannot have reached the server. Errors without an [`ErrorInfo`] stay as they
    /// are.
    ///
    /// A claim whose requests were not sent needs no release. Credentials that are refused to a client that was connected before are retried.
    pub fn unsent(self) -> Self {
        self.with_info(|info| (info.is_unsent, info.is_refused) = (true, true))
    }

    /// Reverses [`unsent`](Self::unsent), as when a first request was sent, and there was no connection for a second one.
    pub fn maybe_sent(self) -> Self {
        self.with_info(|info| info.is_unsent = false)
    }

    /// Adds that the response cannot change with the settings of this client, as when the server demands a certificate and the client has none.
    /// The request is not retried then, even if it was [`unsent`](Self::unsent).
    pub fn lasting(self) -> Self {
        self.with_info(|info| info.is_lasting = true)
    }

    /// Whether the request cannot have reached the server, because there was no connection.
    #[must_use]
    pub fn is_unsent(&self) -> bool {
        self.info().is_some_and(|info| info.is_unsent)
    }

    /// Whether a wait goes on after it.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }

    /// The same error as one that may pass, if the server refused the connection.
    pub(crate) fn refused_for_now(self) -> Self {
        match self {
            Self::Configuration(info) if info.is_refused && !info.is_lasting => Self::Unavailable(ErrorInfo {
                operation: "connecting",
                ..info
            }),
            other => other,
        }
    }

    /// The same error at the end of a wait of several parts, which took `total`.
    pub(crate) fn after(mut self, total: Duration) -> Self {
        if let Self::TimedOut { waited, .. } = &mut self {
            *waited = total;
        }
        self
    }

    /// The same error, about the lock `name` if it names none so far.
    pub fn of(self, name: &LockName) -> Self {
        self.with_info(|info| {
            info.name.get_or_insert_with(|| name.clone());
        })
    }

    /// The lock that the error is about, if it is about one with a usable name.
    #[must_use]
    pub fn name(&self) -> Option<&LockName> {
        match self {
            Self::TimedOut { name, .. }
            | Self::Lost { name, .. }
            | Self::InvalidTtl { name, .. }
            | Self::InvalidMode { name, .. } => Some(name),
            _ => self.info()?.name.as_ref(),
        }
    }

    /// The client that held the lock at the end of the wait, if the error is [`TimedOut`](Self::TimedOut) and the holder is known. Do not show
    /// its label, host and process identifier to strangers.
    #[must_use]
    pub fn holder(&self) -> Option<&Holder> {
        match self {
            Self::TimedOut { holder, .. } => holder.as_deref(),
            _ => None,
        }
    }

    /// Returns whether another client held the lock to the end of the wait.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::TimedOut { .. })
    }

    /// Returns whether the same call may succeed later without a change of the configuration.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Lost { .. } | Self::TimedOut { .. } | Self::Unavailable(_) | Self::Deadlock(_)
        )
    }

    fn info(&self) -> Option<&ErrorInfo> {
        info_of!(self)
    }

    /// The same error with what is known about it changed.
    fn with_info(mut self, change: impl FnOnce(&mut ErrorInfo)) -> Self {
        if let Some(info) = info_of!(&mut self) {
            change(info);
        }
        self
    }

    fn line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.name()) {
            (Self::TimedOut { .. } | Self::Lost { .. }, _) | (_, None) => {}
            (_, Some(name)) => write!(f, "lock \"{name}\": ")?,
        }
        match self {
            Self::TimedOut { name, waited, .. } if waited.is_zero() => write!(f, "lock \"{name}\" is already held"),
            Self::TimedOut { name, waited, .. } => write!(f, "lock \"{name}\" was still held after {waited:.1?}"),
            Self::Lost { name, reason } => write!(f, "lock \"{name}\" was lost: {reason}"),
            Self::InvalidName(invalid) => write!(f, "{invalid}"),
            Self::InvalidMode { asked, found, .. } => write!(
                f,
                "it is in use as {found}, and was asked for as {asked}; use another name for one of them"
            ),
            Self::InvalidTtl { ttl, min, max, .. } => {
                write!(
                    f,
                    "a ttl of {ttl:?} is not possible here; choose one from {min:?} to {max:?}"
                )
            }
            Self::Unavailable(info) if info.message.is_empty() => write!(f, "{} failed", info.operation),
            Self::Unavailable(info) => write!(f, "{} failed: {}", info.operation, info.message),
            Self::Deadlock(_) => f.write_str("the server found a deadlock; take locks in the same order everywhere"),
            Self::UnsafeConfiguration(info) => write!(f, "unsafe configuration: {}", info.message),
            Self::Configuration(info) => f.write_str(&info.message),
            Self::NotSupported(info) => write!(f, "this backend does not support {}", info.operation),
            Self::Closed(_) => f.write_str("the lock client was shut down; connect a new one"),
        }
    }
}

impl From<InvalidName> for LockError {
    fn from(invalid: InvalidName) -> Self {
        Self::InvalidName(invalid)
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.line(f)?;
        let mut cause = self.source().filter(|_| f.alternate());
        let mut said = String::new();
        while let Some(error) = cause {
            let text = error.to_string();
            // Some libraries repeat the cause of their errors.
            if !said.ends_with(&text) {
                write!(f, ": {text}")?;
                said = text;
            }
            cause = error.source();
        }
        Ok(())
    }
}

impl fmt::Debug for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:#}")?;
        self.holder().map_or(Ok(()), |holder| write!(f, " by {holder}"))
    }
}

impl Error for LockError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(self.info()?.source.as_deref()? as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_to_do_and_the_cause_once_and_no_holder() {
        let name: LockName = "stock/1".parse().unwrap();
        let broken = || LockError::failed("renewal", std::io::Error::other("broken pipe"));
        let ttl = LockError::InvalidTtl {
            name: name.clone(),
            ttl: Duration::ZERO,
            min: Duration::from_millis(100),
            max: Duration::from_secs(60),
        };
        let busy = |millis| LockError::timed_out(&name, Duration::from_millis(millis), None);
        let limit = |nanos| LockError::no_answer("acquire", Duration::from_nanos(nanos));
        let closed = || LockError::closed().of(&name).of(&"other".parse().unwrap());
        for (error, line, causes) in [
            (
                ttl,
                "lock \"stock/1\": a ttl of 0ns is not possible here; choose one from 100ms to 60s",
                "",
            ),
            (busy(5_040), "lock \"stock/1\" was still held after 5.0s", ""),
            (busy(0), "lock \"stock/1\" is already held", ""),
            (broken(), "renewal failed", ": broken pipe"),
            (broken().of(&name), "lock \"stock/1\": renewal failed", ": broken pipe"),
            (
                closed(),
                "lock \"stock/1\": the lock client was shut down; connect a new one",
                "",
            ),
            // A limit is told in round figures.
            (limit(4_999_687_745), "acquire failed: no answer within 5s", ""),
            (limit(1_540_000_000), "acquire failed: no answer within 1.5s", ""),
            (limit(99_600_000), "acquire failed: no answer within 99ms", ""),
        ] {
            assert_eq!(error.to_string(), line);
            assert_eq!(format!("{error:#}"), format!("{line}{causes}"));
            assert_eq!(format!("{error:#?}"), format!("{error:#}"));
        }
        // The operator sees the holder, strangers do not.
        let holder = Holder {
            host: Some("db-7.internal".to_owned()),
            pid: Some(7),
            label: Some("nightly".to_owned()),
            ..Holder::default()
        };
        let busy = LockError::timed_out(&name, Duration::ZERO, Some(holder));
        assert_eq!(format!("{busy:#}"), "lock \"stock/1\" is already held");
        assert_eq!(
            format!("{busy:?}"),
            "lock \"stock/1\" is already held by db-7.internal:7 (nightly)"
        );
    }
}
