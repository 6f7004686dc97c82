//! Waiting in the queue.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, SortOrder, SortTarget, Txn, TxnOp};
use lock_core::{Attempt, Busy, Claim, Grant, LockError, Stamp, Wait};
use tokio::time::{sleep, timeout};

use crate::failure::Failure;
use crate::leases::{Kept, reservation_ids};
use crate::link::Link;
use crate::queue::{front, head, is_of, kvs, reservation_of, text};
use crate::requests::{After, as_known};
use crate::session::{PAUSE, Session, is_worth_another};
use crate::tokens::Put;
use crate::watches::{Seen, Waiting};

/// Where a claim stands in the queue.
struct Place {
    key: Arc<str>,
    created: i64,
    base: u64,
    kept: Arc<Kept>,
}

/// What a look at the queue came to.
enum Standing {
    Held(Grant),
    Behind(Box<Behind>),
    /// The claim was released under its own wait, and is not to be put into the queue again.
    Released,
}

/// Somebody else is first.
struct Behind {
    busy: Busy,
    /// The claim's own key.
    mine: Arc<str>,
    /// The one whose going changes something.
    before: String,
    /// When that was seen.
    revision: i64,
    kept: Arc<Kept>,
}

/// How long a waiter rests at least when what it waits with fails.
const REST: Duration = Duration::from_millis(20);

impl Session {
    /// Waits until the claim is granted, or the wait is over.
    ///
    /// The place in the queue survives a broken connection, as long as its lease is kept.
    pub(crate) async fn wait(self: &Arc<Self>, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        let mut place = None;
        let mut asked = false;
        let mut seen = Busy::default();
        // What is watched stays so until the next watches are there: a look can take longer than they linger.
        let mut watching = None;
        loop {
            let looking = async {
                let mut link = self.link().await?;
                loop {
                    match self.stand(&link, claim, &mut place, &mut asked).await {
                        Err(failure) if is_worth_another(&link, &failure) => sleep(PAUSE).await,
                        standing => return Ok((standing?, link)),
                    }
                    link = self.next_link().await?;
                }
            };
            let (standing, link) = self.limited("acquire", looking).await?;
            let behind = match standing {
                Standing::Held(grant) => return Ok(Attempt::Granted(grant)),
                Standing::Behind(behind) => behind,
                Standing::Released => return Ok(seen.into()),
            };
            wait.busy(&behind.busy);
            let watched = watching.insert([&behind.before, &*behind.mine].map(|key| link.watches().wait(key)));
            match self.next(wait.deadline(), &link, &behind, watched).await {
                Next::Look => {}
                Next::GiveUp => return self.give_up(claim, behind.busy).await,
                Next::Closed => return Err(LockError::closed()),
            }
            if self.table().is_given_up(claim) {
                // It was released under its own wait.
                return Ok(behind.busy.into());
            }
            seen = behind.busy;
        }
    }

    /// Looks where the claim stands, after it was put into the queue if it is not in it.
    ///
    /// `asked` tells whether this wait has asked for that before.
    async fn stand(
        self: &Arc<Self>,
        link: &Arc<Link>,
        claim: &Claim,
        place: &mut Option<Place>,
        asked: &mut bool,
    ) -> Result<Standing, Failure> {
        loop {
            match place {
                None => {
                    if let Some(standing) = self.enqueue(link, claim, place, asked).await? {
                        return Ok(standing);
                    }
                }
                Some(known) if !known.kept.is_valid(self.clock().now()) => {
                    // What it kept may be there for a moment longer, and is not to be believed in.
                    let reservation = reservation_of(&known.key, claim);
                    self.remove(link, (&known.key, known.created), reservation).await?;
                    *place = None;
                }
                Some(known) => match self.verify(link, claim, known).await? {
                    Some(standing) => return Ok(standing),
                    None => *place = None,
                },
            }
        }
    }

