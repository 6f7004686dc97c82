//! Processes short of disk space or of file descriptors, or kept from the file.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use lock_core::{DistributedLock, LockError, Released, Renewal};
use lock_sqlite::{SqliteConfig, SqliteLock};
use rustix::process::{Resource, Signal, getrlimit, setrlimit};

use super::player::{Player, say};
use crate::file::{File, HANG_LIMIT, LONG, claim, granted, until_done};

pub(crate) async fn few_descriptors() {
    let file = File::new();
    granted(&file.client().await, &claim("held", LONG)).await;
    Player::start("few descriptors", &file).finish();
}

/// Opens the file with as many descriptors as suffice, and before with each number that does not.
pub(crate) async fn with_few_descriptors(path: &Path) {
    let mut limit = getrlimit(Resource::Nofile);
    let mut failures = 0;
    for descriptors in 0.. {
        let lock = SqliteConfig::new(path).connect_lazy().unwrap();
        limit.current = limit_for(descriptors);
        setrlimit(Resource::Nofile, limit).unwrap();
        let attempt = lock.try_acquire(&claim("held", LONG)).await;
        limit.current = limit.maximum.map(|most| most.min(1024));
        setrlimit(Resource::Nofile, limit).unwrap();
        match attempt {
            Ok(attempt) => {
                assert!(attempt.granted().is_none(), "granted with {descriptors} descriptors");
                break;
            }
            Err(error) => assert!(error.is_retryable(), "with {descriptors} descriptors: {error}"),
        }
        failures += 1;
        assert!(failures < 50, "no number of descriptors suffices");
        // The same client goes on once there are enough.
        assert!(
            lock.try_acquire(&claim("held", LONG))
                .await
                .unwrap()
                .granted()
                .is_none()
        );
        lock.close().await.unwrap();
    }
    assert!(failures >= 2, "only {failures} failures");
}

/// The limit with which that many more descriptors can be opened: it is on the numbers, and some are taken already.
fn limit_for(descriptors: usize) -> Option<u64> {
    let free = |number: &u64| fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_err();
    (0..).filter(free).nth(descriptors)
}

pub(crate) async fn stopped_inside() {
    let file = File::new();
    let limit = Duration::from_millis(300);
    let hasty = SqliteConfig::new(file.path()).op_timeout(limit);
    let hasty = until_done(async || hasty.clone().connect().await).await;
    let lock = file.client().await;
    let held = claim("held", LONG);
    let grant = granted(&lock, &held).await;
    for end in [Signal::CONT, Signal::KILL] {
        let mut stopped = Player::start("stop inside", &file);
        assert_eq!(stopped.line(), "inside");
        stopped.signal(Signal::STOP);
        let other = claim("other", LONG);
        let attempt = tokio::time::timeout(HANG_LIMIT, hasty.try_acquire(&other)).await;
        let failed = attempt.expect("the request ends").unwrap_err();
        assert!(matches!(failed, LockError::Unavailable { .. }), "{failed}");
        assert!(
            format!("{failed:#}").contains("stopped inside a transaction"),
            "{failed}"
        );
        let renewal = hasty.renew(&grant.lease).await;
        assert!(matches!(renewal, Err(LockError::Unavailable { .. })), "{renewal:?}");
        // Reading goes on.
        assert!(lock.holders(held.name()).await.unwrap().pop().is_some());
        stopped.signal(end);
        if end == Signal::CONT {
            assert_eq!(stopped.ask("commit"), "committed");
        }
        stopped.rest();
        let other = claim("other", LONG);
        let attempt = until_done(async || hasty.try_acquire(&other).await).await;
        assert!(attempt.granted().is_some());
        lock.release(&other, None).await.unwrap();
        let renewal = until_done(async || hasty.renew(&grant.lease).await).await;
        assert_eq!(renewal, Renewal::Renewed);
    }
    assert_eq!(file.rows(), 1);
}

