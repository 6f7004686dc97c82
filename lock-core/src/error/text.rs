//! The texts of errors.

use std::error::Error;
use std::fmt;

use crate::LockError;

impl LockError {
    fn line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.name()) {
            (Self::TimedOut { .. } | Self::Lost { .. } | Self::InvalidName(_), _) | (_, None) => {}
            (_, Some(name)) => write!(f, "lock \"{name}\": ")?,
        }
        match self {
            Self::TimedOut { name, waited, .. } if waited.is_zero() => write!(f, "lock \"{name}\" is already held"),
            Self::TimedOut { name, waited, .. } => write!(f, "lock \"{name}\" was still held after {waited:.1?}"),
            Self::Unavailable {
                operation,
                message: Some(message),
                ..
            } => write!(f, "{operation} failed: {message}"),
            Self::Unavailable { operation, .. } => write!(f, "{operation} failed"),
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
            Self::Deadlock { .. } => {
                f.write_str("the server found a deadlock; take locks in the same order everywhere")
            }
            Self::UnsafeConfiguration { message, .. } => write!(f, "unsafe configuration: {message}"),
            Self::Configuration { message, .. } => f.write_str(message),
            Self::NotSupported { operation, .. } => write!(f, "this backend does not support {operation}"),
            Self::Closed { .. } => f.write_str("the lock client was shut down; connect a new one"),
        }
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
        match self {
            Self::Unavailable { source, .. } | Self::Configuration { source, .. } | Self::Deadlock { source, .. } => {
                Some(source.as_deref()? as _)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Holder, LockName};

    fn name() -> LockName {
        "stock/1".parse().unwrap()
    }

    #[test]
    fn messages_say_what_to_do() {
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(60));
        let (name, ttl) = (name(), Duration::ZERO);
        let told = LockError::InvalidTtl { name, ttl, min, max }.to_string();
        assert_eq!(
            told,
            "lock \"stock/1\": a ttl of 0ns is not possible here; choose one from 100ms to 60s"
        );
        let name = self::name();
        let busy = LockError::timed_out(&name, Duration::from_millis(5040), None);
        assert_eq!(busy.to_string(), "lock \"stock/1\" was still held after 5.0s");
        assert!(busy.is_busy());
        let at_once = LockError::timed_out(&name, Duration::ZERO, None);
        assert_eq!(at_once.to_string(), "lock \"stock/1\" is already held");
    }

    #[test]
    fn the_holder_is_shown_to_the_operator_and_not_to_strangers() {
        let holder = Holder {
            host: Some("db-7.internal".to_owned()),
            pid: Some(7),
            label: Some("nightly".to_owned()),
            ..Holder::default()
        };
        let busy = LockError::timed_out(&name(), Duration::ZERO, Some(holder));
        assert_eq!(format!("{busy:#}"), "lock \"stock/1\" is already held");
        assert_eq!(
            busy.holder().and_then(|holder| holder.host.as_deref()),
            Some("db-7.internal")
        );
        let shown = format!("{busy:?}");
        assert!(shown.starts_with("lock \"stock/1\" is already held by "), "{shown}");
        assert!(
            ["db-7.internal", "7", "(nightly)"]
                .iter()
                .all(|part| shown.contains(part)),
            "{shown}"
        );
        let error = LockError::failed("connecting", std::io::Error::other("connection refused"));
        assert_eq!(format!("{error:?}"), "connecting failed: connection refused");
        assert_eq!(format!("{error:#?}"), format!("{error:?}"));
    }

    #[test]
    fn the_cause_is_kept_and_said_once() {
        let error = LockError::failed("renewal", std::io::Error::other("broken pipe"));
        assert_eq!(error.source().unwrap().to_string(), "broken pipe");
        assert_eq!(error.to_string(), "renewal failed");
        assert_eq!(format!("{error:#}"), "renewal failed: broken pipe");
        assert!(error.is_retryable());
        assert!(!LockError::closed().is_retryable());
    }

    #[test]
    fn a_limit_is_told_in_round_figures() {
        for (nanos, told) in [(4_999_687_745, "5s"), (1_540_000_000, "1.5s"), (99_600_000, "99ms")] {
            let error = LockError::no_answer("acquire", Duration::from_nanos(nanos));
            assert_eq!(error.to_string(), format!("acquire failed: no answer within {told}"));
        }
    }

    #[test]
    fn the_first_name_stays() {
        let error = LockError::closed().of(&name()).of(&"other".parse().unwrap());
        assert_eq!(error.name(), Some(&name()));
        assert_eq!(
            error.to_string(),
            "lock \"stock/1\": the lock client was shut down; connect a new one"
        );
    }
}
