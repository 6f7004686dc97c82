//! Commands to the servers, as an administrator sends them.

use std::io;
use std::time::{Duration, Instant};

use conformance_tests::servers::Server;
use fencelock::redis::redis::{self, FromRedisValue};

/// How long a group of servers may take to be whole again.
const LONGEST: Duration = Duration::from_secs(60);

/// The answer to a command, of which spaces separate the words.
pub(crate) async fn ask<T: FromRedisValue>(server: &Server, command: &str) -> io::Result<T> {
    let asking = async {
        let client = redis::Client::open(server.url())?;
        let mut connection = client.get_multiplexed_async_connection().await?;
        let mut words = redis::Cmd::new();
        words.arg(command.split(' ').collect::<Vec<_>>());
        words.query_async(&mut connection).await
    };
    asking.await.map_err(io::Error::other)
}

/// Waits until it is so. A server that does not answer is asked again.
pub(crate) async fn until<F>(what: &str, is_so: impl Fn() -> F) -> io::Result<()>
where
    F: Future<Output = io::Result<bool>>,
{
    let start = Instant::now();
    loop {
        let answer = is_so().await;
        if matches!(answer, Ok(true)) {
            return Ok(());
        }
        if start.elapsed() > LONGEST {
            return Err(io::Error::other(format!("waited in vain until {what}: {answer:?}")));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
