//! Whether locks can be kept at a place, and everything that it takes is allowed there.

use std::fmt::Write;
use std::future::Future;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fencelock::{Capabilities, LockError, LockGuard, LockRequest, Locks, Options, OwnerId, Scope, ServerInfo};
use serde_json::{Value, json};

use crate::exit::{CONFIGURATION, Failure, UNAVAILABLE};
use crate::place::Place;
use crate::run::leave;
use crate::say::print;
use crate::timing::shown;

/// Tries everything on locks of its own, and prints what came of it.
pub(crate) async fn check(place: &Place, json: bool) -> Result<ExitCode, Failure> {
    let locks = place.client()?;
    let other = place.client()?;
    let (steps, server) = try_all(&locks, &other).await;
    leave(&other).await;
    leave(&locks).await;
    let capabilities = locks.capabilities();
    let ok = steps
        .iter()
        .all(|step| !matches!(step.outcome, Outcome::Refused { .. }));
    print(&if json {
        format!("{}\n", in_json(place, server.as_ref(), &capabilities, &steps, ok))
    } else {
        in_words(place, server.as_ref(), &capabilities, &steps)
    })?;
    let codes = || {
        steps.iter().filter_map(|step| match step.outcome {
            Outcome::Refused { code, .. } => Some(code),
            _ => None,
        })
    };
    // One thing that a person has to change is enough.
    let code = codes().find(|code| *code == CONFIGURATION).or_else(|| codes().next());
    Ok(code.map_or(ExitCode::SUCCESS, ExitCode::from))
}

struct Step {
    name: &'static str,
    outcome: Outcome,
}

enum Outcome {
    Done(Duration),
    NotSupported,
    Refused {
        why: String,
        /// The exit code that it calls for.
        code: u8,
    },
}

/// How long the wait for a lock lasts at most once it has been released. Well below the ttl, within which the server would pass on
/// a lock also if it did not tell its waiter.
const HAND_OVER: Duration = Duration::from_secs(5);

/// How long a waiter may take to arrive at the server, at least.
const ARRIVAL: Duration = Duration::from_millis(250);

/// Tries everything, with two clients that share nothing but the server.
async fn try_all(locks: &Locks, other: &Locks) -> (Vec<Step>, Option<ServerInfo>) {
    let name = format!("fencelock-check/{}", OwnerId::random());
    let capabilities = locks.capabilities();
    let ttl = Options::DEFAULT_TTL.clamp(capabilities.min_ttl, capabilities.max_ttl);
    let request = |locks: &Locks, limit| locks.lock(&name).ttl(ttl).wait_for(limit);
    let mut steps = Steps {
        done: Vec::new(),
        limit: capabilities.op_timeout.saturating_mul(2).saturating_add(HAND_OVER),
    };
    // The first request also connects, and finds what is unsafe.
    if steps.run("connect", locks.try_lock(&name)).await.is_none() {
        return (steps.done, None);
    }
    let guard = steps.run("acquire", request(locks, HAND_OVER).into_future()).await;
    if let Some(guard) = guard {
        steps.run("renew", guard.renew_now()).await;
        steps.run("ask for holder", locks.holder(&name)).await;
        steps.run("list", locks.list(&name)).await;
        let refused = steps.run("refuse others", refuse(other, &name)).await.is_some();
        let waiting = tokio::spawn(request(other, ARRIVAL * 2 + HAND_OVER).into_future());
        // There is nothing to see of a waiter before it is granted the lock. The step before shows how long a request takes.
        tokio::time::sleep(ARRIVAL.max(steps.last() * 4).min(ARRIVAL * 2)).await;
        if !refused || waiting.is_finished() {
            let ended = waiting.await;
            steps.run("wait", async { granted_too_soon(ended) }).await;
            steps.run("release", guard.release()).await;
        } else {
            steps.run("release", guard.release()).await;
            let waited = steps.run("wait", async { granted(waiting.await) }).await;
            if let Some(guard) = waited {
                hand_over(&mut steps, guard, request(other, HAND_OVER)).await;
            }
        }
    }
    if let Ok(victim) = request(locks, HAND_OVER).await {
        steps.run("release by force", locks.force_release(&name)).await;
        drop(victim);
    }
    let server = steps.run("look at settings", locks.server_info()).await;
    (steps.done, server)
}

/// Another client asks for what is held.
async fn refuse(other: &Locks, name: &str) -> Result<(), Problem> {
    match other.try_lock(name).await? {
        None => Ok(()),
        Some(_) => Err(Problem::Refused(
            "another client was granted the lock while it was held; locks do not exclude here".to_owned(),
        )),
    }
}

type Waited = Result<Result<LockGuard, LockError>, tokio::task::JoinError>;

/// What a wait came to after the release.
fn granted(waited: Waited) -> Result<LockGuard, Problem> {
    match waited {
        Ok(Err(LockError::TimedOut { .. })) => Err(Problem::Refused(format!(
            "a waiting client was not granted the lock within {} after its release; it may lack the right to be told, or \
             something between the client and the server holds such messages back",
            shown(HAND_OVER)
        ))),
        Ok(done) => Ok(done?),
        Err(error) => Err(Problem::Refused(format!("the wait ended by itself: {error:#}"))),
    }
}

