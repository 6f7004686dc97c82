//! Clients that only look: they change nothing, and see what is held whoever comes and goes meanwhile.

use std::fs;

use crate::file::{File, LONG, claim, granted, name};
use lock_core::{DistributedLock, LockError, Wait};
use lock_sqlite::{SqliteConfig, SqliteLock};

pub(crate) fn reader(file: &File) -> SqliteConfig {
    SqliteConfig::new(file.path()).read_only(true)
}

pub(crate) async fn names(lock: &SqliteLock) -> Vec<String> {
    let held = lock.list("").await.unwrap();
    held.into_iter()
        .map(|holder| holder.name.unwrap().to_string())
        .collect()
}

fn refusal<T: std::fmt::Debug>(done: Result<T, LockError>) -> String {
    match done {
        Err(error @ LockError::Configuration { .. }) => format!("{error:#}"),
        other => panic!("not refused as a wrong configuration: {other:?}"),
    }
}

pub(crate) fn names_in(file: &File) -> Vec<String> {
    let entries = fs::read_dir(file.path().parent().unwrap()).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_hundred_readers_use_up_no_token_and_the_writer_beside_them_goes_on() {
    let file = File::new();
    let lock = file.client().await;
    let first = granted(&lock, &claim("a", LONG)).await;
    for _ in 0..100 {
        let reader = reader(&file).connect().await.unwrap();
        assert_eq!(names(&reader).await, ["a"]);
        let holder = reader.holders(&name("a")).await.unwrap().pop().unwrap();
        assert_eq!(holder.token, Some(first.token));
    }
    let second = granted(&lock, &claim("b", LONG)).await;
    assert_eq!(second.token.get(), first.token.get() + 1);
}

#[tokio::test]
async fn a_reader_takes_and_releases_nothing_and_says_what_to_do() {
    let file = File::new();
    let lock = file.client().await;
    let held = claim("held", LONG);
    let grant = granted(&lock, &held).await;
    let reader = reader(&file).connect().await.unwrap();
    let free = claim("free", LONG);
    for why in [
        refusal(reader.try_acquire(&free).await),
        refusal(reader.acquire(&free, Wait::until(None)).await),
        refusal(reader.renew(&grant.lease).await),
        refusal(reader.release(&held, None).await),
        refusal(reader.force_release(&name("held")).await),
    ] {
        assert!(why.contains("read-only") && why.contains("without mode=ro"), "{why}");
    }
    assert_eq!(reader.server_info().await.unwrap().product, "SQLite");

    reader.close().await.unwrap();
    assert_eq!(names(&lock).await, ["held"]);
}

#[tokio::test]
async fn a_reader_shows_neither_what_has_expired_nor_what_another_boot_left() {
    let file = File::new();
    let lock = file.client().await;
    for n in ["expired", "held", "of another boot"] {
        granted(&lock, &claim(n, LONG)).await;
    }
    file.sql("UPDATE lock SET expires = 1 WHERE name = 'expired'");
    file.sql("UPDATE lock SET boot = 'another' WHERE name = 'of another boot'");
    let reader = reader(&file).connect().await.unwrap();
    assert_eq!(names(&reader).await, ["held"]);
    assert!(reader.holders(&name("expired")).await.unwrap().pop().is_none());
    let held = reader.holders(&name("held")).await.unwrap().pop().unwrap();
    assert!(held.remaining.unwrap() > LONG / 2 && held.remaining.unwrap() <= LONG);
}

#[tokio::test]
async fn a_reader_sees_the_file_that_is_there_and_misses_one_that_is_gone() {
    let file = File::new();
    let reader = reader(&file).connect_lazy().unwrap();
    let why = refusal(reader.list("").await);
    assert!(
        why.contains("there is no file") && why.contains("check the path"),
        "{why}"
    );
    assert_eq!(names_in(&file), [""; 0]);
    fs::write(file.path(), "").unwrap();
    assert_eq!(names(&reader).await, [""; 0]);
    assert_eq!(names_in(&file), ["locks.db"]);

    let lock = file.client().await;
    granted(&lock, &claim("first", LONG)).await;
    assert_eq!(names(&reader).await, ["first"]);
    // The copy is one that no client has opened yet, in another journal mode.
    file.copy_to(file.beside("copy.db"));
    granted(&lock, &claim("second", LONG)).await;
    assert_eq!(names(&reader).await, ["first", "second"]);
    lock.close().await.unwrap();
    fs::rename(file.beside("copy.db"), file.path()).unwrap();
    assert_eq!(names(&reader).await, ["first"]);
    fs::remove_file(file.path()).unwrap();
    refusal(reader.list("").await);
}

#[tokio::test]
async fn places_where_locks_do_not_exclude_are_refused_to_readers_too() {
    let file = File::new();
    drop(file.client().await);
    fs::hard_link(file.path(), file.beside("other.db")).unwrap();
    let refused = reader(&file).connect().await.unwrap_err();
    assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused}");
    let allowed = reader(&file).allow_unsafe_configuration(true).connect().await.unwrap();
    assert_eq!(names(&allowed).await, [""; 0]);
}

#[tokio::test]
async fn a_path_that_sqlite_would_take_for_an_address_is_read_as_it_is() {
    let file = File::new();
    let path = file.beside("file:odd?mode=memory&immutable=1#%20 \u{e9}.db");
    let lock = SqliteLock::open(&path).await.unwrap();
    granted(&lock, &claim("n", LONG)).await;
    let reader = SqliteConfig::new(&path).read_only(true).connect().await.unwrap();
    assert_eq!(names(&reader).await, ["n"]);
    lock.close().await.unwrap();
    assert_eq!(names(&reader).await, [""; 0]);
}

#[tokio::test]
async fn what_only_a_writer_can_put_right_is_told_and_left_as_it_is() {
    for unfinished in ["locks.db-wal", "locks.db-journal"] {
        let file = File::new();
        file.client().await.close().await.unwrap();
        fs::write(file.beside(unfinished), "something").unwrap();
        let before = names_in(&file);
        let why = refusal(reader(&file).connect().await);
        assert!(why.contains(unfinished) && why.contains("fencelock check"), "{why}");
        assert_eq!(names_in(&file), before);
    }
}

#[tokio::test]
async fn a_log_with_nothing_in_it_is_no_obstacle() {
    let file = File::new();
    let lock = file.client().await;
    granted(&lock, &claim("n", LONG)).await;
    file.copy_to(file.beside("copy.db"));
    lock.close().await.unwrap();
    fs::rename(file.beside("copy.db"), file.path()).unwrap();
    fs::write(file.beside("locks.db-wal"), "").unwrap();
    let before = names_in(&file);
    let reader = reader(&file).connect().await.unwrap();
    assert_eq!(names(&reader).await, ["n"]);
    assert_eq!(names_in(&file), before);
}
