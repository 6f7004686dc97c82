//! Waiting for a name in a cluster.

use std::sync::Arc;

use lock_core::{Attempt, Busy, Claim, Grant, LockError, Stamp, Wait};
use tokio::time::sleep;

use super::call::{SILENCE, Try};
use super::subscriptions::Subscription;
use super::topology::Topology;
use crate::failure::Failure;
use crate::requests::{Answer, OnBusy};
use crate::session::Session;
use crate::wait::Next;

impl Topology {
    /// Waits until the claim is granted, or the wait is over.
    ///
    /// The place in the queue moves with the slot of the name. It is kept while no node serves the slot, for as long as that of a waiter
    /// whose connection is broken.
    pub(super) async fn wait(self: &Arc<Self>, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        // Before anything is sent, so that no message is missed.
        let mut ticket = self.identity().listeners.wait(claim.owner());
        let mut subscription: Option<(Arc<Session>, Subscription)> = None;
        loop {
            let (session, answer, sent) = self.ask_in_queue(claim).await?;
            let waiting = match answer {
                Answer::Granted(grant) => return Ok(Attempt::Granted(grant)),
                Answer::Busy(waiting) => waiting,
            };
            wait.busy(&waiting.busy);
            let subscribed = subscription
                .as_ref()
                .filter(|(at, subscription)| session.is_same(at) && !subscription.ending().is_cancelled());
            let Some((_, subscribed)) = subscribed else {
                drop(subscription.take());
                subscription = Some(self.subscribe(claim).await?);
                // Tells the queue where, and finds out what has been missed.
                continue;
            };
            let ending = subscribed.ending().clone();
            let next = session.next(claim, wait.deadline(), &ending, &mut ticket, &waiting, sent);
            match while_heard(subscribed, next).await {
                Next::Ask => {}
                Next::Granted(grant) => {
                    return Ok(Attempt::Granted(self.replicated(grant).await?));
                }
                Next::Ended => return Ok(waiting.busy.into()),
                // Also if only its node has left the cluster.
                Next::Closed if self.is_closed() => return Err(LockError::closed()),
                Next::Closed => {}
                Next::GiveUp => return self.give_up(claim, waiting.busy).await,
            }
        }
    }

    async fn ask_in_queue(self: &Arc<Self>, claim: &Claim) -> Result<(Arc<Session>, Answer, Stamp), LockError> {
        let asking = |Try { session, .. }: Try| async move {
            let link = session.link().await?;
            let asked = session.ask_for(&link, claim, OnBusy::Queue).await;
            if asked.as_ref().is_err_and(Failure::is_slot_moving) {
                // Its place must last until the slot has been moved.
                session.keep_place_on(&link, claim).await?;
            }
            let (answer, sent) = match asked? {
                (Answer::Granted(grant), sent) => (Answer::Granted(session.replicated(grant).await?), sent),
                busy => busy,
            };
            Ok((session, answer, sent))
        };
        self.call("acquire", self.slot(claim.name()), true, asking).await
    }

    /// Waits until enough replicas have a grant that was told by a message.
    async fn replicated(self: &Arc<Self>, grant: Grant) -> Result<Grant, LockError> {
        let slot = self.slot(grant.claim.name());
        let waiting = |Try { session, .. }: Try| {
            let grant = grant.clone();
            async move { session.replicated(grant).await }
        };
        self.call("acquire", slot, true, waiting).await
    }

    async fn subscribe(self: &Arc<Self>, claim: &Claim) -> Result<(Arc<Session>, Subscription), LockError> {
        let subscribing = |Try { session, .. }: Try| async move {
            let subscription = session.subscribe(claim.name()).await?;
            Ok((session, subscription))
        };
        self.call("acquire", self.slot(claim.name()), true, subscribing).await
    }

    /// Leaves the queue. Should the lock have been granted meanwhile, it is given on.
    async fn give_up(self: &Arc<Self>, claim: &Claim, busy: Busy) -> Result<Attempt, LockError> {
        let releasing = |Try { session, .. }: Try| async move {
            session.release_on(&session.link().await?, claim, None).await?;
            Ok::<_, Failure>(())
        };
        self.call("acquire", self.slot(claim.name()), true, releasing).await?;
        Ok(busy.into())
    }
}

/// Waits for what happens next, and makes sure meanwhile that the node answers: one that is stopped or cut off does not say so.
async fn while_heard(subscription: &Subscription, next: impl Future<Output = Next>) -> Next {
    let mut next = std::pin::pin!(next);
    loop {
        tokio::select! {
            biased;
            next = &mut next => return next,
            () = sleep(SILENCE) => subscription.probe(SILENCE / 2),
        }
    }
}
