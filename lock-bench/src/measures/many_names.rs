//! B2: 64 tasks of one client, each with a name of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::{Arena, Entry};
use crate::contestant::{Failure, nothing};
use crate::figures::{Measure, median};

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
    let mut measure = Measure::new("B2", "64 tasks, a name each, one client", &[("lock + release", "/s")]);
    let mut rates = vec![Vec::new(); entries.len()];
    let time = arena.either(Duration::from_millis(1000), Duration::from_millis(200));
    // The first round warms up.
    for round in 0..=arena.either(7, 3) {
        for (entry, rates) in entries.iter().zip(&mut rates) {
            let rate = rate(entry, time).await?;
            if round > 0 {
                rates.push(rate);
            }
        }
    }
    for (entry, rates) in entries.iter().zip(rates) {
        measure.row(&entry.who, entry.kind, "", &[median(rates)]);
    }
    Ok(measure)
}

async fn rate(entry: &Entry, time: Duration) -> Result<f64, Failure> {
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
    Ok(count as f64 / start.elapsed().as_secs_f64())
}
