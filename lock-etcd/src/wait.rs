//! Waiting in the queue.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, Txn, TxnOp};
use lock_core::{Attempt, Busy, Claim, Grant, LockError, Stamp, Wait};
use tokio::time::{sleep, timeout};

use crate::client::{Client, revision};
use crate::commands::Place;
use crate::connection::Connection;
use crate::error::Failure;
use crate::lease::EtcdLease;
use crate::queue::{head, is_of, kv, kvs, nested, text, youngest};
use crate::record::State;
use crate::registry::After;
use crate::watch::Watch;

/// What a look at the queue came to.
enum Standing {
    Held(Grant),
    Behind(Box<Behind>),
    /// The claim was released under its own wait, and is not to be put into the queue again.
    Released,
}

/// Another claim is first.
struct Behind {
    busy: Busy,
    /// The key before the claim's own, and that.
    keys: Vec<String>,
    /// When they were seen.
    revision: i64,
    lease: Arc<EtcdLease>,
}

/// How long a waiter rests, on average, when its watch ended. It doubles with each watch that did not last for [`LAST_REST`], up to that: a server
/// can answer transactions and end each watch, or each connection on which one begins.
const REST: Duration = Duration::from_millis(20);
const LAST_REST: Duration = Duration::from_secs(1);

/// What happens first to a waiting claim.
enum Next {
    /// Time to look again.
    Look,
    /// The deadline has come.
    GiveUp,
    /// The watch ended, or its connection.
    Unwatched,
}

impl Client {
    /// Waits until the claim is granted, or the wait is over.
    ///
    /// The place in the queue survives a broken connection, as long as its lease is kept.
    pub(crate) async fn wait(self: &Arc<Self>, claim: &Claim, mut wait: Wait) -> Result<Attempt, LockError> {
        let place = tokio::sync::Mutex::new(Search::default());
        let (mut busy, mut watch, mut rest) = (Busy::default(), None, REST);
        loop {
            let looking = self.call("acquire", |connection, _| {
                let place = &place;
                async move {
                    let standing = self.stand(&connection, claim, &mut *place.lock().await).await?;
                    Ok((standing, connection))
                }
            });
            let (standing, connection) = looking.await?;
            let behind = match standing {
                Standing::Held(grant) => return Ok(Attempt::Granted(grant)),
                Standing::Behind(behind) => behind,
                Standing::Released => return Ok(busy.into()),
            };
            wait.busy(&behind.busy);
            let began = self.clock().now();
            match self.next(wait.deadline(), &connection, &behind, &mut watch).await {
                Next::GiveUp if wait.is_over(self.clock().now()) => return self.give_up(claim, behind.busy).await,
                // The deadline was put off if it was that.
                Next::Look | Next::GiveUp => {}
                Next::Unwatched => {
                    watch = None;
                    rest = match self.clock().now().since(began) < LAST_REST {
                        true => LAST_REST.min(rest * 2),
                        false => REST,
                    };
                    self.rest(rest, wait.deadline()).await;
                }
            }
            self.still_open().map_err(|failure| failure.explain("acquire"))?;
            busy = behind.busy;
            if self.registry().is_given_up(claim) {
                // It was released under its own wait.
                return Ok(busy.into());
            }
        }
    }

    /// Looks where the claim stands, after it was put into the queue if it is not in it.
    async fn stand(&self, connection: &Connection, claim: &Claim, search: &mut Search) -> Result<Standing, Failure> {
        loop {
            let standing = match &search.place {
                None => self.enqueue(connection, claim, search).await?,
                Some(place) if !place.lease.is_valid(self.clock().now()) => {
                    // The key may be there for a moment longer, and is not to be believed in.
                    self.remove(connection, &place.key, place.created).await?;
                    search.place = None;
                    None
                }
                Some(place) => {
                    let standing = self.verify(connection, claim, place).await?;
                    if standing.is_none() {
                        search.place = None;
                    }
                    standing
                }
            };
            if let Some(standing) = standing {
                return Ok(standing);
            }
        }
    }

    /// Takes the name if it is free, and puts the claim at the end of the queue if not; `None` if it is to be looked at again.
    async fn enqueue(
        &self,
        connection: &Connection,
        claim: &Claim,
        search: &mut Search,
    ) -> Result<Option<Standing>, Failure> {
        // The key can be missing because the claim was released; no lease is granted for it then.
        if search.asked && self.registry().is_given_up(claim) {
            return Ok(Some(Standing::Released));
        }
        let since = self.clock().now();
        let (lease, base) = self.prepare(connection, claim).await?;
        // The same again. A release from here on finds that the claim was asked for.
        if std::mem::replace(&mut search.asked, true) && self.registry().is_given_up(claim) {
            return Ok(Some(Standing::Released));
        }
        let put = self.putting(claim, lease, base);
        let free = Compare::create_revision(&*put.queue, CompareOp::Equal, 0).with_prefix();
        let absent = Compare::create_revision(&*put.key, CompareOp::Equal, 0);
        let [base, mark] = put.read(self);
        let join = Txn::new()
            .when(put.when(self, absent))
            .and_then([
                put.put(State::Waiting),
                youngest(&put.queue, GetOptions::new(), 2),
                head(&put.queue),
            ])
            .or_else([TxnOp::get(&*put.key, None), base, mark]);
        // A full server does not notice puts in nested transactions.
        let txn = Txn::new()
            .when(put.when(self, free))
            .and_then([put.put(State::Held)])
            .or_else([TxnOp::txn(join)]);
        let Some(answer) = self.put(connection, &put, txn).await? else {
            return Ok(None);
        };
        let revision = revision(answer.header());
        if answer.succeeded() {
            let grant = self.grant(claim, &put.place(revision), since)?;
            return Ok(Some(Standing::Held(grant)));
        }
        let joined = nested(&answer).ok_or(Failure::Nonsense)?;
        if !joined.succeeded() {
            match kv(&joined, 0)? {
                Some(mine) => search.place = self.stands(connection, &put, &mine).await?,
                None => self.learn(connection, &put, &joined, 1, revision).await?,
            }
            return Ok(None);
        }
        let place = search.place.insert(put.place(revision));
        let queued = kvs(&joined, 1)?;
        match (queued.get(1), kv(&joined, 2)?) {
            (Some(before), Some(head)) => self.behind(connection, claim, place, (&head, before), revision).await,
            // It was not free a moment before, in the same transaction.
            _ => Err(Failure::Nonsense),
        }
    }

