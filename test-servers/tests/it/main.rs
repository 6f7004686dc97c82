//! Servers can be started, stopped and lost, in every way that there is on this machine.
//!
//! `FENCELOCK_TEST_SERVERS` says which ways are tried, as for every other test that needs servers.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod extended;

use std::time::Duration;

use test_servers::{Kind, Server};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longer than anything takes that is to happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A connection that asks for one thing at a time.
pub(crate) struct Redis(BufReader<TcpStream>);

impl Redis {
    pub(crate) async fn connect(address: impl ToString) -> Self {
        Self(BufReader::new(TcpStream::connect(address.to_string()).await.unwrap()))
    }

    pub(crate) async fn ask(&mut self, command: &str) -> String {
        timeout(PATIENCE, self.try_ask(command)).await.unwrap().unwrap()
    }

    /// The first line of the reply; empty if the connection has ended.
    pub(crate) async fn try_ask(&mut self, command: &str) -> std::io::Result<String> {
        self.0.get_mut().write_all(format!("{command}\r\n").as_bytes()).await?;
        let mut line = String::new();
        self.0.read_line(&mut line).await?;
        Ok(line.trim_end().to_owned())
    }
}

#[tokio::test]
async fn a_server_can_have_arguments_of_its_own() {
    let server = Server::start_own(&Kind::REDIS, &["--databases", "1"]).await.unwrap();
    let mut redis = Redis::connect(server.authority()).await;
    assert!(redis.ask("SELECT 1").await.starts_with("-ERR"));
}

#[tokio::test]
async fn a_server_that_does_not_become_ready_shows_what_it_wrote() {
    let error = Server::start_own(&Kind::REDIS, &["--no-such-thing", "1"])
        .await
        .unwrap_err();
    assert!(error.to_string().contains("did not become ready"), "{error}");
    assert!(error.to_string().contains("no-such-thing"), "{error}");
}
