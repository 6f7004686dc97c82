//! What can go wrong, and what to do about it.

mod text;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use crate::{Holder, InvalidName, LockName, LossReason, Mode};

/// The cause of an error, as the constructors of [`LockError`] take it.
pub type Source = Box<dyn Error + Send + Sync>;

/// Why a lock operation failed.
///
/// "Busy" and "broken" are never confused: a lock that another client held to the end of the wait is
/// [`TimedOut`](Self::TimedOut), a server that did not answer is [`Unavailable`](Self::Unavailable).
///
/// # Display
///
/// `{}` is one line that names the lock. It repeats neither the cause, which is [`source`](Error::source), nor the holder, which is
/// [`holder`](Self::holder): a handler may pass it on to strangers. `{:#}` is the line with all causes behind it, as `anyhow` prints
/// them. `{:?}` is the same with the holder, if it is known: for the log and the terminal of the operator. `main`, `unwrap` and `expect` print it.
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

    /// The backend could not be reached, or did not answer in time. Worth a retry. What was asked for may have been done: a lock that was
    /// asked for is released again in the background, and one that was to be renewed stays held until its deadline.
    #[non_exhaustive]
    Unavailable {
        /// The lock, unless the operation is about all or none.
        name: Option<LockName>,
        /// What was tried.
        operation: &'static str,
        /// What happened, if the cause does not tell.
        message: Option<String>,
        /// The cause, if there is one; shared because several waiters may fail with one request.
        source: Option<Arc<dyn Error + Send + Sync>>,
        /// Whether the request cannot have reached the server, because there was no connection.
        unsent: bool,
    },

    /// The lock was held and is not any more: the body outlived its lock, or was cancelled because the lock was lost.
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

    /// The name is in use as something else: an exclusive or shared lock as a semaphore, or a semaphore as one of another number.
    #[non_exhaustive]
    InvalidMode {
        /// The lock.
        name: LockName,
        /// What was asked for.
        asked: Mode,
        /// What it is.
        found: Mode,
    },

    /// The server found that this wait and another could only wait for each other.
    #[non_exhaustive]
    Deadlock {
        /// The lock, if it is known.
        name: Option<LockName>,
        /// The server's words, if there are any.
        source: Option<Arc<dyn Error + Send + Sync>>,
    },

    /// The server is set up in a way under which locks would not exclude.
    #[non_exhaustive]
    UnsafeConfiguration {
        /// The lock, unless the operation is about all or none.
        name: Option<LockName>,
        /// What is unsafe and what to change.
        message: String,
    },

    /// The address, the credentials, the permissions or the file are wrong, or this is a forked child and the client is its parent's. A
    /// retry will not help.
    #[non_exhaustive]
    Configuration {
        /// The lock, unless the operation is about all or none.
        name: Option<LockName>,
        /// What is wrong and what to change.
        message: String,
        /// The cause, if there is one; shared because several waiters may fail with one request.
        source: Option<Arc<dyn Error + Send + Sync>>,
        /// Whether the server refused the connection.
        refused: bool,
        /// Whether that cannot pass while this client is set up as it is.
        lasting: bool,
        /// Whether the request cannot have reached the server, because the connection was refused.
        unsent: bool,
    },

    /// This backend cannot do that.
    #[non_exhaustive]
    NotSupported {
        /// The lock, unless the operation is about all or none.
        name: Option<LockName>,
        /// The operation.
        operation: &'static str,
    },

    /// The client was shut down.
    #[non_exhaustive]
    Closed {
        /// The lock, unless the operation is about all or none.
        name: Option<LockName>,
    },
}

impl LockError {
    /// The lock stayed busy for `waited`.
    #[must_use]
    pub fn timed_out(name: &LockName, waited: Duration, holder: Option<Holder>) -> Self {
        Self::TimedOut {
            name: name.clone(),
            waited,
            holder: holder.map(Box::new),
        }
    }

    /// The name is in use as `found`, and was asked for as something that does not go together with it.
    #[must_use]
    pub fn invalid_mode(name: &LockName, asked: Mode, found: Mode) -> Self {
        Self::InvalidMode {
            name: name.clone(),
            asked,
            found,
        }
    }

    /// The backend failed to do `operation`; `source` tells why.
    pub fn failed(operation: &'static str, source: impl Into<Source>) -> Self {
        Self::new_unavailable(operation, None).with_source(source)
    }

    /// The backend failed to do `operation`; `message` tells why, and what to do.
    pub fn unavailable(operation: &'static str, message: impl Into<String>) -> Self {
        Self::new_unavailable(operation, Some(message.into()))
    }

    fn new_unavailable(operation: &'static str, message: Option<String>) -> Self {
        Self::Unavailable {
            name: None,
            operation,
            message,
            source: None,
            unsent: false,
        }
    }