    /// Looks whether the claim is first; `None` if it is not in the queue any more.
    ///
    /// **Invariant.** It is first if its own key is the one that it put *and* no key under the name is older. That its key is there,
    /// and the one that it waited for is gone, is not enough: that one may have been a waiter as well.
    async fn verify(&self, connection: &Connection, claim: &Claim, place: &Place) -> Result<Option<Standing>, Failure> {
        let (key, queue) = (&*place.key, self.settings().keys.queue(claim.name()));
        let older = GetOptions::new().with_max_create_revision(place.created - 1);
        let txn = Txn::new()
            .when([
                Compare::create_revision(key, CompareOp::Equal, place.created),
                Compare::create_revision(&*queue, CompareOp::Greater, place.created - 1).with_prefix(),
            ])
            .or_else([TxnOp::get(key, None), youngest(&queue, older, 1), head(&queue)]);
        let answer = connection.txn(txn).await?;
        if answer.succeeded() {
            let grant = self.grant(claim, place, self.clock().now())?;
            return Ok(Some(Standing::Held(grant)));
        }
        let mine = kv(&answer, 0)?.filter(|kv| kv.create_revision() == place.created);
        match (mine, kv(&answer, 1)?, kv(&answer, 2)?) {
            (Some(_), Some(before), Some(head)) => {
                let revision = revision(answer.header());
                self.behind(connection, claim, place, (&head, &before), revision).await
            }
            _ => Ok(None),
        }
    }

    /// The keys that the claim was seen behind; `None` if they are to be looked at again.
    async fn behind(
        &self,
        connection: &Connection,
        claim: &Claim,
        place: &Place,
        (head, before): (&KeyValue, &KeyValue),
        revision: i64,
    ) -> Result<Option<Standing>, Failure> {
        if is_of(head, claim) {
            // Another client put it. It is this one now that the claim is asked for through.
            self.remove(connection, text(head.key())?, head.create_revision())
                .await?;
            return Ok(None);
        }
        Ok(Some(Standing::Behind(Box::new(Behind {
            busy: self.busy(head)?,
            keys: vec![text(before.key())?.to_owned(), place.key.to_string()],
            revision,
            lease: Arc::clone(&place.lease),
        }))))
    }

    /// What happens first to a claim that stands behind another. `watch` is that of the last look, if there is one.
    ///
    /// Keys are watched and not the claims under them: if one goes and comes again, the claim learns that it went, and looks.
    async fn next(
        self: &Arc<Self>,
        deadline: Option<Stamp>,
        connection: &Arc<Connection>,
        behind: &Behind,
        watch: &mut Option<Watch>,
    ) -> Next {
        let changed = async {
            let last = watch.take().filter(|last| last.is_of(connection, &behind.keys));
            let watching = match last {
                Some(last) => last,
                None => Watch::start(connection, behind.keys.clone()).await?,
            };
            watch.insert(watching).changed(behind.revision).await
        };
        tokio::pin!(changed);
        let mut due = behind.lease.due();
        loop {
            tokio::select! {
                biased;
                () = connection.broken() => return Next::Unwatched,
                changed = &mut changed => return match changed {
                    Ok(()) => Next::Look,
                    Err(_) => Next::Unwatched,
                },
                () = self.until(deadline) => return Next::GiveUp,
                () = self.until(Some(due)) => {
                    let limit = self.settings().op_timeout.min(behind.lease.ttl() / 4);
                    match timeout(limit, self.keep_alive_if_due(connection, &behind.lease)).await {
                        Ok(Ok(was_due)) => {
                            if was_due {
                                self.check(connection, &behind.lease);
                            }
                            due = behind.lease.due();
                        }
                        Ok(Err(Failure::LeaseGone)) => return Next::Look,
                        _ => due = self.clock().now() + behind.lease.ttl() / 20,
                    }
                    if !behind.lease.is_valid(self.clock().now()) {
                        return Next::Look;
                    }
                }
            }
        }
    }

    /// Leaves the queue. Should the lock have been granted meanwhile, it is released.
    async fn give_up(&self, claim: &Claim, busy: Busy) -> Result<Attempt, LockError> {
        self.leave(claim, After::Free);
        self.call("acquire", |connection, _| async move {
            self.release_on(&connection, claim, After::Free).await
        })
        .await?;
        Ok(busy.into())
    }

    /// Rests about that long, so that clients of one server do not come together, or until the deadline.
    async fn rest(&self, rest: Duration, deadline: Option<Stamp>) {
        let rest = self.clock().now() + rest.mul_f64(0.5 + fastrand::f64());
        self.until(Some(deadline.map_or(rest, |deadline| deadline.min(rest))))
            .await;
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

/// What a wait knows of its claim.
#[derive(Default)]
struct Search {
    /// Whether it has asked for it before.
    asked: bool,
    place: Option<Place>,
}
