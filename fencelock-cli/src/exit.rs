//! What the exit codes mean.

use std::fmt;

use fencelock::LockError;

use crate::secrets::without_secrets;
use crate::timing::shown;

/// Wrong arguments, or an address that no backend of this build answers to.
pub(crate) const USAGE: u8 = 64;
/// The backend cannot be reached, or the system refuses a process, a thread or a file. It may work later.
pub(crate) const UNAVAILABLE: u8 = 69;
/// What was asked for could not be written out.
pub(crate) const OUTPUT: u8 = 74;
/// The lock stayed busy.
pub(crate) const BUSY: u8 = 75;
/// The lock was lost while the command ran.
pub(crate) const LOST: u8 = 76;
/// Something is set up in a way that a person has to change first.
pub(crate) const CONFIGURATION: u8 = 78;
/// The command cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
pub(crate) const NOT_FOUND: u8 = 127;
/// The lock that was asked about is free.
pub(crate) const FREE: u8 = 1;

/// What shells say of a process that a signal ended.
pub(crate) fn by_signal(signal: i32) -> u8 {
    u8::try_from(signal).map_or(u8::MAX, |signal| signal.saturating_add(128))
}

/// Why the command ends without having done its work: one line, and the exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    message: String,
    /// It is no error, so that `--quiet` applies to it.
    pub(crate) is_remark: bool,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            is_remark: false,
        }
    }

    /// An outcome that is no error, such as a lock that is busy.
    pub(crate) fn remark(code: u8, message: impl Into<String>) -> Self {
        Self {
            is_remark: true,
            ..Self::new(code, message)
        }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(UNAVAILABLE, message)
    }

    pub(crate) fn configuration(message: impl Into<String>) -> Self {
        Self::new(CONFIGURATION, message)
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        let code = match &error {
            LockError::TimedOut { .. } => BUSY,
            LockError::Lost { .. } => LOST,
            LockError::InvalidName { .. } => USAGE,
            LockError::InvalidTtl { ttl, min, max, .. } => {
                let [ttl, min, max] = [ttl, min, max].map(|time| shown(*time));
                return Self::usage(format!(
                    "a ttl of {ttl} is not possible here; choose one from {min} to {max}"
                ));
            }
            LockError::NotSupported { .. } => {
                let advice = "`fencelock check` tells what the locks in that place can do";
                return Self::new(CONFIGURATION, format!("{error:#}; {advice}"));
            }
            LockError::Configuration { .. } | LockError::InvalidMode { .. } | LockError::UnsafeConfiguration { .. } => {
                CONFIGURATION
            }
            _ => UNAVAILABLE,
        };
        Self::new(code, format!("{error:#}"))
    }
}

/// One line without secrets, whatever the message came from.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = self.message.replace(char::is_control, " ");
        f.write_str(&without_secrets(&line))
    }
}
