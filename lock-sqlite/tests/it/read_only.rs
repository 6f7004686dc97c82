//! Clients that only look: they change nothing, and see what is held whoever comes and goes meanwhile.

use std::fs;
use std::thread;

use lock_core::{DistributedLock, LockError, Wait};
use lock_sqlite::{SqliteConfig, SqliteLock};

use crate::file::{File, LONG, claim, granted, name, runtime};

fn reader(file: &File) -> SqliteLock {
    SqliteConfig::new(file.path()).read_only(true).connect_lazy().unwrap()
}

async fn names(lock: &SqliteLock) -> Vec<String> {
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

/// The files of the directory with their content and the times of their last change.
fn contents(file: &File) -> Vec<(String, Vec<u8>, std::time::SystemTime)> {
    let look = |name: String| {
        let path = file.beside(&name);
        (
            name,
            fs::read(&path).unwrap(),
            fs::metadata(&path).unwrap().modified().unwrap(),
        )
    };
    file.names().into_iter().map(look).collect()
}

#[tokio::test]
async fn a_reader_takes_and_releases_nothing_and_says_what_to_do() {
    let file = File::new();
    let lock = file.client().await;
    let held = claim("held", LONG);
    let grant = granted(&lock, &held).await;
    let (reader, free) = (reader(&file), claim("free", LONG));
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
    for _ in 0..100 {
        assert_eq!(names(&reader).await, ["held"]);
    }
    // No token was used up, and the writer beside them goes on.
    let next = granted(&lock, &free).await;
    assert_eq!(next.token.get(), grant.token.get() + 1);
}

/// In a directory of its own, so that no client of this process has the files open: reading them would drop its locks.
#[tokio::test]
async fn a_reader_leaves_every_file_as_it_is() {
    let (file, copy) = (File::new(), File::new());
    let lock = file.client().await;
    granted(&lock, &claim("n", LONG)).await;
    let reader = reader(&copy);
    let why = refusal(reader.list("").await);
    assert!(
        why.contains("there is no file") && why.contains("check the path"),
        "{why}"
    );
    assert_eq!(copy.names(), [""; 0]);
    fs::write(copy.path(), "").unwrap();
    assert_eq!(names(&reader).await, [""; 0]);
    let of = |name: &str| (file.beside(name), copy.beside(name));
    // As a client that was killed leaves them: with the log and its index, and without.
    for names_of_files in [&["locks.db", "locks.db-wal", "locks.db-shm"][..], &["locks.db"]] {
        for name in copy.names() {
            fs::remove_file(copy.beside(&name)).unwrap();
        }
        for name in names_of_files {
            let (from, to) = of(name);
            assert!(
                std::process::Command::new("cp")
                    .args([from, to])
                    .status()
                    .unwrap()
                    .success()
            );
        }
        let before = contents(&copy);
        assert_eq!(names(&reader).await, ["n"], "{names_of_files:?}");
        assert!(contents(&copy) == before, "{names_of_files:?}");
        file.sql("PRAGMA wal_checkpoint");
    }
    // An empty log is no obstacle, and what only a writer can put right is told.
    fs::write(copy.beside("locks.db-wal"), "").unwrap();
    assert_eq!(names(&reader).await, ["n"]);
    fs::remove_file(copy.beside("locks.db-wal")).unwrap();
    for unfinished in ["locks.db-wal", "locks.db-journal"] {
        fs::write(copy.beside(unfinished), "something").unwrap();
        let before = contents(&copy);
        let why = refusal(reader.list("").await);
        assert!(why.contains(unfinished) && why.contains("fencelock check"), "{why}");
        assert!(contents(&copy) == before);
        fs::remove_file(copy.beside(unfinished)).unwrap();
    }
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

#[test]
fn readers_see_what_is_held_while_clients_of_their_process_come_and_go() {
    let file = File::new();
    runtime().block_on(async {
        granted(&file.client().await, &claim("kept", LONG)).await;
    });
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            runtime().block_on(async {
                for _ in 0..100 {
                    let lock = file.client().await;
                    granted(&lock, &claim("passing", LONG)).await;
                    lock.close().await.unwrap();
                }
            });
        });
        runtime().block_on(async {
            let reader = reader(&file);
            while !writer.is_finished() {
                let seen = names(&reader).await;
                assert!(seen.contains(&"kept".to_owned()), "{seen:?}");
            }
        });
        writer.join().unwrap();
    });
}
