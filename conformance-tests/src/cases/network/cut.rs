//! Connections that end in the middle of something.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, FencingToken, Grant, LockError, Released, Renewal};
use tokio::task::JoinSet;

use crate::case::{Case, rises};
use crate::faults::{Direction, Proxy, Then, Trap};
use crate::link::Link;
use crate::outcome::{Outcome, ensure, fail};

/// How many are cut at the same time; most of a cut is waiting for the next connection.
const LANES: usize = 4;

/// How often a request is cut. A longer one is cut at as many places, spread over it, and at others in each run.
const MOST_CUTS: usize = 256;

/// What is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Acquire,
    Renew,
    Release,
}

pub(super) async fn cut_after_any_byte(case: &Arc<Case>, request: Request) -> Outcome {
    let (mut lanes, mut length) = (Vec::new(), usize::MAX);
    for number in 0..LANES {
        let lane = Lane::new(case, number).await?;
        // What a connection sends beside the request makes it look longer. All lanes must agree on where to cut.
        length = length.min(lane.length(case, request).await?);
        lanes.push(lane);
    }
    let mut running = JoinSet::new();
    for lane in lanes {
        let case = Arc::clone(case);
        running.spawn(async move { lane.run(&case, request, length).await });
    }
    let mut cuts = 0;
    while let Some(ended) = running.join_next().await {
        cuts += ended??;
    }
    let wanted = length / stride(length);
    ensure!(
        cuts >= wanted / 4 * 3,
        "the suite",
        "a request of {length} bytes is cut at about {wanted} places; it was at {cuts}"
    );
    case.remark(format!(
        "{request:?} was cut {cuts} times, at places all over its {length} bytes"
    ));
    Ok(())
}

/// How many bytes there are between two cuts.
fn stride(length: usize) -> usize {
    (length + 1).div_ceil(MOST_CUTS)
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

    /// How often a request of that length was cut.
    async fn run(&self, case: &Case, request: Request, length: usize) -> Outcome<usize> {
        let stride = stride(length);
        let first = self.number * stride + fastrand::usize(..stride);
        let (mut last, mut cuts) = (None, 0);
        for cut in (first..=length).step_by(LANES * stride) {
            cuts += usize::from(self.cut(case, request, cut, &mut last).await?);
        }
        Ok(cuts)
    }

    /// How many bytes the request has when nothing goes wrong.
    async fn length(&self, case: &Case, request: Request) -> Outcome<usize> {
        let mut shortest = u64::MAX;
        // The first one may be longer, since whatever can be prepared is prepared then; so may one that is not the only one.
        for _ in 0..4 {
            let claim = case.claim(&self.name);
            let sent = || self.proxy.counts().bytes_to_server;
            let mut before = sent();
            let grant = case.take_through(&self.client, &claim, case.hang_limit()).await?;
            let mut length = sent() - before;
            if request != Request::Acquire {
                before = sent();
                self.renew_through(case, &grant).await?;
                length = sent() - before;
                before = sent();
            }
            case.release_through(&self.client, &claim).await?;
            if request == Request::Release {
                length = sent() - before;
            }
            shortest = shortest.min(length);
        }
        usize::try_from(shortest).map_err(|error| std::io::Error::other(error).into())
    }

    /// One request ends after that many bytes; then its owner lets go, and the next one comes. False if it was over by then: it
    /// need not always be as long as the one that was measured.
    async fn cut(&self, case: &Case, request: Request, bytes: usize, last: &mut Option<FencingToken>) -> Outcome<bool> {
        // What is held has time for a new connection and another try.
        let claim = match request {
            Request::Acquire => case.claim(&self.name),
            Request::Renew | Request::Release => {
                Claim::new(case.name(&self.name), case.ttl_of(Duration::from_secs(10))).with_own_lease()
            }
        };
        let held = match request {
            // The connection is made before, so that it is the request that is cut.
            Request::Acquire => self.nothing(case).await.map(|()| None)?,
            Request::Renew | Request::Release => {
                Some(case.take_through(&self.client, &claim, case.hang_limit()).await?)
            }
        };
        let trap = self.proxy.cut_after(Direction::ToServer, bytes);
        let answer = match (request, &held) {
            (Request::Renew, Some(grant)) => self.client.renew(&grant.lease).await.map(drop),
            (Request::Release, _) => self.client.release(&claim, None).await.map(drop),
            _ => self.client.try_acquire(&claim).await.map(drop),
        };
        if let Err(error) = &answer {
            ensure!(
                error.is_retryable(),
                "the backend",
                "a cut connection is worth another try; it said {error:?}"
            );
        }
        let was_cut = trap.has_sprung();
        drop(trap);
        if let (Request::Renew, Some(grant), true) = (request, &held, was_cut) {
            self.still_kept(case, grant).await?;
        }
        case.release_through(&self.client, &claim).await?;
        // The cut request may arrive even later than that, and then ends by itself.
        let next = case.claim(&self.name);
        let limit = case.steady_ttl() + case.hang_limit();
        let (grant, _) = case.take_within(&self.other, &next, limit).await?;
        let before = held.map(|grant| grant.token).max(*last);
        rises(before, grant.token)?;
        *last = Some(grant.token);
        self.other.release(&next, None).await?;
        Ok(was_cut)
    }

    async fn nothing(&self, case: &Case) -> Outcome {
        let nothing = case.claim(&self.name);
        case.release_through(&self.client, &nothing).await.map(drop)
    }

    /// Renews, across a fault: failures are waited out for a while.
    async fn renew_through(&self, case: &Case, grant: &Grant) -> Outcome<Renewal> {
        let start = case.now();
        loop {
            match self.client.renew(&grant.lease).await {
                Ok(renewal) => return Ok(renewal),
                Err(error) if case.now().since(start) > grant.lease.ttl() / 2 => return Err(error.into()),
                Err(_) => tokio::task::yield_now().await,
            }
        }
    }

    /// Whether the renewal was done or not, the lock is still its holder's, unless it ended with the connection.
    async fn still_kept(&self, case: &Case, grant: &Grant) -> Outcome {
        let renewal = self.renew_through(case, grant).await?;
        let expected = if case.leases_are_connections() {
            Renewal::NotHeld
        } else {
            Renewal::Renewed
        };
        ensure!(
            renewal == expected,
            "the backend",
            "a renewal that was cut can be repeated, and is {expected:?}; it said {renewal:?}"
        );
        Ok(())
    }
}

