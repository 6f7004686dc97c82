//! Whether locks can be kept at a place, and everything that it takes is allowed there.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fencelock::{Capabilities, LockError, LockGuard, Locks, Options, OwnerId, Scope, ServerInfo};
use serde_json::{Value, json};
use tokio::task::JoinError;

use crate::exit::{CONFIGURATION, Failure, UNAVAILABLE};
use crate::location::{Location, leave};
use crate::output::print;
use crate::timing::shown;

/// Tries everything on locks of its own, and prints what came of it.
pub(crate) async fn check(location: &Location, json: bool) -> Result<ExitCode, Failure> {
    let (locks, other) = (location.client()?, location.client()?);
    let (steps, server) = try_all(&locks, &other).await;
    leave(&other).await;
    leave(&locks).await;
    let capabilities = locks.capabilities();
    print(&match json {
        true => format!("{}\n", in_json(location, server.as_ref(), &capabilities, &steps)),
        false => in_words(location, server.as_ref(), &capabilities, &steps),
    })?;
    // One thing that a person has to change is enough.
    let codes = steps.iter().filter_map(|(_, outcome)| match outcome {
        Outcome::Refused(failure) => Some(failure.code),
        _ => None,
    });
    Ok(ExitCode::from(codes.max().unwrap_or(0)))
}

type Step = (&'static str, Outcome);

enum Outcome {
    Done(Duration),
    NotSupported,
    Refused(Failure),
}

/// Another answer than expected: what keeps the locks does not do what locks need.
fn refused(why: impl Into<String>) -> Outcome {
    Outcome::Refused(Failure::configuration(why))
}

impl From<LockError> for Outcome {
    fn from(error: LockError) -> Self {
        if let LockError::NotSupported { .. } = error {
            return Self::NotSupported;
        }
        let mut failure = Failure::from(error);
        // A lock of the check itself that is busy, or lost, is not what its user asked for.
        if failure.code != CONFIGURATION {
            failure.code = UNAVAILABLE;
        }
        Self::Refused(failure)
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
        let refusing = async {
            let granted = other.try_lock(&name).await?;
            granted.map_or(Ok(()), |_| Err(refused(DOES_NOT_EXCLUDE)))
        };
        steps.run("refuse others", refusing).await;
        let waiting = tokio::spawn(request(other, ARRIVAL * 2 + HAND_OVER));
        // There is nothing to see of a waiter before it is granted the lock. The step before shows how long a request takes.
        tokio::time::sleep(ARRIVAL.max(steps.last() * 4).min(ARRIVAL * 2)).await;
        let too_soon = waiting.is_finished();
        steps.run("release", guard.release()).await;
        let waited = async {
            match granted(waiting.await)? {
                _ if too_soon => Err(refused(DOES_NOT_EXCLUDE)),
                guard => Ok(guard),
            }
        };
        if let Some(guard) = steps.run("wait", waited).await {
            // The next request of the same client is granted what the client held.
            let next = tokio::spawn(request(other, HAND_OVER));
            tokio::task::yield_now().await;
            let handing = async {
                guard.release().await?;
                Ok::<_, Outcome>(granted(next.await)?.release().await?)
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
fn granted(waited: Result<Result<LockGuard, LockError>, JoinError>) -> Result<LockGuard, Outcome> {
    match waited {
        Ok(Err(LockError::TimedOut { .. })) => Err(refused(format!(
            "a waiting client was not granted the lock within {} after its release; it may lack the right to be told, or \
             something between the client and the server holds such messages back",
            shown(HAND_OVER)
        ))),
        Ok(done) => Ok(done?),
        Err(error) => Err(refused(format!("the wait ended by itself: {error:#}"))),
    }
}

struct Steps {
    done: Vec<Step>,
    /// How long one step may take.
    limit: Duration,
}

impl Steps {
    async fn run<T, E: Into<Outcome>>(
        &mut self,
        name: &'static str,
        work: impl Future<Output = Result<T, E>>,
    ) -> Option<T> {
        let started = Instant::now();
        let (outcome, value) = match tokio::time::timeout(self.limit, work).await {
            Ok(Ok(value)) => (Outcome::Done(started.elapsed()), Some(value)),
            Ok(Err(problem)) => (problem.into(), None),
            Err(_) => {
                let why = format!("no end within {}", shown(self.limit));
                (Outcome::Refused(Failure::unavailable(why)), None)
            }
        };
        self.done.push((name, outcome));
        value
    }

    /// How long the last step took.
    fn last(&self) -> Duration {
        match self.done.last() {
            Some((_, Outcome::Done(time))) => *time,
            _ => Duration::ZERO,
        }
    }
}

fn in_words(location: &Location, server: Option<&ServerInfo>, capabilities: &Capabilities, steps: &[Step]) -> String {
    let named = server.map(|server| format!(" ({server})")).unwrap_or_default();
    let mut text = format!("fencelock {}, locks in {location}{named}\n", env!("CARGO_PKG_VERSION"));
    for (step, outcome) in steps {
        let _ = match outcome {
            Outcome::Done(time) => writeln!(text, "  {step:17} ok       {:.1} ms", time.as_secs_f64() * 1_000.0),
            Outcome::NotSupported => writeln!(text, "  {step:17} not supported here"),
            Outcome::Refused(why) => writeln!(text, "  {step:17} refused  {why}"),
        };
    }
    for warning in server.iter().flat_map(|server| &server.warnings) {
        let _ = writeln!(text, "  warning  {warning}");
    }
    let order = match capabilities.fair {
        true => "in the order in which they came",
        false => "in no particular order",
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

fn in_json(location: &Location, server: Option<&ServerInfo>, capabilities: &Capabilities, steps: &[Step]) -> Value {
    let shown = steps.iter().map(|(step, outcome)| match outcome {
        Outcome::Done(time) => json!({ "step": step, "outcome": "ok", "ms": time.as_secs_f64() * 1_000.0 }),
        Outcome::NotSupported => json!({ "step": step, "outcome": "not supported" }),
        Outcome::Refused(why) => json!({ "step": step, "outcome": "refused", "why": why.to_string() }),
    });
    json!({
        "ok": !steps.iter().any(|(_, outcome)| matches!(outcome, Outcome::Refused(_))),
        "version": env!("CARGO_PKG_VERSION"),
        "location": location.to_string(),
        "backend": server.map(|server| json!({ "product": server.product, "version": server.version })),
        "scope": scope(capabilities),
        "fair": capabilities.fair,
        "shared": capabilities.shared,
        "permits": capabilities.permits,
        "min_ttl_ms": capabilities.min_ttl.as_millis() as u64,
        "max_ttl_ms": capabilities.max_ttl.as_millis() as u64,
        "steps": shown.collect::<Value>(),
        "warnings": server.map(|server| server.warnings.as_slice()).unwrap_or_default(),
    })
}

fn scope(capabilities: &Capabilities) -> &'static str {
    match capabilities.scope {
        Scope::Process => "clients of the same store in this process",
        Scope::Machine => "the processes of this machine",
        Scope::Server => "all clients of the server",
        _ => "some clients",
    }
}
