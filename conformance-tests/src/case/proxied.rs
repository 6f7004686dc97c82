//! Clients with a proxy between them and their server.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Claim, DistributedLock, LockError, Options, Released};

use super::{Case, Party};
use crate::faults::{Held, Proxy, Then, Trap};
use crate::link::Link;
use crate::outcome::{Outcome, Stop};

/// Whoever is silent for so long most likely waits for nothing: also a server that many cases keep busy answers sooner.
const QUIET: Duration = Duration::from_millis(500);

impl Case {
    /// A proxy before the server, or the end of the case if nothing can stand there. It lives as long as the case.
    pub(crate) async fn proxy(&self) -> Outcome<Arc<Proxy>> {
        let Some(address) = self.harness.address(&self.namespace).await? else {
            return Err(Stop::not_applicable(
                "the harness knows no server that a proxy could stand before",
            ));
        };
        let proxy = Arc::new(Proxy::start(address).await?);
        self.open().proxies.push(Arc::clone(&proxy));
        Ok(proxy)
    }

    /// A client that reaches the server through the proxy.
    pub(crate) async fn client_through(&self, proxy: &Proxy) -> Outcome<Arc<Link>> {
        let link = Arc::new(self.linked(self.connect_through(proxy).await?));
        self.open().links.push(Arc::clone(&link));
        Ok(link)
    }

    /// Locks on such a client.
    pub(crate) async fn party_through(&self, proxy: &Proxy) -> Outcome<Party> {
        let link = self.linked(self.connect_through(proxy).await?);
        Ok(self.party_on(Arc::new(link), Options::new()))
    }

    /// The bare client, or why there is none.
    pub(crate) async fn connect_through(&self, proxy: &Proxy) -> Result<Arc<dyn DistributedLock>, LockError> {
        self.harness.client_at(&self.namespace, proxy.address()).await
    }

    /// Holds back the next request that changes something.
    pub(crate) fn hold(&self, proxy: &Proxy) -> Held {
        proxy.hold(self.harness.committing_request())
    }

    /// Loses the reply to the next request that changes something. What a client does by itself, such as to look after its locks
    /// on a new connection, is over by then, unless the client is never quiet.
    pub(crate) async fn swallow_reply(&self, proxy: &Proxy, then: Then) -> Trap {
        let start = self.now();
        let mut seen = proxy.counts();
        while self.now().since(start) < self.hang_limit()
            && let Ok(counts) = tokio::time::timeout(QUIET, proxy.counted(|counts| *counts != seen)).await
        {
            seen = counts;
        }
        let harness = Arc::clone(&self.harness);
        proxy.swallow_reply_that(
            self.harness.committing_request(),
            move |bytes| harness.is_reply(bytes),
            then,
        )
    }

    /// Lets go of the claim, across a fault: failures that are worth a retry are waited out.
    pub(crate) async fn release_through(&self, client: &Link, claim: &Claim) -> Outcome<Released> {
        let start = self.now();
        loop {
            match client.release(claim, None).await {
                Ok(released) => return Ok(released),
                Err(error) if !error.is_retryable() || self.now().since(start) > self.hang_limit() => {
                    return Err(error.into());
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }
}
