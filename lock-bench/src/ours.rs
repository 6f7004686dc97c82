//! fencelock, as its users call it.

use std::time::Duration;

use async_trait::async_trait;
use fencelock::{LockError, Locks, Options};
use tokio::runtime::Handle;

use crate::contestant::{Body, Contestant, Failure, Kept};

pub(crate) struct Ours(Locks);

impl Ours {
    /// A client whose work is done on the background thread, as by default, or on the runtime of the caller.
    pub(crate) async fn connect(url: &str, ttl: Duration, here: bool) -> Result<Self, Failure> {
        let options = Options::new().ttl(ttl);
        let options = if here {
            options.runtime(Handle::current())
        } else {
            options
        };
        Ok(Self(fencelock::connect_with(url, options).await?))
    }
}

#[async_trait]
impl Contestant for Ours {
    async fn section(&self, name: &str, body: Body) -> Result<(), Failure> {
        let guard = self.0.lock(name).await?;
        body.await;
        guard.release().await?;
        Ok(())
    }

    async fn within(&self, name: &str, limit: Duration, body: Body) -> Option<Result<bool, Failure>> {
        Some(match self.0.lock(name).wait_for(limit).await {
            Ok(guard) => {
                body.await;
                guard.release().await.map(|_| true).map_err(Into::into)
            }
            Err(LockError::TimedOut { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        })
    }

    async fn keep(&self, name: &str) -> Option<Result<Kept, Failure>> {
        let guard = self.0.lock(name).await;
        Some(guard.map(|guard| Box::new(guard) as Kept).map_err(Into::into))
    }

    fn renewals(&self) -> Option<u64> {
        Some(self.0.stats().renewed)
    }
}
