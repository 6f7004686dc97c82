//! The ways in.

use std::ffi::OsString;

use crate::{LockError, Locks, Options, address};

/// The environment variable that [`from_env`] reads.
pub const ENV: &str = "FENCELOCK_URL";

/// Connects to the backend at that [address](crate#addresses).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), fencelock::LockError> {
/// # #[cfg(feature = "memory")] {
/// let locks = fencelock::connect("memory:").await?;
/// assert!(locks.try_lock("a").await?.is_some());
/// # }
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`LockError::Configuration`] if no backend of this build answers to the address or the backend refuses it;
/// [`LockError::UnsafeConfiguration`] if locks would not exclude there; [`LockError::Unavailable`] if the backend
/// cannot be reached now.
///
/// # Cancellation
///
/// Dropping the future leaves nothing behind.
pub async fn connect(url: impl AsRef<str>) -> Result<Locks, LockError> {
    connect_with(url, Options::new()).await
}

/// Connects as [`connect`] does, with a default ttl, a limit for requests or a runtime of your choice.
///
/// ```no_run
/// # async fn example() -> Result<(), fencelock::LockError> {
/// let options = fencelock::Options::new().ttl(std::time::Duration::from_secs(10));
/// let locks = fencelock::connect_with("redis://localhost", options).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// As [`connect`].
pub async fn connect_with(url: impl AsRef<str>, options: Options) -> Result<Locks, LockError> {
    let backend = address::connect(url.as_ref(), &options).await?;
    Ok(Locks::with_options(backend, options))
}

/// A client that connects when it is used for the first time. If that fails, the request fails and the next one tries
/// again.
///
/// It needs no runtime, so it suits a `static`:
///
/// ```
/// use std::sync::LazyLock;
/// use fencelock::{LockError, Locks};
///
/// static LOCKS: LazyLock<Result<Locks, LockError>> = LazyLock::new(|| fencelock::connect_lazy("memory:"));
/// ```
///
/// # Errors
///
/// [`LockError::Configuration`] if no backend of this build answers to the address, [`LockError::Unavailable`] if the
/// system refuses a thread. What only connecting can show is an error of the first request.
pub fn connect_lazy(url: impl AsRef<str>) -> Result<Locks, LockError> {
    connect_lazy_with(url, Options::new())
}

/// As [`connect_lazy`], with the options of [`connect_with`].
///
/// # Errors
///
/// As [`connect_lazy`].
pub fn connect_lazy_with(url: impl AsRef<str>, options: Options) -> Result<Locks, LockError> {
    let backend = address::connect_lazy(url.as_ref(), &options)?;
    Ok(Locks::with_options(backend, options))
}

/// Connects as [`connect`] does, to the address in the environment variable `FENCELOCK_URL`.
///
/// # Errors
///
/// [`LockError::Configuration`] if the variable is not set, empty, or not UTF-8; otherwise as [`connect`].
pub async fn from_env() -> Result<Locks, LockError> {
    connect(address_in(std::env::var_os(ENV))?).await
}

fn address_in(value: Option<OsString>) -> Result<String, LockError> {
    let value = value.filter(|value| !value.is_empty()).ok_or_else(|| {
        LockError::configuration(format!(
            "the environment variable {ENV} is not set; set it to an address such as sqlite:/var/lib/shop/locks.db"
        ))
    })?;
    value
        .into_string()
        .map_err(|_| LockError::configuration(format!("the environment variable {ENV} is not UTF-8")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_not_set_or_empty_is_named() {
        for value in [None, Some(OsString::new())] {
            let error = address_in(value).unwrap_err();
            assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
            assert!(error.to_string().contains("FENCELOCK_URL is not set"), "{error}");
        }
        assert_eq!(address_in(Some("memory:".into())).unwrap(), "memory:");
    }
}
