//! The processes, as the one that starts them sees them.

use std::path::Path;
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
    pub(crate) fn start(role: &str, dir: &Path) -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["worker", role])
            .arg(dir)
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
        self.input.write_all(format!("{word}\n").as_bytes()).await?;
        Ok(())
    }

    /// Waits for a line that starts with `word`, and returns what follows it.
    pub(crate) async fn hear(&mut self, word: &str) -> Outcome<String> {
        let role = &self.role;
        let find = async {
            while let Some(line) = self.output.next_line().await? {
                if let Some(rest) = line.strip_prefix(word) {
                    return Ok(rest.trim().to_owned());
                }
            }
            Err(format!("the process \"{role}\" ended before it said \"{word}\"").into())
        };
        tokio::time::timeout(PATIENCE, find).await.unwrap_or_else(|_| {
            Err(format!("the process \"{role}\" did not say \"{word}\" within {PATIENCE:?}").into())
        })
    }

    pub(crate) async fn hear_number(&mut self, word: &str) -> Outcome<u64> {
        Ok(self.hear(word).await?.parse()?)
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
