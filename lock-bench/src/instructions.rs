//! What the client itself costs, in instructions of the processor: the same in each run, so that a change shows.
//!
//! The backend in memory stands for a server that answers at once, one thread does everything, and the clock is not read.

use std::path::Path;
use std::process::Command;

use fencelock::{Clock, LockGuard, Locks, MemoryLock, Options};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use crate::contestant::Failure;

/// What a case costs each time it is done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Count {
    pub(crate) case: String,
    pub(crate) instructions: u64,
}

const CASES: [(&str, &str); 5] = [
    ("pair", "lock + release"),
    ("busy", "try_lock of a name that is held"),
    ("hand-over", "release to the next task of the client, and its grant"),
    ("is-held", "is_held()"),
    ("fence", "a write past the fence in memory"),
];

/// Between these two numbers of times the start and the end of the program cancel out.
const TIMES: [u64; 2] = [2_000, 12_000];

/// Counts all cases. Needs valgrind.
pub(crate) fn count() -> Result<Vec<Count>, Failure> {
    CASES
        .into_iter()
        .map(|(case, title)| {
            let [few, many] = TIMES;
            let instructions = (under_callgrind(case, many)? - under_callgrind(case, few)?) / (many - few);
            Ok(Count {
                case: title.to_owned(),
                instructions,
            })
        })
        .collect()
}

fn under_callgrind(case: &str, times: u64) -> Result<u64, Failure> {
    let folder = tempfile::tempdir()?;
    let counts = folder.path().join("counts");
    let output = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", counts.display()))
        .arg(std::env::current_exe()?)
        .args(["repeat", case, &times.to_string()])
        .output()
        .map_err(|error| format!("valgrind did not start (Debian: apt-get install valgrind): {error}"))?;
    if !output.status.success() {
        return Err(format!("valgrind failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    total(&counts)
}

fn total(counts: &Path) -> Result<u64, Failure> {
    let text = std::fs::read_to_string(counts)?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("summary:").or_else(|| line.strip_prefix("totals:")));
    Ok(line.ok_or("callgrind counted nothing")?.trim().parse()?)
}

/// Does that case that many times.
pub(crate) async fn repeat(case: &str, times: u64) -> Result<(), Failure> {
    let options = Options::new().runtime(Handle::current());
    // The system's clock is read in ways that valgrind does not know. This one stands still.
    let (clock, _stands) = Clock::manual();
    let locks = Locks::with_options(MemoryLock::with_clock(clock), options);
    let held = locks.lock("held").await?;
    match case {
        "pair" => {
            for _ in 0..times {
                locks.lock("pair").await?.release().await?;
            }
        }
        "busy" => {
            for _ in 0..times {
                if locks.try_lock("held").await?.is_some() {
                    return Err("a held lock was granted".into());
                }
            }
        }
        "hand-over" => hand_over(&locks, times).await?,
        "is-held" => {
            for _ in 0..times {
                if !std::hint::black_box(&held).is_held() {
                    return Err("a lock was lost".into());
                }
            }
        }
        "fence" => {
            let fence = fencelock::fence::Fence::new("stock", 0_u64);
            for _ in 0..times {
                fence.write(held.token(), |count| *count += 1)?;
            }
        }
        other => return Err(format!("there is no case {other}").into()),
    }
    Ok(())
}

/// Two tasks that always want the same lock, so that each release hands it on.
async fn hand_over(locks: &Locks, times: u64) -> Result<(), Failure> {
    let task = async || -> Result<(), Failure> {
        let mut guard: LockGuard = locks.lock("shared").await?;
        for _ in 0..times / 2 {
            let next = locks.lock("shared");
            // The request is in the queue before the guard goes.
            let (next, released) = tokio::join!(next.into_future(), async {
                tokio::task::yield_now().await;
                tokio::task::yield_now().await;
                guard.release().await
            });
            released?;
            guard = next?;
        }
        guard.release().await?;
        Ok(())
    };
    let (one, other) = tokio::join!(task(), task());
    one.and(other)
}
