//! The child's side.

use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use lock_core::{LockError, LockGuard, Locks, ReleaseOutcome};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::harness::{Harness, Namespace};
use crate::writers;

/// Where children count, within the folder of their namespace.
pub(crate) const COUNTER: &str = "counter";

/// Obeys until the input ends.
pub(crate) fn obey(harness: &Arc<dyn Harness>, folder: PathBuf) -> ExitCode {
    let namespace = Namespace::of_parent(folder);
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            answer(&format!("no runtime: {error}"));
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(async {
        let client = match harness.client(&namespace).await {
            Ok(client) => client,
            Err(error) => {
                answer(&format!("not connected: {error}"));
                return ExitCode::FAILURE;
            }
        };
        answer("ready");
        let mut servant = Servant {
            locks: Locks::new(client),
            harness: Arc::clone(harness),
            counter: namespace.folder().join(COUNTER),
            guards: HashMap::new(),
            namespace,
        };
        let mut commands = BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(command)) = commands.next_line().await {
            match command.as_str() {
                "return" => return ExitCode::SUCCESS,
                "drain and exit" => {
                    servant.guards.clear();
                    servant.locks.drain().await;
                    std::process::exit(0)
                }
                command => answer(&servant.obey(command).await),
            }
        }
        // The parent is gone or has let go of this child: nobody waits for an orderly end.
        std::process::exit(0)
    })
}

struct Servant {
    harness: Arc<dyn Harness>,
    namespace: Namespace,
    locks: Locks,
    counter: PathBuf,
    guards: HashMap<String, LockGuard>,
}

impl Servant {
    async fn obey(&mut self, command: &str) -> String {
        let done = match command.split_once(' ') {
            Some(("lock", rest)) => self.lock(rest).await,
            Some(("reserve", rest)) => self.reserve(rest).await,
            Some(("release", name)) => self.release(name).await,
            Some(("held", name)) => Ok(self.guards.get(name).is_some_and(LockGuard::is_held).to_string()),
            Some(("count", rest)) => self.count(rest).await,
            Some(("write", rest)) => self.write(rest).await,
            _ => Err("unknown command".to_owned()),
        };
        done.unwrap_or_else(|error| format!("error: {error}"))
    }

    async fn lock(&mut self, arguments: &str) -> Result<String, String> {
        let mut parts = arguments.splitn(3, ' ');
        let ttl = millis(parts.next())?;
        let wait = parts.next().filter(|wait| *wait != "forever");
        let request = |name: &str| self.locks.lock(name).ttl(ttl);
        let name = arguments.splitn(3, ' ').nth(2).ok_or("no name")?;
        let request = match wait {
            Some(wait) => request(name).wait_for(millis(Some(wait))?),
            None => request(name).wait_forever(),
        };
        let asked = tokio::spawn(request.into_future());
        answer("asking");
        match asked.await.map_err(|error| error.to_string())? {
            Ok(guard) => {
                let answer = format!("granted {}", guard.token());
                self.guards.insert(name.to_owned(), guard);
                Ok(answer)
            }
            Err(LockError::TimedOut { .. }) => Ok("busy".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    async fn reserve(&mut self, arguments: &str) -> Result<String, String> {
        let mut parts = arguments.splitn(3, ' ');
        let (ttl, length) = (millis(parts.next())?, millis(parts.next())?);
        let name = parts.next().ok_or("no name")?;
        let guard = self.locks.lock(name).ttl(ttl).at_least(length).no_wait().await;
        let guard = guard.map_err(|error| error.to_string())?;
        let answer = format!("granted {}", guard.token());
        self.guards.insert(name.to_owned(), guard);
        Ok(answer)
    }

    async fn release(&mut self, name: &str) -> Result<String, String> {
        let guard = self.guards.remove(name).ok_or("not held")?;
        match guard.release().await {
            Ok(ReleaseOutcome::Released) => Ok("released".to_owned()),
            Ok(_) => Ok("lost".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    async fn count(&self, arguments: &str) -> Result<String, String> {
        let mut parts = arguments.splitn(3, ' ');
        let ttl = millis(parts.next())?;
        let times: usize = parts.next().and_then(|n| n.parse().ok()).ok_or("no number")?;
        let name = parts.next().ok_or("no name")?;
        let mut answer = "counted".to_owned();
        for _ in 0..times {
            let guard = self.locks.lock(name).ttl(ttl).await.map_err(|e| e.to_string())?;
            add_one(&self.counter).map_err(|e| e.to_string())?;
            answer.push_str(&format!(" {}", guard.token()));
            guard.release().await.map_err(|e| e.to_string())?;
        }
        Ok(answer)
    }

    async fn write(&self, arguments: &str) -> Result<String, String> {
        let mut parts = arguments.splitn(3, ' ');
        let writes: usize = parts.next().and_then(|n| n.parse().ok()).ok_or("no number")?;
        let (name, resource) = (parts.next().ok_or("no name")?, parts.next().ok_or("no resource")?);
        let resource = self.harness.resource(&self.namespace, resource).await;
        let resource = resource.map_err(|e| e.to_string())?.ok_or("no resource is shipped")?;
        let written = writers::write_on(&self.locks, &resource, name, writes).await;
        let file = self.namespace.folder().join(format!("written-{}", std::process::id()));
        writers::save(&written.map_err(|e| e.to_string())?, &file).map_err(|e| e.to_string())?;
        Ok(format!("written {}", file.display()))
    }
}

/// Reads, waits a little, writes: two that do it at once lose an update.
fn add_one(counter: &Path) -> std::io::Result<()> {
    let number: u64 = std::fs::read_to_string(counter)?
        .trim()
        .parse()
        .map_err(std::io::Error::other)?;
    std::thread::sleep(Duration::from_micros(200));
    std::fs::write(counter, (number + 1).to_string())
}

fn millis(text: Option<&str>) -> Result<Duration, String> {
    let millis = text.and_then(|text| text.parse().ok()).ok_or("no duration")?;
    Ok(Duration::from_millis(millis))
}

fn answer(line: &str) {
    let mut out = std::io::stdout().lock();
    // If the parent is gone there is nobody to tell.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
