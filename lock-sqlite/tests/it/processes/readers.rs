//! A client that only looks, while others open and close the file.

use std::path::Path;

use lock_core::DistributedLock;
use lock_sqlite::{SqliteConfig, SqliteLock};

use super::player::{Player, say};
use crate::file::{File, LONG, claim, granted, name};

pub(crate) async fn read_meanwhile() {
    let file = File::new();
    // It stays held, with nobody connected.
    granted(&file.client().await, &claim("kept", LONG)).await;
    let mut others = [(); 2].map(|()| Player::start("come and go", &file));
    let reader = SqliteConfig::new(file.path()).read_only(true).connect_lazy().unwrap();
    let mut reads = 0;
    for other in &mut others {
        assert_eq!(other.line(), "first");
    }
    let last = std::thread::spawn(move || others.map(|mut other| (other.line(), other.finish())));
    while !last.is_finished() {
        let held = reader.list("").await.unwrap();
        let kept = held.iter().filter(|holder| holder.name == Some(name("kept")));
        assert_eq!(kept.count(), 1, "{held:?}");
        reads += 1;
    }
    assert!(last.join().unwrap().iter().all(|(line, ())| line == "last"));
    assert!(reads > 0, "{reads}");
}

/// Takes a lock, releases it and closes the file, again and again.
pub(crate) async fn come_and_go(path: &Path) {
    for round in 0..100 {
        let lock = SqliteLock::open(path).await.unwrap();
        let passing = claim("passing", LONG);
        if let Some(grant) = lock.try_acquire(&passing).await.unwrap().granted() {
            lock.release(&grant.claim, None).await.unwrap();
        }
        lock.close().await.unwrap();
        if round == 0 {
            say("first");
        }
    }
    say("last");
}

/// A process that returns from `main` closes the file to the end: a log without its index would be an obstacle to who only looks.
pub(crate) async fn ends() {
    let file = File::new();
    for _ in 0..10 {
        Player::start("come once", &file).finish();
        for suffix in ["-wal", "-shm"] {
            assert!(
                !file.beside(&format!("locks.db{suffix}")).exists(),
                "{suffix} was left behind"
            );
        }
    }
}

/// Takes a lock, releases it, and drops the client.
pub(crate) async fn come_once(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    let grant = granted(&lock, &claim("passing", LONG)).await;
    lock.release(&grant.claim, None).await.unwrap();
}
