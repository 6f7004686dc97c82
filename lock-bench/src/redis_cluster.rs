//! A Redis Cluster, and what the same locks cost on a server of its own.

use std::sync::Arc;
use std::time::Duration;

use fencelock::Options;

use crate::backend::Peer;
use crate::contestant::{Contestant, Failure, Trips};
use crate::ours::Ours;
use crate::redis;

pub(crate) const PRIMARIES: usize = 3;

/// fencelock on the server beside the cluster.
pub(crate) const ONE_SERVER: &str = "fencelock, on a server of its own";

pub(crate) const PEERS: &[Peer] = &[Peer::new(ONE_SERVER)];

/// A client of that contestant. The server beside the cluster is the last one.
pub(crate) async fn peer(who: &str, urls: &[String], ttl: Duration) -> Result<Arc<dyn Contestant>, Failure> {
    match (who, urls) {
        (ONE_SERVER, [.., url]) => Ok(Arc::new(Ours::connect(url, Options::new().ttl(ttl)).await?)),
        (other, _) => Err(format!("there is no contestant {other} on a Redis Cluster").into()),
    }
}

/// The bare round trips to the first node.
pub(crate) async fn trips(urls: &[String]) -> Result<Arc<dyn Trips>, Failure> {
    redis::trips(urls.first().ok_or("a cluster has no node")?).await
}
