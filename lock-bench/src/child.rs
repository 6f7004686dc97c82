//! Other processes: this program again, with a job as its argument and the result on its standard output.

use std::process::Stdio;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::backend::Place;
use crate::contestant::{Contestant, Result};

/// Takes a lock again and again between two times of [`now`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) place: Place,
    pub(crate) who: String,
    pub(crate) ttl: Duration,
    pub(crate) name: String,
    pub(crate) from: u64,
    pub(crate) until: u64,
}

/// When a lock was granted, and when its release began, in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Span {
    pub(crate) granted: u64,
    pub(crate) released: u64,
}

/// How long a lock is held, and how long after a release its former holder asks again.
pub(crate) const HOLD: Duration = Duration::from_millis(5);
pub(crate) const PAUSE: Duration = Duration::from_millis(2);

/// Nanoseconds by the clock that all processes of this machine share.
pub(crate) fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// Nanoseconds of a processor that this process has used.
pub(crate) fn processor() -> u64 {
    nanoseconds(ClockId::ProcessCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Does the job in another process, which ends when this future is dropped. A process that hangs ends, as a failure, a minute after the
/// job should have.
pub(crate) async fn run(job: &Job) -> Result<Vec<Span>> {
    let child = Command::new(std::env::current_exe()?)
        .arg("child")
        .arg(serde_json::to_string(job)?)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output();
    let limit = Duration::from_nanos(job.until.saturating_sub(now())) + Duration::from_secs(60);
    let output = timeout(limit, child).await??;
    if !output.status.success() {
        return Err("a process failed".into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The job, in the other process; the result as JSON.
pub(crate) async fn work(job: &str) -> Result<String> {
    // If the measuring process is killed, this one ends too.
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let job: Job = serde_json::from_str(job)?;
    let client = job.place.connect(&job.who, job.ttl).await?;
    // What is made at the first use of a client belongs to no acquisition.
    client(format!("warm-up-{}", std::process::id()), Box::pin(async {})).await?;
    let wait = job
        .from
        .checked_sub(now())
        .ok_or("not ready in time: the machine is too busy")?;
    sleep(Duration::from_nanos(wait)).await;
    let mut spans = Vec::new();
    let time = Duration::from_nanos(job.until - job.from);
    if let Ok(ended) = timeout(time, contend(client, &job.name, &mut spans)).await {
        ended?;
    }
    Ok(serde_json::to_string(&spans)?)
}

/// Never ends, unless it fails.
async fn contend(client: Contestant, name: &str, spans: &mut Vec<Span>) -> Result {
    loop {
        let (done, span) = oneshot::channel();
        let body = async move {
            let granted = now();
            sleep(HOLD).await;
            let _ = done.send(Span {
                granted,
                released: now(),
            });
        };
        client(name.to_owned(), Box::pin(body)).await?;
        spans.push(span.await?);
        sleep(PAUSE).await;
    }
}
