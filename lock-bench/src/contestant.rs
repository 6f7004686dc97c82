//! What is measured: a way to do something under a lock.

use std::any::Any;
use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;

/// Whatever goes wrong, in a text for people.
pub(crate) type Failure = Box<dyn Error + Send + Sync>;

/// What is done under a lock.
pub(crate) type Body = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A lock that is kept.
pub(crate) type Kept = Box<dyn Any + Send>;

/// A client of one library, or what stands for a bound on all of them.
#[async_trait]
pub(crate) trait Contestant: Send + Sync {
    /// Waits for the lock, runs `body` under it, and lets go of it.
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure>;

    /// The same, unless the lock stays busy for that long; says whether the body ran. None where the library knows no such
    /// limit.
    async fn within(&self, _name: &str, _limit: Duration, _body: Body) -> Option<Result<bool, Failure>> {
        None
    }

    /// Takes the lock and keeps it, and keeps it alive, until the result is dropped. None where nobody keeps it alive.
    async fn keep(&self, _name: &str) -> Option<Result<Kept, Failure>> {
        None
    }

    /// How many leases were renewed so far, where the library tells.
    fn renewals(&self) -> Option<u64> {
        None
    }
}

/// A body that does nothing.
pub(crate) fn nothing() -> Body {
    Box::pin(async {})
}

/// The two round trips that no lock on a server can do without, as bare as its client library makes them.
#[async_trait]
pub(crate) trait Trips: Send + Sync {
    async fn first(&self, name: &str) -> Result<(), Failure>;
    async fn second(&self, name: &str) -> Result<(), Failure>;
}

/// Where what stands beside fencelock is done, as fencelock does its own work: on the background thread, or where the caller
/// is.
pub(crate) fn threads(background: bool) -> Result<Handle, Failure> {
    if background {
        Ok(fencelock::backend::background()?)
    } else {
        Ok(Handle::current())
    }
}

/// The bare trips, made where the caller is.
pub(crate) struct Floor(pub(crate) Arc<dyn Trips>);

#[async_trait]
impl Contestant for Floor {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        self.0.first(name).await?;
        body.await;
        self.0.second(name).await
    }
}

/// The bare trips, made on the thread on which fencelock makes its own.
pub(crate) struct BackgroundFloor(pub(crate) Arc<dyn Trips>);

#[async_trait]
impl Contestant for BackgroundFloor {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let background = threads(true)?;
        let (trips, to) = (Arc::clone(&self.0), name.to_owned());
        background.spawn(async move { trips.first(&to).await }).await??;
        body.await;
        let (trips, to) = (Arc::clone(&self.0), name.to_owned());
        background.spawn(async move { trips.second(&to).await }).await?
    }
}
