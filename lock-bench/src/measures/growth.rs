//! Lock and release after the server has seen many names.

use std::time::Duration;

use futures_util::stream::{StreamExt as _, TryStreamExt as _, iter};

use super::pair::alternate;
use super::{Bench, TASKS};
use crate::contestant::{OURS, Result};
use crate::report::{ROUNDS, Report, quantile};

pub(super) async fn measure(bench: &Bench, report: &mut Report) -> Result {
    let entries = bench.connect(&[OURS, bench.floor()]).await?;
    let name = |n: usize| format!("growth-{n}");
    let mut known = 0;
    for names in bench.either(&[10, 1_000, 100_000][..], &[10, 1_000][..]) {
        let client = &entries[0].1;
        iter(known..*names)
            .map(|n| client(name(n), Box::pin(async {})))
            .buffer_unordered(TASKS)
            .try_collect::<Vec<_>>()
            .await?;
        known = *names;
        // What servers do in the background after that.
        tokio::time::sleep(Duration::from_secs(1)).await;
        for _ in 0..ROUNDS {
            // In an order that no cache foresees, the same in each run.
            let all = alternate(bench, &entries, |_, n| name(n * 7_919 % names)).await?;
            for ((who, _), mut times) in entries.iter().zip(all) {
                let title = format!("lock + release among {names} names, p50");
                report.add(&title, "µs", Some(bench.floor()), who, quantile(&mut times, 0.5)?);
            }
        }
    }
    Ok(())
}
