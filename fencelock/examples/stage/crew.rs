//! The processes, as the one that starts them sees them.

use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::Outcome;

/// How long any single step may take, on the busiest machine, before something must be wrong.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// A process of ours. Dropping it kills it, also when it is stopped, and waits until it is gone.
pub(crate) struct Worker {
    role: String,
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    /// This program again, with what `dress` adds to its command line.
    pub(crate) fn start(role: &str, dress: impl FnOnce(&mut Command)) -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        dress(&mut command);
        let mut child = command
            // Ctrl-C is for the one that started them; it ends them in order.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a process was started without pipes".into());
        };
        Ok(Self {
            role: role.to_owned(),
            child,
            input,
            output: BufReader::new(output).lines(),
        })
    }

    pub(crate) async fn tell(&mut self, word: &str) -> Outcome<()> {
        let told = self.input.write_all(format!("{word}\n").as_bytes()).await;
        // Why nobody reads any more may be among the last words.
        match told {
            Err(error) => {
                self.hear(word).await?;
                Err(error.into())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Waits for a line that starts with `word`, and returns what follows it.
    pub(crate) async fn hear(&mut self, word: &str) -> Outcome<String> {
        match self.hear_within(word, PATIENCE).await? {
            Some(rest) => Ok(rest),
            None => Err(format!(
                "the process \"{}\" did not say \"{word}\" within {PATIENCE:?}",
                self.role
            )
            .into()),
        }
    }

    /// The same, or nothing if the line has not come by then. It can still be waited for.
    pub(crate) async fn hear_within(&mut self, word: &str, limit: Duration) -> Outcome<Option<String>> {
        let role = &self.role;
        let find = async {
            while let Some(line) = self.output.next_line().await? {
                if let Some(rest) = line.strip_prefix(word) {
                    return Ok(rest.trim().to_owned());
                }
                if let Some(why) = line.strip_prefix("failed") {
                    return Err(format!("The process \"{role}\" failed: {}", why.trim()).into());
                }
            }
            Err(format!("the process \"{role}\" ended before it said \"{word}\"").into())
        };
        tokio::time::timeout(limit, find).await.ok().transpose()
    }

    pub(crate) async fn kill(&mut self) -> Outcome<()> {
        Ok(self.child.kill().await?)
    }

    pub(crate) fn stop(&self) -> Outcome<()> {
        self.signal(Signal::STOP)
    }

    pub(crate) fn go_on(&self) -> Outcome<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Outcome<()> {
        let id = self.child.id().ok_or("the process has ended")?;
        let pid = Pid::from_raw(i32::try_from(id)?).ok_or("the process has no id")?;
        Ok(kill_process(pid, signal)?)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.child.start_kill();
        let end = Instant::now() + Duration::from_secs(10);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
    }
}
