//! Other processes: the same test binary again, told what to do line by line.
//!
//! A child reads one order per line and answers each with one line, or two if it waits. It ends when its input does, so that no child
//! outlives the suite.

mod obey;
mod order;

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use lock_core::FencingToken;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};

pub(crate) use obey::{COUNTER, obey};
use order::{Answer, Order};

use crate::harness::Namespace;
use crate::history::History;
use crate::outcome::{Outcome, Stop, ensure, fail};
use crate::writers::Written;

/// Tells a process that it is a child, and of which namespace.
pub(crate) const NAMESPACE: &str = "FENCELOCK_CONFORMANCE_CHILD";

/// And of which row.
pub(crate) const ROW: &str = "FENCELOCK_CONFORMANCE_ROW";

/// How long a child may take to answer what needs no waiting.
const LONGEST_ANSWER: Duration = Duration::from_secs(60);

/// How much of a line the history shows.
const SHOWN: usize = 120;

/// A process with one client. Killed when dropped.
pub(crate) struct Child {
    process: tokio::process::Child,
    input: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    history: Arc<History>,
    pid: u32,
}

impl Child {
    /// Starts one, and waits until it has connected. `adapt` changes how the process is started.
    pub(crate) async fn start(
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
        match child.answer(LONGEST_ANSWER).await? {
            Answer::Ready => Ok(child),
            other => other.unexpected("it connects"),
        }
    }

    /// Asks for a lock, and returns when the child has begun to; [`locked`](Self::locked) waits for the answer. Without `wait` it
    /// waits for ever.
    pub(crate) async fn ask(&mut self, name: &str, ttl: Duration, wait: Option<Duration>) -> Outcome {
        let name = name.to_owned();
        self.send(&Order::Lock { name, ttl, wait }).await?;
        match self.answer(LONGEST_ANSWER).await? {
            Answer::Asking => Ok(()),
            other => other.unexpected("it asks for a lock"),
        }
    }

    /// The answer to [`ask`](Self::ask): the token, or `None` if it was busy to the end.
    pub(crate) async fn locked(&mut self, limit: Duration) -> Outcome<Option<FencingToken>> {
        match self.told(limit).await? {
            Ok(locked) => Ok(locked),
            Err(why) => Answer::Failed(why).unexpected("it gets the lock or is told that it is busy"),
        }
    }

    /// The same, or how it failed, where that may be.
    pub(crate) async fn told(&mut self, limit: Duration) -> Outcome<Result<Option<FencingToken>, String>> {
        match self.answer(limit).await? {
            Answer::Busy => Ok(Ok(None)),
            Answer::Granted(token) => Ok(Ok(Some(token))),
            Answer::Failed(why) => Ok(Err(why)),
            other => other.unexpected("it tells what became of its request"),
        }
    }

    /// Takes a lock that must be free.
    pub(crate) async fn lock(&mut self, name: &str, ttl: Duration) -> Outcome<FencingToken> {
        self.ask(name, ttl, Some(LONGEST_ANSWER)).await?;
        match self.locked(2 * LONGEST_ANSWER).await? {
            Some(token) => Ok(token),
            None => fail!("the backend", "{name:?} is granted to a child process"),
        }
    }

    /// Takes a lock that must be free, and reserves its name for `length`.
    pub(crate) async fn reserve(&mut self, name: &str, ttl: Duration, length: Duration) -> Outcome<FencingToken> {
        let name = name.to_owned();
        self.send(&Order::Reserve { name, ttl, length }).await?;
        match self.answer(LONGEST_ANSWER).await? {
            Answer::Granted(token) => Ok(token),
            other => other.unexpected("it reserves a name"),
        }
    }

    /// Lets go. Says whether the lock was held to that moment.
    pub(crate) async fn release(&mut self, name: &str) -> Outcome<bool> {
        self.send(&Order::Release(name.to_owned())).await?;
        match self.answer(LONGEST_ANSWER).await? {
            Answer::Was(held) => Ok(held),
            other => other.unexpected("it releases what it has"),
        }
    }

    /// Whether the child believes to hold the lock.
    pub(crate) async fn is_held(&mut self, name: &str) -> Outcome<bool> {
        self.send(&Order::Look(name.to_owned())).await?;
        match self.answer(LONGEST_ANSWER).await? {
            Answer::Was(held) => Ok(held),
            other => other.unexpected("it looks"),
        }
    }

    /// Adds one to the number in a file, `times` times, each time under the lock. [`counted`](Self::counted) waits for
    /// the end.
    pub(crate) async fn count(&mut self, name: &str, ttl: Duration, times: usize) -> Outcome {
        let name = name.to_owned();
        self.send(&Order::Count { name, ttl, times }).await
    }

    /// The tokens under which the child counted, in their order.
    pub(crate) async fn counted(&mut self, limit: Duration) -> Outcome<Vec<FencingToken>> {
        match self.answer(limit).await? {
            Answer::Counted(tokens) => Ok(tokens),
            other => other.unexpected("it counts under the lock"),
        }
    }

    /// Writes to the resource, under the lock and beyond; [`written`](Self::written) waits for the end.
    pub(crate) async fn write(&mut self, name: &str, resource: &str, writes: usize) -> Outcome {
        let (name, resource) = (name.to_owned(), resource.to_owned());
        self.send(&Order::Write { name, resource, writes }).await
    }

    /// What the resource answered.
    pub(crate) async fn written(&mut self, limit: Duration) -> Outcome<Vec<Written>> {
        match self.answer(limit).await? {
            Answer::Written(written) => Ok(written),
            other => other.unexpected("it writes"),
        }
    }

    /// Has the process drop its guards and return from `main`, or call `exit` once the client has drained.
    pub(crate) async fn end(mut self, exits: bool) -> Outcome {
        self.send(&Order::End { exits }).await?;
        let ended = tokio::time::timeout(LONGEST_ANSWER, self.process.wait()).await;
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

    async fn send(&mut self, order: &Order) -> Outcome {
        let line = serde_json::to_string(order).map_err(std::io::Error::other)?;
        self.history.note(format!("process {}: < {line}", self.pid));
        self.input.write_all(format!("{line}\n").as_bytes()).await?;
        Ok(())
    }

    async fn answer(&mut self, limit: Duration) -> Outcome<Answer> {
        match tokio::time::timeout(limit, self.answers.next_line()).await {
            Ok(Ok(Some(line))) => {
                let shown: String = line.chars().take(SHOWN).collect();
                self.history.note(format!("process {}: > {shown}", self.pid));
                Ok(serde_json::from_str(&line).map_err(std::io::Error::other)?)
            }
            Ok(Ok(None)) => fail!(
                "a child process",
                "it answers; it ended ({:?})",
                self.process.try_wait()
            ),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => fail!("a child process", "it answers within {limit:?}"),
        }
    }
}

impl Answer {
    /// Ends the case, as something else was expected.
    fn unexpected<T>(self, what: &str) -> Outcome<T> {
        fail!("a child process", "{what}; it said {self:?}")
    }
}
