//! Whether locks can be kept at a place, and everything that it takes is allowed there.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fencelock::{Capabilities, LockError, LockGuard, Locks, Options, OwnerId, Scope, ServerInfo};
use serde_json::{Value, json};

use crate::exit::{CONFIGURATION, Failure, UNAVAILABLE};
use crate::place::Place;
use crate::run::leave;
use crate::say::print;
use crate::timing::shown;

/// Tries everything on locks of its own, and prints what came of it.
pub(crate) async fn check(place: &Place, json: bool) -> Result<ExitCode, Failure> {
    let (locks, other) = (place.client()?, place.client()?);
    let (steps, server) = try_all(&locks, &other).await;
    leave(&other).await;
    leave(&locks).await;
    let capabilities = locks.capabilities();
    print(&match json {
        true => format!("{}\n", in_json(place, server.as_ref(), &capabilities, &steps)),
        false => in_words(place, server.as_ref(), &capabilities, &steps),
    })?;
    // One thing that a person has to change is enough.
    Ok(ExitCode::from(steps.iter().filter_map(Step::code).max().unwrap_or(0)))
}

struct Step {
    name: &'static str,
    outcome: Outcome,
}

enum Outcome {
    Done(Duration),
    NotSupported,
    /// Why, and the exit code that it calls for.
    Refused(String, u8),
}

impl Step {
    fn code(&self) -> Option<u8> {
        match self.outcome {
            Outcome::Refused(_, code) => Some(code),
            _ => None,
        }
    }
}

/// How long the wait for a lock lasts at most once it has been released. Well below the ttl, within which the server would pass on
/// a lock also if it did not tell its waiter.
const HAND_OVER: Duration = Duration::from_secs(5);

/// How long a waiter may take to arrive at the server, at least.
const ARRIVAL: Duration = Duration::from_millis(250);

const DOES_NOT_EXCLUDE: &str = "another client was granted the lock while it was held; locks do not exclude here";

/// Tries everything, with two clients that share nothing but the server.
async fn try_all(locks: &Locks, other: &Locks) -> (Vec<Step>, Option<ServerInfo>) {
    let name = format!("fencelock-check/{}", OwnerId::random());
    let capabilities = locks.capabilities();
    let ttl = Options::DEFAULT_TTL.clamp(capabilities.min_ttl, capabilities.max_ttl);
    let request = |locks: &Locks, limit| locks.lock(&name).ttl(ttl).wait_for(limit).into_future();
    let mut steps = Steps {
        done: Vec::new(),
        limit: capabilities.op_timeout.saturating_mul(2).saturating_add(HAND_OVER),
    };
    // The first request also connects, and finds what is unsafe.
    if steps.run("connect", locks.try_lock(&name)).await.is_none() {
        return (steps.done, None);
    }
    if let Some(guard) = steps.run("acquire", request(locks, HAND_OVER)).await {
        steps.run("renew", guard.renew_now()).await;
        steps.run("ask for holder", locks.holder(&name)).await;
        steps.run("list", locks.list(&name)).await;
        let refused = steps.run("refuse others", async {
            other
                .try_lock(&name)
                .await?
                .map_or(Ok(()), |_| Err(Problem::refused(DOES_NOT_EXCLUDE)))
        });
        refused.await;
        let waiting = tokio::spawn(request(other, ARRIVAL * 2 + HAND_OVER));
        // There is nothing to see of a waiter before it is granted the lock. The step before shows how long a request takes.
        tokio::time::sleep(ARRIVAL.max(steps.last() * 4).min(ARRIVAL * 2)).await;
        let too_soon = waiting.is_finished();
        steps.run("release", guard.release()).await;
        let waited = async {
            let guard = granted(waiting.await)?;
            if too_soon {
                Err(Problem::refused(DOES_NOT_EXCLUDE))
            } else {
                Ok(guard)
            }
        };
        if let Some(guard) = steps.run("wait", waited).await {
            // The next request of the same client is granted what the client held.
            let next = tokio::spawn(request(other, HAND_OVER));
            tokio::task::yield_now().await;
            let handing = async {
                guard.release().await?;
                Ok::<_, Problem>(granted(next.await)?.release().await?)
            };
            steps.run("hand over", handing).await;
        }
    }
    if let Ok(victim) = request(locks, HAND_OVER).await {
        steps.run("release by force", locks.force_release(&name)).await;
        drop(victim);
    }
    let server = steps.run("look at settings", locks.server_info()).await;
    (steps.done, server)
}

