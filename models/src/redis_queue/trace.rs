//! Replays what the scripts of a real server answered, and says whether the queue of the model does the same.
//!
//! Every answer of a script carries the server's clock, so the end of a lease and of a place in the queue follow from the steps. Tokens
//! are compared exactly. What must be recorded besides: the waiters whose push had no receiver.

use serde::{Deserialize, Serialize};

use super::server::{Acquire, Answer, Push, Renewal, Run, Server};

/// One run of a script. Times are in milliseconds of the server's clock, except `at`, which is in microseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The server's clock when the script ran.
    pub at: u64,
    /// The script, and what it answered.
    #[serde(flatten)]
    pub script: Script,
    /// The grant that the script pushed to a waiter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub push: Option<Push<String>>,
    /// The waiters that the script passed over because no client received their push.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unheard: Vec<String>,
}

/// A script, and what it answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "script", rename_all = "snake_case")]
pub enum Script {
    /// Takes the name, or enters the queue.
    Acquire {
        /// The claim.
        owner: String,
        /// How long a lease lasts.
        ttl: u64,
        /// When the claim must have ended.
        stop: u64,
        /// The stamp of the request.
        sent: u64,
        /// Whether the claim waits.
        waits: bool,
        /// What the script answered.
        answer: Answer,
    },
    /// Lengthens the lease.
    Renew {
        /// The claim.
        owner: String,
        /// How long a lease lasts.
        ttl: u64,
        /// When the request is too late.
        stop: u64,
        /// What the script answered.
        answer: Renewal,
    },
    /// Frees the name, and leaves the queue.
    Release {
        /// The claim.
        owner: String,
        /// Whether the claim held the name.
        released: bool,
    },
    /// Releases one claim, and takes the name for another one.
    HandOver {
        /// The claim that is released.
        from: String,
        /// The claim that takes the name.
        to: String,
        /// How long a lease lasts.
        ttl: u64,
        /// When the other claim must have ended.
        stop: u64,
        /// Whether the first claim held the name.
        released: bool,
        /// What the script answered for the other claim.
        answer: Answer,
    },
}

/// Why a trace is not one of the queue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {at}: {reason}")]
pub struct Rejected {
    /// The number of the step, from 0.
    pub at: usize,
    /// What is wrong with it.
    pub reason: String,
}

/// Checks the trace of one name, on a server that knows nothing of it at the beginning.
///
/// # Errors
///
/// The first step that does not follow from those before.
pub fn accepts(trace: &[Step]) -> Result<(), Rejected> {
    let mut server = Server::new();
    let mut last = 0;
    for (at, step) in trace.iter().enumerate() {
        let reason = if step.at < last {
            Err("the clock went back".to_owned())
        } else {
            replay(&mut server, step)
        };
        reason.map_err(|reason| Rejected { at, reason })?;
        last = step.at;
    }
    Ok(())
}

fn replay(server: &mut Server<String>, step: &Step) -> Result<(), String> {
    let hears = |owner: &String| !step.unheard.contains(owner);
    let run = Run {
        now_us: step.at,
        hears: &hears,
        bug: None,
    };
    let waiting: Vec<_> = server.queue.iter().map(|entry| entry.owner.clone()).collect();
    if let Some(owner) = step.unheard.iter().find(|owner| !waiting.contains(owner)) {
        return Err(format!("{owner} was passed over, and does not wait"));
    }
    let (expected, push) = match &step.script {
        Script::Acquire {
            owner,
            ttl,
            stop,
            sent,
            waits,
            ..
        } => {
            let request = Acquire {
                owner: owner.clone(),
                ttl: *ttl,
                stop: *stop,
                sent: *sent,
                waits: *waits,
            };
            let (answer, push) = server.acquire(&run, &request);
            (with(&step.script, Some(answer), None, None), push)
        }
        Script::Renew { owner, ttl, stop, .. } => {
            let (answer, push) = server.renew(&run, owner, *ttl, *stop);
            (with(&step.script, None, Some(answer), None), push)
        }
        Script::Release { owner, .. } => {
            let (released, push) = server.release(&run, owner);
            (with(&step.script, None, None, Some(released)), push)
        }
        Script::HandOver {
            from, to, ttl, stop, ..
        } => {
            let request = Acquire {
                owner: to.clone(),
                ttl: *ttl,
                stop: *stop,
                sent: 0,
                waits: false,
            };
            let (released, answer, push) = server.hand_over(&run, from, &request);
            (with(&step.script, Some(answer), None, Some(released)), push)
        }
    };
    if expected != step.script {
        return Err(format!(
            "the server did {:?}, and the queue says {expected:?}",
            step.script
        ));
    }
    if push != step.push {
        return Err(format!(
            "the server pushed {:?}, and the queue says {push:?}",
            step.push
        ));
    }
    Ok(())
}

/// The script with these answers in place of its own.
fn with(script: &Script, grant: Option<Answer>, renewal: Option<Renewal>, freed: Option<bool>) -> Script {
    let mut script = script.clone();
    match &mut script {
        Script::Acquire { answer, .. } => *answer = grant.unwrap_or(*answer),
        Script::Renew { answer, .. } => *answer = renewal.unwrap_or(*answer),
        Script::Release { released, .. } => *released = freed.unwrap_or(*released),
        Script::HandOver { released, answer, .. } => {
            *released = freed.unwrap_or(*released);
            *answer = grant.unwrap_or(*answer);
        }
    }
    script
}