pub(crate) fn stop_inside(path: &Path) {
    let conn = rusqlite::Connection::open(path).unwrap();
    conn.execute_batch("BEGIN IMMEDIATE; UPDATE counter SET token = token")
        .unwrap();
    say("inside");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    conn.execute_batch("COMMIT").unwrap();
    say("committed");
}

pub(crate) async fn full_disk() {
    let file = File::new();
    // For it files end at 160 KiB, which SQLite meets as a full disk. Without the trap the signal would end it.
    let limited = "trap '' XFSZ; ulimit -f 320; exec \"$0\" \"$@\"";
    let command = Player::command_by(&["sh", "-c", limited], "fill", &file.path());
    Player::spawn(command).finish();
    assert_eq!(
        file.number("SELECT count(*) FROM pragma_integrity_check WHERE integrity_check <> 'ok'"),
        0
    );
    // There is room again, and everything is as it was left.
    let lock = file.client().await;
    let held = lock.list("").await.unwrap();
    assert!(held.len() > 10, "only {} locks", held.len());
    for (i, holder) in held.iter().enumerate() {
        assert_eq!(
            lock.force_release(holder.name.as_ref().unwrap())
                .await
                .unwrap()
                .pop()
                .unwrap()
                .owner,
            holder.owner,
            "{i}"
        );
    }
    granted(&lock, &claim("n", LONG)).await;
}

/// Works where the log cannot grow, and then takes locks until there is no room at all.
pub(crate) async fn fill(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    let held = claim("held", LONG);
    let grant = granted(&lock, &held).await;
    // Far more than the log has room for.
    for _ in 0..300 {
        let claim = claim("n", LONG);
        granted(&lock, &claim).await;
        assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
        assert_eq!(lock.release(&claim, None).await.unwrap(), Released::Released);
    }
    let label = "x".repeat(4_000);
    let mut taken = 1;
    let refused = loop {
        let claim = claim(&format!("n{taken}"), LONG).with_label(label.as_str());
        match lock.try_acquire(&claim).await {
            Ok(attempt) => drop(attempt.granted().unwrap()),
            Err(error) => break error,
        }
        taken += 1;
        assert!(taken < 10_000, "the disk never became full");
    };
    assert!(matches!(refused, LockError::Unavailable { .. }), "{refused}");
    assert!(format!("{refused:#}").contains("free some space"), "{refused}");
    assert_eq!(lock.list("").await.unwrap().len(), taken);
}

/// Whether a disk of a few hundred KiB can be mounted here, seen by one process only.
pub(crate) fn small_disk() -> Result<(), &'static str> {
    let made = Command::new("unshare")
        .args(["-rm", "sh", "-c", "mount -t tmpfs -o size=600k none /tmp"])
        .stderr(Stdio::null())
        .status();
    match made {
        Err(_) => Err("needs the program unshare"),
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err("needs the right to mount"),
    }
}

pub(crate) async fn really_full() {
    let file = File::new();
    let disk = file.beside("disk");
    fs::create_dir(&disk).unwrap();
    let mount = "mount -t tmpfs -o size=600k none \"$DISK\" && exec \"$0\" \"$@\"";
    let before = ["unshare", "-rm", "sh", "-c", mount];
    let mut command = Player::command_by(&before, "fill disk", &disk.join("locks.db"));
    command.env("DISK", &disk);
    Player::spawn(command).finish();
}

/// Keeps a lock while somebody else uses up all space, and all descriptors are in use, and lets go of it.
pub(crate) async fn fill_disk(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    let held = claim("held", LONG);
    let grant = granted(&lock, &held).await;
    let mut filler = fs::File::create(path.with_file_name("filler")).unwrap();
    let full = std::iter::repeat_with(|| filler.write_all(&[1; 512])).find_map(Result::err);
    assert_eq!(full.unwrap().kind(), std::io::ErrorKind::StorageFull);
    // To make room takes no descriptor either.
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit_for(0);
    setrlimit(Resource::Nofile, limit).unwrap();
    for _ in 0..300 {
        assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    }
    assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
    assert!(lock.holders(held.name()).await.unwrap().pop().is_none());
}
