//! Waiting in the queue.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, SortOrder, SortTarget, Txn, TxnOp};
use lock_core::{Attempt, Busy, Claim, Grant, LockError, Stamp};
use tokio::time::{sleep, timeout};

use crate::failure::Failure;
use crate::leases::Kept;
use crate::link::Link;
use crate::record;
use crate::requests::{Found, head, kvs, put};
use crate::session::Session;
use crate::watches::Seen;

/// Where a claim stands in the queue.
struct Place {
    created: i64,
    base: u64,
    kept: Arc<Kept>,
}

/// What a look at the queue came to.
enum Standing {
    Held(Grant),
    Behind(Behind),
}

/// Somebody else is first.
struct Behind {
    busy: Busy,
    /// Whose going changes something.
    before: String,
    /// When that was seen.
    revision: i64,
    kept: Arc<Kept>,
}

/// How long a waiter rests at least when what it waits with fails.
const REST: Duration = Duration::from_millis(20);

impl Session {
    /// Waits until the claim is granted, or for `deadline`.
    ///
    /// The place in the queue survives a broken connection, as long as its lease is kept.
    pub(crate) async fn wait(self: &Arc<Self>, claim: &Claim, deadline: Option<Stamp>) -> Result<Attempt, LockError> {
        let mut place = None;
        loop {
            let looking = async {
                let link = self.link().await?;
                Ok((self.stand(&link, claim, &mut place).await?, link))
            };
            let (standing, link) = self.limited("acquire", looking).await?;
            let behind = match standing {
                Standing::Held(grant) => return Ok(Attempt::Granted(grant)),
                Standing::Behind(behind) => behind,
            };
            match self.next(claim, deadline, &link, &behind).await {
                Next::Look => {}
                Next::GiveUp => return self.give_up(claim, behind.busy).await,
                Next::Closed => return Err(LockError::Closed),
            }
            if self.table().is_given_up(claim) {
                // It was released under its own wait.
                return Ok(behind.busy.into());
            }
        }
    }

    /// Looks where the claim stands, after it was put into the queue if it is not in it.
    async fn stand(
        self: &Arc<Self>,
        link: &Arc<Link>,
        claim: &Claim,
        place: &mut Option<Place>,
    ) -> Result<Standing, Failure> {
        loop {
            match place {
                None => {
                    if let Some(standing) = self.enqueue(link, claim, place).await? {
                        return Ok(standing);
                    }
                }
                Some(known) if !known.kept.is_valid(self.clock().now()) => {
                    // What it kept may be there for a moment longer, and is not to be believed in.
                    let delete = TxnOp::delete(self.settings().keys.claim(claim), None);
                    self.ask(link, Txn::new().and_then([delete])).await?;
                    *place = None;
                }
                Some(known) => match self.verify(link, claim, known).await? {
                    Some(standing) => return Ok(standing),
                    None => *place = None,
                },
            }
        }
    }

    /// Puts the claim at the end of the queue; `None` if it is there already, or has to be put there again.
    async fn enqueue(
        self: &Arc<Self>,
        link: &Arc<Link>,
        claim: &Claim,
        place: &mut Option<Place>,
    ) -> Result<Option<Standing>, Failure> {
        let keys = &self.settings().keys;
        let (key, queue) = (keys.claim(claim), keys.queue(claim.name()));
        let (kept, base) = self.prepare(link, claim).await?;
        let new = Compare::create_revision(&*key, CompareOp::Equal, 0);
        let txn = Txn::new()
            .when(self.as_known(new, &kept, base))
            .and_then([
                put(&key, claim, &kept, base, false),
                youngest(&queue, GetOptions::new(), 2),
                head(&queue, 1),
            ])
            .or_else(self.reads(&key, &queue, &kept));
        let Some(answer) = self.take(link, claim, &kept, txn).await? else {
            return Ok(None);
        };
        if !answer.succeeded() {
            let found = Found::read(&answer)?;
            match &found.mine {
                Some(mine) => {
                    if self.stands(link, &kept, mine).await? {
                        *place = Some(Place {
                            created: mine.create_revision(),
                            base: record::base(mine.value()).ok_or(Failure::Nonsense)?,
                            kept,
                        });
                    }
                }
                None => self.learn(link, &kept, &found).await?,
            }
            return Ok(None);
        }
        let revision = self.seen(answer.header());
        let known = place.insert(Place {
            created: revision,
            base: base.value,
            kept,
        });
        let queued = kvs(&answer, 1)?;
        match (queued.get(1), kvs(&answer, 2)?.first()) {
            (Some(before), Some(head)) => Ok(Some(Standing::Behind(Behind {
                busy: self.busy(head),
                before: text(before.key())?,
                revision,
                kept: Arc::clone(&known.kept),
            }))),
            // Alone in its queue from the beginning.
            _ => self.hold(link, claim, known).map(Some),
        }
    }

