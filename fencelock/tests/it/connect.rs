//! The ways in, as a program uses them.

use std::time::Duration;

use fencelock::{LockError, Locks, MemoryLock, Options, connect, connect_lazy, connect_with};

#[tokio::test]
async fn a_memory_address_without_a_name_is_a_store_of_its_own() {
    for url in ["memory:", "memory://"] {
        let (a, b) = (connect(url).await.unwrap(), connect(url).await.unwrap());
        let _held = a.lock("x").no_wait().await.unwrap();
        assert!(b.try_lock("x").await.unwrap().is_some());
    }
}

#[tokio::test]
async fn memory_addresses_with_the_same_name_exclude_each_other() {
    let a = connect("memory:a shop").await.unwrap();
    let b = connect_lazy("memory://a shop").unwrap();
    let other = connect("memory:another shop").await.unwrap();
    let first = a.lock("x").no_wait().await.unwrap();
    assert!(b.try_lock("x").await.unwrap().is_none());
    assert!(other.try_lock("x").await.unwrap().is_some());
    let token = first.token();
    first.release().await.unwrap();
    a.shutdown().await.unwrap();
    assert!(b.try_lock("x").await.unwrap().unwrap().token() > token);
}

#[tokio::test]
async fn tokens_go_on_rising_when_the_last_client_of_a_named_store_is_gone() {
    let url = "memory:comes and goes";
    let first = connect(url).await.unwrap().lock("x").await.unwrap().token();
    assert!(connect(url).await.unwrap().lock("x").await.unwrap().token() > first);
}

#[tokio::test]
async fn a_memory_address_takes_no_settings() {
    for url in ["memory:?ttl=5s", "memory:a#b", "memory:a\nb"] {
        let error = connect(url).await.unwrap_err();
        assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    }
}

#[tokio::test]
async fn clients_of_one_sqlite_file_exclude_each_other_however_they_came_in() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("locks.db").display());
    let a = connect(&url).await.unwrap();
    let b = connect_lazy(url.replace("sqlite:", "SQLite://")).unwrap();
    let held = a.lock("x").no_wait().await.unwrap();
    assert!(b.try_lock("x").await.unwrap().is_none());
    held.release().await.unwrap();
    assert!(b.try_lock("x").await.unwrap().is_some());
    a.shutdown().await.unwrap();
    b.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_lazy_client_touches_nothing_before_its_first_request_and_tries_again_after_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("later");
    let idle = connect_lazy(format!("sqlite:{}", dir.path().join("idle.db").display())).unwrap();
    let locks = connect_lazy(format!("sqlite:{}", folder.join("locks.db").display())).unwrap();
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
    drop(connect_lazy(format!("sqlite:{}", file.display())).unwrap());
    assert!(!file.exists());
}

#[tokio::test]
async fn options_reach_the_client_and_its_backend() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options::new()
        .ttl(Duration::from_secs(70))
        .op_timeout(Duration::from_secs(33));
    let file = dir.path().join("locks.db");
    let locks = connect_with(format!("sqlite:{}?op_timeout=1s", file.display()), options)
        .await
        .unwrap();
    assert_eq!(locks.capabilities().op_timeout, Duration::from_secs(33));
    assert_eq!(locks.lock("x").await.unwrap().ttl(), Duration::from_secs(70));
    locks.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_user_who_depends_on_the_facade_alone_can_name_every_backend() {
    let dir = tempfile::tempdir().unwrap();
    let sqlite = fencelock::sqlite::SqliteConfig::new(dir.path().join("locks.db"))
        .connect()
        .await
        .unwrap();
    for locks in [Locks::new(MemoryLock::new()), Locks::new(sqlite)] {
        assert!(locks.try_lock("x").await.unwrap().is_some());
        locks.shutdown().await.unwrap();
    }
}
