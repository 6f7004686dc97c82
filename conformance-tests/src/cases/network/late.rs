//! Requests and replies that arrive late.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{Claim, DistributedLock, Renew, Renewal};

use crate::case::{Case, is_over, renews};
use crate::faults::{Direction, Held, Proxy, Traffic};
use crate::link::Link;
use crate::outcome::{Outcome, ensure};

pub(super) async fn an_acquisition_delivered_after_its_clean_up_is_gone_after_a_ttl(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let (client, other) = (case.client_through(&proxy).await?, case.client().await?);
    let kept = case.claim("kept");
    for round in 0..2 {
        // The client goes on, and keeps another lock of the same ttl: nothing may hide behind its end, or live on its lease.
        let keeper = case.party_through(&proxy).await?;
        let guard = keeper.locks.lock(kept.name().clone()).ttl(case.ttl()).await?;
        let claim = Claim::new(case.name("n"), case.ttl());
        case.release_through(&client, &claim).await?;
        let held = case.hold(&proxy);
        let asking = given_up(&case, &client, &held, claim.clone(), async |client, claim| {
            client.try_acquire(&claim).await.map(drop)
        });
        asking.await?;
        case.release_through(&client, &claim).await?;
        if round == 1 {
            // So late that the claim's time is over.
            tokio::time::sleep(case.ttl()).await;
        }
        deliver(&case, &proxy, held).await;
        // Everything of it has ended by then, whether somebody looks or not.
        tokio::time::sleep(case.ttl()).await;
        case.is_free_within(&other, claim.name(), case.hang_limit()).await?;
        guard.release().await?;
    }
    Ok(())
}

pub(super) async fn a_renewal_delivered_after_its_clean_up_brings_nothing_back(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let (client, other) = (case.client_through(&proxy).await?, case.client().await?);
    let claim = case.claim("n");
    let lease = case.take(&client, &claim).await?.lease;
    let held = case.hold(&proxy);
    let renewed = lease.clone();
    given_up(&case, &client, &held, claim.clone(), async move |client, _| {
        client.renew(&renewed).await.map(drop)
    })
    .await?;
    case.release_through(&client, &claim).await?;
    case.is_free_within(&other, claim.name(), case.steady_ttl() + case.hang_limit())
        .await?;
    deliver(&case, &proxy, held).await;
    case.is_free(&other, claim.name()).await?;
    renews(&client, &lease, Renewal::NotHeld, "what was released is not renewed").await?;
    Ok(())
}

pub(super) async fn a_release_delivered_after_its_clean_up_spares_the_successor(case: Arc<Case>) -> Outcome {
    let proxy = case.proxy().await?;
    let (client, other) = (case.client_through(&proxy).await?, case.client().await?);
    let claim = case.claim("n");
    case.take(&client, &claim).await?;
    let held = case.hold(&proxy);
    given_up(&case, &client, &held, claim.clone(), async |client, claim| {
        client.release(&claim, None).await.map(drop)
    })
    .await?;
    case.release_through(&client, &claim).await?;
    // A successor of the same client: it must be the owner that is looked at.
    let next = Claim::new(case.name("n"), case.ttl_of(Duration::from_secs(30)));
    case.take_through(&client, &next, case.steady_ttl() + case.hang_limit())
        .await?;
    deliver(&case, &proxy, held).await;
    case.is_busy(&other, next.name()).await?;
    case.release_through(&client, &next).await?;
    Ok(())
}

/// Asks, and gives up when the request is held back.
async fn given_up<F>(
    case: &Case,
    client: &Arc<Link>,
    held: &Held,
    claim: Claim,
    call: impl FnOnce(Arc<Link>, Claim) -> F,
) -> Outcome
where
    F: Future<Output = Result<(), lock_core::LockError>> + Send + 'static,
{
    let asking = tokio::spawn(call(Arc::clone(client), claim));
    case.soon("a request is sent", held.caught()).await?;
    asking.abort();
    // It may have ended before: then it had an error.
    let _ = asking.await;
    Ok(())
}

/// Lets the request through, and returns when the server has it, as far as can be seen from here: when the connection
/// that it came by has ended.
async fn deliver(case: &Case, proxy: &Proxy, held: Held) {
    let open = proxy.counts().open;
    case.note("a request that was held back is delivered");
    held.deliver();
    let ended = proxy.counted(|counts| counts.open < open);
    let _ = tokio::time::timeout(Duration::from_secs(1), ended).await;
}

pub(super) async fn believed_in_time(case: &Case, direction: Direction) -> Outcome {
    let proxy = case.proxy().await?;
    let (party, other) = (case.party_through(&proxy).await?, case.client().await?);
    // A connection that has to be made first takes several times that.
    let ttl = case.steady_ttl();
    let delay = ttl / 8;
    for _ in 0..2 {
        party.locks.lock("n").await?.release().await?;
        proxy.set(direction, Traffic::Delayed(delay));
        let guard = party.locks.lock("n").ttl(ttl).renew(Renew::Never).await?;
        let believed = case.now() + guard.remaining();
        // Nothing that the holder does may free it.
        proxy.set(Direction::Both, Traffic::Lost);
        let left = believed.since(case.now());
        ensure!(
            left <= guard.ttl() - delay,
            "the client",
            "{delay:?} on the way leave at most {:?}; they left {left:?}",
            guard.ttl() - delay
        );
        let next = case.claim("n");
        let (_, at) = case
            .take_within(&other, &next, guard.ttl() + delay + case.hang_limit())
            .await?;
        is_over(&guard)?;
        case.margin(believed, at)?;
        proxy.heal().await;
        other.release(&next, None).await?;
        case.lock_through(&party.locks, "n", case.steady_ttl())
            .await?
            .release()
            .await?;
    }
    Ok(())
}
