//! What the server has.

use std::time::Duration;

use lock_core::{DistributedLock, LockName};

use super::Case;
use crate::outcome::{Outcome, ensure};

impl Case {
    /// Waits until the server has that many claims in line for the name. False, and at once, if nobody can see that.
    pub(crate) async fn in_line(&self, name: &str, wanted: usize) -> Outcome<bool> {
        let (name, start) = (self.name(name), self.now());
        while let Some(seen) = self.seen_in_line(&name).await? {
            if seen == wanted {
                return Ok(true);
            }
            ensure!(
                self.now().since(start) < self.hang_limit(),
                "the backend",
                "{wanted} are in line for {name:?}; there are {seen}"
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(false)
    }

    /// With a bug, as far as the clients know, since it keeps some from the server. Without one, who waits by its own account may not have
    /// come to the server yet.
    async fn seen_in_line(&self, name: &LockName) -> Outcome<Option<usize>> {
        let seen = match &self.breakage {
            Some(breakage) if breakage.hides_the_line() => None,
            _ => self.harness.in_line(&self.namespace, name).await?,
        };
        Ok(seen.or_else(|| self.breakage.as_ref().map(|breakage| breakage.in_line(name))))
    }

    /// What is left of this namespace on the server; `None` if nobody can tell.
    pub(crate) async fn leftovers(&self) -> Outcome<Option<Vec<String>>> {
        if let Some(left) = self.harness.leftovers(&self.namespace).await? {
            return Ok(Some(left));
        }
        if !self.capabilities.list {
            return Ok(None);
        }
        let held = self.observer.list("").await?;
        Ok(Some(held.iter().map(|h| format!("{:?} held by {h}", h.name)).collect()))
    }

    /// Nothing but `expected` lines may be left on the server when the hang limit is over.
    pub(crate) async fn only_leftovers(&self, expected: usize) -> Outcome {
        let limit = self.hang_limit();
        let start = self.now();
        loop {
            let Some(left) = self.leftovers().await? else {
                return Ok(());
            };
            if left.len() == expected {
                return Ok(());
            }
            let over = self.now().since(start) > limit;
            ensure!(
                !over,
                "the backend",
                "{expected} things are left after {limit:?}; there are {left:#?}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
