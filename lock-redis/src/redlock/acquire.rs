//! Acquiring a name from a majority of the nodes.

use lock_core::{Attempt, Claim, LockError, Wait};

use super::campaign::Campaign;
use super::quorum::Quorum;
use crate::requests::OnBusy;

impl Quorum {
    pub(crate) async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, LockError> {
        let _proposal = self.proposals.propose(claim.owner(), self.server_micros());
        let mut campaign = Campaign::new(self, claim);
        for node in 0..self.len() {
            campaign.ask(node, OnBusy::Fail);
        }
        loop {
            if let Some(grant) = campaign.granted().await? {
                return Ok(campaign.finish(grant));
            }
            if campaign.failed() > self.len() - self.majority() {
                return Err(campaign.failure());
            }
            let (holds, open) = (campaign.holds(), campaign.open());
            if holds + open < self.majority() {
                // Of nodes that fail it is not known who holds them: if they are the majority, that is the answer.
                let may_fail = open > 0 && campaign.failed() > 0;
                if campaign.other_holder() || holds == 0 && !may_fail {
                    return campaign.give_up().await;
                }
                if holds > 0 {
                    // No claim has a majority: the earliest one gets it.
                    let deadline = self.now() + self.op_timeout / 2;
                    return campaign.wait(Wait::until(Some(deadline)), true).await;
                }
            }
            campaign.hear().await;
        }
    }

    pub(crate) async fn wait(&self, claim: &Claim, wait: Wait) -> Result<Attempt, LockError> {
        let _proposal = self.proposals.propose(claim.owner(), self.server_micros());
        let mut campaign = Campaign::new(self, claim);
        for node in 0..self.len() {
            campaign.ask(node, OnBusy::Queue);
        }
        campaign.wait(wait, false).await
    }
}
