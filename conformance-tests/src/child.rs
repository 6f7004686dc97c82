//! Other processes: the same test binary again, told what to do line by line.
//!
//! A child reads one command per line and answers each with one line. It ends when its input does, so that no child
//! outlives the suite.

mod obey;

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use lock_core::FencingToken;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};

pub(crate) use obey::{COUNTER, obey};

use crate::harness::Namespace;
use crate::history::History;
use crate::outcome::{Outcome, Stop, ensure, fail};
use crate::writers::{self, Written};

/// Tells a process that it is a child, and of which namespace.
pub(crate) const NAMESPACE: &str = "FENCELOCK_CONFORMANCE_CHILD";

/// And of which row.
pub(crate) const ROW: &str = "FENCELOCK_CONFORMANCE_ROW";

/// How long a child may take to answer what needs no waiting.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process with one client. Killed when dropped.
pub(crate) struct Child {
    process: tokio::process::Child,
    input: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    history: Arc<History>,
    pid: u32,
}

impl Child {
    pub(crate) async fn start(
        row: &str,
        namespace: &Namespace,
        environment: Vec<(String, String)>,
        history: &Arc<History>,
    ) -> Outcome<Self> {
        Self::start_with(row, namespace, environment, history, |_| {}).await
    }

    /// The same, and `adapt` changes how the process is started.
    pub(crate) async fn start_with(
        row: &str,
        namespace: &Namespace,
        environment: Vec<(String, String)>,
        history: &Arc<History>,
        adapt: impl FnOnce(&mut std::process::Command),
    ) -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .env(ROW, row)
            .env(NAMESPACE, namespace.folder())
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        adapt(command.as_std_mut());
        let mut process = command.spawn()?;
        let no_pipe = || Stop::Failed("the child has no pipe".to_owned());
        let input = process.stdin.take().ok_or_else(no_pipe)?;
        let output = process.stdout.take().ok_or_else(no_pipe)?;
        let mut child = Self {
            pid: process.id().unwrap_or_default(),
            process,
            input,
            answers: BufReader::new(output).lines(),
            history: Arc::clone(history),
        };
        let ready = child.answer(PATIENCE).await?;
        ensure!(ready == "ready", "a child process", "it connects; it said {ready:?}");
        Ok(child)
    }

    /// Asks for a lock, and returns when the child has begun to; [`locked`](Self::locked) waits for the answer.
    pub(crate) async fn ask(&mut self, name: &str, ttl: Duration, wait: Option<Duration>) -> Outcome {
        let wait = wait.map_or("forever".to_owned(), |wait| wait.as_millis().to_string());
        self.send(&format!("lock {} {wait} {name}", ttl.as_millis())).await?;
        let answer = self.answer(PATIENCE).await?;
        ensure!(
            answer == "asking",
            "a child process",
            "it asks for {name:?}; it said {answer:?}"
        );
        Ok(())
    }

    /// The answer to [`ask`](Self::ask): the token, or `None` if it was busy to the end.
    pub(crate) async fn locked(&mut self, patience: Duration) -> Outcome<Option<FencingToken>> {
        match self.told(patience).await? {
            Ok(locked) => Ok(locked),
            Err(answer) => fail!(
                "a child process",
                "it gets the lock or is told that it is busy; it said {answer:?}"
            ),
        }
    }

    /// The same, or what it said instead, where that may be.
    pub(crate) async fn told(&mut self, patience: Duration) -> Outcome<Result<Option<FencingToken>, String>> {
        let answer = self.answer(patience).await?;
        if answer == "busy" {
            return Ok(Ok(None));
        }
        Ok(match answer.strip_prefix("granted ").map(str::parse) {
            Some(Ok(token)) => Ok(Some(token)),
            _ => Err(answer),
        })
    }

    /// Takes a lock that must be free.
    pub(crate) async fn lock(&mut self, name: &str, ttl: Duration) -> Outcome<FencingToken> {
        self.ask(name, ttl, Some(PATIENCE)).await?;
        match self.locked(2 * PATIENCE).await? {
            Some(token) => Ok(token),
            None => fail!("the backend", "{name:?} is granted to a child process"),
        }
    }

    /// Takes a lock that must be free, and reserves its name for `length`.
    pub(crate) async fn reserve(&mut self, name: &str, ttl: Duration, length: Duration) -> Outcome<FencingToken> {
        self.send(&format!("reserve {} {} {name}", ttl.as_millis(), length.as_millis()))
            .await?;
        match self.told(PATIENCE).await? {
            Ok(Some(token)) => Ok(token),
            other => fail!(
                "the backend",
                "{name:?} is reserved for a child process; it said {other:?}"
            ),
        }
    }

    /// Lets go. Says whether the lock was held to that moment.
    pub(crate) async fn release(&mut self, name: &str) -> Outcome<bool> {
        self.send(&format!("release {name}")).await?;
        match self.answer(PATIENCE).await?.as_str() {
            "released" => Ok(true),
            "lost" => Ok(false),
            other => fail!("a child process", "it releases {name:?}; it said {other:?}"),
        }
    }

    /// Whether the child believes to hold the lock.
    pub(crate) async fn is_held(&mut self, name: &str) -> Outcome<bool> {
        self.send(&format!("held {name}")).await?;
        Ok(self.answer(PATIENCE).await? == "true")
    }

    /// Adds one to the number in a file, `times` times, each time under the lock. [`counted`](Self::counted) waits for
    /// the end.
    pub(crate) async fn count(&mut self, name: &str, ttl: Duration, times: usize) -> Outcome {
        self.send(&format!("count {} {times} {name}", ttl.as_millis())).await
    }

    /// The tokens under which the child counted, in their order.
    pub(crate) async fn counted(&mut self, patience: Duration) -> Outcome<Vec<FencingToken>> {
        let answer = self.answer(patience).await?;
        let tokens = answer
            .strip_prefix("counted")
            .map(|tokens| tokens.split_whitespace().map(str::parse).collect());
        match tokens {
            Some(Ok(tokens)) => Ok(tokens),
            _ => fail!("a child process", "it counts under the lock; it said {answer:?}"),
        }
    }

    /// Writes to the resource, under the lock and beyond; [`written`](Self::written) waits for the end.
    pub(crate) async fn write(&mut self, name: &str, resource: &str, writes: usize) -> Outcome {
        self.send(&format!("write {writes} {name} {resource}")).await
    }

    /// What the resource answered.
    pub(crate) async fn written(&mut self, patience: Duration) -> Outcome<Vec<Written>> {
        let answer = self.answer(patience).await?;
        match answer.strip_prefix("written ") {
            Some(file) => Ok(writers::load(Path::new(file))?),
            None => fail!("a child process", "it writes; it said {answer:?}"),
        }
    }

    /// Has the process drop its guards and return from `main`, or call `exit` once the client has drained.
    pub(crate) async fn end(mut self, exits: bool) -> Outcome {
        self.send(if exits { "drain and exit" } else { "return" }).await?;
        let ended = tokio::time::timeout(PATIENCE, self.process.wait()).await;
        ensure!(
            matches!(&ended, Ok(Ok(status)) if status.success()),
            "a child process",
            "it ends when it is told to; it said {ended:?}"
        );
        Ok(())
    }

    /// Ends the process at once, as `kill -9` does.
    pub(crate) async fn kill(&mut self) -> Outcome {
        self.history.note(format!("process {}: killed", self.pid));
        self.process.kill().await?;
        Ok(())
    }

    /// Stops the process where it is, as SIGSTOP does.
    #[cfg(unix)]
    pub(crate) fn stop(&self) -> Outcome {
        self.signal(rustix::process::Signal::STOP)
    }

    /// Lets a stopped process go on.
    #[cfg(unix)]
    pub(crate) fn wake(&self) -> Outcome {
        self.signal(rustix::process::Signal::CONT)
    }

    #[cfg(unix)]
    fn signal(&self, signal: rustix::process::Signal) -> Outcome {
        self.history.note(format!("process {}: {signal:?}", self.pid));
        let pid = i32::try_from(self.pid).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.ok_or_else(|| Stop::Failed("the child has ended".to_owned()))?;
        rustix::process::kill_process(pid, signal).map_err(|e| Stop::from(std::io::Error::from(e)))
    }

    #[cfg(not(unix))]
    pub(crate) fn stop(&self) -> Outcome {
        Err(Stop::not_applicable("processes cannot be stopped on this system"))
    }

    #[cfg(not(unix))]
    pub(crate) fn wake(&self) -> Outcome {
        Err(Stop::not_applicable("processes cannot be stopped on this system"))
    }

    async fn send(&mut self, command: &str) -> Outcome {
        self.history.note(format!("process {}: < {command}", self.pid));
        self.input.write_all(format!("{command}\n").as_bytes()).await?;
        Ok(())
    }

    async fn answer(&mut self, patience: Duration) -> Outcome<String> {
        match tokio::time::timeout(patience, self.answers.next_line()).await {
            Ok(Ok(Some(answer))) => {
                self.history.note(format!("process {}: > {answer}", self.pid));
                Ok(answer)
            }
            Ok(Ok(None)) => fail!(
                "a child process",
                "it answers; it ended ({:?})",
                self.process.try_wait()
            ),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => fail!("a child process", "it answers within {patience:?}"),
        }
    }
}
