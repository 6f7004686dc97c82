//! What cannot hold locks is refused with a typed error that says what to do. The same as root and as anybody else.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::thread;

use lock_core::{DistributedLock, LockError, Renewal};
use lock_sqlite::{SqliteConfig, SqliteLock};

use crate::file::{File, busy, claim, granted, refusal, runtime};

/// Checks that the path is refused for good, and that the reason holds that.
async fn refused(path: impl Into<PathBuf>, wanted: &str) {
    let why = refusal(SqliteLock::open(path).await);
    assert!(why.contains(wanted), "{wanted}: {why}");
}

/// Works as a user whom permissions stop, also if the tests run as root.
fn as_nobody<T: Send>(work: impl Future<Output = T> + Send) -> T {
    // Credentials belong to threads on Linux, and a thread that is started inherits them.
    thread::scope(|scope| {
        let working = scope.spawn(move || {
            #[cfg(target_os = "linux")]
            if rustix::process::geteuid().is_root() {
                use rustix::process::{Gid, Uid};
                use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
                let (group, user) = (Gid::from_raw(65534), Uid::from_raw(65534));
                set_thread_groups(&[]).unwrap();
                set_thread_res_gid(group, group, group).unwrap();
                set_thread_res_uid(user, user, user).unwrap();
            }
            runtime().block_on(work)
        });
        working.join().unwrap()
    })
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn what_is_no_database_of_locks_is_refused_and_left_as_it_is() {
    let file = File::new();
    for content in ["Dear diary\n".repeat(500), "x".to_owned()] {
        fs::write(file.path(), &content).unwrap();
        refused(file.path(), "not an SQLite database; choose another path").await;
        assert_eq!(fs::read_to_string(file.path()).unwrap(), content);
    }
    for sql in [
        "CREATE TABLE lock (name)",
        "PRAGMA application_id = 7",
        "PRAGMA user_version = 1",
    ] {
        let file = File::new();
        file.sql(sql);
        let before = fs::read(file.path()).unwrap();
        refused(file.path(), "another program; give locks a file of their own").await;
        assert_eq!(fs::read(file.path()).unwrap(), before, "{sql}");
    }
    let file = File::new();
    file.client().await.close().await.unwrap();
    for (sql, wanted) in [
        (
            "PRAGMA user_version = 4",
            "has format 4, and this version of fencelock knows format 3; update",
        ),
        (
            "PRAGMA user_version = 2",
            "has format 2, of an earlier version of fencelock; stop all its users",
        ),
        (
            "PRAGMA user_version = 3; DROP TABLE counter",
            "lacks our tables; stop all its users",
        ),
    ] {
        file.sql(sql);
        refused(file.path(), wanted).await;
    }
}

#[tokio::test]
async fn a_path_that_leads_to_no_file_is_refused_and_nothing_is_made() {
    let file = File::new();
    let dir = file.path().parent().unwrap().display().to_string();
    let looping = file.beside("loop.db");
    symlink(&looping, &looping).unwrap();
    symlink(file.beside("missing"), file.beside("dangling.db")).unwrap();
    for (path, wanted) in [
        (file.beside("no/locks.db"), "does not exist; create it"),
        (format!("{dir}/a\0b.db").into(), "nul byte"),
        (format!("{dir}/a.db/").into(), "give the path of a file"),
        (dir.into(), "is a directory"),
        ("/dev/null".into(), "not a regular file"),
        (":memory:".into(), "in memory"),
        (file.beside("dangling.db"), "symbolic link to what does not exist"),
        (looping, "change the path"),
    ] {
        refused(path, wanted).await;
    }
    assert_eq!(file.names(), ["dangling.db", "loop.db"]);
}

#[test]
fn what_permissions_forbid_is_refused_with_the_owner_and_a_new_file_is_private_or_for_a_group() {
    let file = File::new();
    let dir = file.path().parent().unwrap().to_owned();
    fs::write(file.path(), "").unwrap();
    for (dir_mode, file_mode, path, wanted) in [
        (0o777, 0o000, file.path(), "locks.db, which belongs to user"),
        (
            0o777,
            0o444,
            file.path(),
            "and has mode 444, is read-only for this process; change its owner or mode",
        ),
        (
            0o555,
            0o666,
            file.path(),
            "and has mode 555, is read-only for this process",
        ),
        (
            0o555,
            0o666,
            file.beside("new.db"),
            "and has mode 555, is read-only for this process",
        ),
    ] {
        set_mode(&file.path(), file_mode);
        set_mode(&dir, dir_mode);
        as_nobody(refused(path, wanted));
        set_mode(&dir, 0o755);
    }
    let new = file.beside("new.db");
    runtime().block_on(async { SqliteLock::open(&new).await.unwrap() });
    let mode = fs::metadata(&new).unwrap().permissions().mode() & 0o777;
    assert!([0o600, 0o660].contains(&mode), "{mode:o}");
}

#[test]
fn a_file_that_cannot_be_looked_at_for_a_while_is_not_lost() {
    let file = File::new();
    let (outer, dir) = (file.beside("outer"), file.beside("outer/d"));
    fs::create_dir_all(&dir).unwrap();
    set_mode(file.path().parent().unwrap(), 0o755);
    set_mode(&dir, 0o777);
    let (lock, grant) = as_nobody(async {
        let lock = SqliteLock::open(dir.join("locks.db")).await.unwrap();
        let grant = granted(&lock, &claim("n")).await;
        (lock, grant)
    });
    // The client's own thread goes on with the rights that it was started with.
    let renew = || as_nobody(lock.renew(&grant.lease));
    set_mode(&outer, 0o000);
    let failed = renew();
    set_mode(&outer, 0o755);
    let why = refusal(failed);
    assert!(why.contains("what this process may see"), "{why}");
    assert_eq!(renew().unwrap(), Renewal::Renewed);
}

#[tokio::test]
async fn a_second_hard_link_is_refused_unless_allowed_and_a_symbolic_link_leads_to_the_same_locks() {
    let file = File::new();
    let lock = file.client().await;
    symlink(file.path(), file.beside("link.db")).unwrap();
    let linked = SqliteLock::open(file.beside("link.db")).await.unwrap();
    granted(&lock, &claim("n")).await;
    busy(&linked, &claim("n")).await;
    fs::hard_link(file.path(), file.beside("other.db")).unwrap();
    for read_only in [false, true] {
        let config = SqliteConfig::new(file.path()).read_only(read_only);
        let refused = config.clone().connect().await.unwrap_err();
        assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused}");
        config.allow_unsafe_configuration(true).connect().await.unwrap();
    }
}

#[tokio::test]
async fn a_damaged_file_is_refused_with_what_to_do() {
    let file = File::new();
    let lock = file.client().await;
    file.sql("PRAGMA wal_checkpoint(TRUNCATE)");
    // The head of the file stays, so that it still looks like a database of ours.
    let mut content = fs::read(file.path()).unwrap();
    content[4096..].fill(0xA5);
    lock.close().await.unwrap();
    fs::write(file.path(), content).unwrap();
    refused(file.path(), "damaged; stop all its users, then remove it").await;
}
