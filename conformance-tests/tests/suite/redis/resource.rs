//! A resource in Redis.

use async_trait::async_trait;
use conformance_tests::Resource;
use lock_core::{FencingToken, LockError};
use lock_redis::fence::{self, FenceError};
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{self};

use super::failed;

/// A number under a key, protected by the fence that the backend ships.
pub(crate) struct FencedKey {
    connection: MultiplexedConnection,
    resource: String,
}

impl FencedKey {
    pub(crate) fn new(connection: MultiplexedConnection, resource: String) -> Self {
        Self { connection, resource }
    }

    fn key(&self) -> String {
        format!("{}:value", self.resource)
    }
}

#[async_trait]
impl Resource for FencedKey {
    async fn admit(&self, token: FencingToken) -> Result<bool, LockError> {
        admitted(fence::admit(&mut self.connection.clone(), &self.resource, token).await)
    }

    async fn admit_shared(&self, token: FencingToken) -> Result<bool, LockError> {
        admitted(fence::admit_shared(&mut self.connection.clone(), &self.resource, token).await)
    }

    async fn read(&self) -> Result<i64, LockError> {
        let get = redis::cmd("GET").arg(self.key()).clone();
        let number: Option<i64> = get.query_async(&mut self.connection.clone()).await.map_err(failed)?;
        Ok(number.unwrap_or(0))
    }

    async fn write(&self, token: FencingToken, number: i64) -> Result<bool, LockError> {
        let set = redis::cmd("SET").arg(self.key()).arg(number).clone();
        admitted(fence::write(&mut self.connection.clone(), &self.resource, token, &set).await)
    }
}

fn admitted(outcome: Result<(), FenceError>) -> Result<bool, LockError> {
    match outcome {
        Ok(()) => Ok(true),
        Err(FenceError::Stale(_)) => Ok(false),
        Err(error) => Err(LockError::failed("admitting a token", error)),
    }
}