    /// Looks whether the claim is first; `None` if it is not in the queue any more.
    ///
    /// **Invariant.** It is first if its own key is the one that it put *and* no key under the name is older. That its key is there,
    /// and the one that it waited for is gone, is not enough: that one may have been a waiter as well.
    async fn verify(
        self: &Arc<Self>,
        link: &Arc<Link>,
        claim: &Claim,
        place: &Place,
    ) -> Result<Option<Standing>, Failure> {
        let keys = &self.settings().keys;
        let (key, queue) = (keys.claim(claim), keys.queue(claim.name()));
        let older = GetOptions::new().with_max_create_revision(place.created - 1);
        let txn = Txn::new()
            .when([
                Compare::create_revision(&*key, CompareOp::Equal, place.created),
                Compare::create_revision(&*queue, CompareOp::Greater, place.created - 1).with_prefix(),
            ])
            .or_else([TxnOp::get(&*key, None), youngest(&queue, older, 1), head(&queue, 1)]);
        let answer = self.ask(link, txn).await?;
        if answer.succeeded() {
            return self.hold(link, claim, place).map(Some);
        }
        let (mine, before, head) = (kvs(&answer, 0)?, kvs(&answer, 1)?, kvs(&answer, 2)?);
        let mine = mine.first().filter(|kv| kv.create_revision() == place.created);
        match (mine, before.first(), head.first()) {
            (Some(_), Some(before), Some(head)) => Ok(Some(Standing::Behind(Behind {
                busy: self.busy(head),
                before: text(before.key())?,
                revision: self.seen(answer.header()),
                kept: Arc::clone(&place.kept),
            }))),
            _ => Ok(None),
        }
    }

    fn hold(self: &Arc<Self>, link: &Arc<Link>, claim: &Claim, place: &Place) -> Result<Standing, Failure> {
        let grant = self.grant(link, claim, &place.kept, place.base, place.created, self.clock().now())?;
        Ok(Standing::Held(grant))
    }

    /// What happens first to a claim that stands behind somebody.
    async fn next(&self, claim: &Claim, deadline: Option<Stamp>, link: &Link, behind: &Behind) -> Next {
        let from = behind.revision + 1;
        let (_watching_before, mut before) = link.watches().wait(behind.before.clone(), from);
        let (_watching_mine, mut mine) = link.watches().wait(self.settings().keys.claim(claim), from);
        let mut due = behind.kept.due();
        loop {
            tokio::select! {
                biased;
                () = link.broken() => return if self.is_closed() { Next::Closed } else { Next::Look },
                seen = &mut before => return look(seen.unwrap_or(Seen::Unclear)).await,
                seen = &mut mine => return look(seen.unwrap_or(Seen::Unclear)).await,
                () = self.until(deadline) => return Next::GiveUp,
                () = self.until(Some(due)) => {
                    let limit = self.settings().op_timeout.min(behind.kept.ttl() / 4);
                    match timeout(limit, self.keep_alive_if_due(link, &behind.kept)).await {
                        Ok(Ok(())) => due = behind.kept.due(),
                        Ok(Err(Failure::LeaseGone)) => return Next::Look,
                        _ => due = self.clock().now() + behind.kept.ttl() / 20,
                    }
                    if !behind.kept.is_valid(self.clock().now()) {
                        return Next::Look;
                    }
                }
            }
        }
    }

    /// Leaves the queue. Should the lock have been granted meanwhile, it is let go of.
    async fn give_up(&self, claim: &Claim, busy: Busy) -> Result<Attempt, LockError> {
        self.abandon(claim);
        self.limited("acquire", async {
            let link = self.link().await?;
            self.release_on(&link, claim).await?;
            Ok(busy.into())
        })
        .await
    }

    async fn until(&self, stamp: Option<Stamp>) {
        let Some(stamp) = stamp else {
            return std::future::pending().await;
        };
        loop {
            let left = stamp.since(self.clock().now());
            if left.is_zero() {
                return;
            }
            sleep(left).await;
        }
    }
}

enum Next {
    /// Time to look again.
    Look,
    GiveUp,
    Closed,
}

async fn look(seen: Seen) -> Next {
    if seen == Seen::Unclear {
        sleep(REST).await;
    }
    Next::Look
}

/// Reads the youngest keys of a queue.
fn youngest(queue: &str, options: GetOptions, limit: i64) -> TxnOp {
    let options = options
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Descend)
        .with_limit(limit);
    TxnOp::get(queue, Some(options))
}

fn text(key: &[u8]) -> Result<String, Failure> {
    String::from_utf8(key.to_vec()).map_err(|_| Failure::Nonsense)
}
