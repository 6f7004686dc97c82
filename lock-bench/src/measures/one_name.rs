//! B3: 64 tasks of one client that all want the same name.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::sleep;

use super::many_names::TASKS;
use super::{Arena, Entry, name_for};
use crate::contestant::Failure;
use crate::figures::{Check, Measure, median};

pub(crate) async fn measure(arena: &Arena) -> Result<Measure, Failure> {
    let mut entries = arena.ours().await?;
    entries.extend(arena.peers(Check::is_fit_for_tasks).await?);
    let mut measure = Measure::new(
        "B3",
        "64 tasks, one name, one client",
        &[("critical sections", "/s"), ("two at once", "")],
    );
    let mut rates = vec![Vec::new(); entries.len()];
    let mut overlaps = vec![0; entries.len()];
    let time = arena.either(Duration::from_millis(1500), Duration::from_millis(500));
    for round in 0..=arena.either(7, 2) {
        for (i, entry) in entries.iter().enumerate() {
            let (rate, seen) = rate(entry, time, round).await?;
            if round > 0 {
                rates[i].push(rate);
            }
            overlaps[i] += seen;
        }
    }
    for ((entry, rates), overlaps) in entries.iter().zip(rates).zip(overlaps) {
        measure.row(&entry.who, entry.kind, "", &[median(rates), Some(overlaps as f64)]);
    }
    Ok(measure)
}

/// Sections per second, and how often there were two in it.
async fn rate(entry: &Entry, time: Duration, round: usize) -> Result<(f64, u64), Failure> {
    let inside = Arc::new(AtomicBool::new(false));
    let [sections, overlaps] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let start = Instant::now();
    let mut tasks: JoinSet<Result<(), Failure>> = JoinSet::new();
    for _ in 0..TASKS {
        let contestant = Arc::clone(&entry.contestant);
        let (inside, sections, overlaps) = (Arc::clone(&inside), Arc::clone(&sections), Arc::clone(&overlaps));
        let who = entry.who.clone();
        tasks.spawn(async move {
            // Another name each round: what the last one left behind is not waited for.
            let name = name_for(&who, &format!("b3-{round}"));
            loop {
                let (inside, sections, overlaps) = (Arc::clone(&inside), Arc::clone(&sections), Arc::clone(&overlaps));
                let body = async move {
                    if inside.swap(true, Ordering::SeqCst) {
                        overlaps.fetch_add(1, Ordering::Relaxed);
                    }
                    // Whoever else is let in has a chance to show up.
                    tokio::task::yield_now().await;
                    sections.fetch_add(1, Ordering::Relaxed);
                    inside.store(false, Ordering::SeqCst);
                };
                contestant.section(&name, Box::pin(body)).await?;
            }
        });
    }
    sleep(time).await;
    let rate = sections.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64();
    if let Some(ended) = tasks.try_join_next() {
        ended??;
    }
    tasks.shutdown().await;
    Ok((rate, overlaps.load(Ordering::Relaxed)))
}