/// What a wait came to before the release.
fn granted_too_soon(waited: Waited) -> Result<(), Problem> {
    match waited {
        Ok(Err(error)) => Err(error.into()),
        _ => Err(Problem::Refused(
            "a waiting client was granted the lock before its release; locks do not exclude here".to_owned(),
        )),
    }
}

/// The next request of the same client is granted what the client held.
async fn hand_over(steps: &mut Steps, guard: LockGuard, next: LockRequest) {
    let next = tokio::spawn(next.into_future());
    tokio::task::yield_now().await;
    let handing = async {
        guard.release().await?;
        Ok::<_, Problem>(granted(next.await)?.release().await?)
    };
    steps.run("hand over", handing).await;
}

struct Steps {
    done: Vec<Step>,
    /// How long one step may take.
    limit: Duration,
}

/// Why a step did not do what it should.
enum Problem {
    NotSupported,
    /// Another answer than expected: what keeps the locks does not do what locks need.
    Refused(String),
    Failed(Failure),
}

impl From<LockError> for Problem {
    fn from(error: LockError) -> Self {
        match error {
            LockError::NotSupported { .. } => Self::NotSupported,
            error => Self::Failed(error.into()),
        }
    }
}

impl Steps {
    async fn run<T, E: Into<Problem>>(
        &mut self,
        name: &'static str,
        work: impl Future<Output = Result<T, E>>,
    ) -> Option<T> {
        let started = Instant::now();
        let done = tokio::time::timeout(self.limit, work).await;
        let (outcome, value) = match done.map(|done| done.map_err(Into::into)) {
            Ok(Ok(value)) => (Outcome::Done(started.elapsed()), Some(value)),
            Ok(Err(Problem::NotSupported)) => (Outcome::NotSupported, None),
            Ok(Err(Problem::Refused(why))) => (
                Outcome::Refused {
                    why,
                    code: CONFIGURATION,
                },
                None,
            ),
            Ok(Err(Problem::Failed(failure))) => {
                let (why, code) = (failure.to_string(), failure.code);
                // A lock of the check itself that is busy, or lost, is not what its user asked for.
                let code = if code == CONFIGURATION { code } else { UNAVAILABLE };
                (Outcome::Refused { why, code }, None)
            }
            Err(_) => {
                let why = format!("no end within {}", shown(self.limit));
                (Outcome::Refused { why, code: UNAVAILABLE }, None)
            }
        };
        self.done.push(Step { name, outcome });
        value
    }

    /// How long the last step took.
    fn last(&self) -> Duration {
        match self.done.last() {
            Some(Step {
                outcome: Outcome::Done(time),
                ..
            }) => *time,
            _ => Duration::ZERO,
        }
    }
}

fn in_words(place: &Place, server: Option<&ServerInfo>, capabilities: &Capabilities, steps: &[Step]) -> String {
    let named = server.map(|server| format!(" ({server})")).unwrap_or_default();
    let mut text = format!("fencelock {}, locks in {place}{named}\n", env!("CARGO_PKG_VERSION"));
    for step in steps {
        let outcome = match &step.outcome {
            Outcome::Done(time) => format!("ok       {:.1} ms", time.as_secs_f64() * 1_000.0),
            Outcome::NotSupported => "not supported here".to_owned(),
            Outcome::Refused { why, .. } => format!("refused  {why}"),
        };
        let _ = writeln!(text, "  {:17} {outcome}", step.name);
    }
    for warning in server.iter().flat_map(|server| &server.warnings) {
        let _ = writeln!(text, "  warning  {warning}");
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

fn in_json(place: &Place, server: Option<&ServerInfo>, capabilities: &Capabilities, steps: &[Step], ok: bool) -> Value {
    let steps: Vec<Value> = steps
        .iter()
        .map(|step| match &step.outcome {
            Outcome::Done(time) => json!({ "step": step.name, "outcome": "ok", "ms": time.as_secs_f64() * 1_000.0 }),
            Outcome::NotSupported => json!({ "step": step.name, "outcome": "not supported" }),
            Outcome::Refused { why, .. } => json!({ "step": step.name, "outcome": "refused", "why": why }),
        })
        .collect();
    json!({
        "ok": ok,
        "version": env!("CARGO_PKG_VERSION"),
        "location": place.to_string(),
        "backend": server.map(|server| json!({ "product": server.product, "version": server.version })),
        "scope": scope(capabilities),
        "fair": capabilities.fair,
        "min_ttl_ms": capabilities.min_ttl.as_millis() as u64,
        "max_ttl_ms": capabilities.max_ttl.as_millis() as u64,
        "steps": steps,
        "warnings": server.map(|server| server.warnings.as_slice()).unwrap_or_default(),
    })
}

fn scope(capabilities: &Capabilities) -> &'static str {
    match capabilities.scope {
        Scope::Process => "clients of the same store in this process",
        Scope::Machine => "the processes of this machine",
        Scope::Server => "everyone who reaches the server",
        _ => "somebody",
    }
}
