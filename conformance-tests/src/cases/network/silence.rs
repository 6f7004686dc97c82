//! Connections that nothing comes out of any more, without an end that anyone is told of.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Claim, DistributedLock, LockError, Wait};
use tokio::task::JoinSet;

use crate::case::Case;
use crate::faults::{Direction, Traffic};
use crate::link::Link;
use crate::outcome::{Outcome, ensure, fail};

/// No byte, no FIN, no RST: only a limit of the client's own can end its calls.
pub(super) async fn every_call_ends(case: &Arc<Case>, direction: Direction) -> Outcome {
    let proxy = case.proxy().await?;
    let client = case.client_through(&proxy).await?;
    let op_timeout = client.capabilities().op_timeout;
    let limit = op_timeout + case.hang_limit();
    // None of it ends by itself while the calls last; what ends only with its lease is not waited for longer than that.
    let ttl = case.ttl_of(2 * op_timeout);
    let claims = ["held", "released", "tried", "awaited"].map(|name| Claim::new(case.name(name), ttl).with_own_lease());
    let [held, released, tried, awaited] = &claims;
    let lease = case.take(&client, held).await?.lease;
    case.take(&client, released).await?;

    proxy.set(direction, Traffic::Lost);
    case.note(format!("lost: {direction:?}"));
    let mut calls = JoinSet::new();
    let mut call = |what: &'static str, call: Call| {
        let case = Arc::clone(case);
        calls.spawn(async move {
            let answer = case.within(limit, what, call).await?;
            ensure!(
                matches!(
                    answer,
                    Err(LockError::Unavailable { .. } | LockError::NotSupported { .. })
                ),
                "the backend",
                "{what} into silence is Unavailable; it said {answer:?}"
            );
            Outcome::Ok(())
        });
    };
    call(
        "try_acquire",
        of(&client, tried, async |c, claim| c.try_acquire(&claim).await.map(drop)),
    );
    call(
        "acquire",
        of(&client, awaited, async |c, claim| {
            c.acquire(&claim, Wait::until(None)).await.map(drop)
        }),
    );
    call(
        "release",
        of(&client, released, async |c, claim| {
            c.release(&claim, None).await.map(drop)
        }),
    );
    call(
        "holders",
        of(&client, held, async |c, claim| c.holders(claim.name()).await.map(drop)),
    );
    call("list", of(&client, held, async |c, _| c.list("").await.map(drop)));
    call(
        "force_release",
        of(&client, tried, async |c, claim| {
            c.force_release(claim.name()).await.map(drop)
        }),
    );
    call(
        "renew",
        of(&client, held, async move |c, _| c.renew(&lease).await.map(drop)),
    );
    while let Some(ended) = calls.join_next().await {
        ended??;
    }

    proxy.heal().await;
    let healed = case.now();
    let again = case.claim("again");
    case.take_through(&client, &again, 2 * limit).await?;
    case.note(format!("works again {:?} after the healing", case.now().since(healed)));
    for claim in claims.iter().chain([&again]) {
        case.release_through(&client, claim).await?;
    }
    Ok(())
}

type Call = std::pin::Pin<Box<dyn Future<Output = Result<(), LockError>> + Send>>;

fn of<F>(client: &Arc<Link>, claim: &Claim, call: impl FnOnce(Arc<Link>, Claim) -> F) -> Call
where
    F: Future<Output = Result<(), LockError>> + Send + 'static,
{
    Box::pin(call(Arc::clone(client), claim.clone()))
}

pub(super) async fn connecting_into_silence_ends_in_time(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let limit = case.connect_through(&proxy).await?.capabilities().op_timeout + case.hang_limit();
    for direction in [Direction::Both, Direction::ToServer, Direction::ToClient] {
        proxy.set(direction, Traffic::Lost);
        match case.within(limit, "connecting", case.connect_through(&proxy)).await? {
            Err(LockError::Unavailable { .. }) => {}
            other => fail!(
                "the backend",
                "connecting into silence is Unavailable; it said {other:?}"
            ),
        }
        proxy.heal().await;
    }
    case.connect_through(&proxy).await?.close().await?;
    Ok(())
}

