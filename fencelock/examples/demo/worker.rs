//! What each process does. It speaks in lines on its output, and waits for words on its input.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use fencelock::sqlite::fence::FenceError;
use fencelock::{LockGuard, Renew};
use tokio::time::sleep;

use crate::lines::{end_with_parent, listen, say, say_failed};
use crate::{ADDITIONS, Outcome, TTL, shop};

pub(crate) async fn work(role: &str, dir: &Path) -> ExitCode {
    end_with_parent();
    let outcome = match role {
        "count-bare" => count_bare(dir).await,
        "count-locked" => count_locked(dir).await,
        "hold" => hold(dir).await,
        "sell" => sell(dir).await,
        _ => Err(format!("there is no role \"{role}\"").into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say_failed(&error);
            ExitCode::FAILURE
        }
    }
}

/// All processes have read before the first one writes, so that additions are lost on any machine.
async fn count_bare(dir: &Path) -> Outcome<()> {
    let count = shop::read_count(dir)?;
    say(format_args!("ready"))?;
    wait_for("go")?;
    shop::write_count(dir, count + 1)?;
    for _ in 1..ADDITIONS {
        add_one(dir).await?;
    }
    say(format_args!("done"))?;
    Ok(())
}

async fn count_locked(dir: &Path) -> Outcome<()> {
    let locks = shop::locks(dir).await?;
    say(format_args!("ready"))?;
    wait_for("go")?;
    for _ in 0..ADDITIONS {
        let counted = locks
            .lock("demo")
            .with(async |guard| {
                shop::note_token(dir, guard.token())?;
                add_one(dir).await
            })
            .await?;
        counted?;
    }
    locks.shutdown().await?;
    say(format_args!("done"))?;
    Ok(())
}

/// Reads, thinks for a moment, writes.
async fn add_one(dir: &Path) -> io::Result<()> {
    let count = shop::read_count(dir)?;
    sleep(Duration::from_millis(1)).await;
    shop::write_count(dir, count + 1)
}

async fn hold(dir: &Path) -> Outcome<()> {
    let guard = lock(dir, Renew::UntilReleased).await?;
    say(format_args!("held {}", guard.token()))?;
    wait_for("release")?;
    guard.release().await?;
    say(format_args!("released"))?;
    Ok(())
}

/// Does not renew: whoever is stopped in the middle of a renewal has the whole file, and not only the lock.
async fn sell(dir: &Path) -> Outcome<()> {
    let guard = lock(dir, Renew::Never).await?;
    let mut conn = shop::open(dir)?;
    let amount = shop::read_stock(&mut conn, guard.token())?;
    say(format_args!("read {}", guard.token()))?;
    wait_for("write")?;
    match shop::write_stock(&mut conn, guard.token(), amount - 1) {
        Ok(()) => say(format_args!("write accepted"))?,
        Err(FenceError::Stale(_)) => say(format_args!("write refused by the fence: a later token was here"))?,
        Err(error) => return Err(error.into()),
    }
    match guard.is_held() {
        true => say(format_args!("guard held"))?,
        false => say(format_args!("guard {}", guard.lost().await))?,
    }
    guard.release().await?;
    Ok(())
}

async fn lock(dir: &Path, renew: Renew) -> Outcome<LockGuard> {
    let locks = shop::locks(dir).await?;
    say(format_args!("asking"))?;
    Ok(locks.lock("demo").ttl(TTL).renew(renew).await?)
}

/// Returns when that word comes.
fn wait_for(word: &str) -> Outcome<()> {
    while listen()? != word {}
    Ok(())
}
