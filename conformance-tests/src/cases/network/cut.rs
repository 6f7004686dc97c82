//! Connections that end in the middle of something.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, FencingToken, Grant, LockError, Released, Renewal};
use tokio::task::JoinSet;

use crate::case::Case;
use crate::faults::{Direction, Proxy, Then};
use crate::link::Link;
use crate::outcome::{Outcome, ensure, fail};

/// How many are cut at the same time; most of a cut is waiting for the next connection.
const LANES: usize = 4;

/// What is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Acquire,
    Renew,
    Release,
}

pub(super) async fn an_acquisition_cut_after_any_byte_leaves_nothing(case: Arc<Case>) -> Outcome {
    cut_after_any_byte(&case, Request::Acquire).await
}

pub(super) async fn a_renewal_cut_after_any_byte_leaves_nothing(case: Arc<Case>) -> Outcome {
    cut_after_any_byte(&case, Request::Renew).await
}

pub(super) async fn a_release_cut_after_any_byte_leaves_nothing(case: Arc<Case>) -> Outcome {
    cut_after_any_byte(&case, Request::Release).await
}

async fn cut_after_any_byte(case: &Arc<Case>, request: Request) -> Outcome {
    let mut lanes = JoinSet::new();
    for lane in 0..LANES {
        let case = Arc::clone(case);
        lanes.spawn(async move {
            let lane = Lane::new(&case, lane).await?;
            lane.run(&case, request).await
        });
    }
    let mut length = 0;
    while let Some(ended) = lanes.join_next().await {
        length = ended??;
    }
    case.remark(format!("{request:?} was cut after each of its {length} bytes"));
    Ok(())
}

/// Every fourth of the cuts, under a name of its own.
struct Lane {
    number: usize,
    name: String,
    proxy: Arc<Proxy>,
    client: Arc<Link>,
    other: Arc<Link>,
}

impl Lane {
    async fn new(case: &Case, number: usize) -> Outcome<Self> {
        let proxy = case.proxy().await?;
        Ok(Self {
            number,
            name: format!("n {number}"),
            client: case.client_through(&proxy).await?,
            other: case.client().await?,
            proxy,
        })
    }

    async fn run(&self, case: &Case, request: Request) -> Outcome<usize> {
        let length = self.length(case, request).await?;
        let mut last = None;
        for cut in (self.number..=length).step_by(LANES) {
            self.cut(case, request, cut, &mut last).await?;
        }
        Ok(length)
    }

    /// How many bytes the request has when nothing goes wrong.
    async fn length(&self, case: &Case, request: Request) -> Outcome<usize> {
        let mut length = 0;
        // The first one may be longer: whatever can be prepared is prepared then.
        for _ in 0..2 {
            let claim = case.claim(&self.name);
            let sent = || self.proxy.counts().bytes_to_server;
            let mut before = sent();
            let grant = case.take(&self.client, &claim).await?;
            length = sent() - before;
            if request != Request::Acquire {
                before = sent();
                self.client.renew(&grant.lease).await?;
                length = sent() - before;
                before = sent();
            }
            self.client.release(&claim).await?;
            if request == Request::Release {
                length = sent() - before;
            }
        }
        usize::try_from(length).map_err(|error| std::io::Error::other(error).into())
    }

    /// One request ends after that many bytes; then its owner lets go, and the next one comes.
    async fn cut(&self, case: &Case, request: Request, bytes: usize, last: &mut Option<FencingToken>) -> Outcome {
        let claim = case.claim(&self.name);
        let held = match request {
            // The connection is made before, so that it is the request that is cut.
            Request::Acquire => self.nothing(case).await.map(|()| None)?,
            Request::Renew | Request::Release => Some(case.take_through(&self.client, &claim, case.patience()).await?),
        };
        let trap = self.proxy.cut_after(Direction::ToServer, bytes);
        let answer = match (request, &held) {
            (Request::Renew, Some(grant)) => self.client.renew(&grant.lease).await.map(drop),
            (Request::Release, _) => self.client.release(&claim).await.map(drop),
            _ => self.client.try_acquire(&claim).await.map(drop),
        };
        if let Err(error) = &answer {
            ensure!(
                error.is_retryable(),
                "the backend",
                "a cut connection is worth another try; it said {error:?}"
            );
        }
        ensure!(
            trap.has_sprung(),
            "the suite",
            "the request is cut after {bytes} bytes; it was answered {answer:?}"
        );
        if let (Request::Renew, Some(grant)) = (request, &held) {
            self.still_kept(case, grant).await?;
        }
        case.release_through(&self.client, &claim).await?;
        // The cut request may arrive even later than that, and then ends by itself.
        let next = case.claim(&self.name);
        let limit = case.steady_ttl() + case.slack();
        let (grant, _) = case.take_within(&self.other, &next, limit).await?;
        let before = held.map(|grant| grant.token).max(*last);
        ensure!(
            before.is_none_or(|before| grant.token > before),
            "the backend",
            "the next token is higher; {} came after {before:?}",
            grant.token
        );
        *last = Some(grant.token);
        self.other.release(&next).await?;
        Ok(())
    }

