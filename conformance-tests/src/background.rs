//! A runtime that outlives those of the cases: a proxy must go on while one of them is blocked.

use std::future::Future;
use std::sync::{Mutex, PoisonError};

use tokio::runtime::{Builder, Handle};

/// The runtime of one thread that lives as long as the process.
///
/// # Errors
///
/// If the system has no thread left.
pub(crate) fn background() -> std::io::Result<Handle> {
    // Locked while it is made, or two could be: one of them would have to be dropped, which no async caller may do.
    static HANDLE: Mutex<Option<Handle>> = Mutex::new(None);
    let mut made = HANDLE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*made {
        return Ok(handle.clone());
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("fencelock-test-background".to_owned())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    *made = Some(handle.clone());
    Ok(handle)
}

/// Does the work on that runtime; also if the caller goes away.
pub(crate) async fn in_background<T, F>(work: F) -> std::io::Result<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    background()?.spawn(work).await.map_err(std::io::Error::other)
}
