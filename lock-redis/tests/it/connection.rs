//! What happens when the way to the server is bad.

use std::time::Duration;

use lock_core::DistributedLock;
use lock_redis::{RedisConfig, RedisLock};

use crate::server::{LONG, Proxy, Server, claim, granted, name, until_queued, waiting};

/// A client whose requests may take that long, and the way that they go.
pub(crate) async fn by_proxy(server: &Server, limit: Duration) -> (RedisLock, Proxy) {
    let proxy = Proxy::to(server.port()).await;
    let config = RedisConfig::new("127.0.0.1", proxy.port()).op_timeout(limit);
    (config.connect().await.unwrap(), proxy)
}

/// Waits until a claim of that client waits for the name `n`, and has been told so: a request whose connection ends before it is answered
/// fails.
async fn until_told(server: &Server, lock: &RedisLock) {
    until_queued(server, "n", 1).await;
    // Answers come in the order of the requests.
    lock.holders(&name("n")).await.unwrap().pop();
}

#[tokio::test]
async fn a_push_that_was_lost_with_its_connection_is_made_up_for() {
    let server = Server::start();
    let (lock, proxy) = by_proxy(&server, LONG).await;
    let holder = server.client().await;
    let (held, wanted) = (claim("n", LONG), claim("n", LONG));
    granted(&holder, &held).await;
    let wait = waiting(&lock, &wanted);
    until_told(&server, &lock).await;
    proxy.hold_answers();
    holder.release(&held, None).await.unwrap();
    until_queued(&server, "n", 0).await;
    proxy.cut();
    // Passed on before the connection has ended, the push would not be lost.
    proxy.until_accepted(1).await;
    proxy.pass();
    assert_eq!(wait.await.unwrap().claim, wanted);
}
