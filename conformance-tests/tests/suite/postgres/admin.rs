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

/// What the databases of namespaces are copies of.
const TEMPLATE: &str = "fencelock_tests";

/// Makes a database in which the role can lock, and do nothing else.
pub(crate) async fn make(url: &str, database: &str) -> Result<(), LockError> {
    let client = admin(url, "postgres").await?;
    // One makes the template, and the others wait for it: nothing else may be connected to what is copied.
    client
        .batch_execute("SELECT pg_advisory_lock(1)")
        .await
        .map_err(failed)?;
    let known = client
        .query_opt("SELECT 1 FROM pg_database WHERE datname = $1", &[&TEMPLATE])
        .await
        .map_err(failed)?;
    if known.is_none() {
        make_template(url, &client).await?;
    }
    let copy = format!("CREATE DATABASE \"{database}\" TEMPLATE {TEMPLATE}");
    client.batch_execute(&copy).await.map_err(failed)
}

async fn make_template(url: &str, client: &Client) -> Result<(), LockError> {
    const NEW: &str = "fencelock_tests_new";
    let role = format!(
        "DO $$ BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{ROLE}')
            THEN CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'; END IF;
         END $$"
    );
    client.batch_execute(&role).await.map_err(failed)?;
    let drop = format!("DROP DATABASE IF EXISTS {NEW} WITH (FORCE)");
    client.batch_execute(&drop).await.map_err(failed)?;
    client
        .batch_execute(&format!("CREATE DATABASE {NEW}"))
        .await
        .map_err(failed)?;
    let schema = schema_sql("fencelock", Some(ROLE))?;
    admin(url, NEW).await?.batch_execute(&schema).await.map_err(failed)?;
    // That connection may not have ended yet, and what is in use is not renamed.
    let rename = format!(
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = '{NEW}'; \
         ALTER DATABASE {NEW} RENAME TO {TEMPLATE}"
    );
    for statement in rename.split("; ") {
        client.batch_execute(statement).await.map_err(failed)?;
    }
    Ok(())
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
