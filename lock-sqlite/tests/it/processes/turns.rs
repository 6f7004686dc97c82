//! Many processes that take turns, some of which are killed.

use std::path::Path;
use std::time::Duration;

use lock_core::{Attempt, DistributedLock, FencingToken};
use lock_sqlite::SqliteLock;
use rustix::process::Signal;

use super::player::{Player, SAID, said, say};
use crate::file::{File, LONG, SHORT, claim, granted};

pub(crate) async fn killed() {
    let file = File::new();
    let lock = file.client().await;
    let mut seen = granted(&lock, &claim("own", LONG)).await.token;
    let mut heard = 0;
    for round in 0..25 {
        let players: Vec<_> = (0..2).map(|_| Player::start("take turns", &file)).collect();
        let mut outputs = Vec::new();
        for mut player in players {
            // From its first token on, so that the kill meets it at work.
            let first = player.line();
            std::thread::sleep(Duration::from_micros(fastrand::u64(0..3_000)));
            player.signal(Signal::KILL);
            outputs.push(format!("{SAID}{first}\n{}", player.rest()));
        }
        // Everything that they told of was granted before this is asked for.
        let claim = claim("own", LONG);
        lock.force_release(claim.name()).await.unwrap();
        let next = granted(&lock, &claim).await.token;
        for output in outputs {
            // The last line may be cut off.
            let tokens: Vec<FencingToken> = output
                .split_inclusive('\n')
                .filter_map(|line| said(line)?.parse().ok())
                .collect();
            heard += tokens.len();
            assert!(tokens.is_sorted_by(|a, b| a < b), "round {round}: {tokens:?}");
            assert!(
                tokens.iter().all(|token| *token > seen),
                "round {round}: {tokens:?} after {seen}"
            );
            assert!(
                tokens.iter().all(|token| *token < next),
                "round {round}: {tokens:?} before {next}"
            );
        }
        seen = next;
    }
    println!("{heard} tokens were heard of");
    assert_eq!(
        file.number("SELECT count(*) FROM pragma_integrity_check WHERE integrity_check <> 'ok'"),
        0
    );
}

/// Takes and releases without end, telling each token.
pub(crate) async fn take_turns(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    loop {
        let claim = claim(&format!("turn/{}", fastrand::u8(0..3)), SHORT);
        if let Attempt::Granted(grant) = lock.try_acquire(&claim).await.unwrap() {
            say(grant.token);
            lock.release(&claim, None).await.unwrap();
        }
    }
}
