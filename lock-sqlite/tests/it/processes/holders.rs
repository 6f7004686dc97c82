//! A holder that is killed, stopped, or has a boot clock of its own.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use lock_core::{DistributedLock, Grant, Wait};
use lock_sqlite::SqliteLock;
use rustix::process::Signal;

use super::player::{Player, say};
use crate::file::{File, HANG_LIMIT, LONG, claim, granted, name};

pub(crate) async fn killed_holder() {
    let file = File::new();
    let (holder, next) = followed_after(Signal::KILL, &file).await;
    assert!(next.lease.is_valid(file.client().await.clock().now()));
    holder.rest();
}

pub(crate) async fn stopped_holder() {
    let file = File::new();
    let (mut holder, next) = followed_after(Signal::STOP, &file).await;
    holder.signal(Signal::CONT);
    assert_eq!(holder.ask("renew"), "NotHeld");
    assert_eq!(holder.ask("valid"), "false");
    let lock = file.client().await;
    assert!(lock.holder(next.claim.name()).await.unwrap().is_some());
    holder.finish();
}

/// A holder that gets the signal is followed within its ttl, with a higher token.
async fn followed_after(signal: Signal, file: &File) -> (Player, Grant) {
    let ttl = Duration::from_millis(500);
    let lock = file.client().await;
    let mut holder = Player::start("hold", file);
    let token = holder.take(ttl);
    holder.signal(signal);
    let wanted = claim("held", LONG);
    let next = tokio::time::timeout(HANG_LIMIT, lock.acquire(&wanted, Wait::until(None))).await;
    let next = next.expect("the ttl ends").unwrap().granted().unwrap();
    assert!(next.token > token);
    (holder, next)
}

/// Takes a lock when told to, and renews it when told to.
pub(crate) async fn hold(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    let mut grant = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("take", millis) => {
                let claim = claim("held", Duration::from_millis(millis.parse().unwrap()));
                let granted = granted(&lock, &claim).await;
                say(granted.token);
                grant = Some(granted);
            }
            ("renew", _) => say(format!(
                "{:?}",
                lock.renew(&grant.as_ref().unwrap().lease).await.unwrap()
            )),
            ("valid", _) => say(grant.as_ref().unwrap().lease.is_valid(lock.clock().now())),
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
        let held = lock.holder(&name("held")).await.unwrap().unwrap();
        assert!(held.remaining.unwrap() > LONG / 2 && held.remaining.unwrap() <= LONG);
        other.finish();
    }
}