/// The holder is cut off at different points between two of its renewals, and works again once it is not.
pub(super) async fn notices(case: &Case, direction: Direction) -> Outcome {
    let proxy = case.proxy().await?;
    let (party, other) = (case.party_through(&proxy).await?, case.client().await?);
    let mut smallest = Duration::MAX;
    for share in 0..3 {
        let guard = case.lock_through(&party.locks, "n", case.ttl()).await?;
        // Somewhere between two renewals.
        tokio::time::sleep(case.ttl() * share / 8).await;
        proxy.set(direction, Traffic::Lost);
        let next = case.claim("n");
        let look = async {
            let mut believed = case.now();
            while guard.is_held() {
                believed = believed.max(case.now() + guard.remaining());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            believed
        };
        // The server may have been told once more at the very end, and then keeps it for another ttl.
        let limit = 2 * guard.ttl() + case.hang_limit();
        let (believed, taken) = tokio::join!(look, case.take_within(&other, &next, limit));
        let (_, at) = taken?;
        // Where requests arrive, it may be the holder's own release that frees the lock, and no measure of its lease.
        if direction == Direction::ToClient {
            case.in_turn(believed, at)?;
        } else {
            case.margin(believed, at)?;
        }
        smallest = smallest.min(at.since(believed));
        proxy.heal().await;
        other.release(&next, None).await?;
        let again = case.lock_through(&party.locks, "n", case.steady_ttl()).await?;
        ensure!(!guard.is_held(), "the guard", "what is lost stays lost");
        again.release().await?;
    }
    case.remark(format!(
        "a holder cut off ({direction:?}) knew {smallest:.1?} or more before the next grant"
    ));
    Ok(())
}

pub(super) async fn a_server_that_is_gone_is_unavailable_and_is_found_again(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let party = case.party_through(&proxy).await?;
    let limit = party.link.capabilities().op_timeout + case.hang_limit();
    party.locks.lock("n").await?.release().await?;
    proxy.refuse().await;
    proxy.cut();
    for _ in 0..3 {
        let asked = party.locks.lock("n").no_wait().into_future();
        match case.within(limit, "a server that is gone is noticed", asked).await? {
            Err(error @ LockError::Unavailable { .. }) => ensure!(
                error.is_retryable(),
                "the client",
                "a server that is gone may come back; it said {error}"
            ),
            other => fail!("the client", "a server that is gone is Unavailable; it said {other:?}"),
        }
    }
    proxy.heal().await;
    let again = case.lock_through(&party.locks, "n", case.steady_ttl());
    case.within(2 * limit, "a server that is back is found", again)
        .await??
        .release()
        .await?;
    Ok(())
}

/// The first question of a wait fails, and many more. Others have no time to wait, and are told meanwhile.
pub(super) async fn a_wait_goes_on_until_the_server_is_there(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let party = case.party_through(&proxy).await?;
    let limit = 2 * party.link.capabilities().op_timeout + case.hang_limit();
    proxy.refuse().await;
    proxy.cut();
    let wait = || {
        let request = party.locks.lock("n").ttl(case.steady_ttl()).wait_for(2 * limit);
        // Each lets the next one have it.
        tokio::spawn(async move { request.await?.release().await })
    };
    let waits = [wait(), wait(), wait()];
    for request in [
        party.locks.lock("other").no_wait(),
        party.locks.lock("n"),
        party.locks.lock("third"),
    ] {
        match case
            .within(limit, "a server that is gone is noticed", request.into_future())
            .await?
        {
            Err(LockError::Unavailable { .. }) => {}
            other => fail!("the client", "a server that is gone is Unavailable; it said {other:?}"),
        }
    }
    ensure!(
        waits.iter().all(|wait| !wait.is_finished()),
        "the client",
        "what may pass is waited out for as long as the request may wait"
    );
    proxy.heal().await;
    for wait in waits {
        case.within(2 * limit, "a server that is there again is found", wait)
            .await???;
    }
    Ok(())
}
