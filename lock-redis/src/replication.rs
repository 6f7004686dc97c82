//! Grants and renewals that count only when enough replicas have them.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Claim, Grant, Renewal};

use crate::failure::Failure;
use crate::link::Link;
use crate::requests::millis;
use crate::session::Session;

impl Session {
    /// Renews the lease of the claim. It counts only if as many replicas have it as are wanted: a server that was replaced
    /// while it stays up has none any more.
    pub(crate) async fn renew(&self, claim: &Claim) -> Result<Renewal, Failure> {
        let Some(line) = self.replicas() else {
            let link = self.link().await?;
            let renewal = self.renew_on(&link, claim).await?;
            link.look_again();
            return Ok(renewal);
        };
        let link = line.link().await?;
        // The core waits for a quarter of the ttl.
        let patience = (self.settings().op_timeout / 2).min(claim.ttl() / 8);
        let renewal = self.renew_replicated(&link, claim, patience).await?;
        link.look_again();
        Ok(renewal)
    }

    /// Waits until as many replicas as are wanted have the grant; one that too few have is given back.
    ///
    /// What is waited for is a renewal of its own: a grant may have been written by the release of another client, and the
    /// server waits only for what came over the same connection.
    pub(crate) async fn replicated(&self, grant: Grant) -> Result<Grant, Failure> {
        let Some(line) = self.replicas() else { return Ok(grant) };
        // The server has granted it, whatever this connection comes to.
        let link = line.link().await.map_err(Failure::maybe_sent)?;
        let patience = self.settings().op_timeout / 2;
        match self.renew_replicated(&link, &grant.claim, patience).await {
            Ok(Renewal::Renewed) => Ok(grant),
            Ok(_) => {
                let wanted = self.settings().min_replicas;
                Err(Failure::TooFew { reached: 0, wanted })
            }
            Err(failure @ Failure::TooFew { .. }) => {
                let link = self.link().await.map_err(Failure::maybe_sent)?;
                self.release_on(&link, &grant.claim, None).await?;
                Err(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Renews, and waits for the replicas that are wanted; an error if too few have the renewal within `patience`.
    async fn renew_replicated(&self, link: &Arc<Link>, claim: &Claim, patience: Duration) -> Result<Renewal, Failure> {
        let renewal = self.renew_on(link, claim).await?;
        if renewal == Renewal::Renewed {
            self.until_replicated(link, patience).await?;
        }
        Ok(renewal)
    }

    /// Waits until the replicas that are wanted have what this connection wrote; an error if too few have it within `patience`.
    pub(crate) async fn until_replicated(&self, link: &Arc<Link>, patience: Duration) -> Result<(), Failure> {
        let wanted = self.settings().min_replicas;
        // 0 would wait for ever.
        let wait = redis::cmd("WAIT").arg(wanted).arg(millis(patience).max(1)).clone();
        let reached = redis::from_redis_value(link.ask(&wait).await?).map_err(|_| Failure::Nonsense)?;
        if reached < wanted {
            return Err(Failure::TooFew { reached, wanted });
        }
        Ok(())
    }
}
