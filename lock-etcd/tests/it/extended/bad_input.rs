//! Logins that expire.

use std::time::Duration;

use lock_core::{DistributedLock, Released, Renewal};
use test_servers::Data;

use crate::bad_input::{SECRET, as_root, with_users};
use crate::server::{LONG, claim, config, granted, until_queued, waiting};

#[tokio::test]
async fn a_login_that_has_expired_is_refreshed() {
    let (server, root) = with_users(&["--auth-token-ttl", "1"]).await;
    let config = || config(&server).credentials("locks", SECRET);
    let (lock, other) = (config().connect().await.unwrap(), config().connect().await.unwrap());
    let held = claim("n", LONG);
    let grant = granted(&lock, &held).await;
    let next = waiting(&other, &claim("n", LONG));
    until_queued(&root, "n", 1).await;
    // Nobody says anything meanwhile.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
    assert!(next.await.unwrap().token > grant.token);
    // Whoever has logged in long ago, and watches something since then, waits for more.
    let held = claim("o", LONG);
    granted(&lock, &held).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let waiting = waiting(&other, &claim("o", LONG));
    until_queued(&as_root(&server).await, "o", 1).await;
    assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
    waiting.await.unwrap();
    // A restart forgets all logins.
    server.restart(Data::Kept).await.unwrap();
    granted(&lock, &claim("m", LONG)).await;
}
