//! The backend.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use lock_core::{
    Attempt, Capabilities, Claim, DistributedLock, Holder, Lease, LockError, LockName, Released, Renewal, Scope,
    ServerInfo, Wait,
};

use crate::client::Client;
use crate::commands::{Answer, OnBusy};
use crate::connection::Connection;
use crate::error::Failure;

/// Locks on a Redis server, on the primary that Sentinels name, or in a Redis Cluster.
///
/// Every client has one connection to each server that it uses, which is made again when it breaks; clones share it. Dropping the last
/// clone closes it and leaves what it held to expire; [`close`](DistributedLock::close) releases it.
#[derive(Clone, Debug)]
pub struct RedisLock {
    client: Arc<Client>,
}

impl RedisLock {
    pub(crate) fn new(client: Client) -> Self {
        Self {
            client: Arc::new(client),
        }
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }
}

#[async_trait]
impl DistributedLock for RedisLock {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Scope::Server)
            .with_op_timeout(self.client.settings().op_timeout)
            .with_fairness()
            .with_inspection()
            .with_reservations()
            .with_shared()
            .with_permits()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let client = &*self.client;
        let busy = &OnceLock::new();
        let asking = |connection, resent| async move {
            if busy.get().is_none() {
                // If an earlier request was carried out, the same owner gets the same token.
                match client.acquire_on(&connection, claim, OnBusy::Fail).await?.0 {
                    Answer::Busy(waiting) if resent => busy.set(waiting.busy).unwrap_or_default(),
                    answer => return Ok(answer.into()),
                }
            }
            // It may be carried out yet. From now on the claim is only released: a release that arrives late would end a grant.
            client.release_on(&connection, claim, None).await?;
            Ok(busy.get().cloned().unwrap_or_default().into())
        };
        client.call("acquire", claim.name(), asking).await
    }

    async fn renew(&self, lease: &Lease) -> Result<Renewal, LockError> {
        // A lease without a claim is not one of ours.
        let Some(claim) = lease.claim() else {
            return Ok(Renewal::NotHeld);
        };
        let client = &*self.client;
        let asking = |connection, _| async move { client.renew_on(&connection, claim).await };
        client.call("renew", claim.name(), asking).await
    }

    async fn release(&self, claim: &Claim, keep: Option<Duration>) -> Result<Released, LockError> {
        self.client.release("release", claim, keep).await
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        if wait.is_over(self.client.clock().now()) {
            return self.try_acquire(claim).await;
        }
        self.client.wait(claim, wait).await
    }

    async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, LockError> {
        let client = &*self.client;
        // Only by the grant that this client knows: an acquire of the same claim that the network held back until after its release may
        // get another one, which a late reservation must not make last.
        let Some(token) = client.subscriptions().token(claim.owner()) else {
            return Ok(Renewal::NotHeld);
        };
        let asking = |connection, _| async move { client.reserve_on(&connection, claim, token, length).await };
        let renewal = client.call("reservation", claim.name(), asking).await?;
        match renewal == Renewal::Renewed {
            true => {
                let until = client.clock().now() + length;
                client.subscriptions().reserved(claim.owner(), until);
            }
            false => client.subscriptions().forget(claim.owner()),
        }
        Ok(renewal)
    }

    async fn holders(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        self.client.holders(name).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        self.client.list(prefix).await
    }

    async fn force_release(&self, name: &LockName) -> Result<Vec<Holder>, LockError> {
        let client = &*self.client;
        let asking = |connection, resent| async move {
            // A second one would end the hold of the next.
            if resent {
                return Err(Failure::NotRepeated);
            }
            client.force_release_on(&connection, name).await
        };
        client.call("forced release", name, asking).await
    }

    async fn server_info(&self) -> Result<ServerInfo, LockError> {
        const OPERATION: &str = "asking for the settings of the server";
        let client = &*self.client;
        let (name, keys) = (LockName::new("none")?, &client.settings().keys);
        let unused = &*keys.never(&name);
        let asking = |connection: Connection, _| async move { connection.use_rare_commands(unused).await };
        client.call(OPERATION, &name, asking).await?;
        let is_cluster = client.settings().is_cluster();
        let look = async |connection: &Connection| {
            if is_cluster {
                // For slots that are being moved.
                connection.clone().asking().request(&redis::cmd("PING")).await?;
            }
            Ok::<_, Failure>(connection.look().await?.warnings())
        };
        let looking = async {
            let connections = client.router().all().await?;
            let warnings = try_join_all(connections.iter().map(look)).await?;
            Ok(connections.into_iter().zip(warnings).collect::<Vec<_>>())
        };
        let mut servers = client.limited(OPERATION, looking).await?;
        if !is_cluster && let Some((connection, warnings)) = servers.pop() {
            return Ok(connection.version().clone().with_warnings(warnings));
        }
        let product = format!("Redis Cluster of {} primaries:", servers.len());
        let mut versions: Vec<_> = servers.iter().map(|(node, _)| node.version().to_string()).collect();
        versions.sort_unstable();
        versions.dedup();
        let of_node = |(node, warnings): (Connection, Vec<String>)| {
            let place = node.place().to_string();
            warnings
                .into_iter()
                .map(move |warning| format!("node {place}: {warning}"))
        };
        let warnings: Vec<_> = client
            .unserved()
            .into_iter()
            .chain(servers.into_iter().flat_map(of_node))
            .collect();
        Ok(ServerInfo::new(product, versions.join(", ")).with_warnings(warnings))
    }

    async fn close(&self) -> Result<(), LockError> {
        self.client.close().await
    }
}