    /// Takes the name if it is free, and puts the claim at the end of the queue if not; `None` if it is there already, or has to
    /// be put there again.
    async fn enqueue(
        self: &Arc<Self>,
        link: &Arc<Link>,
        claim: &Claim,
        place: &mut Option<Place>,
        asked: &mut bool,
    ) -> Result<Option<Standing>, Failure> {
        // The key can be missing because the claim was released; no lease is made for it then.
        if *asked && self.table().is_given_up(claim) {
            return Ok(Some(Standing::Released));
        }
        let since = self.clock().now();
        let queue = self.settings().keys.queue(claim.name());
        let (kept, drawing) = self.prepare(link, claim).await?;
        // The same again. A release from here on finds that the claim was asked for.
        if std::mem::replace(asked, true) && self.table().is_given_up(claim) {
            return Ok(Some(Standing::Released));
        }
        let put = |holds| Put {
            claim,
            kept: &kept,
            holds,
        };
        let taken = self.take(link, claim, &queue, &kept, drawing, |key| {
            let free = Compare::create_revision(&*queue, CompareOp::Equal, 0).with_prefix();
            let mine: Vec<_> = [key.to_owned()].into_iter().chain(reservation_of(key, claim)).collect();
            let absent = |key: &String| Compare::create_revision(&**key, CompareOp::Equal, 0);
            let new = as_known(mine.iter().map(absent), &kept);
            let more = vec![youngest(&queue, GetOptions::new(), 2), head(&queue)];
            let mine = mine.into_iter().map(|key| TxnOp::get(key, None)).collect();
            let join = self.taking(new, put(false), key, drawing, more, mine);
            let join = vec![TxnOp::txn(join)];
            self.taking(as_known([free], &kept), put(true), key, drawing, Vec::new(), join)
        });
        let Some((key, revision, taken)) = taken.await? else {
            return Ok(None);
        };
        let life = (&*key, revision);
        if taken.put {
            let drawn = self.drawn(link, drawing, put(true), life, &taken).await?;
            let Some(base) = drawn else { return Ok(None) };
            let grant = self.grant(link, claim, &kept, base, life, since)?;
            return Ok(Some(Standing::Held(grant)));
        }
        let joined = taken.instead()?;
        if !joined.put {
            let reservation = claim.at_least().map(|_| joined.kvs(1)).transpose()?;
            match (joined.kvs(0)?.first(), reservation.iter().flatten().next()) {
                (Some(mine), _) => {
                    if let Some(base) = self.stands(link, claim, &key, &kept, mine).await? {
                        *place = Some(Place {
                            key,
                            created: mine.create_revision(),
                            base,
                            kept,
                        });
                    }
                }
                // The claim was released, and comes again before its reservation has ended.
                (None, Some(reserved)) if reservation_ids(claim.owner()).contains(&reserved.lease()) => {
                    return Ok(Some(Standing::Behind(Box::new(Behind {
                        busy: self.busy(reserved),
                        before: text(reserved.key())?.to_owned(),
                        mine: key,
                        revision,
                        kept,
                    }))));
                }
                // Left by another client of the claim, or its key was deleted by hand.
                (None, Some(left)) => {
                    self.remove(link, (text(left.key())?, left.create_revision()), None)
                        .await?;
                }
                (None, None) => self.learn(link, &kept).await?,
            }
            return Ok(None);
        }
        let drawn = self.drawn(link, drawing, put(false), life, &joined).await?;
        let Some(base) = drawn else { return Ok(None) };
        let known = place.insert(Place {
            key,
            created: revision,
            base,
            kept,
        });
        let queued = joined.kvs(0)?;
        match (queued.get(1), front(&joined.kvs(1)?)) {
            (Some(before), Some(head)) => self.behind(link, claim, known, (head, before), revision).await,
            // It was not free a moment before, in the same transaction.
            _ => Err(Failure::Nonsense),
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
        let (key, queue) = (&*place.key, self.settings().keys.queue(claim.name()));
        let older = GetOptions::new().with_max_create_revision(place.created - 1);
        let txn = Txn::new()
            .when([
                Compare::create_revision(key, CompareOp::Equal, place.created),
                Compare::create_revision(&*queue, CompareOp::Greater, place.created - 1).with_prefix(),
            ])
            .or_else([TxnOp::get(key, None), youngest(&queue, older, 1), head(&queue)]);
        let answer = link.txn(txn).await?;
        if answer.succeeded() {
            return self.hold(link, claim, place).map(Some);
        }
        let (mine, before, head) = (kvs(&answer, 0)?, kvs(&answer, 1)?, kvs(&answer, 2)?);
        let mine = mine.first().filter(|kv| kv.create_revision() == place.created);
        match (mine, before.first(), front(&head)) {
            (Some(_), Some(before), Some(head)) => {
                let revision = self.seen(answer.header());
                self.behind(link, claim, place, (head, before), revision).await
            }
            _ => Ok(None),
        }
    }

    /// Behind whom the claim was seen; `None` if that is to be looked at again.
    async fn behind(
        &self,
        link: &Link,
        claim: &Claim,
        place: &Place,
        (head, before): (&KeyValue, &KeyValue),
        revision: i64,
    ) -> Result<Option<Standing>, Failure> {
        if is_of(head, claim) {
            // Another client put it. It is this one now that the claim is asked for through.
            let life = (text(head.key())?, head.create_revision());
            self.remove(link, life, None).await?;
            return Ok(None);
        }
        Ok(Some(Standing::Behind(Box::new(Behind {
            busy: self.busy(head),
            mine: Arc::clone(&place.key),
            before: text(before.key())?.to_owned(),
            revision,
            kept: Arc::clone(&place.kept),
        }))))
    }

    fn hold(self: &Arc<Self>, link: &Arc<Link>, claim: &Claim, place: &Place) -> Result<Standing, Failure> {
        let life = (&*place.key, place.created);
        let grant = self.grant(link, claim, &place.kept, place.base, life, self.clock().now())?;
        Ok(Standing::Held(grant))
    }

    /// What happens first to a claim that stands behind somebody.
    ///
    /// Keys are watched and not the claims under them: if one goes and comes again, that it went is told, and has the claim look.
    async fn next(&self, deadline: Option<Stamp>, link: &Link, behind: &Behind, watched: &mut [Waiting; 2]) -> Next {
        let [before, mine] = watched;
        let mut due = behind.kept.due();
        loop {
            tokio::select! {
                biased;
                () = link.broken() => return if self.is_closed() { Next::Closed } else { Next::Look },
                seen = before.seen(behind.revision) => return look(seen).await,
                seen = mine.seen(behind.revision) => return look(seen).await,
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
        self.abandon(claim, After::Free);
        let leaving = |link: Arc<Link>| async move { self.release_on(&link, claim, After::Free).await };
        self.on_link("acquire", leaving).await?;
        Ok(busy.into())
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
    match seen {
        Seen::Deleted | Seen::Gap => Next::Look,
        Seen::Unclear => {
            sleep(REST).await;
            Next::Look
        }
    }
}

/// Reads the youngest keys of a queue.
fn youngest(queue: &str, options: GetOptions, limit: i64) -> TxnOp {
    let options = options
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Descend)
        .with_limit(limit);
    TxnOp::get(queue, Some(options))
}
