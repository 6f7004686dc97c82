//! A number in a table, protected by the fence that the backend ships.

use async_trait::async_trait;
use conformance_tests::Resource;
use lock_core::{FencingToken, LockError};
use lock_postgres::fence::{self, FenceError};
use lock_postgres::tokio_postgres::types::Type;
use lock_postgres::tokio_postgres::{Client, Statement};
use tokio::sync::Mutex;

use super::admin::failed;

pub(crate) struct FencedRow {
    /// For transactions.
    client: Mutex<Client>,
    /// Many writes are on their way at the same time.
    writer: Client,
    write: Statement,
    resource: String,
}

impl FencedRow {
    pub(crate) async fn new(client: Client, writer: Client, resource: &str) -> Result<Self, LockError> {
        // The marks have to survive a restart of whoever uses them, and that is all that is shown of them.
        for client in [&client, &writer] {
            let quickly = client.batch_execute("SET synchronous_commit = off").await;
            quickly.map_err(failed)?;
        }
        // Two at once would hit each other's names.
        let tables = format!(
            "BEGIN; SELECT pg_advisory_xact_lock(1); {};
             CREATE TABLE IF NOT EXISTS resource (name text PRIMARY KEY, number bigint NOT NULL); COMMIT",
            fence::CREATE_SQL
        );
        client.batch_execute(&tables).await.map_err(failed)?;
        // In one step: nothing is written unless the token is admitted.
        let write = format!(
            "WITH admitted AS ({}) INSERT INTO resource (name, number) SELECT $1, $3 FROM admitted
             ON CONFLICT (name) DO UPDATE SET number = excluded.number",
            fence::ADMIT_SQL
        );
        let write = writer
            .prepare_typed(&write, &[Type::TEXT, Type::INT8, Type::INT8])
            .await;
        Ok(Self {
            client: Mutex::new(client),
            writer,
            write: write.map_err(failed)?,
            resource: resource.to_owned(),
        })
    }
}

#[async_trait]
impl Resource for FencedRow {
    async fn admit(&self, token: FencingToken) -> Result<bool, LockError> {
        let mut client = self.client.lock().await;
        let tx = client.transaction().await.map_err(failed)?;
        let admitted = admitted(fence::admit(&tx, &self.resource, token).await)?;
        tx.commit().await.map_err(failed)?;
        Ok(admitted)
    }

    async fn read(&self) -> Result<i64, LockError> {
        let read = "SELECT number FROM resource WHERE name = $1";
        let row = self.client.lock().await.query_opt(read, &[&self.resource]).await;
        Ok(row.map_err(failed)?.map_or(0, |row| row.get(0)))
    }

    async fn write(&self, token: FencingToken, number: i64) -> Result<bool, LockError> {
        let token = token.as_i64();
        let written = self
            .writer
            .execute(&self.write, &[&self.resource, &token, &number])
            .await;
        Ok(written.map_err(failed)? == 1)
    }
}

fn admitted(outcome: Result<(), FenceError>) -> Result<bool, LockError> {
    match outcome {
        Ok(()) => Ok(true),
        Err(FenceError::Stale(_)) => Ok(false),
        Err(error) => Err(LockError::failed("admitting a token", error)),
    }
}
