//! Many locks of fencelock that are held while nothing else happens.

use std::time::Duration;

use fencelock::Options;
use futures_util::stream::{StreamExt as _, TryStreamExt as _, iter};
use tokio::time::sleep;

use super::{Bench, TASKS};
use crate::child::{now, processor};
use crate::contestant::{OURS, Result};
use crate::report::{ROUNDS, Report};

pub(super) async fn measure(bench: &Bench, report: &mut Report) -> Result {
    let locks = bench.either(10_000, 1_000);
    let ttl = bench.either(Duration::from_secs(15), Duration::from_secs(5));
    let client = fencelock::connect_with(&bench.site.place.url, Options::new().ttl(ttl)).await?;
    let asked = iter(0..locks).map(|n| client.lock(format!("held-{n}")).into_future());
    let held: Vec<_> = asked.buffer_unordered(TASKS).try_collect().await?;
    for _ in 0..ROUNDS {
        let (began, used, renewed) = (now(), processor(), client.stats().renewed);
        sleep(2 * ttl).await;
        let elapsed = (now() - began) as f64;
        let of_a_core = 100.0 * (processor() - used) as f64 / elapsed;
        let renewals = (client.stats().renewed - renewed) as f64 * ttl.as_nanos() as f64 / 3.0 / elapsed;
        report.add(&format!("{locks} held locks, of a core"), "%", None, OURS, of_a_core);
        report.add(
            &format!("{locks} held locks, renewals in a third of the ttl"),
            "",
            None,
            OURS,
            renewals,
        );
    }
    report.note(format!("Held locks have a ttl of {ttl:?}."));
    drop(held);
    Ok(client.shutdown().await?)
}