pub(super) async fn a_reply_swallowed_after_the_commit_is_made_good_by_asking_again(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let (client, other) = (case.client_through(&proxy).await?, case.client().await?);
    if case.leases_are_connections() {
        return gone_with_its_connection(&case, &proxy, &client, &other).await;
    }
    let mut last: Option<FencingToken> = None;
    for then in [Then::Cut, Then::Silence] {
        case.note(format!("swallowed, and then {then:?}"));
        // So long that silence does not outlast it, and that no request for another reason than the lock's comes before it is over.
        let claim = Claim::new(case.name("n"), case.ttl_of(Duration::from_secs(10 * 60)));
        prepare(&case, &client, claim.ttl()).await?;
        let trap = case.swallow_reply(&proxy, then).await;
        let repeated = unheard_or_repeated(client.try_acquire(&claim).await)?;
        answered(&case, &trap).await?;
        case.is_busy(&other, claim.name()).await?;
        let grant = case.take_through(&client, &claim, case.hang_limit()).await?;
        granted_to_itself(repeated, Some(grant.token))?;
        rises(last, grant.token)?;
        same_again(&client, &claim, grant.token).await?;

        let trap = case.swallow_reply(&proxy, then).await;
        let repeated = unheard_or_repeated(client.renew(&grant.lease).await)?;
        ensure!(
            matches!(repeated, None | Some(Renewal::Renewed)),
            "the backend",
            "a renewal whose reply was lost can be repeated, and renews; it said {repeated:?}"
        );
        answered(&case, &trap).await?;
        let again = case.take_through(&client, &claim, case.hang_limit()).await?;
        ensure!(
            again.token == grant.token,
            "the backend",
            "a renewal draws no token; {} became {}",
            grant.token,
            again.token
        );

        let trap = case.swallow_reply(&proxy, then).await;
        let repeated = unheard_or_repeated(client.release(&claim, None).await)?;
        answered(&case, &trap).await?;
        not_told_as_a_loss(repeated)?;
        case.is_free(&other, claim.name()).await?;
        let released = case.release_through(&client, &claim).await?;
        ensure!(
            released == Released::NotHeld,
            "the backend",
            "what was released is not held; it said {released:?}"
        );

        // It is not asked again: the clean-up alone has to do.
        let given_up = Claim::new(claim.name().clone(), claim.ttl());
        prepare(&case, &client, claim.ttl()).await?;
        let trap = case.swallow_reply(&proxy, then).await;
        granted_to_itself(unheard_or_repeated(client.try_acquire(&given_up).await)?, None)?;
        answered(&case, &trap).await?;
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

/// What was granted ends with the connection that the reply was lost on. Another request gets something new.
async fn gone_with_its_connection(case: &Case, proxy: &Proxy, client: &Link, other: &Link) -> Outcome {
    let mut last: Option<FencingToken> = None;
    for then in [Then::Cut, Then::Silence] {
        for request in [Request::Acquire, Request::Renew, Request::Release] {
            case.note(format!("{request:?} is swallowed, and then {then:?}"));
            // So long that it is not over before the client gives up: it would know then that it holds nothing.
            let ttl = case.ttl_of(Duration::from_secs(10));
            let claim = Claim::new(case.name("n"), ttl).with_own_lease();
            // The connection is made before, so that it is the reply that is lost.
            let nothing = Claim::new(case.name("nothing"), ttl).with_own_lease();
            case.take_through(client, &nothing, case.hang_limit()).await?;
            case.release_through(client, &nothing).await?;
            let held = match request {
                Request::Acquire => None,
                Request::Renew | Request::Release => Some(case.take_through(client, &claim, case.hang_limit()).await?),
            };
            let trap = case.swallow_reply(proxy, then).await;
            let answer = match (request, &held) {
                (Request::Renew, Some(grant)) => client.renew(&grant.lease).await.map(drop),
                (Request::Release, _) => client.release(&claim, None).await.map(drop),
                _ => client.try_acquire(&claim).await.map(drop),
            };
            answered(case, &trap).await?;
            // Of an end it is told, and can ask again by itself.
            if then == Then::Silence || answer.is_err() {
                unheard(answer)?;
            }
            case.release_through(client, &claim).await?;
            let next = case.claim("n");
            let (grant, _) = case.take_within(other, &next, ttl + case.hang_limit()).await?;
            let before = held.map(|grant| grant.token).max(last);
            rises(before, grant.token)?;
            last = Some(grant.token);
            other.release(&next, None).await?;
        }
    }
    Ok(())
}

/// Waits until the reply came that is lost.
async fn answered(case: &Case, trap: &Trap) -> Outcome {
    let sprung = case.soon("the server answers", trap.sprung()).await?;
    ensure!(sprung, "the suite", "the server has answered");
    Ok(())
}

/// Has the client do what it does once for a connection or a ttl, so that the next request is that of its lock alone.
async fn prepare(case: &Case, client: &Link, ttl: Duration) -> Outcome {
    let other = Claim::new(case.name("another"), ttl);
    case.take_through(client, &other, case.hang_limit()).await?;
    case.release_through(client, &other).await.map(drop)
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

/// A backend may repeat a request by itself, on another connection: then this is what that came to.
fn unheard_or_repeated<T: std::fmt::Debug>(answer: Result<T, LockError>) -> Outcome<Option<T>> {
    match answer {
        Ok(repeated) => Ok(Some(repeated)),
        failed => unheard(failed).map(|()| None),
    }
}

/// A backend that repeats an acquisition by itself is granted what it was granted before.
fn granted_to_itself(repeated: Option<Attempt>, token: Option<FencingToken>) -> Outcome {
    match repeated {
        None => Ok(()),
        Some(Attempt::Granted(grant)) if token.is_none_or(|token| token == grant.token) => Ok(()),
        Some(other) => fail!(
            "the backend",
            "an acquisition that is repeated is granted with the same token, {token:?}; it said {other:?}"
        ),
    }
}

/// A backend that repeats a release by itself finds nothing that it could release.
fn not_told_as_a_loss(repeated: Option<Released>) -> Outcome {
    ensure!(
        repeated != Some(Released::NotHeld),
        "the backend",
        "a release whose reply was lost is Unavailable, or Released if that can be proven; it said that the lock was not held, as if it had \
         been lost"
    );
    Ok(())
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
