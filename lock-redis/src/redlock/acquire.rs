//! Acquiring a name from a majority of the nodes.

use futures_util::StreamExt;
use lock_core::{Attempt, Claim, HandOver, LockError, Released, Wait};
use tokio::time::{Instant, sleep};

use super::campaign::{Campaign, Seat, try_once};
use super::quorum::{PAUSE, Quorum, after_release};
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

    pub(crate) async fn hand_over(&self, from: &Claim, to: &Claim) -> Result<HandOver, LockError> {
        if from.name() != to.name() || self.claims.any_unconfirmed(to.owner(), self.now()) {
            let released = self.release(from).await?;
            return Ok(HandOver::new(released, self.try_acquire(to).await?));
        }
        let earlier = self.stragglers.take_back(from.owner());
        self.claims.forget(from.owner());
        let micros = self.server_micros();
        let proposals = [from, to].map(|claim| self.proposals.propose(claim.owner(), micros));
        let mut round = self.ask(|session| {
            let (earlier, from, to, proposals) = (earlier.clone(), from.clone(), to.clone(), proposals.clone());
            async move {
                let asking = async {
                    let link = session.link().await?;
                    let handing_over = session.hand_over_on(&link, &from, &to);
                    after_release(&session, &link, earlier.as_ref(), handing_over).await
                };
                let began = Instant::now();
                let done = session.limited("hand-over", asking).await;
                let done = match done {
                    Ok(HandOver { from, to, .. }) => Ok((Some(from), to)),
                    // It may have been carried out.
                    Err(error) if error.is_retryable() && began.elapsed() < session.settings().op_timeout / 4 => {
                        sleep(PAUSE).await;
                        let asking = async { session.release_on(&session.link().await?, &from, None).await };
                        session.limited("release", asking).await?;
                        try_once(&session, &to).await.map(|to| (None, to))
                    }
                    Err(error) => Err(error),
                };
                drop(proposals);
                done
            }
        });
        let mut campaign = Campaign::new(self, to);
        let (mut released, mut lost) = (0, 0);
        while let Some((node, answer)) = round.next().await {
            campaign.seats[node] = match answer {
                Ok((from, to)) => {
                    match from {
                        Some(Released::Released) => released += 1,
                        Some(_) => lost += 1,
                        None => {}
                    }
                    match to {
                        Attempt::Granted(grant) => Seat::Granted(grant),
                        Attempt::Busy(busy) => campaign.found_busy(busy),
                        _ => Seat::Asked,
                    }
                }
                Err(error) => Seat::Failed(error),
            };
            let known = released >= self.majority() || lost > self.len() - self.majority();
            if known && campaign.holds() >= self.majority() {
                break;
            }
        }
        self.stragglers
            .go_on(&self.executor, round, Some((to.owner(), Some(from.clone()))));
        if campaign.failed() > self.len() - self.majority() {
            return Err(campaign.failure());
        }
        // Of a node that failed it is not known.
        let released = match lost > self.len() - self.majority() {
            true => Released::NotHeld,
            false => Released::Released,
        };
        let attempt = match campaign.granted().await? {
            Some(grant) => Attempt::Granted(grant),
            None => campaign.give_up().await?,
        };
        Ok(HandOver::new(released, attempt))
    }
}
