//! What cannot hold locks is refused with a typed error that says what to do. The same as root and as anybody else.

use std::fs;
use std::future::IntoFuture;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::file::{File, LONG, claim, granted, runtime};
use lock_core::{DistributedLock, LockError, Locks, Released, Renewal};
use lock_sqlite::{SqliteConfig, SqliteLock};

/// Why the path is refused for good.
async fn refusal(path: impl Into<PathBuf>) -> String {
    match SqliteLock::open(path).await {
        Err(error @ LockError::Configuration { .. }) => format!("{error:#}"),
        other => panic!("not refused as a wrong configuration: {other:?}"),
    }
}

/// The same as somebody whom permissions stop, also if the tests run as root.
fn refusal_as_nobody(path: &Path) -> String {
    let path = path.to_owned();
    as_nobody(false, refusal(path))
}

/// Works as somebody whom permissions stop, also if the tests run as root. If it is `borrowed`, root only acts as them.
fn as_nobody<T: Send>(borrowed: bool, work: impl Future<Output = T> + Send) -> T {
    // Credentials belong to threads on Linux, and a thread that is started inherits them.
    thread::scope(|scope| {
        let working = scope.spawn(move || {
            #[cfg(target_os = "linux")]
            if rustix::process::geteuid().is_root() {
                use rustix::process::{Gid, Uid};
                use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
                let (group, user) = (Gid::from_raw(65534), Uid::from_raw(65534));
                let real = if borrowed { Uid::ROOT } else { user };
                set_thread_groups(&[]).unwrap();
                set_thread_res_gid(group, group, group).unwrap();
                set_thread_res_uid(real, user, user).unwrap();
            }
            runtime().block_on(work)
        });
        working.join().unwrap()
    })
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused_and_left_as_it_is() {
    let file = File::new();
    for content in ["Dear diary\n".repeat(500), "x".to_owned()] {
        fs::write(file.path(), &content).unwrap();
        let why = refusal(file.path()).await;
        assert!(why.contains("not an SQLite database; choose another path"), "{why}");
        assert_eq!(fs::read_to_string(file.path()).unwrap(), content);
    }
}

#[tokio::test]
async fn the_database_of_another_program_is_refused_and_left_as_it_is() {
    for sql in [
        "CREATE TABLE lock (name)",
        "PRAGMA application_id = 7",
        "PRAGMA user_version = 1",
    ] {
        let file = File::new();
        file.sql(sql);
        let before = fs::read(file.path()).unwrap();
        let why = refusal(file.path()).await;
        assert!(
            why.contains("another program; give locks a file of their own"),
            "{sql}: {why}"
        );
        assert_eq!(fs::read(file.path()).unwrap(), before, "{sql}");
    }
}

#[tokio::test]
async fn an_empty_file_becomes_a_database() {
    let file = File::new();
    fs::write(file.path(), "").unwrap();
    granted(&file.client().await, &claim("n", LONG)).await;
}

#[tokio::test]
async fn a_newer_format_is_refused() {
    let file = File::new();
    file.client().await.close().await.unwrap();
    file.sql("PRAGMA user_version = 3");
    let why = refusal(file.path()).await;
    assert!(
        why.contains("has format 3") && why.contains("update this program"),
        "{why}"
    );
}

#[tokio::test]
async fn what_is_no_regular_file_is_refused() {
    let file = File::new();
    fs::create_dir(file.path()).unwrap();
    assert!(refusal(file.path()).await.contains("is a directory"));
    assert!(refusal("/dev/null").await.contains("not a regular file"));
    assert!(refusal("").await.contains("in memory"));
    assert!(refusal(":memory:").await.contains("in memory"));
}

#[tokio::test]
async fn a_missing_directory_is_not_made_silently() {
    let file = File::new();
    let why = refusal(file.beside("no/locks.db")).await;
    assert!(why.contains("does not exist; create it"), "{why}");
    assert!(!file.beside("no").exists());
}

#[test]
fn what_permissions_forbid_is_refused_by_name() {
    let file = File::new();
    let dir = file.path().parent().unwrap().to_owned();
    fs::write(file.path(), "").unwrap();

    mode(&dir, 0o777);
    mode(&file.path(), 0o000);
    let why = refusal_as_nobody(&file.path());
    assert!(why.contains("is not readable for this process; change"), "{why}");

    mode(&file.path(), 0o444);
    let why = refusal_as_nobody(&file.path());
    assert!(why.contains("is read-only for this process; change"), "{why}");

    mode(&file.path(), 0o666);
    mode(&dir, 0o555);
    for path in [file.path(), file.beside("new.db")] {
        let why = refusal_as_nobody(&path);
        assert!(
            why.contains("is not writable for this process") && why.contains("change"),
            "{why}"
        );
    }
    mode(&dir, 0o755);
}

#[test]
fn what_the_acting_user_may_not_do_is_refused_whoever_started_the_process() {
    let file = File::new();
    let dir = file.path().parent().unwrap().to_owned();
    fs::write(file.path(), "").unwrap();
    mode(&dir, 0o555);
    mode(&file.path(), 0o666);
    let why = as_nobody(true, refusal(file.path()));
    assert!(why.contains("is not writable for this process"), "{why}");
    mode(&dir, 0o755);
}

#[test]
fn a_link_is_judged_by_where_it_leads_to() {
    let file = File::new();
    let (links, real) = (file.beside("links"), file.beside("real"));
    fs::create_dir(&links).unwrap();
    fs::create_dir(&real).unwrap();
    mode(file.path().parent().unwrap(), 0o755);
    fs::write(real.join("locks.db"), "").unwrap();
    symlink(real.join("locks.db"), links.join("locks.db")).unwrap();
    mode(&real.join("locks.db"), 0o666);
    mode(&links, 0o777);
    mode(&real, 0o555);
    let why = refusal_as_nobody(&links.join("locks.db"));
    assert!(
        why.contains("real") && why.contains("is not writable for this process"),
        "{why}"
    );
    mode(&real, 0o755);
}

#[tokio::test]
async fn a_link_to_nothing_and_a_link_to_itself_are_refused() {
    let file = File::new();
    symlink(file.beside("missing"), file.path()).unwrap();
    let why = refusal(file.path()).await;
    assert!(why.contains("symbolic link to what does not exist"), "{why}");
    assert!(!file.beside("missing").exists());
    let looping = file.beside("loop.db");
    symlink(&looping, &looping).unwrap();
    let why = refusal(&looping).await;
    assert!(
        why.contains("cannot be read") && why.contains("change the path"),
        "{why}"
    );
}

#[tokio::test]
async fn a_path_that_is_too_long_is_refused_and_the_longest_is_not() {
    let file = File::new();
    let open = async |length| SqliteLock::open(file.beside(&"x".repeat(length))).await;
    open(247).await.unwrap();
    for length in [248, 255, 256, 5_000] {
        let refused = open(length).await.unwrap_err();
        assert!(matches!(refused, LockError::Configuration { .. }), "{refused}");
    }
    let mut deep = file.path().parent().unwrap().to_owned();
    while deep.as_os_str().len() < 504 {
        deep.push("d".repeat(100));
    }
    fs::create_dir_all(&deep).unwrap();
    let why = refusal(deep.join("locks.db")).await;
    assert!(why.contains("too long"), "{why}");
}

#[tokio::test]
async fn a_path_with_a_nul_byte_or_a_slash_at_its_end_is_refused_and_makes_nothing() {
    let file = File::new();
    let dir = file.path().parent().unwrap().display().to_string();
    assert!(refusal(format!("{dir}/a\0b.db")).await.contains("nul byte"));
    for end in ["a.db/", "a.db/.", "a.db/.."] {
        let why = refusal(format!("{dir}/{end}")).await;
        assert!(why.contains("give the path of a file"), "{why}");
    }
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
}

#[tokio::test]
async fn any_time_for_requests_but_zero_will_do() {
    let file = File::new();
    let lock = SqliteConfig::new(file.path())
        .op_timeout(Duration::MAX)
        .connect()
        .await
        .unwrap();
    granted(&lock, &claim("n", LONG)).await;
    let refused = SqliteConfig::new(file.path()).op_timeout(Duration::ZERO).connect_lazy();
    assert!(matches!(refused, Err(LockError::Configuration { .. })), "{refused:?}");
}

#[tokio::test]
async fn a_file_of_ours_without_its_tables_is_refused_with_what_to_do() {
    let file = File::new();
    file.client().await.close().await.unwrap();
    file.sql("DROP TABLE counter");
    let why = refusal(file.path()).await;
    assert!(why.contains("lacks our tables; stop all its users"), "{why}");
}

#[test]
fn a_file_that_cannot_be_looked_at_for_a_while_is_not_lost() {
    let file = File::new();
    let (outer, dir) = (file.beside("outer"), file.beside("outer/d"));
    fs::create_dir_all(&dir).unwrap();
    mode(file.path().parent().unwrap(), 0o755);
    mode(&dir, 0o777);
    let (lock, grant) = as_nobody(false, async {
        let lock = SqliteLock::open(dir.join("locks.db")).await.unwrap();
        let grant = granted(&lock, &claim("n", LONG)).await;
        (lock, grant)
    });
    // The client's own thread goes on with the rights that it was started with.
    let renew = || as_nobody(false, lock.renew(&grant.lease));
    mode(&outer, 0o000);
    let failed = renew().unwrap_err();
    mode(&outer, 0o755);
    assert!(matches!(failed, LockError::Configuration { .. }), "{failed}");
    assert!(failed.to_string().contains("what this process may see"), "{failed}");
    assert_eq!(renew().unwrap(), Renewal::Renewed);
}

#[test]
fn a_wait_ends_when_the_process_is_shut_out_of_the_directory() {
    let file = File::new();
    let (outer, dir) = (file.beside("outer"), file.beside("outer/d"));
    fs::create_dir_all(&dir).unwrap();
    mode(file.path().parent().unwrap(), 0o755);
    mode(&dir, 0o777);
    let open = || as_nobody(false, SqliteLock::open(dir.join("locks.db"))).unwrap();
    let (holder, waiter) = (Locks::new(open()), Locks::new(open()));
    runtime().block_on(async {
        let guard = holder.lock("n").ttl(LONG).await.unwrap();
        let waits = [0, 1].map(|_| tokio::spawn(waiter.lock("n").into_future()));
        while waiter.stats().waiting < 2 {
            tokio::task::yield_now().await;
        }
        assert!(waiter.try_lock("n").await.unwrap().is_none());
        mode(&outer, 0o000);
        for wait in waits {
            let failed = wait.await.unwrap().unwrap_err();
            assert!(matches!(failed, LockError::Configuration { .. }), "{failed:?}");
            assert!(failed.to_string().contains("what this process may see"), "{failed}");
        }
        mode(&outer, 0o755);
        // The holder has not lost anything by it.
        guard.renew_now().await.unwrap();
        guard.release().await.unwrap();
    });
}

#[tokio::test]
async fn a_second_hard_link_is_refused_unless_allowed() {
    let file = File::new();
    file.client().await.close().await.unwrap();
    fs::hard_link(file.path(), file.beside("other.db")).unwrap();
    let refused = SqliteLock::open(file.path()).await.unwrap_err();
    assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused}");
    let allowed = SqliteConfig::new(file.path()).allow_unsafe_configuration(true);
    allowed.connect().await.unwrap();
}

#[tokio::test]
async fn a_symbolic_link_leads_to_the_same_locks() {
    let file = File::new();
    let lock = file.client().await;
    symlink(file.path(), file.beside("link.db")).unwrap();
    let linked = SqliteLock::open(file.beside("link.db")).await.unwrap();
    let held = claim("n", LONG);
    granted(&lock, &held).await;
    assert!(linked.try_acquire(&claim("n", LONG)).await.unwrap().granted().is_none());
    assert_eq!(linked.release(&held, None).await.unwrap(), Released::Released);
}

#[tokio::test]
async fn a_file_damaged_while_open_is_refused_with_what_to_do() {
    let file = File::new();
    let lock = file.client().await;
    file.sql("PRAGMA wal_checkpoint(TRUNCATE)");
    // The head of the file stays, so that it still looks like a database of ours.
    let mut content = fs::read(file.path()).unwrap();
    content[4096..].fill(0xA5);
    lock.close().await.unwrap();
    fs::write(file.path(), content).unwrap();
    let why = refusal(file.path()).await;
    assert!(why.contains("damaged; stop all its users, then remove it"), "{why}");
}
