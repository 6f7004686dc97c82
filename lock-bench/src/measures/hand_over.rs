//! Processes that all want the same lock: the time from a release to the grant of the next process.

use futures_util::future::try_join_all;

use super::pair::PAIR;
use super::{Bench, TTL, name};
use crate::child::{self, HOLD, Job, PAUSE, Span, now};
use crate::contestant::{OURS, OURS_HERE, Result};
use crate::report::{ROUNDS, Report, quantile};

pub(super) async fn measure(bench: &Bench, report: &mut Report) -> Result {
    let floor = bench.floor();
    let pair = report.row(PAIR).and_then(|pair| pair.median(floor));
    for processes in bench.either(&[2, 10, 100][..], &[2, 10][..]) {
        let title = format!("hand-over, {processes} processes");
        for round in 0..ROUNDS {
            // Half of it is the release on its way to the server, and a message on its way to the next holder.
            if let Some(pair) = pair {
                report.add(&format!("{title}, p50"), "µs", Some(floor), floor, pair / 2.0);
            }
            for who in bench.locks() {
                let (mut times, overlaps) = match contend(bench, who, *processes, round).await {
                    Ok(seen) if !seen.0.is_empty() => seen,
                    Err(error) if [OURS, OURS_HERE].contains(&who) => return Err(error),
                    seen => {
                        let why = seen.map_or_else(
                            |error| error.to_string(),
                            |_| "no process but one got the lock".to_owned(),
                        );
                        report.note(format!("{title}, {who}: {why}."));
                        continue;
                    }
                };
                let (p50, p99) = (quantile(&mut times, 0.5)?, quantile(&mut times, 0.99)?);
                report.add(&format!("{title}, p50"), "µs", Some(floor), who, p50);
                report.add(&format!("{title}, p99"), "µs", None, who, p99);
                if overlaps > 0 {
                    report.note(format!(
                        "{title}: two processes of {who} held the lock at the same time."
                    ));
                }
            }
        }
    }
    report.note(format!(
        "Hand-over: each process holds the lock for {HOLD:?} and asks again {PAUSE:?} after its release."
    ));
    Ok(())
}

async fn contend(bench: &Bench, who: &str, processes: usize, round: usize) -> Result<(Vec<f64>, usize)> {
    // Until all are connected, and then until all wait.
    let ready = 2_000 + 60 * u64::try_from(processes)?;
    let [from, began, ended] =
        [ready, ready + 500, ready + bench.either(3_500, 1_500)].map(|milliseconds| now() + milliseconds * 1_000_000);
    let job = Job {
        place: bench.site.place.clone(),
        who: who.to_owned(),
        ttl: TTL,
        name: name(&format!("hand-over-{processes}-{round}"), who),
        from,
        until: ended,
    };
    let spans = try_join_all((0..processes).map(|_| child::run(&job))).await?;
    let spans = spans.into_iter().enumerate();
    let mut spans: Vec<_> = spans
        .flat_map(|(process, spans)| spans.into_iter().map(move |span| (process, span)))
        .collect();
    spans.sort_unstable_by_key(|(_, span)| span.granted);
    Ok(hand_overs(&spans, began))
}

/// The hand-overs since then, in microseconds, and how many grants came before a release, of spans in the order of their grants. A
/// holder may take the lock several times before another process gets it, so a hand-over counts from the first release.
fn hand_overs(spans: &[(usize, Span)], since: u64) -> (Vec<f64>, usize) {
    let (mut times, mut overlaps) = (Vec::new(), 0);
    let Some((&(mut holder, first), rest)) = spans.split_first() else {
        return (times, overlaps);
    };
    let (mut first_release, mut last_release) = (first.released, first.released);
    for &(process, span) in rest {
        overlaps += usize::from(span.granted < last_release);
        if process != holder {
            if span.granted >= since {
                times.push(span.granted.saturating_sub(first_release) as f64 / 1e3);
            }
            (holder, first_release) = (process, span.released);
        }
        last_release = last_release.max(span.released);
    }
    (times, overlaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(spans: &[(usize, u64, u64)]) -> (Vec<f64>, usize) {
        let micro = |time| time * 1_000;
        let spans = spans.iter().map(|&(process, granted, released)| {
            let (granted, released) = (micro(granted), micro(released));
            (process, Span { granted, released })
        });
        hand_overs(&spans.collect::<Vec<_>>(), micro(8))
    }

    #[test]
    fn a_hand_over_counts_from_the_first_release_that_others_waited_for() {
        let spans = [(1, 1, 2), (0, 7, 20), (0, 22, 30), (1, 35, 40), (0, 42, 50)];
        assert_eq!(seen(&spans), (vec![15.0, 2.0], 0));
    }

    #[test]
    fn two_holders_at_the_same_time_are_seen() {
        let (_, overlaps) = seen(&[(0, 10, 20), (1, 15, 25), (2, 30, 40)]);
        assert_eq!(overlaps, 1);
    }
}
