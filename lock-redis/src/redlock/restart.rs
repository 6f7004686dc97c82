//! Nodes that are new, were restarted or have lost their data.

use std::collections::BTreeMap;
use std::time::Duration;

use lock_core::LockError;

use super::node::{Born, Node};
use super::quorum::Quorum;

/// Nodes that all begin without data within this time, or within `max_ttl` if that is less, are new together.
const TOGETHER: Duration = Duration::from_secs(10);

/// How exactly the start of a process is known.
const SECOND: Duration = Duration::from_secs(1);

impl<N: Node> Quorum<N> {
    /// Lets the nodes grant locks at once if all of them began without data at about the same time: none of them can have forgotten
    /// what another one knows. Returns whether a majority grants.
    ///
    /// A node that alone lacks data may have granted leases that it has lost, and waits for their end.
    pub(super) async fn open_new(&self) -> Result<bool, LockError> {
        let all = self.born(vec![String::new(); self.len()]).await?;
        let is_open = |born: &Vec<Born>| born.iter().filter(|born| !born.is_new).count() >= self.majority();
        let together = TOGETHER.min(self.max_ttl);
        let began_together = spread(all.iter().map(|born| born.age)) <= together
            && spread(all.iter().map(|born| born.process_age)) <= together.saturating_sub(SECOND).max(SECOND);
        if all.len() < self.len() || !began_together || all.iter().any(|born| !born.is_new) {
            // Another client may have let them.
            return Ok(is_open(&all));
        }
        let since = all.into_iter().map(|born| born.since).collect();
        Ok(is_open(&self.born(since).await?))
    }

    /// What each node says of its data, in the order of the nodes. None if the user may not let a node grant locks.
    async fn born(&self, open: Vec<String>) -> Result<Vec<Born>, LockError> {
        let mut round = self.ask("connecting", &open, |number, node, open| async move {
            node.born(&open[number]).await
        });
        let mut all = BTreeMap::new();
        while let Some((node, born)) = round.next().await {
            match born.map_err(|error| self.no_majority("connecting", vec![(node, error)]))? {
                Some(born) => all.insert(node, born),
                None => return Ok(Vec::new()),
            };
        }
        Ok(all.into_values().collect())
    }
}

/// Between the least and the most of them.
fn spread(ages: impl Iterator<Item = Duration> + Clone) -> Duration {
    let (least, most) = (ages.clone().min(), ages.max());
    most.unwrap_or_default().saturating_sub(least.unwrap_or_default())
}
