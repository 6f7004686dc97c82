//! What is measured: fencelock, other libraries and raw round trips, all in the same form.

use std::sync::Arc;
use std::time::Duration;

use fencelock::Options;
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;
pub(crate) type Result<T = ()> = std::result::Result<T, Error>;

/// What is done while a lock is held.
pub(crate) type Body = BoxFuture<'static, ()>;

/// A client of one library: waits for the lock of a name, runs a body while it is held, and releases it.
pub(crate) type Contestant = Arc<dyn Fn(String, Body) -> BoxFuture<'static, Result> + Send + Sync>;

/// fencelock with default options: its background thread does the work.
pub(crate) const OURS: &str = "fencelock";
/// fencelock with `Options::runtime`.
pub(crate) const OURS_HERE: &str = "fencelock, on the caller's runtime";
/// fencelock with `Options::linger`: the client keeps the claim between two acquisitions.
pub(crate) const OURS_LINGERING: &str = "fencelock, lingering";

/// A contestant that does this with a copy of its client.
pub(crate) fn contestant<C, F>(client: C, section: impl Fn(C, String, Body) -> F + Send + Sync + 'static) -> Contestant
where
    C: Clone + Send + Sync + 'static,
    F: Future<Output = Result> + Send + 'static,
{
    Arc::new(move |name, body| Box::pin(section(client.clone(), name, body)))
}

/// The raw round trips that no lock on a server can do without. `trip` is told whether it is the second of the two.
pub(crate) fn round_trips<C, F>(client: C, trip: impl Fn(C, String, bool) -> F + Send + Sync + 'static) -> Contestant
where
    C: Clone + Send + Sync + 'static,
    F: Future<Output = Result> + Send + 'static,
{
    let trip = Arc::new(trip);
    contestant((client, trip), |(client, trip), name, body| async move {
        trip(client.clone(), name.clone(), false).await?;
        body.await;
        trip(client, name, true).await
    })
}

/// fencelock, as its users call it. `None` if the name is that of another contestant.
pub(crate) async fn fencelock(who: &str, url: &str, ttl: Duration) -> Result<Option<Contestant>> {
    let options = Options::new().ttl(ttl);
    let options = match who {
        OURS => options,
        OURS_HERE => options.runtime(Handle::current()),
        OURS_LINGERING => options.linger(ttl),
        _ => return Ok(None),
    };
    let locks = fencelock::connect_with(url, options).await?;
    Ok(Some(contestant(locks, |locks, name, body| async move {
        let guard = locks.lock(name).await?;
        body.await;
        guard.release().await?;
        Ok(())
    })))
}
