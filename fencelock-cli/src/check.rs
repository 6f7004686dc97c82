//! Whether locks can be kept at a place, and everything that it takes is allowed there.

use std::fmt::Write;
use std::future::Future;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fencelock::{BackendVersion, Capabilities, LockError, Locks, OwnerId, Scope};
use serde_json::{Value, json};

use crate::exit::{Failure, UNAVAILABLE};
use crate::place::Place;
use crate::say::print;
use crate::timing::shown;

/// Tries everything on locks of its own, and prints what came of it.
pub(crate) async fn check(place: &Place, json: bool) -> Result<ExitCode, Failure> {
    let locks = place.client()?;
    let steps = try_all(&locks).await;
    let connected = matches!(
        steps.first(),
        Some(Step {
            outcome: Outcome::Done(_),
            ..
        })
    );
    let backend = match connected {
        true => locks.backend_version().await.ok(),
        // The first step says why.
        false => None,
    };
    let capabilities = locks.capabilities();
    let ok = steps.iter().all(|step| !matches!(step.outcome, Outcome::Refused(_)));
    print(&if json {
        format!("{}\n", in_json(place, backend.as_ref(), &capabilities, &steps, ok))
    } else {
        in_words(place, backend.as_ref(), &capabilities, &steps)
    })?;
    Ok(if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(UNAVAILABLE)
    })
}

struct Step {
    name: &'static str,
    outcome: Outcome,
}

enum Outcome {
    Done(Duration),
    NotSupported,
    Refused(String),
}

async fn try_all(locks: &Locks) -> Vec<Step> {
    let name = format!("fencelock-check/{}", OwnerId::random());
    let ttl = Locks::DEFAULT_TTL.clamp(locks.capabilities().min_ttl, locks.capabilities().max_ttl);
    let mut steps = Steps(Vec::new());
    // The first request also connects, and finds what is unsafe.
    if steps.run("connect", locks.try_lock(&name)).await.is_none() {
        return steps.0;
    }
    let guard = steps
        .run(
            "acquire",
            locks
                .lock(&name)
                .ttl(ttl)
                .wait_for(Duration::from_secs(5))
                .into_future(),
        )
        .await;
    if let Some(guard) = guard {
        steps.run("renew", guard.renew_now()).await;
        steps.run("ask for holder", locks.holder(&name)).await;
        steps.run("list", locks.list(&name)).await;
        steps.run("release", guard.release()).await;
    }
    if let Ok(victim) = locks.lock(&name).ttl(ttl).wait_for(Duration::from_secs(5)).await {
        steps.run("release by force", locks.force_release(&name)).await;
        drop(victim);
    }
    steps.0
}

struct Steps(Vec<Step>);

impl Steps {
    async fn run<T>(&mut self, name: &'static str, work: impl Future<Output = Result<T, LockError>>) -> Option<T> {
        let started = Instant::now();
        let done = work.await;
        let (outcome, value) = match done {
            Ok(value) => (Outcome::Done(started.elapsed()), Some(value)),
            Err(LockError::NotSupported { .. }) => (Outcome::NotSupported, None),
            Err(error) => (Outcome::Refused(Failure::from(error).to_string()), None),
        };
        self.0.push(Step { name, outcome });
        value
    }
}

fn in_words(place: &Place, backend: Option<&BackendVersion>, capabilities: &Capabilities, steps: &[Step]) -> String {
    let backend = backend.map(|backend| format!(" ({backend})")).unwrap_or_default();
    let mut text = format!("fencelock {}, locks in {place}{backend}\n", env!("CARGO_PKG_VERSION"));
    for step in steps {
        let outcome = match &step.outcome {
            Outcome::Done(time) => format!("ok       {:.1} ms", time.as_secs_f64() * 1_000.0),
            Outcome::NotSupported => "not supported here".to_owned(),
            Outcome::Refused(why) => format!("refused  {why}"),
        };
        let _ = writeln!(text, "  {:17} {outcome}", step.name);
    }
    let order = if capabilities.fair {
        "in the order in which they came"
    } else {
        "in no particular order"
    };
    let _ = writeln!(
        text,
        "  locks exclude {}; waiters are served {order}; a ttl is {} to {}",
        scope(capabilities),
        shown(capabilities.min_ttl),
        shown(capabilities.max_ttl),
    );
    text
}

fn in_json(
    place: &Place,
    backend: Option<&BackendVersion>,
    capabilities: &Capabilities,
    steps: &[Step],
    ok: bool,
) -> Value {
    let steps: Vec<Value> = steps
        .iter()
        .map(|step| match &step.outcome {
            Outcome::Done(time) => json!({ "step": step.name, "outcome": "ok", "ms": time.as_secs_f64() * 1_000.0 }),
            Outcome::NotSupported => json!({ "step": step.name, "outcome": "not supported" }),
            Outcome::Refused(why) => json!({ "step": step.name, "outcome": "refused", "why": why }),
        })
        .collect();
    json!({
        "ok": ok,
        "version": env!("CARGO_PKG_VERSION"),
        "location": place.to_string(),
        "backend": backend.map(|backend| json!({ "product": backend.product, "version": backend.version })),
        "scope": scope(capabilities),
        "fair": capabilities.fair,
        "min_ttl_ms": capabilities.min_ttl.as_millis() as u64,
        "max_ttl_ms": capabilities.max_ttl.as_millis() as u64,
        "steps": steps,
    })
}

fn scope(capabilities: &Capabilities) -> &'static str {
    match capabilities.scope {
        Scope::Process => "the tasks of one process",
        Scope::Machine => "the processes of this machine",
        Scope::Server => "everyone who reaches the server",
        _ => "somebody",
    }
}
