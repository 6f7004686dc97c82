use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use lock_core::LockError;

/// A password or token, which no text shows. The client reads it at each connect, so credentials can change while it runs.
#[derive(Clone)]
pub struct Secret(Kind);

#[derive(Clone)]
enum Kind {
    Literal(String),
    File(PathBuf),
    Function(Arc<Function>),
}

type Function = dyn Fn() -> Result<String, LockError> + Send + Sync;

impl Secret {
    /// That text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(Kind::Literal(text.into()))
    }

    /// The content of that file at each connect, without the line break at its end.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self(Kind::File(path.into()))
    }

    /// What the function returns at each connect. It runs on a thread where it may block.
    pub fn from_fn(function: impl Fn() -> Result<String, LockError> + Send + Sync + 'static) -> Self {
        Self(Kind::Function(Arc::new(function)))
    }

    /// Returns the text as it is now. Must be called on a runtime of tokio.
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if the file cannot be read or the function panics, and the errors of the function.
    pub async fn get(&self) -> Result<String, LockError> {
        let kind = self.0.clone();
        // Not on the thread that renews locks.
        let reading = tokio::task::spawn_blocking(move || match kind {
            Kind::Literal(text) => Ok(text),
            Kind::File(path) => match std::fs::read_to_string(&path) {
                Ok(text) => Ok(text.trim_end_matches(['\n', '\r']).to_owned()),
                Err(error) => {
                    let message = format!("the password cannot be read from {}", path.display());
                    Err(LockError::configuration(message).with_source(error))
                }
            },
            Kind::Function(function) => function(),
        });
        let failed = |error| LockError::configuration("the function that gives the password failed").with_source(error);
        reading.await.map_err(failed)?
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Functions are equal if they are the same one.
impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Kind::Literal(one), Kind::Literal(other)) => one == other,
            (Kind::File(one), Kind::File(other)) => one == other,
            (Kind::Function(one), Kind::Function(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Eq for Secret {}

impl<T: Into<String>> From<T> for Secret {
    fn from(text: T) -> Self {
        Self::new(text)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_secret_is_read_anew_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        let file = Secret::file(&path);
        assert!(matches!(file.get().await, Err(LockError::Configuration { .. })));
        let calls = AtomicU32::new(0);
        let counted = Secret::from_fn(move || Ok(format!("hunter{}", calls.fetch_add(1, Ordering::Relaxed))));
        for text in ["hunter0", "hunter1"] {
            std::fs::write(&path, format!("{text}\r\n")).unwrap();
            assert_eq!(
                (file.get().await.unwrap(), counted.get().await.unwrap()),
                (text.into(), text.into())
            );
        }
        assert_eq!(
            format!("{:?} {file:?} {counted:?}", Secret::from("hunter2")),
            "*** *** ***"
        );
        assert!(Secret::from("hunter2") != file && counted == counted.clone());
    }
}