/// What a wait came to after the release.
fn granted(waited: Result<Result<LockGuard, LockError>, tokio::task::JoinError>) -> Result<LockGuard, Problem> {
    match waited {
        Ok(Err(LockError::TimedOut { .. })) => Err(Problem::refused(format!(
            "a waiting client was not granted the lock within {} after its release; it may lack the right to be told, or \
             something between the client and the server holds such messages back",
            shown(HAND_OVER)
        ))),
        Ok(done) => Ok(done?),
        Err(error) => Err(Problem::refused(format!("the wait ended by itself: {error:#}"))),
    }
}

struct Steps {
    done: Vec<Step>,
    /// How long one step may take.
    limit: Duration,
}

/// Why a step did not do what it should.
struct Problem(Outcome);

impl Problem {
    /// Another answer than expected: what keeps the locks does not do what locks need.
    fn refused(why: impl Into<String>) -> Self {
        Self(Outcome::Refused(why.into(), CONFIGURATION))
    }
}

impl From<LockError> for Problem {
    fn from(error: LockError) -> Self {
        if let LockError::NotSupported { .. } = error {
            return Self(Outcome::NotSupported);
        }
        let failure = Failure::from(error);
        // A lock of the check itself that is busy, or lost, is not what its user asked for.
        let code = if failure.code == CONFIGURATION {
            CONFIGURATION
        } else {
            UNAVAILABLE
        };
        Self(Outcome::Refused(failure.to_string(), code))
    }
}

impl Steps {
    async fn run<T, E: Into<Problem>>(
        &mut self,
        name: &'static str,
        work: impl Future<Output = Result<T, E>>,
    ) -> Option<T> {
        let started = Instant::now();
        let (outcome, value) = match tokio::time::timeout(self.limit, work).await {
            Ok(Ok(value)) => (Outcome::Done(started.elapsed()), Some(value)),
            Ok(Err(problem)) => (problem.into().0, None),
            Err(_) => (
                Outcome::Refused(format!("no end within {}", shown(self.limit)), UNAVAILABLE),
                None,
            ),
        };
        self.done.push(Step { name, outcome });
        value
    }

    /// How long the last step took.
    fn last(&self) -> Duration {
        match self.done.last().map(|step| &step.outcome) {
            Some(Outcome::Done(time)) => *time,
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
            Outcome::Refused(why, _) => format!("refused  {why}"),
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
    let modes = match (capabilities.shared, capabilities.permits) {
        (true, true) => "; locks can be shared (--shared, --max-holders)",
        (true, false) => "; locks can be shared (--shared)",
        (false, true) => "; locks can be shared (--max-holders)",
        (false, false) => "",
    };
    let _ = writeln!(
        text,
        "  locks exclude {}; waiters are served {order}; a ttl is {} to {}{modes}",
        scope(capabilities),
        shown(capabilities.min_ttl),
        shown(capabilities.max_ttl),
    );
    text
}

fn in_json(place: &Place, server: Option<&ServerInfo>, capabilities: &Capabilities, steps: &[Step]) -> Value {
    let shown: Vec<Value> = steps
        .iter()
        .map(|step| match &step.outcome {
            Outcome::Done(time) => json!({ "step": step.name, "outcome": "ok", "ms": time.as_secs_f64() * 1_000.0 }),
            Outcome::NotSupported => json!({ "step": step.name, "outcome": "not supported" }),
            Outcome::Refused(why, _) => json!({ "step": step.name, "outcome": "refused", "why": why }),
        })
        .collect();
    json!({
        "ok": steps.iter().all(|step| step.code().is_none()),
        "version": env!("CARGO_PKG_VERSION"),
        "location": place.to_string(),
        "backend": server.map(|server| json!({ "product": server.product, "version": server.version })),
        "scope": scope(capabilities),
        "fair": capabilities.fair,
        "shared": capabilities.shared,
        "permits": capabilities.permits,
        "min_ttl_ms": capabilities.min_ttl.as_millis() as u64,
        "max_ttl_ms": capabilities.max_ttl.as_millis() as u64,
        "steps": shown,
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
