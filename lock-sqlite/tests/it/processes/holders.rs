//! A holder that has a boot clock of its own.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use lock_core::DistributedLock;
use lock_sqlite::SqliteLock;

use super::player::{Player, say};
use crate::file::{File, LONG, claim, granted, name};

/// Takes a lock when told to, and tries to.
pub(crate) async fn hold(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("take", millis) => {
                let claim = claim("held", Duration::from_millis(millis.parse().unwrap()));
                say(granted(&lock, &claim).await.token);
            }
            ("busy", _) => say(lock
                .try_acquire(&claim("held", LONG))
                .await
                .unwrap()
                .granted()
                .is_none()),
            (other, _) => panic!("do not know how to {other}"),
        }
    }
}

/// Whether a time namespace can be made here.
pub(crate) fn time_namespace() -> Result<(), &'static str> {
    let made = Command::new("unshare")
        .args(["--time", "--boottime", "1000", "true"])
        .stderr(Stdio::null())
        .status();
    match made {
        Err(_) => Err("needs the program unshare"),
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err("needs the right to make time namespaces"),
    }
}

pub(crate) async fn other_clock() {
    let file = File::new();
    let lock = file.client().await;
    granted(&lock, &claim("held", LONG)).await;
    for ahead in ["1000000", "-60"] {
        let before = ["unshare", "--time", "--boottime", ahead];
        let mut other = Player::spawn(Player::command_by(&before, "hold", &file.path()));
        assert_eq!(other.ask("busy"), "true", "with a clock {ahead} s ahead");
        lock.force_release(&name("held")).await.unwrap();
        other.take(LONG);
        let held = lock.holders(&name("held")).await.unwrap().pop().unwrap();
        assert!(held.remaining.unwrap() > LONG / 2 && held.remaining.unwrap() <= LONG);
        other.finish();
    }
}
