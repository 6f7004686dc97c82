//! Seeing to what a lease keeps, beside its renewals.

use std::sync::Arc;

use etcd_client::{GetOptions, Txn, TxnOp, TxnOpResponse};
use lock_core::LossReason;

use crate::failure::Failure;
use crate::leases::Kept;
use crate::link::Link;
use crate::session::Session;
use crate::table::Unwatched;
use crate::watches::Seen;

/// How many keys are looked up in one transaction; etcd takes 128 operations by default.
const BATCH: usize = 100;

impl Session {
    /// Sees in the background to what a lease keeps: what should have gone goes, and what is held is watched from now on.
    pub(crate) fn look_after(self: &Arc<Self>, link: &Arc<Link>, kept: &Arc<Kept>) {
        if !kept.is_to_be_looked_after() {
            return;
        }
        let (session, worked, looked_after) = (Arc::clone(self), Arc::clone(link), LookedAfter(Arc::clone(kept)));
        link.runtime().spawn(async move {
            let kept = &looked_after.0;
            let looking = async {
                // Holders are to hear of their losses, whatever becomes of the rest.
                session.watch_lease(&worked, kept).await?;
                session.watch_held(&worked, kept).await?;
                session.sweep(&worked, kept).await
            };
            if let Err(failure) = looking.await {
                tracing::debug!(target: "fencelock", ?failure, "a lease is looked after again at its next renewal");
            }
        });
    }

    /// Releases once more what could not be released and would live as long as the lease.
    async fn sweep(&self, link: &Link, kept: &Kept) -> Result<(), Failure> {
        let patience = self.settings().op_timeout;
        for (claim, after) in self.table().overdue(kept, self.clock().now() - patience) {
            // It may have been asked for again meanwhile.
            if self.table().is_given_up(&claim) {
                self.release_on(link, &claim, after).await?;
            }
        }
        Ok(())
    }

    async fn watch_lease(&self, link: &Link, kept: &Arc<Kept>) -> Result<(), Failure> {
        let Some(key) = kept.unwatched_key(link.serial()) else {
            return Ok(());
        };
        let answer = link.get(key, GetOptions::new()).await?;
        match answer.kvs().first() {
            Some(kv) => {
                kept.marked(kv.mod_revision());
                kept.watch(link, self.seen(answer.header()) + 1);
            }
            None => kept.ended(),
        }
        Ok(())
    }

    async fn watch_held(&self, link: &Link, kept: &Kept) -> Result<(), Failure> {
        for batch in self.table().unwatched(kept, link.serial()).chunks(BATCH) {
            let get = |held: &Unwatched| TxnOp::get(&*held.key, Some(GetOptions::new().with_keys_only()));
            let txn = Txn::new().and_then(batch.iter().map(get).collect::<Vec<_>>());
            let answer = link.txn(txn).await?;
            let from = self.seen(answer.header()) + 1;
            for (held, found) in batch.iter().zip(answer.op_responses()) {
                let TxnOpResponse::Get(found) = found else {
                    return Err(Failure::Nonsense);
                };
                let there = found
                    .kvs()
                    .first()
                    .is_some_and(|kv| kv.create_revision() == held.created);
                let revoker = held.revoker.clone();
                if !there {
                    revoker.revoke(LossReason::NotHeld);
                    continue;
                }
                let watch = link.watches().watch(String::from(&*held.key), from, move |seen| {
                    if seen == Seen::Deleted {
                        revoker.revoke(LossReason::NotHeld);
                    }
                });
                self.table().watched(&held.claim, watch);
            }
        }
        Ok(())
    }
}

/// A lease that is looked after until this is dropped, also with the runtime.
struct LookedAfter(Arc<Kept>);

impl Drop for LookedAfter {
    fn drop(&mut self) {
        self.0.looked_after();
    }
}
