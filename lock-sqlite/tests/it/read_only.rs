//! Clients that only look: they change nothing, and see what is held whoever comes and goes meanwhile.

use std::process::Command;
use std::{fs, thread};

use lock_core::{DistributedLock, Wait};
use lock_sqlite::{SqliteConfig, SqliteLock};

use crate::file::{File, claim, granted, name, refusal, runtime};

async fn names(lock: &SqliteLock) -> Vec<String> {
    let held = lock.list("").await.unwrap().into_iter();
    held.map(|holder| holder.name.unwrap().to_string()).collect()
}

/// The files of the directory with their content and the times of their last change.
fn contents(file: &File) -> Vec<(String, Vec<u8>, std::time::SystemTime)> {
    let names = file.names().into_iter();
    let look = names.map(|name| {
        let path = file.beside(&name);
        let changed = fs::metadata(&path).unwrap().modified().unwrap();
        (name, fs::read(&path).unwrap(), changed)
    });
    look.collect()
}

#[tokio::test]
async fn a_reader_takes_and_releases_nothing_and_says_what_to_do() {
    let file = File::new();
    // SQLite must not take it for an address.
    let path = file.beside("file:odd?mode=memory&immutable=1#%20 \u{e9}.db");
    let lock = SqliteLock::open(&path).await.unwrap();
    let held = claim("held");
    let grant = granted(&lock, &held).await;
    let reader = SqliteConfig::new(&path).read_only(true).connect().await.unwrap();
    let free = claim("free");
    for why in [
        refusal(reader.try_acquire(&free).await),
        refusal(reader.acquire(&free, Wait::until(None)).await),
        refusal(reader.renew(&grant.lease).await),
        refusal(reader.release(&held, None).await),
        refusal(reader.force_release(&name("held")).await),
    ] {
        assert!(why.contains("read-only") && why.contains("without mode=ro"), "{why}");
    }
    for _ in 0..100 {
        assert_eq!(names(&reader).await, ["held"]);
    }
    // No token was used up, and the writer beside them goes on.
    assert_eq!(granted(&lock, &free).await.token.get(), grant.token.get() + 1);
}

/// In a directory of its own, so that no client of this process has the files open: reading them would drop its locks.
#[tokio::test]
async fn a_reader_leaves_every_file_as_it_is() {
    let (file, copy) = (File::new(), File::new());
    let lock = file.client().await;
    granted(&lock, &claim("n")).await;
    let reader = copy.reader();
    assert!(refusal(reader.list("").await).contains("there is no file"));
    assert_eq!(copy.names(), [""; 0]);
    fs::write(copy.path(), "").unwrap();
    assert_eq!(names(&reader).await, [""; 0]);
    // As a client that was killed leaves them, with the log and its index; without a log; and with an empty one.
    for (suffixes, empty) in [
        (&["", "-wal", "-shm"][..], None),
        (&["", "-shm"], None),
        (&[""], Some("-wal")),
    ] {
        for name in copy.names() {
            fs::remove_file(copy.beside(&name)).unwrap();
        }
        for suffix in suffixes {
            let name = format!("locks.db{suffix}");
            let paths = [file.beside(&name), copy.beside(&name)];
            assert!(Command::new("cp").args(paths).status().unwrap().success());
        }
        if let Some(suffix) = empty {
            fs::write(copy.beside(&format!("locks.db{suffix}")), "").unwrap();
        }
        let before = contents(&copy);
        assert_eq!(names(&reader).await, ["n"], "{suffixes:?}");
        assert!(contents(&copy) == before, "{suffixes:?}");
        file.sql("PRAGMA wal_checkpoint");
    }
}

#[test]
fn readers_see_what_is_held_while_clients_of_their_process_come_and_go() {
    let file = File::new();
    runtime().block_on(async {
        granted(&file.client().await, &claim("kept")).await;
    });
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            runtime().block_on(async {
                for _ in 0..100 {
                    let lock = file.client().await;
                    granted(&lock, &claim("passing")).await;
                    lock.close().await.unwrap();
                }
            });
        });
        runtime().block_on(async {
            let reader = file.reader();
            while !writer.is_finished() {
                let seen = names(&reader).await;
                assert!(seen.contains(&"kept".to_owned()), "{seen:?}");
            }
        });
    });
}

/// Started by the next test as a process of its own, with the path of the database.
#[test]
#[ignore = "started by another test"]
fn a_process_comes_once() {
    let Some(path) = std::env::var_os("FENCELOCK_TEST_PATH") else {
        return;
    };
    runtime().block_on(async {
        let lock = SqliteLock::open(path).await.unwrap();
        let grant = granted(&lock, &claim("passing")).await;
        lock.release(&grant.claim, None).await.unwrap();
    });
    // As at the end of `main`, and without what the test harness does after a test.
    std::process::exit(0);
}

/// A process that returns from `main` closes the file to the end: a log without its index would be an obstacle to clients that only look.
#[test]
fn a_process_that_ends_leaves_no_log_behind() {
    let file = File::new();
    for _ in 0..5 {
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", "read_only::a_process_comes_once", "--ignored"]);
        let ended = process
            .args(["--test-threads=2"])
            .env("FENCELOCK_TEST_PATH", file.path());
        assert!(ended.output().unwrap().status.success());
        let names = file.names();
        assert!(
            !names
                .iter()
                .any(|name| name.ends_with("-wal") || name.ends_with("-shm")),
            "{names:?}"
        );
    }
}
