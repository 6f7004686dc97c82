//! Redlock on five servers: the other library for it, and the bare round trips.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use futures_util::stream::{FuturesUnordered, StreamExt as _};

use crate::backend::Peer;
use crate::contestant::{Contestant, Failure, Trips};
use crate::redis;

/// How many servers there are.
pub(crate) const NODES: usize = 5;

pub(crate) const FLOOR: &str = "2 x PING, 3 of 5 servers";

pub(crate) const PEERS: &[Peer] = &[Peer::new(redis::RSLOCK)];

/// A client of one of the peers.
pub(crate) fn peer(who: &str, urls: &[String], ttl: Duration) -> Result<Arc<dyn Contestant>, Failure> {
    match who {
        redis::RSLOCK => Ok(redis::rslock(urls, ttl)),
        other => Err(format!("there is no contestant {other} on several Redis servers").into()),
    }
}

/// The bare round trips to all servers at once, which end when a majority has answered.
struct Majority(Vec<Arc<dyn Trips>>);

pub(crate) async fn trips(urls: &[String]) -> Result<Arc<dyn Trips>, Failure> {
    let servers = try_join_all(urls.iter().map(|url| redis::trips(url))).await?;
    Ok(Arc::new(Majority(servers)))
}

#[async_trait]
impl Trips for Majority {
    async fn first(&self, name: &str) -> Result<(), Failure> {
        let mut trips: FuturesUnordered<_> = self.0.iter().map(|server| server.first(name)).collect();
        let mut answers = 0;
        while let Some(answer) = trips.next().await {
            answers += usize::from(answer.is_ok());
            if answers > self.0.len() / 2 {
                return Ok(());
            }
        }
        Err(format!("{answers} of {} servers answered", self.0.len()).into())
    }

    async fn second(&self, name: &str) -> Result<(), Failure> {
        self.first(name).await
    }
}
