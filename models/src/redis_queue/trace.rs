//! Replays what the scripts of a real server answered, and says whether the queue of the model does the same.
//!
//! Every answer of a script carries the server's clock, so the end of a lease and of a place in the queue follow from the steps. Tokens
//! are compared exactly. What must be recorded besides: the waiters whose push had no receiver, and those that the server came upon by chance and
//! removed because their time was over.

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
    /// The waiters that the script removed because no client received their push.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unheard: Vec<String>,
    /// The waiters whose time was over and that the script came upon and removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub swept: Vec<String>,
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
    let mut state = State {
        server: Server::new(),
        queue_end: 0,
    };
    let mut last = 0;
    for (at, step) in trace.iter().enumerate() {
        let reason = if step.at < last {
            Err("the clock went back".to_owned())
        } else {
            state.step(step)
        };
        reason.map_err(|reason| Rejected { at, reason })?;
        last = step.at;
    }
    Ok(())
}

#[derive(Clone)]
struct State {
    server: Server<String>,
    /// Until when the server keeps the queue.
    queue_end: u64,
}

impl State {
    /// In the millisecond in which a key ends, Redis may have removed it or not: requests find it still, until the server comes upon it by itself.
    fn step(&mut self, step: &Step) -> Result<(), String> {
        let now = step.at / 1000;
        let lock_ends = self.server.lock.as_ref().is_some_and(|lock| lock.end == now);
        let queue_ends = self.queue_end == now;
        let before = (lock_ends || queue_ends).then(|| self.clone());
        let kept = self.step_with(step, (true, true));
        let Some(before) = before.filter(|_| kept.is_err()) else {
            return kept;
        };
        for (keeps_lock, keeps_queue) in [(false, true), (true, false), (false, false)] {
            let mut other = before.clone();
            if other
                .step_with(step, (keeps_lock || !lock_ends, keeps_queue || !queue_ends))
                .is_ok()
            {
                *self = other;
                return Ok(());
            }
        }
        kept
    }

    fn step_with(&mut self, step: &Step, (keeps_lock, keeps_queue): (bool, bool)) -> Result<(), String> {
        // The server forgets the whole queue when nothing in it can be valid any more.
        if step.at / 1000 + u64::from(!keeps_queue) > self.queue_end {
            self.server.queue.clear();
        }
        let queued = waiting(&self.server);
        replay(&mut self.server, step, u64::from(keeps_lock))?;
        leave(&mut self.server, step)?;
        self.queue_end = end_of_queue(&self.server, step, &queued, self.queue_end);
        Ok(())
    }
}

fn waiting(server: &Server<String>) -> Vec<String> {
    server.queue.iter().map(|entry| entry.owner.clone()).collect()
}

/// Until when the server keeps the queue: each entry that it writes may lengthen that, and a new queue begins anew.
fn end_of_queue(server: &Server<String>, step: &Step, queued: &[String], before: u64) -> u64 {
    let Script::Acquire {
        owner,
        waits: true,
        answer: Answer::Busy,
        ..
    } = &step.script
    else {
        return before;
    };
    let is_new = server.queue.len() == 1 && !queued.contains(owner);
    let entry = server.queue.iter().find(|entry| entry.owner == *owner);
    let end = entry.map_or(0, |entry| entry.stop);
    if is_new { end } else { end.max(before) }
}

/// Takes the waiters out of the queue that left it in this run, other than by a grant.
fn leave(server: &mut Server<String>, step: &Step) -> Result<(), String> {
    for owner in &step.swept {
        let at = server.queue.iter().position(|entry| entry.owner == *owner);
        match at {
            Some(at) if server.queue[at].stop <= step.at / 1000 => server.queue.remove(at),
            _ => return Err(format!("{owner} was removed before its time was over")),
        };
    }
    // Those that were to be told only that they are the first.
    for owner in &step.unheard {
        if server.queue.first().is_some_and(|first| first.owner == *owner) {
            server.queue.remove(0);
        }
    }
    match step.unheard.iter().find(|owner| waiting(server).contains(owner)) {
        Some(owner) => Err(format!("{owner} was removed, and is not the first of the queue")),
        None => Ok(()),
    }
}

fn replay(server: &mut Server<String>, step: &Step, keeps: u64) -> Result<(), String> {
    let hears = |owner: &String| !step.unheard.contains(owner);
    let run = Run {
        now_us: step.at,
        hears: &hears,
        keeps,
        bug: None,
    };
    let queued = waiting(server);
    if let Some(owner) = step.unheard.iter().find(|owner| !queued.contains(owner)) {
        return Err(format!("{owner} was removed, and does not wait"));
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
    }
    script
}
