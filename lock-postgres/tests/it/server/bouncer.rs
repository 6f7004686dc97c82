//! A PgBouncer before a server.

use lock_postgres::PostgresConfig;
use lock_postgres::tokio_postgres::{Client, NoTls, SimpleQueryMessage};
use test_servers::PgBouncer;

use super::process::Server;

/// Ends when dropped.
pub(crate) struct Bouncer {
    pub(crate) port: u16,
    _process: PgBouncer,
}

impl Bouncer {
    /// With these lines of its settings, such as `pool_mode = session`.
    pub(crate) fn start(server: &Server, settings: &str) -> Self {
        let place = format!("user=postgres host=127.0.0.1 port={}", server.port());
        let process = PgBouncer::start(&place, settings).unwrap();
        Self {
            port: process.address().port(),
            _process: process,
        }
    }

    pub(crate) fn config(&self, server: &Server) -> PostgresConfig {
        server.config_at(self.port)
    }

    /// A connection of an application that shares the pool.
    pub(crate) async fn plain(&self, server: &Server) -> Client {
        let (client, connection) = server.login_at(self.port).connect(NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }
}

/// The one value that a statement is answered with, by the simple protocol: poolers that share have no other.
pub(crate) async fn simple(client: &Client, sql: &str) -> Option<String> {
    let answer = client.simple_query(sql).await.unwrap();
    answer.iter().rev().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    })
}
