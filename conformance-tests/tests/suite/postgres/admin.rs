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

/// What the databases of namespaces are copies of, on a server of the run.
const TEMPLATE: &str = "fencelock_tests";

/// Makes a database in which the role can lock, and do nothing else: as a copy of a template, or without leaving one.
pub(crate) async fn make(url: &str, database: &str, with_template: bool) -> Result<(), LockError> {
    let client = admin(url, "postgres").await?;
    // One at a time makes the role and the template, and nothing may be connected to what is copied.
    run(&client, "SELECT pg_advisory_lock(1)").await?;
    let role = format!(
        "DO $$ BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{ROLE}')
            THEN CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'; END IF;
         END $$"
    );
    run(&client, &role).await?;
    if !with_template {
        return make_with_schema(url, &client, database).await;
    }
    let known = "SELECT 1 FROM pg_database WHERE datname = $1";
    if client.query_opt(known, &[&TEMPLATE]).await.map_err(failed)?.is_none() {
        make_template(url, &client).await?;
    }
    run(&client, &format!("CREATE DATABASE \"{database}\" TEMPLATE {TEMPLATE}")).await
}

async fn make_with_schema(url: &str, client: &Client, database: &str) -> Result<(), LockError> {
    run(client, &format!("CREATE DATABASE \"{database}\"")).await?;
    run(&admin(url, database).await?, &schema_sql("fencelock", Some(ROLE))?).await
}

/// It has its name only when it is whole.
async fn make_template(url: &str, client: &Client) -> Result<(), LockError> {
    const NEW: &str = "fencelock_tests_new";
    run(client, &format!("DROP DATABASE IF EXISTS {NEW} WITH (FORCE)")).await?;
    make_with_schema(url, client, NEW).await?;
    // The connection that made the schema may not have ended yet, and what is in use is not renamed.
    let end = format!("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = '{NEW}'");
    run(client, &end).await?;
    run(client, &format!("ALTER DATABASE {NEW} RENAME TO {TEMPLATE}")).await
}

async fn run(client: &Client, sql: &str) -> Result<(), LockError> {
    client.batch_execute(sql).await.map_err(failed)
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
