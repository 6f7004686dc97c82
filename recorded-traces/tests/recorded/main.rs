//! The model of the queue accepts what a real server did under torture, and nothing that differs from it in one step.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod decisions;
mod edits;
mod frames;
mod monitor;
mod proxy;
mod queue;
mod queue_edits;
mod torture;
mod transcript;

use edits::{count, try_all};

/// Of everything that is chosen by chance. What the clients and servers make of it depends on their speed.
const SEED: u64 = 20_261_124;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_model_accepts_what_a_server_did_and_nothing_else() {
    eprintln!("seed {SEED}");
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