    /// The backend did not answer `operation` within `limit`.
    #[must_use]
    pub fn no_answer(operation: &'static str, limit: Duration) -> Self {
        // Rounded for display.
        let step = if limit < Duration::from_secs(1) { 1 } else { 100 };
        let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX - step);
        let limit = Duration::from_millis((millis + step / 2) / step * step);
        Self::unavailable(operation, format!("no answer within {limit:?}"))
    }

    /// A configuration that only a person can change; `message` says how.
    pub fn configuration(message: impl Into<String>) -> Self {
        Self::Configuration {
            name: None,
            message: message.into(),
            source: None,
            refused: false,
            lasting: false,
            unsent: false,
        }
    }

    /// A configuration under which locks would not exclude; `message` says what to change.
    pub fn unsafe_configuration(message: impl Into<String>) -> Self {
        Self::UnsafeConfiguration {
            name: None,
            message: message.into(),
        }
    }

    /// The server found a deadlock, in the words of `source`.
    pub fn deadlock(source: impl Into<Source>) -> Self {
        Self::Deadlock {
            name: None,
            source: Some(source.into().into()),
        }
    }

    /// The backend cannot do `operation`.
    #[must_use]
    pub fn not_supported(operation: &'static str) -> Self {
        Self::NotSupported { name: None, operation }
    }

    /// The client was shut down.
    #[must_use]
    pub fn closed() -> Self {
        Self::Closed { name: None }
    }

    /// Adds the cause. Its text should not be in the message, as it is printed behind it. Only [`Unavailable`](Self::Unavailable),
    /// [`Configuration`](Self::Configuration) and [`Deadlock`](Self::Deadlock) have causes; others stay as they are.
    #[must_use]
    pub fn with_source(mut self, cause: impl Into<Source>) -> Self {
        if let Self::Unavailable { source, .. } | Self::Configuration { source, .. } | Self::Deadlock { source, .. } =
            &mut self
        {
            *source = Some(cause.into().into());
        }
        self
    }

    /// Adds that there was no connection, so that the request cannot have reached the server. Only [`Unavailable`](Self::Unavailable) and
    /// [`Configuration`](Self::Configuration) can tell that; others stay as they are.
    ///
    /// A claim whose requests were not sent needs no release. Credentials that are refused to a client that was connected before are
    /// asked with again, as what may pass.
    #[must_use]
    pub fn unsent(mut self) -> Self {
        if let Self::Configuration { refused, .. } = &mut self {
            *refused = true;
        }
        if let Self::Unavailable { unsent, .. } | Self::Configuration { unsent, .. } = &mut self {
            *unsent = true;
        }
        self
    }

    /// Takes [`unsent`](Self::unsent) back, as when a first request was sent, and there was no connection for a second one.
    #[must_use]
    pub fn maybe_sent(mut self) -> Self {
        if let Self::Unavailable { unsent, .. } | Self::Configuration { unsent, .. } = &mut self {
            *unsent = false;
        }
        self
    }

    /// Adds that another answer cannot be hoped for while this client is set up as it is, as when the server wants to see a certificate
    /// and the client has none. Then [`unsent`](Self::unsent) does not make the error one that may pass. Only
    /// [`Configuration`](Self::Configuration) can tell that; others stay as they are.
    #[must_use]
    pub fn lasting(mut self) -> Self {
        if let Self::Configuration { lasting, .. } = &mut self {
            *lasting = true;
        }
        self
    }

    /// Whether the request cannot have reached the server, because there was no connection.
    #[must_use]
    pub fn is_unsent(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { unsent: true, .. } | Self::Configuration { unsent: true, .. }
        )
    }

    /// Whether a wait goes on after it.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    /// The same error as one that may pass, if the server refused the connection.
    pub(crate) fn refused_for_now(self) -> Self {
        match self {
            Self::Configuration {
                name,
                message,
                source,
                refused: true,
                lasting: false,
                unsent,
            } => Self::Unavailable {
                name,
                operation: "connecting",
                message: Some(message),
                source,
                unsent,
            },
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
    #[must_use]
    pub fn of(mut self, lock: &LockName) -> Self {
        if let Self::Unavailable { name, .. }
        | Self::Deadlock { name, .. }
        | Self::UnsafeConfiguration { name, .. }
        | Self::Configuration { name, .. }
        | Self::NotSupported { name, .. }
        | Self::Closed { name } = &mut self
        {
            name.get_or_insert_with(|| lock.clone());
        }
        self
    }

    /// The lock that the error is about, if it is about one with a usable name.
    #[must_use]
    pub fn name(&self) -> Option<&LockName> {
        match self {
            Self::TimedOut { name, .. }
            | Self::Lost { name, .. }
            | Self::InvalidTtl { name, .. }
            | Self::InvalidMode { name, .. } => Some(name),
            Self::Unavailable { name, .. }
            | Self::Deadlock { name, .. }
            | Self::UnsafeConfiguration { name, .. }
            | Self::Configuration { name, .. }
            | Self::NotSupported { name, .. }
            | Self::Closed { name } => name.as_ref(),
            Self::InvalidName(_) => None,
        }
    }

    /// The client that held the lock at the end of the wait, if the error is [`TimedOut`](Self::TimedOut) and it is known. Its
    /// label, host and process identifier are not meant for strangers.
    #[must_use]
    pub fn holder(&self) -> Option<&Holder> {
        match self {
            Self::TimedOut { holder, .. } => holder.as_deref(),
            _ => None,
        }
    }

    /// Whether another client held the lock to the end of the wait: the operation was refused, and nothing is broken.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::TimedOut { .. })
    }

    /// Whether the same call may succeed later without anyone changing anything.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Lost { .. } | Self::TimedOut { .. } | Self::Unavailable { .. } | Self::Deadlock { .. }
        )
    }
}

impl From<InvalidName> for LockError {
    fn from(invalid: InvalidName) -> Self {
        Self::InvalidName(invalid)
    }
}
