//! Lock and release without contention, by one task.

use std::time::{Duration, Instant};

use super::{Bench, Entry, name};
use crate::backend::Backend;
use crate::contestant::{OURS_LINGERING, Result};
use crate::report::{ROUNDS, Report, quantile};

pub(crate) const PAIR: &str = "lock + release, p50";

pub(crate) async fn measure(bench: &Bench, report: &mut Report) -> Result {
    let mut names = bench.locks();
    names.insert(2, OURS_LINGERING);
    names.insert(3, bench.floor());
    let entries = bench.connect(&names).await?;
    rounds(bench, report, &entries, "").await?;
    if bench.backend() == Backend::Redlock {
        let down = &bench.site.servers[..2];
        for server in down {
            server.pause().await?;
        }
        rounds(bench, report, &entries, "2 of 5 stopped: ").await?;
        for server in down {
            server.resume().await?;
        }
    }
    Ok(())
}

async fn rounds(bench: &Bench, report: &mut Report, entries: &[Entry], prefix: &str) -> Result {
    for _ in 0..ROUNDS {
        let all = alternate(bench, entries, |who, _| name("pair", who)).await?;
        for ((who, _), mut times) in entries.iter().zip(all) {
            for (what, q) in [("p50", 0.5), ("p99", 0.99)] {
                let title = format!("{prefix}lock + release, {what}");
                report.add(&title, "µs", Some(bench.floor()), who, quantile(&mut times, q)?);
            }
        }
    }
    Ok(())
}

/// The times of pairs, in microseconds: some of each contestant in turn, so that whatever else the machine does hits all. `name` is
/// asked for the name of the lock of each pair.
pub(super) async fn alternate(
    bench: &Bench,
    entries: &[Entry],
    mut name: impl FnMut(&str, usize) -> String,
) -> Result<Vec<Vec<f64>>> {
    /// So few that a disturbance hits more than one contestant, so many that the first after a switch do not decide.
    const TURN: usize = 10;
    /// For a contestant that is much slower than the others.
    const LONGEST_TURN: Duration = Duration::from_secs(1);
    let time = bench.either(Duration::from_secs(8), Duration::from_millis(1500));
    let mut times = vec![Vec::new(); entries.len()];
    let (start, mut n) = (Instant::now(), 0);
    for first in (0..entries.len()).cycle() {
        if start.elapsed() > time && times.iter().all(|times| !times.is_empty()) {
            break;
        }
        // The one after the slowest is not always the same.
        for i in (first..entries.len()).chain(0..first) {
            let ((who, contestant), turn) = (&entries[i], Instant::now());
            for _ in 0..TURN {
                let (name, begun) = (name(who, n), Instant::now());
                contestant(name, Box::pin(async {})).await?;
                times[i].push(begun.elapsed().as_secs_f64() * 1e6);
                n += 1;
                if turn.elapsed() > LONGEST_TURN {
                    break;
                }
            }
        }
    }
    for times in &mut times {
        // They warm up.
        times.drain(..times.len() / 10);
    }
    Ok(times)
}
