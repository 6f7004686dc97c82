//! fencelock, as its users call it.

use std::time::Duration;

use async_trait::async_trait;
use fencelock::{LockError, Locks, Options};

use crate::contestant::{Body, Contestant, Failure, Kept};

pub(crate) struct Ours(Locks);

impl Ours {
    pub(crate) async fn connect(url: &str, options: Options) -> Result<Self, Failure> {
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
