//! The child's side.

use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use lock_core::{LockError, LockGuard, Locks, ReleaseOutcome};
use tokio::io::{AsyncBufReadExt, BufReader};

use super::order::{Answer, Order};
use crate::harness::{Harness, Namespace};
use crate::writers;

/// Where children count, within the folder of their namespace.
pub(crate) const COUNTER: &str = "counter";

/// Obeys until the input ends.
pub(crate) fn obey(harness: &Arc<dyn Harness>, folder: PathBuf) -> ExitCode {
    let namespace = Namespace::of_parent(folder);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(&Answer::Failed(format!("no runtime: {error}")));
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(async {
        let client = match harness.client(&namespace).await {
            Ok(client) => client,
            Err(error) => {
                tell(&Answer::Failed(format!("not connected: {error}")));
                return ExitCode::FAILURE;
            }
        };
        tell(&Answer::Ready);
        let mut servant = Servant {
            locks: Locks::new(client),
            harness: Arc::clone(harness),
            namespace,
            guards: HashMap::new(),
        };
        let mut orders = BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(order)) = orders.next_line().await {
            let done = match serde_json::from_str(&order) {
                Ok(Order::End { exits: false }) => return ExitCode::SUCCESS,
                Ok(Order::End { exits: true }) => {
                    servant.guards.clear();
                    servant.locks.drain().await;
                    std::process::exit(0)
                }
                Ok(order) => servant.obey(order).await.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            tell(&done.unwrap_or_else(Answer::Failed));
        }
        // The parent is gone or has let go of this child: nobody waits for an orderly end.
        std::process::exit(0)
    })
}

struct Servant {
    harness: Arc<dyn Harness>,
    namespace: Namespace,
    locks: Locks,
    guards: HashMap<String, LockGuard>,
}

impl Servant {
    async fn obey(&mut self, order: Order) -> Result<Answer, LockError> {
        match order {
            Order::Lock { name, ttl, wait } => {
                let request = self.locks.lock(&*name).ttl(ttl);
                let request = match wait {
                    Some(wait) => request.wait_for(wait),
                    None => request.wait_forever(),
                };
                let asked = tokio::spawn(request.into_future());
                tell(&Answer::Asking);
                match asked.await.map_err(|error| LockError::failed("asking", error))? {
                    Ok(guard) => Ok(self.keep(name, guard)),
                    Err(LockError::TimedOut { .. }) => Ok(Answer::Busy),
                    Err(error) => Err(error),
                }
            }
            Order::Reserve { name, ttl, length } => {
                let request = self.locks.lock(&*name).ttl(ttl).at_least(length).no_wait();
                let guard = request.await?;
                Ok(self.keep(name, guard))
            }
            Order::Release(name) => {
                let Some(guard) = self.guards.remove(&name) else {
                    return Ok(Answer::Failed("not held".to_owned()));
                };
                Ok(Answer::Was(guard.release().await? == ReleaseOutcome::Released))
            }
            Order::Look(name) => Ok(Answer::Was(self.guards.get(&name).is_some_and(LockGuard::is_held))),
            Order::Count { name, ttl, times } => {
                let mut tokens = Vec::new();
                for _ in 0..times {
                    let guard = self.locks.lock(&*name).ttl(ttl).await?;
                    let counter = self.namespace.folder().join(COUNTER);
                    add_one(&counter).map_err(|error| LockError::failed("counting", error))?;
                    tokens.push(guard.token());
                    guard.release().await?;
                }
                Ok(Answer::Counted(tokens))
            }
            Order::Write { name, resource, writes } => {
                let Some(resource) = self.harness.resource(&self.namespace, &resource).await? else {
                    return Ok(Answer::Failed("no resource is shipped".to_owned()));
                };
                let written = writers::write_on(&self.locks, &resource, &name, writes).await?;
                Ok(Answer::Written(written))
            }
            Order::End { .. } => Ok(Answer::Failed("it has an end already".to_owned())),
        }
    }

    fn keep(&mut self, name: String, guard: LockGuard) -> Answer {
        let token = guard.token();
        self.guards.insert(name, guard);
        Answer::Granted(token)
    }
}

/// Reads, waits a little, writes: two that do it at once lose an update.
fn add_one(counter: &Path) -> std::io::Result<()> {
    let number = std::fs::read_to_string(counter)?;
    let number: u64 = number.trim().parse().map_err(std::io::Error::other)?;
    std::thread::sleep(Duration::from_micros(200));
    std::fs::write(counter, (number + 1).to_string())
}

fn tell(answer: &Answer) {
    let mut out = std::io::stdout().lock();
    let line = serde_json::to_string(answer).unwrap_or_default();
    // If the parent is gone there is nobody to tell.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
