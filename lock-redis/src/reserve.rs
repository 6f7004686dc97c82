//! Names that stay taken for a time, whatever becomes of their holder.
//!
//! A reservation is the time that the stored lock has left: a claim that reserves its name lengthens that, no renewal shortens it, and the
//! release of the claim keeps the lock for the rest, under an owner that no claim has.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Claim, Released, Renewal};

use crate::failure::Failure;
use crate::link::Link;
use crate::requests::millis;
use crate::scripts;
use crate::session::Session;

/// For requests that any grant of the claim will do for.
const ANY_TOKEN: &str = "";

impl Session {
    /// Reserves the name for `length` from now on, if the claim holds it.
    ///
    /// Only by the grant that this client knows: an acquire of the same claim that the network held back until after its release may
    /// get another one, which a late reservation must not make last.
    pub(crate) async fn reserve(&self, claim: &Claim, length: Duration) -> Result<Renewal, Failure> {
        let Some(token) = self.listeners().token(claim.owner()) else {
            return Ok(Renewal::NotHeld);
        };
        let link = match self.replicas() {
            Some(line) => line.link().await?,
            None => self.link().await?,
        };
        if !self.reserve_on(&link, claim, &token.to_string(), length, false).await? {
            self.listeners().forget(claim.owner());
            return Ok(Renewal::NotHeld);
        }
        if self.replicas().is_some() {
            self.until_replicated(&link, self.settings().op_timeout / 2).await?;
        }
        self.listeners().reserved(claim.owner(), self.clock().now() + length);
        Ok(Renewal::Renewed)
    }

    /// Ends the hold, and leaves the name reserved for `rest` from now on.
    pub(crate) async fn release_reserved_on(
        &self,
        link: &Arc<Link>,
        claim: &Claim,
        rest: Duration,
    ) -> Result<Released, Failure> {
        self.listeners().forget(claim.owner());
        let held = self.reserve_on(link, claim, ANY_TOKEN, rest, true).await?;
        Ok(if held { Released::Released } else { Released::NotHeld })
    }

    /// Whether the claim held the name. If so, it is reserved for `length` now.
    pub(crate) async fn reserve_on(
        &self,
        link: &Arc<Link>,
        claim: &Claim,
        token: &str,
        length: Duration,
        ends: bool,
    ) -> Result<bool, Failure> {
        // The server takes no 0.
        let (owner, length) = (claim.owner().to_string(), millis(length).max(1).to_string());
        let mut round_trip = Duration::ZERO;
        for _ in 0..2 {
            let sent = self.clock().now();
            // The core does not wait for longer, and releases the claim then or asks again.
            let stop = link.server_millis(sent) + millis(self.settings().op_timeout);
            let arguments = [&*owner, token, &length, &stop.to_string(), if ends { "1" } else { "0" }];
            let mut answer = self.run(&scripts::RESERVE, link, claim.name(), &arguments).await?;
            round_trip = self.clock().now().since(sent);
            let (word, time) = (answer.word()?, answer.number()?);
            if word == "late" {
                link.relearn(time, sent);
                continue;
            }
            link.learn(time, sent);
            return match &*word {
                "renewed" | "released" => Ok(true),
                "lost" => Ok(false),
                _ => Err(Failure::Nonsense),
            };
        }
        let ttl = claim.ttl();
        Err(Failure::Late { round_trip, ttl })
    }
}
