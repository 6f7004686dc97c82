//! B1: taking a lock that is free, and letting go of it.

use std::time::Instant;

use super::{Arena, Entry, TTL};
use crate::backend::{OURS, OURS_LINGERING};
use crate::contestant::{Failure, nothing};
use crate::figures::{Kind, MICRO, Measure, Times};

pub(crate) async fn measure(arena: &Arena) -> Result<Measure, Failure> {
    let entries = arena.entries().await?;
    let mut measure = Measure::new(
        "B1",
        "Uncontended lock + release, one task",
        &[("p50", "µs"), ("p99", "µs"), ("p50 / floor", "x"), ("pairs", "")],
    );
    let times = alternate(arena, &entries, |_| "b1".to_owned()).await?;
    // Whoever works on the background thread is compared with who does the same.
    let background = arena.backend().background_floor();
    let floor = |who: &str| {
        let floor = if who == OURS || who == background {
            &background
        } else {
            arena.backend().floor()
        };
        let at = entries.iter().position(|entry| entry.who == floor)?;
        times[at].quantile(0.5, MICRO)
    };
    // A name of its own: it has the lock between two pairs.
    let lingering = [arena.entry(OURS_LINGERING, Kind::Ours, TTL).await?];
    let kept = alternate(arena, &lingering, |_| "b1-lingering".to_owned()).await?;
    for (entry, times) in entries.iter().chain(&lingering).zip(times.iter().chain(&kept)) {
        let count = Some(times.count() as f64);
        let [p50, p99] = [0.5, 0.99].map(|quantile| times.quantile(quantile, MICRO));
        let ratio = p50.zip(floor(&entry.who)).map(|(p50, floor)| p50 / floor);
        measure.row(&entry.who, entry.kind, "", &[p50, p99, ratio, count]);
    }
    Ok(measure)
}

/// Some pairs of each, in turns, so that whatever else the machine does hits all. `name` is asked for the name of the
/// `n`th pair.
pub(crate) async fn alternate(
    arena: &Arena,
    entries: &[Entry],
    name: impl Fn(usize) -> String,
) -> Result<Vec<Times>, Failure> {
    /// So few that a disturbance hits more than one contestant, so many that the first after a switch do not decide.
    const BATCH: usize = 10;
    let rounds = arena.either(300, 30);
    let mut times = entries.iter().map(|_| Times::new()).collect::<Result<Vec<_>, _>>()?;
    let mut n = 0;
    for round in 0..rounds + rounds / 10 {
        for i in 0..entries.len() {
            // Whoever comes after the slowest is not always the same.
            let i = (i + round) % entries.len();
            for _ in 0..BATCH {
                let name = name(n);
                n += 1;
                let start = Instant::now();
                entries[i].contestant.section(&name, nothing()).await?;
                let time = start.elapsed();
                // The first rounds warm up.
                if round >= rounds / 10 {
                    times[i].add(u64::try_from(time.as_nanos())?)?;
                }
            }
        }
    }
    Ok(times)
}
