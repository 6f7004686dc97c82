//! 64 tasks of one client: all with the same name, and each with a name of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{Bench, Entry, TASKS, name};
use crate::contestant::Result;
use crate::report::{ROUNDS, Report};

pub(super) async fn measure(bench: &Bench, report: &mut Report) -> Result {
    let time = bench.either(Duration::from_millis(1500), Duration::from_millis(300));
    let locks = bench.locks();
    let with_floor = [&locks[..], &[bench.floor()]].concat();
    for (title, who, names, reference) in [
        ("64 tasks, one name", locks, 1, bench.backend().peers()[0]),
        ("64 tasks, a name each", with_floor, TASKS, bench.floor()),
    ] {
        let entries = bench.connect(&who).await?;
        // The first round warms up.
        for round in 0..=ROUNDS {
            for entry in &entries {
                let (rate, overlaps) = rate(entry, time, round, names).await?;
                if round > 0 {
                    report.add(title, "/s", Some(reference), entry.0, rate);
                }
                if overlaps > 0 {
                    report.note(format!(
                        "{title}: two tasks of {} held a lock at the same time.",
                        entry.0
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Critical sections per second, and how many there were in which another holder was seen.
async fn rate((who, contestant): &Entry, time: Duration, round: usize, names: usize) -> Result<(f64, u64)> {
    let counters = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect::<Arc<[_]>>();
    let (inside, sections, overlaps) = (counters(names), counters(1), counters(1));
    let start = Instant::now();
    let mut tasks: JoinSet<Result> = JoinSet::new();
    for at in (0..TASKS).map(|task| task % names) {
        let (contestant, shared) = (
            Arc::clone(contestant),
            (inside.clone(), sections.clone(), overlaps.clone()),
        );
        // Other names in each round, since tasks that are ended may leave locks behind.
        let name = name(&format!("crowd-{names}-{round}-{at}"), who);
        tasks.spawn(async move {
            loop {
                let (inside, sections, overlaps) = shared.clone();
                let body = async move {
                    let others = inside[at].fetch_add(1, Ordering::SeqCst);
                    // Another holder, if there is one, gets a chance to show up.
                    tokio::task::yield_now().await;
                    inside[at].fetch_sub(1, Ordering::SeqCst);
                    sections[0].fetch_add(1, Ordering::Relaxed);
                    overlaps[0].fetch_add(others.min(1), Ordering::Relaxed);
                };
                contestant(name.clone(), Box::pin(body)).await?;
            }
        });
    }
    sleep(time).await;
    let rate = sections[0].load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64();
    if let Some(ended) = tasks.try_join_next() {
        ended??;
    }
    tasks.shutdown().await;
    Ok((rate, overlaps[0].load(Ordering::Relaxed)))
}
