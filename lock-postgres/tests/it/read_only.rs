//! Clients that only look: they make nothing, and need no right to write.

use std::fmt::Debug;
use std::time::Duration;

use lock_core::{DistributedLock, LockError, Wait};
use lock_postgres::PostgresLock;

use crate::inquiry::names;
use crate::server::{Database, claim, granted, name};

const TTL: Duration = Duration::from_secs(30);

async fn reader(server: &Database, user: &str) -> PostgresLock {
    server.config_as(user).read_only(true).connect().await.unwrap()
}

#[tokio::test]
async fn a_role_that_may_only_read_sees_the_locks_and_makes_nothing() {
    let server = Database::new().await;
    let plain = server.plain().await;
    plain.batch_execute("CREATE ROLE looker LOGIN").await.unwrap();
    let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'fencelock'";
    for user in ["looker", "postgres"] {
        let reader = reader(&server, user).await;
        assert!(reader.list("").await.unwrap().is_empty());
        assert!(reader.holders(&name("a")).await.unwrap().pop().is_none());
        assert_eq!(server.value::<i64>(schemas).await, 0, "{user}");
    }

    let lock = server.client().await;
    granted(&lock, &claim("a", TTL)).await;
    let counter = "SELECT c::text || e::text FROM fencelock.counter c, fencelock.era e";
    let before: String = server.value(counter).await;
    plain
        .batch_execute("GRANT USAGE ON SCHEMA fencelock TO looker")
        .await
        .unwrap();
    let looker = reader(&server, "looker").await;
    // Whose clients it may not ask, it sees the keys of.
    assert_eq!(names(&looker.list("").await.unwrap()), ["?"]);
    let select = "GRANT SELECT ON fencelock.channel TO looker";
    plain.batch_execute(select).await.unwrap();
    assert_eq!(names(&looker.list("").await.unwrap()), ["a"]);
    let holder = looker.holders(&name("a")).await.unwrap().pop().unwrap();
    assert!(
        holder.token.is_some() && holder.pid == Some(std::process::id()),
        "{holder:?}"
    );
    let reserved = claim("b", TTL).with_at_least(TTL);
    granted(&lock, &reserved).await;
    lock.reserve(&reserved, TTL).await.unwrap();
    lock.release(&reserved, Some(TTL)).await.unwrap();
    assert_eq!(names(&looker.list("").await.unwrap()), ["a"]);
    let select = "GRANT SELECT ON fencelock.reservation, fencelock.reserved_until TO looker";
    plain.batch_execute(select).await.unwrap();
    let looker_too = reader(&server, "looker").await;
    assert_eq!(names(&looker_too.list("").await.unwrap()), ["a", "b"]);
    assert!(looker_too.holders(&name("b")).await.unwrap().pop().unwrap().is_reserved);
    assert_eq!(looker.server_info().await.unwrap().product, "PostgreSQL");
    assert_eq!(server.value::<String>(counter).await, before);
}

#[tokio::test]
async fn a_reader_takes_and_releases_nothing_and_says_what_to_do() {
    fn refused<T: Debug>(done: Result<T, LockError>) {
        match done {
            Err(error @ LockError::Configuration { .. }) => assert!(error.to_string().contains("read-only"), "{error}"),
            other => panic!("not refused: {other:?}"),
        }
    }
    let server = Database::new().await;
    let lock = server.client().await;
    let (held, free) = (claim("held", TTL), claim("free", TTL));
    let grant = granted(&lock, &held).await;
    let reader = reader(&server, "postgres").await;
    refused(reader.try_acquire(&free).await);
    refused(reader.acquire(&free, Wait::until(None)).await);
    refused(reader.renew(&grant.lease).await);
    refused(reader.release(&held, None).await);
    refused(reader.force_release(&name("held")).await);
    refused(reader.prepare_tokens().await);
    let mut plain = server.plain().await;
    let mut tx = plain.transaction().await.unwrap();
    refused(reader.in_transaction(&mut tx, &name("free"), None).await);
    assert_eq!(names(&reader.list("").await.unwrap()), ["held"]);
}
