//! The models accept what real servers did under torture, and nothing that differs from it in one step.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod decisions;
mod edits;
mod frames;
mod monitor;
mod proxy;
mod queue;
mod queue_edits;
mod redlock;
mod redlock_edits;
mod redlock_kinds;
mod torture;
mod transcript;

use edits::{count, try_all};
use tokio::task::JoinSet;

/// Of everything that is chosen by chance. What the clients and servers make of it depends on their speed.
const SEED: u64 = 20_261_124;

/// At the same time, as they wait most of the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_models_accept_what_servers_did_and_nothing_else() {
    eprintln!("seed {SEED}");
    let mut recordings = JoinSet::new();
    recordings.spawn(several_servers(3));
    recordings.spawn(several_servers(5));
    recordings.spawn(one_server());
    while let Some(recorded) = recordings.join_next().await {
        recorded.unwrap();
    }
}

async fn one_server() {
    let traces = queue::record(&["a", "b"], 250, SEED).await;
    all_are_accepted(&traces, |trace| {
        models::redis_queue::trace::accepts(trace).map_err(|no| (no.at, no.reason))
    });
    let kinds = traces.iter().flat_map(|trace| {
        let mut seen = queue_edits::Seen::default();
        trace.iter().flat_map(move |step| seen.kinds(step))
    });
    count("the queue of one server", kinds, &queue_edits::LEAST);
    try_all(&traces, &queue_edits::edits(), models::redis_queue::trace::accepts);
}

async fn several_servers(nodes: usize) {
    let accepts =
        |trace: &[models::redlock::trace::Step]| models::redlock::trace::accepts(nodes, redlock::MAX_TTL, trace);
    let traces = redlock::record(nodes, &["a", "b"], 70, SEED).await;
    all_are_accepted(&traces, |trace| accepts(trace).map_err(|no| (no.at, no.reason)));
    let kinds = traces.iter().flat_map(|trace| {
        let mut seen = redlock_kinds::Seen::default();
        trace.iter().flat_map(move |step| seen.kinds(step, nodes))
    });
    count(&format!("{nodes} nodes"), kinds, &redlock_kinds::LEAST);
    try_all(&traces, &redlock_edits::edits(nodes), accepts);
}

/// Panics with the steps before the one that was rejected.
fn all_are_accepted<S: serde::Serialize>(traces: &[Vec<S>], accepts: impl Fn(&[S]) -> Result<(), (usize, String)>) {
    for trace in traces {
        eprintln!("{} steps", trace.len());
        if let Err((at, reason)) = accepts(trace) {
            panic!("step {at}: {reason}\n{}", around(trace, at));
        }
    }
}

/// The steps before the one that was rejected, one a line.
fn around<S: serde::Serialize>(trace: &[S], at: usize) -> String {
    let shown = trace.iter().enumerate().take(at + 3).skip(at.saturating_sub(100));
    let lines: Vec<_> = shown
        .map(|(at, step)| format!("{at} {}", serde_json::to_string(step).unwrap()))
        .collect();
    lines.join("\n")
}
