//! A resource in etcd.

use async_trait::async_trait;
use conformance_tests::Resource;
use lock_core::{FencingToken, LockError};
use lock_etcd::etcd_client::{Client, TxnOp};
use lock_etcd::fence::{self, FenceError};

use super::failed;

/// A number under a key, protected by the fence that the backend ships.
pub(crate) struct FencedKey {
    client: Client,
    resource: String,
}

impl FencedKey {
    pub(crate) fn new(client: Client, resource: String) -> Self {
        Self { client, resource }
    }
}

#[async_trait]
impl Resource for FencedKey {
    async fn admit(&self, token: FencingToken) -> Result<bool, LockError> {
        admitted(fence::admit(&self.client, &self.resource, token).await)
    }

    async fn read(&self) -> Result<i64, LockError> {
        let answer = self
            .client
            .kv_client()
            .get(&*self.resource, None)
            .await
            .map_err(failed)?;
        let number = answer.kvs().first().and_then(|kv| kv.value_str().ok()?.parse().ok());
        Ok(number.unwrap_or(0))
    }

    async fn write(&self, token: FencingToken, number: i64) -> Result<bool, LockError> {
        let put = TxnOp::put(&*self.resource, number.to_string(), None);
        admitted(fence::write(&self.client, &self.resource, token, [put]).await.map(drop))
    }
}

fn admitted(outcome: Result<(), FenceError>) -> Result<bool, LockError> {
    match outcome {
        Ok(()) => Ok(true),
        Err(FenceError::Stale(_)) => Ok(false),
        Err(error) => Err(LockError::failed("admitting a token", error)),
    }
}