    async fn nothing(&self, case: &Case) -> Outcome {
        let nothing = case.claim(&self.name);
        case.release_through(&self.client, &nothing).await.map(drop)
    }

    /// Whether the renewal was done or not, the lock is still its holder's.
    async fn still_kept(&self, case: &Case, grant: &Grant) -> Outcome {
        let start = case.now();
        let renewal = loop {
            match self.client.renew(&grant.lease).await {
                Ok(renewal) => break renewal,
                Err(error) if case.now().since(start) > grant.lease.ttl() / 2 => return Err(error.into()),
                Err(_) => tokio::task::yield_now().await,
            }
        };
        ensure!(
            renewal == Renewal::Renewed,
            "the backend",
            "a renewal that was cut can be repeated; it said {renewal:?}"
        );
        Ok(())
    }
}

pub(super) async fn a_reply_swallowed_after_the_commit_is_made_good_by_asking_again(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let (client, other) = (case.client_through(&proxy).await?, case.client().await?);
    let mut last: Option<FencingToken> = None;
    for then in [Then::Cut, Then::Silence] {
        case.note(format!("swallowed, and then {then:?}"));
        // So long that silence does not outlast it.
        let claim = Claim::new(case.name("n"), case.ttl_of(Duration::from_secs(30)));
        case.release_through(&client, &claim).await?;
        let trap = proxy.swallow_reply(b"", then);
        unheard(client.try_acquire(&claim).await)?;
        ensure!(trap.sprung().await, "the suite", "the server has answered");
        case.is_busy(&other, claim.name()).await?;
        let grant = case.take_through(&client, &claim, case.patience()).await?;
        ensure!(
            last < Some(grant.token),
            "the backend",
            "tokens rise; {} came after {last:?}",
            grant.token
        );
        same_again(&client, &claim, grant.token).await?;

        let trap = proxy.swallow_reply(b"", then);
        unheard(client.renew(&grant.lease).await)?;
        ensure!(trap.sprung().await, "the suite", "the server has answered");
        let again = case.take_through(&client, &claim, case.patience()).await?;
        ensure!(
            again.token == grant.token,
            "the backend",
            "a renewal draws no token; {} became {}",
            grant.token,
            again.token
        );

        let trap = proxy.swallow_reply(b"", then);
        unheard(client.release(&claim).await)?;
        ensure!(trap.sprung().await, "the suite", "the server has answered");
        case.is_free(&other, claim.name()).await?;
        let released = case.release_through(&client, &claim).await?;
        ensure!(
            released == Released::NotHeld,
            "the backend",
            "what was released is not held; it said {released:?}"
        );

        // Nobody asks again: the clean-up alone has to do.
        let given_up = Claim::new(claim.name().clone(), claim.ttl());
        let trap = proxy.swallow_reply(b"", then);
        unheard(client.try_acquire(&given_up).await)?;
        ensure!(trap.sprung().await, "the suite", "the server has answered");
        let released = case.release_through(&client, &given_up).await?;
        ensure!(
            released == Released::Released,
            "the backend",
            "what the server has granted is held until its release; it said {released:?}"
        );
        case.is_free(&other, given_up.name()).await?;
        last = Some(grant.token);
    }
    Ok(())
}

fn unheard<T: std::fmt::Debug>(answer: Result<T, LockError>) -> Outcome {
    match answer {
        Err(LockError::Unavailable { .. }) => Ok(()),
        other => fail!(
            "the backend",
            "a request without an answer is Unavailable; it said {other:?}"
        ),
    }
}

async fn same_again(client: &Link, claim: &Claim, token: FencingToken) -> Outcome {
    match client.try_acquire(claim).await? {
        Attempt::Granted(again) if again.token == token => Ok(()),
        other => fail!(
            "the backend",
            "who asks again gets the same token, {token}; it said {other:?}"
        ),
    }
}
