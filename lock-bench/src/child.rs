//! Processes that take part: they are this program again, told what to do by its arguments and by lines.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child as Process, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::{sleep, timeout};

use crate::backend::Place;
use crate::clock::{now, processor};
use crate::contestant::{Contestant, Failure, nothing, threads};

/// How long a process may take to say what is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a process is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) place: Place,
    pub(crate) who: String,
    pub(crate) ttl: Duration,
    pub(crate) task: Task,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Task {
    /// Takes the lock again and again from "go" to "stop", and tells its [`Span`]s.
    Contend {
        name: String,
        hold: Duration,
        pause: Duration,
    },
    /// Takes the lock, tells when, and keeps it until it is killed.
    Hold { name: String },
    /// Takes that many locks, tells what they cost, and keeps them from "go" to "stop", and tells [`Kept`].
    Keep { locks: usize },
    /// Tells when each push came, to the background thread or to that of the caller.
    Hear { times: usize, background: bool },
}

/// A time in which a lock was held, by the clock of the machine.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Span {
    pub(crate) granted: u64,
    /// When the release began.
    pub(crate) released: u64,
}

/// What many held locks cost their process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// Nanoseconds of a processor.
    pub(crate) processor: u64,
    /// Nanoseconds in which they were used.
    pub(crate) time: u64,
    pub(crate) renewals: Option<u64>,
}

/// Such a process, as the measurement holds it. It ends when this is dropped.
pub(crate) struct Child {
    process: Process,
    told: ChildStdin,
    tells: Lines<BufReader<ChildStdout>>,
}

impl Child {
    pub(crate) fn start(job: &Job) -> Result<Self, Failure> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg("child")
            .arg(serde_json::to_string(job)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let told = process.stdin.take().ok_or("a process has no input")?;
        let tells = process.stdout.take().ok_or("a process has no output")?;
        Ok(Self {
            process,
            told,
            tells: BufReader::new(tells).lines(),
        })
    }

    pub(crate) async fn tell(&mut self, what: &str) -> Result<(), Failure> {
        self.told.write_all(format!("{what}\n").as_bytes()).await?;
        Ok(())
    }

    /// The next line.
    pub(crate) async fn hear(&mut self) -> Result<String, Failure> {
        let line = timeout(PATIENCE, self.tells.next_line()).await;
        let line = line.map_err(|_| format!("a process said nothing within {PATIENCE:?}"))??;
        let line = line.ok_or("a process ended early")?;
        match line.strip_prefix(FAILED) {
            Some(why) => Err(why.into()),
            None => Ok(line),
        }
    }

    /// The next line, which stands for a value.
    pub(crate) async fn hear_of<T: for<'a> Deserialize<'a>>(&mut self) -> Result<T, Failure> {
        Ok(serde_json::from_str(&self.hear().await?)?)
    }

    pub(crate) async fn ready(&mut self) -> Result<(), Failure> {
        match self.hear().await?.as_str() {
            "ready" => Ok(()),
            other => Err(format!("a process said {other:?} instead of being ready").into()),
        }
    }

    /// Kills it, and waits until it is gone.
    pub(crate) async fn kill(mut self) -> Result<(), Failure> {
        Ok(self.process.kill().await?)
    }
}

/// What a process says when it failed, before why.
const FAILED: &str = "failed: ";

/// Such a process, from within. Its failures are for the measurement to tell.
pub(crate) async fn run(job: &str) {
    if let Err(error) = work(job).await {
        say(&format!("{FAILED}{error}"));
    }
}

async fn work(job: &str) -> Result<(), Failure> {
    // Otherwise it would stay when the measurement is killed.
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let job: Job = serde_json::from_str(job)?;
    match &job.task {
        Task::Contend { name, hold, pause } => contend(&job, name, *hold, *pause).await,
        Task::Hold { name } => {
            let client = job.place.connect(&job.who, job.ttl).await?;
            let held = async {
                say(&now().to_string());
                std::future::pending::<()>().await;
            };
            client.section(name, Box::pin(held)).await
        }
        Task::Keep { locks } => keep(&job, *locks).await,
        Task::Hear { times, background } => {
            let heard = hear(&job.place, *times, *background).await?;
            say(&serde_json::to_string(&heard)?);
            Ok(())
        }
    }
}

