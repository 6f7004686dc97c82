//! Names of locks.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The name of a lock: 1 to 512 bytes of UTF-8 without control characters, compared byte for byte.
///
/// `a`, `A`, `a ` and `á` in its two Unicode normal forms are five different names. Cloning is cheap.
///
/// ```
/// use fencelock::LockName;
///
/// let name: LockName = "stock/10000".parse()?;
/// assert_eq!(name.as_str(), "stock/10000");
/// assert!("two\nlines".parse::<LockName>().is_err());
/// # Ok::<(), fencelock::LockError>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String", into = "String"))]
pub struct LockName(Arc<str>);

impl LockName {
    /// The longest name, in bytes.
    pub const MAX_LEN: usize = 512;

    /// Checks and keeps a name.
    ///
    /// # Errors
    ///
    /// [`InvalidName`] if it is empty, longer than [`MAX_LEN`](Self::MAX_LEN) bytes, or holds a control
    /// character.
    pub fn new(name: impl AsRef<str>) -> Result<Self, InvalidName> {
        let name = name.as_ref();
        let invalid = |reason| {
            Err(InvalidName {
                name: shown(name),
                reason,
            })
        };
        if name.is_empty() {
            return invalid("it is empty; give at least one character");
        }
        if name.len() > Self::MAX_LEN {
            return invalid("it is longer than 512 bytes; shorten or hash it");
        }
        if name.chars().any(char::is_control) {
            return invalid("it holds a control character; remove or encode it");
        }
        Ok(Self(Arc::from(name)))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn shared(&self) -> Arc<str> {
        Arc::clone(&self.0)
    }
}

/// A text that cannot be the name of a lock.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lock name \"{name}\" is not usable: {reason}")]
pub struct InvalidName {
    /// Escaped and shortened.
    name: String,
    reason: &'static str,
}

/// The start of a refused name, escaped, so that an error stays one short line.
fn shown(name: &str) -> String {
    const SHOWN: usize = 40;
    let mut text: String = name.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if name.chars().nth(SHOWN).is_some() {
        text.push('…');
    }
    text
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl AsRef<str> for LockName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for LockName {
    type Err = InvalidName;

    fn from_str(s: &str) -> Result<Self, InvalidName> {
        Self::new(s)
    }
}

impl TryFrom<&str> for LockName {
    type Error = InvalidName;

    fn try_from(s: &str) -> Result<Self, InvalidName> {
        Self::new(s)
    }
}

impl TryFrom<String> for LockName {
    type Error = InvalidName;

    fn try_from(s: String) -> Result<Self, InvalidName> {
        Self::new(s)
    }
}

impl From<LockName> for String {
    fn from(name: LockName) -> Self {
        name.as_str().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_names_are_refused_in_one_short_line() {
        assert!(LockName::new("é".repeat(256)).is_ok());
        // Counted in bytes.
        let too_long = [format!("{}a", "é".repeat(256)), "x".repeat(600)];
        let too_long = too_long.iter().map(|name| (&**name, "512 bytes"));
        let control = ["a\nb", "\0", "a\u{7f}", "\u{85}", "tab\t"].map(|name| (name, "control character"));
        for (name, reason) in too_long.chain(control).chain([("", "empty")]) {
            let error = LockName::new(name).unwrap_err().to_string();
            assert!(error.contains(reason) && error.len() < 200, "{error}");
            assert!(!error.chars().any(char::is_control), "{error:?}");
        }
    }
}
