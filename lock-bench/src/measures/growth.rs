//! B8: what changes with the number of names that the server has seen.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};

use super::pair::alternate;
use super::processes::contend;
use super::{Arena, TTL};
use crate::backend::OURS;
use crate::contestant::{Failure, nothing};
use crate::figures::{Kind, MICRO, Measure};

const NAMES: [usize; 3] = [10, 1_000, 100_000];
const PROCESSES: usize = 10;

pub(crate) async fn measure(arena: &Arena) -> Result<Measure, Failure> {
    let mut measure = Measure::new(
        "B8",
        "Growth with the names that the server has seen",
        &[
            ("lock + release p50", "µs"),
            ("lock + release p99", "µs"),
            ("hand-over p50", "µs"),
            ("hand-over p99", "µs"),
        ],
    );
    let mut entries = vec![arena.entry(OURS, Kind::Ours, TTL).await?];
    entries.extend(arena.floors().await?);
    let mut known = 0;
    for names in arena.either(&NAMES[..], &NAMES[..2]) {
        introduce(&*entries[0].contestant, known..*names).await?;
        known = *names;
        // In an order that no cache foresees, the same for each run.
        let at = AtomicUsize::new(0);
        let times = alternate(arena, &entries, |_| {
            let n = at.fetch_add(7_919, Ordering::Relaxed) % names;
            name(n)
        })
        .await?;
        let seen = contend(arena, OURS, &name(names / 2), PROCESSES).await?.values();
        for (entry, times) in entries.iter().zip(&times) {
            let [p50, p99] = [0.5, 0.99].map(|quantile| times.quantile(quantile, MICRO));
            let (hand_over, late) = if entry.kind == Kind::Ours {
                (seen[0], seen[1])
            } else {
                (None, None)
            };
            measure.row(&entry.who, entry.kind, &case(*names), &[p50, p99, hand_over, late]);
        }
    }
    measure
        .notes
        .push(format!("The hand-overs are those of {PROCESSES} processes."));
    Ok(measure)
}

pub(crate) fn case(names: usize) -> String {
    format!("{names} names")
}

fn name(n: usize) -> String {
    format!("b8-{n}")
}

async fn introduce(client: &dyn crate::contestant::Contestant, names: std::ops::Range<usize>) -> Result<(), Failure> {
    let sections = futures_util::stream::iter(names)
        .map(|n| async move { client.section(&name(n), nothing()).await })
        .buffer_unordered(super::many_names::TASKS);
    sections.try_collect::<Vec<()>>().await?;
    // What the server does after that is done.
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(())
}