fn say(what: &str) {
    println!("{what}");
}

/// What the measurement says.
struct Orders(Lines<BufReader<tokio::io::Stdin>>);

impl Orders {
    fn new() -> Self {
        Self(BufReader::new(tokio::io::stdin()).lines())
    }

    async fn wait_for(&mut self, order: &str) -> Result<(), Failure> {
        match self.0.next_line().await? {
            Some(line) if line == order => Ok(()),
            other => Err(format!("{order} was expected, not {other:?}").into()),
        }
    }
}

async fn contend(job: &Job, name: &str, hold: Duration, pause: Duration) -> Result<(), Failure> {
    let client = job.place.connect(&job.who, job.ttl).await?;
    // What is made at the first use belongs to no acquisition.
    client
        .section(&format!("warm-{}", std::process::id()), nothing())
        .await?;
    let mut orders = Orders::new();
    say("ready");
    orders.wait_for("go").await?;
    let mut spans = Vec::new();
    tokio::select! {
        ended = again_and_again(&*client, name, hold, pause, &mut spans) => ended?,
        stopped = orders.wait_for("stop") => stopped?,
    }
    say(&serde_json::to_string(&spans)?);
    Ok(())
}

/// Never ends, unless it fails.
async fn again_and_again(
    client: &dyn Contestant,
    name: &str,
    hold: Duration,
    pause: Duration,
    spans: &mut Vec<Span>,
) -> Result<(), Failure> {
    loop {
        spans.push(section(client, name, hold).await?);
        sleep(pause).await;
    }
}

/// Takes the lock once, and says when it was held.
async fn section(client: &dyn Contestant, name: &str, hold: Duration) -> Result<Span, Failure> {
    let times = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let seen = Arc::clone(&times);
    let body = async move {
        seen[0].store(now(), Ordering::Relaxed);
        sleep(hold).await;
        seen[1].store(now(), Ordering::Relaxed);
    };
    client.section(name, Box::pin(body)).await?;
    let [granted, released] = [0, 1].map(|i: usize| times[i].load(Ordering::Relaxed));
    Ok(Span { granted, released })
}

/// When each push was known to the caller.
async fn hear(place: &Place, times: usize, background: bool) -> Result<Vec<u64>, Failure> {
    let (tell, mut told) = unbounded_channel();
    let place = place.clone();
    let hearing = threads(background)?.spawn(async move {
        // Who is told has heard enough if it hears no more.
        let tell = || {
            let _ = tell.send(());
        };
        place.hear(times, || say("ready"), tell).await
    });
    let mut heard = Vec::with_capacity(times);
    while told.recv().await.is_some() {
        heard.push(now());
    }
    hearing.await??;
    Ok(heard)
}

async fn keep(job: &Job, locks: usize) -> Result<(), Failure> {
    /// How many are asked for at once.
    const AT_ONCE: usize = 64;
    let client = job.place.connect(&job.who, job.ttl).await?;
    client.section("warm", nothing()).await?;
    let before = resident()?;
    let mut kept = Vec::with_capacity(locks);
    let mut asking = futures_util::stream::iter(0..locks)
        .map(|i| {
            let client = &client;
            async move { client.keep(&format!("kept-{i}")).await }
        })
        .buffer_unordered(AT_ONCE);
    while let Some(lock) = asking.next().await {
        kept.push(lock.ok_or("this contestant keeps no lock alive")??);
    }
    drop(asking);
    let bytes = resident()?.saturating_sub(before) / locks.max(1) as u64;
    let mut orders = Orders::new();
    say("ready");
    say(&bytes.to_string());
    orders.wait_for("go").await?;
    let (processor_before, began, renewals_before) = (processor(), now(), client.renewals());
    orders.wait_for("stop").await?;
    let renewals = client.renewals().zip(renewals_before);
    let cost = Kept {
        processor: processor() - processor_before,
        time: now() - began,
        renewals: renewals.map(|(after, before)| after - before),
    };
    say(&serde_json::to_string(&cost)?);
    drop(kept);
    Ok(())
}

/// The memory that this process uses, in bytes.
fn resident() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kilobytes: u64 = kilobytes
        .ok_or("the system does not tell what memory is used")?
        .trim()
        .parse()?;
    Ok(kilobytes * 1024)
}
