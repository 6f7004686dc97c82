//! The ways in, as a program uses them.

use std::path::Path;
use std::time::Duration;

use fencelock::sqlite::SqliteConfig;
use fencelock::{LockError, Locks, MemoryLock, Options, connect, connect_lazy, connect_with};

fn sqlite(file: &Path) -> String {
    format!("sqlite:{}", file.display())
}

/// Whether the second client is kept out by the first.
async fn exclude(a: &Locks, b: &Locks) -> bool {
    let held = a.lock("x").no_wait().await.unwrap();
    let excluded = b.try_lock("x").await.unwrap().is_none();
    held.release().await.unwrap();
    excluded
}

#[tokio::test]
async fn memory_addresses_with_the_same_name_exclude_each_other() {
    for url in ["memory:", "memory://"] {
        assert!(!exclude(&connect(url).await.unwrap(), &connect(url).await.unwrap()).await);
    }
    let a = connect("memory:a shop").await.unwrap();
    assert!(exclude(&a, &connect_lazy("memory://a shop").unwrap()).await);
    assert!(!exclude(&a, &connect("memory:another shop").await.unwrap()).await);
    // Tokens go on rising when the last client of a named store has ended.
    let url = "memory:comes and goes";
    let first = connect(url).await.unwrap().lock("x").await.unwrap().token();
    assert!(connect(url).await.unwrap().lock("x").await.unwrap().token() > first);
    for url in ["memory:?ttl=5s", "memory:a#b", "memory:a\nb"] {
        let error = connect(url).await.unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    }
}

#[tokio::test]
async fn clients_of_one_sqlite_file_exclude_each_other_however_they_came_in() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("locks.db");
    let a = connect(sqlite(&file)).await.unwrap();
    let b = connect_lazy(sqlite(&file).replace("sqlite:", "SQLite://")).unwrap();
    let c = Locks::new(SqliteConfig::new(&file).connect().await.unwrap());
    assert!(exclude(&a, &b).await && exclude(&b, &c).await);
    assert!(!exclude(&a, &Locks::new(MemoryLock::new())).await);
    for locks in [a, b, c] {
        locks.shutdown().await.unwrap();
    }
}

#[tokio::test]
async fn a_lazy_client_touches_nothing_before_its_first_request_and_tries_again_after_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("later");
    let idle = connect_lazy(sqlite(&dir.path().join("idle.db"))).unwrap();
    let locks = connect_lazy(sqlite(&folder.join("locks.db"))).unwrap();
    let error = locks.try_lock("x").await.unwrap_err();
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    drop(idle);
    // From now on the clean-up after the failure, which is tried again and again, can make the file, too.
    std::fs::create_dir(&folder).unwrap();
    assert!(locks.try_lock("x").await.unwrap().is_some());
    locks.shutdown().await.unwrap();
}

#[test]
fn a_lazy_client_needs_no_runtime_to_be_made_or_closed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("locks.db");
    drop(connect_lazy(sqlite(&file)).unwrap());
    assert!(!file.exists());
}

#[tokio::test]
async fn options_reach_the_client_and_its_backend() {
    let dir = tempfile::tempdir().unwrap();
    let [ttl, op_timeout] = [70, 33].map(Duration::from_secs);
    let url = format!("{}?op_timeout=1s", sqlite(&dir.path().join("locks.db")));
    let options = Options::new().ttl(ttl).op_timeout(op_timeout);
    let locks = connect_with(url, options).await.unwrap();
    assert_eq!(locks.capabilities().op_timeout, op_timeout);
    assert_eq!(locks.lock("x").await.unwrap().ttl(), ttl);
    locks.shutdown().await.unwrap();
}
