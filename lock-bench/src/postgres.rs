//! Postgres: the advisory locks of sqlx, and bare advisory locks.

use std::sync::Arc;

use sqlx::postgres::{PgAdvisoryLock, PgPoolOptions};
use tokio_postgres::{Client, NoTls};

use crate::contestant::{Contestant, Result, contestant, round_trips};

pub(crate) const FLOOR: &str = "pg_try_advisory_lock + pg_advisory_unlock";
pub(crate) const PEERS: &[&str] = &["sqlx 0.9 PgAdvisoryLock, pool"];

/// Of the server: connections for a hundred processes.
pub(crate) const ARGUMENTS: &[&str] = &["-c", "max_connections=500"];

pub(crate) async fn connect(who: &str, url: &str) -> Result<Contestant> {
    if who == FLOOR {
        return Ok(round_trips(
            Arc::new(client(url).await?),
            |client, name, unlock| async move {
                let key = name
                    .bytes()
                    .fold(7, |key: u64, byte| (key * 31 + u64::from(byte)) % (1 << 48));
                let function = if unlock {
                    "pg_advisory_unlock"
                } else {
                    "pg_try_advisory_lock"
                };
                client.simple_query(&format!("SELECT {function}({key})")).await?;
                Ok(())
            },
        ));
    }
    // Each lock takes a connection, and so does each task that waits.
    let pool = PgPoolOptions::new().max_connections(80).connect(url).await?;
    Ok(contestant(pool, |pool, name, body| async move {
        let guard = PgAdvisoryLock::new(name).acquire(pool.acquire().await?).await?;
        body.await;
        guard.release_now().await?;
        Ok(())
    }))
}

async fn client(url: &str) -> Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}
