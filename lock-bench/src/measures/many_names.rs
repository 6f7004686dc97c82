//! B2: 64 tasks of one client, each with a name of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::{Arena, Entry};
use crate::clock::{Processors, processor};
use crate::contestant::{Failure, nothing};
use crate::figures::{MICRO, Measure, median};

pub(crate) const TASKS: usize = 64;

pub(crate) async fn measure(arena: &Arena) -> Result<Measure, Failure> {
    let mut entries = arena.ours().await?;
    entries.extend(arena.floors().await?);
    let one_task = |who: &str| {
        arena
            .backend()
            .peers()
            .iter()
            .any(|peer| peer.name == who && peer.one_task)
    };
    entries.extend(arena.peers(|check| !one_task(&check.who)).await?);
    let mut measure = Measure::new(
        "B2",
        "64 tasks, a name each, one client",
        &[
            ("lock + release", "/s"),
            ("of a processor, client", "µs each"),
            ("of a processor, server and all else", "µs each"),
        ],
    );
    let mut seen = vec![[const { Vec::new() }; 3]; entries.len()];
    let time = arena.either(Duration::from_millis(1000), Duration::from_millis(200));
    // The first round warms up.
    for round in 0..=arena.either(7, 3) {
        for (entry, seen) in entries.iter().zip(&mut seen) {
            let values = run(entry, time).await?;
            if round > 0 {
                for (seen, value) in seen.iter_mut().zip(values) {
                    seen.extend(value);
                }
            }
        }
    }
    for (entry, seen) in entries.iter().zip(seen) {
        measure.row(&entry.who, entry.kind, "", &seen.map(median));
    }
    measure.notes.push(
        "What a pair takes of the processors is shared by all that wait for an answer at the time. The machine has as many \
         microseconds in each as it has processors, and a server of one thread has one."
            .to_owned(),
    );
    Ok(measure)
}

/// The rate, and what each pair took of a processor: of this process, and of all others.
async fn run(entry: &Entry, time: Duration) -> Result<[Option<f64>; 3], Failure> {
    let before = (processor(), Processors::look());
    let start = Instant::now();
    let end = start + time;
    let mut tasks: JoinSet<Result<u64, Failure>> = JoinSet::new();
    for i in 0..TASKS {
        let contestant = Arc::clone(&entry.contestant);
        tasks.spawn(async move {
            let name = format!("b2-{i}");
            let mut count = 0;
            while Instant::now() < end {
                contestant.section(&name, nothing()).await?;
                count += 1;
            }
            Ok(count)
        });
    }
    let mut count = 0;
    while let Some(ended) = tasks.join_next().await {
        count += ended??;
    }
    let elapsed = start.elapsed().as_secs_f64();
    let of_client = processor() - before.0;
    // One is counted in ticks, and may lag behind.
    let used = Processors::look().zip(before.1);
    let of_others = used.map(|(after, before)| (after.used - before.used).saturating_sub(of_client));
    let pairs = count as f64;
    let each = |nanoseconds: u64| nanoseconds as f64 / MICRO / pairs;
    Ok([Some(pairs / elapsed), Some(each(of_client)), of_others.map(each)])
}
