use std::fmt;

use lock_core::LockError;

/// What keeps the locks of several applications on one server apart: 1 to 128 letters, digits, and any of `-`, `_`, `.`, `/`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Namespace(String);

impl Namespace {
    /// Checks the text.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if it has other characters, none, or too many. Keys separate the namespace from what follows
    /// with others, so that two namespaces cannot be confused.
    pub fn new(text: impl Into<String>) -> Result<Self, LockError> {
        let text = text.into();
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
        if text.is_empty() || text.len() > 128 || !text.chars().all(fits) {
            return Err(LockError::configuration(
                "the namespace cannot be used; give 1 to 128 letters, digits, and any of - _ . /",
            ));
        }
        Ok(Self(text))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_that_could_be_mistaken_is_refused() {
        for text in ["", "a b", "a:b", "{a}", "\u{e9}", &"x".repeat(129)] {
            let error = Namespace::new(text).unwrap_err();
            assert!(error.to_string().contains("the namespace"), "{text}");
        }
        for text in ["shop/eu-1_a.b", &"x".repeat(128)] {
            assert_eq!(Namespace::new(text).unwrap().as_str(), text);
        }
    }
}
