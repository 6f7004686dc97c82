//! Nodes that have no data: new ones, and those that have lost it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use lock_core::LockError;

use super::quorum::Quorum;
use crate::failure::Failure;
use crate::fields::Fields;
use crate::link::Link;
use crate::requests::NOBODY;
use crate::scripts::{self, Setting};
use crate::session::Session;

/// Nodes that all begin without data within this time, or within `max_ttl` if that is less, are new together.
const TOGETHER: Duration = Duration::from_secs(10);

/// How exactly the start of a process is known.
const SECOND: Duration = Duration::from_secs(1);

/// What a node says of its data.
#[derive(Clone, Debug)]
pub(super) struct Born {
    is_new: bool,
    age: Duration,
    since: String,
    /// How old its process is, which may have lost data long before the first request that noticed.
    process_age: Duration,
}

impl Session {
    /// Asks a node since when it has its data. If that is since `open`, it may grant locks at once from now on.
    ///
    /// `None` if the user may only look at locks, and so cannot let a node grant any.
    async fn born_on(&self, link: &Arc<Link>, open: &str) -> Result<Option<Born>, Failure> {
        let settings = self.settings();
        let mut keys = vec![settings.keys.unused(); 4];
        keys.push(settings.keys.born());
        let retention = settings.counter_retention.as_millis().to_string();
        let of_node = self.node().map(|node| node.arguments(link, NOBODY)).unwrap_or_default();
        let channels = settings.keys.channels();
        let mut arguments = vec![&*channels, &retention, NOBODY, open];
        arguments.extend(of_node.iter().map(String::as_str));
        let sent = self.clock().now();
        let answer = scripts::BORN.run(link, Setting::Node, &keys, &arguments).await;
        let mut answer = match answer.map_err(Failure::from) {
            Err(failure) if failure.is_denied() => return Ok(None),
            answer => Fields::read(answer?)?,
        };
        let state = answer.word()?;
        link.learn(answer.number()?, sent);
        if state == "differs" {
            return Err(answer.difference()?);
        }
        Ok(Some(Born {
            is_new: state == "new",
            age: Duration::from_millis(answer.number()?),
            since: answer.word()?,
            process_age: link.server_age(),
        }))
    }
}

impl Quorum {
    /// Lets the nodes grant locks at once if all of them began without data at about the same time: none of them can have forgotten
    /// what another one knows. Returns whether they were let.
    ///
    /// A node that alone lacks data may have granted leases that it has lost, and waits for their end.
    pub(super) async fn open_new(&self) -> Result<bool, LockError> {
        let mut all = Vec::new();
        let mut round = self.ask(|session| async move {
            let asking = async { session.born_on(&session.link().await?, "").await };
            session.limited("connecting", asking).await
        });
        while let Some((node, born)) = round.next().await {
            match born.map_err(|error| self.no_majority("connecting", vec![(node, error)]))? {
                Some(born) => all.push((node, born)),
                None => return Ok(false),
            }
        }
        all.sort_by_key(|(node, _)| *node);
        let together = TOGETHER.min(self.max_ttl);
        let began_together = spread(all.iter().map(|(_, born)| born.age)) <= together
            && spread(all.iter().map(|(_, born)| born.process_age)) <= together.saturating_sub(SECOND).max(SECOND);
        if all.len() < self.len() || !began_together || all.iter().any(|(_, born)| !born.is_new) {
            // Another client may have let them.
            return Ok(all.iter().filter(|(_, born)| !born.is_new).count() >= self.majority());
        }
        let mut round = self.ask_each(|node, session| {
            let since = all[node].1.since.clone();
            async move {
                let asking = async { session.born_on(&session.link().await?, &since).await };
                session.limited("connecting", asking).await
            }
        });
        let mut open = 0;
        while let Some((_, born)) = round.next().await {
            open += usize::from(born?.is_some_and(|born| !born.is_new));
        }
        Ok(open >= self.majority())
    }
}

/// Between the least and the most of them.
fn spread(ages: impl Iterator<Item = Duration> + Clone) -> Duration {
    let (least, most) = (ages.clone().min(), ages.max());
    most.unwrap_or_default().saturating_sub(least.unwrap_or_default())
}
