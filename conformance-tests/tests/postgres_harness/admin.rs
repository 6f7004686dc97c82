//! What is done as the owner of the server.

use lock_core::LockError;
use lock_postgres::schema_sql;
use lock_postgres::tokio_postgres::{Client, Config, Error, NoTls};

/// The role that the clients under test are.
pub(crate) const ROLE: &str = "locks";
pub(crate) const PASSWORD: &str = "secret";

/// A connection as the user that the URL names, who may do everything.
pub(crate) async fn admin(url: &str, database: &str) -> Result<Client, LockError> {
    let mut config: Config = url.parse().map_err(failed)?;
    let (client, connection) = config.dbname(database).connect(NoTls).await.map_err(failed)?;
    tokio::spawn(connection);
    Ok(client)
}

/// Makes a database in which the role can lock, and do nothing else.
pub(crate) async fn make(url: &str, database: &str) -> Result<(), LockError> {
    let client = admin(url, "postgres").await?;
    let role = format!(
        "SELECT pg_advisory_xact_lock(1);
         DO $$ BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{ROLE}')
            THEN CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'; END IF;
         END $$"
    );
    client.batch_execute(&role).await.map_err(failed)?;
    let made = client.batch_execute(&format!("CREATE DATABASE \"{database}\"")).await;
    made.map_err(failed)?;
    let schema = schema_sql("fencelock", Some(ROLE))?;
    let client = admin(url, database).await?;
    client.batch_execute(&schema).await.map_err(failed)
}

/// Removes the database, so that many do not fill the disk.
pub(crate) async fn remove(url: &str, database: &str) -> Result<(), LockError> {
    let client = admin(url, "postgres").await?;
    let drop = format!("DROP DATABASE IF EXISTS \"{database}\" WITH (FORCE)");
    client.batch_execute(&drop).await.map_err(failed)
}

pub(crate) fn failed(error: Error) -> LockError {
    LockError::failed("looking at the server", error)
}
