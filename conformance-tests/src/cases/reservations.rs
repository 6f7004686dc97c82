//! Names that stay taken for a time, whatever becomes of their holder.

use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use lock_core::{DistributedLock, LockName, LossReason, Released, Renewal, Stamp};

use tokio::task::JoinSet;

use super::{Entry, cases};
use crate::case::{Case, rises};
use crate::link::Link;
use crate::outcome::{Outcome, Stop, ensure};

pub(crate) const CASES: &[Entry] = cases![
    a_name_that_is_released_early_stays_taken_for_the_rest_of_its_time,
    those_who_wait_are_served_when_the_reservation_ends,
    a_name_stays_taken_when_its_client_is_shut_down,
    a_name_stays_taken_when_its_process_is_killed,
    a_name_stays_taken_when_its_holder_hangs_and_renewals_do_not_shorten_that,
    the_wall_clock_of_a_holder_changes_no_reservation,
    a_claim_that_is_released_for_good_reserves_nothing,
    a_reservation_is_shown_and_ends_by_force,
];

impl Case {
    fn needs_reservations(&self) -> Outcome {
        self.needs(self.capabilities().reservations, "the backend has no reservations")
    }

    /// How long names are reserved: longer than the ttl of what does not renew.
    fn reservation(&self) -> Duration {
        self.ttl_of(2 * self.ttl())
    }

    /// The name must be taken until `length` after `since`, and free soon after.
    async fn is_taken_for(&self, client: &Link, name: &str, since: Stamp, length: Duration) -> Outcome {
        let name = self.name(name);
        self.is_busy(client, &name).await?;
        let left = (since + length).since(self.now());
        let free = self.is_free_within(client, &name, left + self.hang_limit()).await?;
        ensure!(
            free.since(since) >= length,
            "the backend",
            "{name:?} stays taken for {length:?}; it was free after {:?}",
            free.since(since)
        );
        Ok(())
    }
}

pub(crate) async fn a_name_that_is_released_early_stays_taken_for_the_rest_of_its_time(case: Arc<Case>) -> Outcome {
    case.needs_reservations()?;
    let (party, other) = (case.party().await?, case.client().await?);
    let length = case.reservation();
    let mut last = None;
    for dropped in [false, true] {
        let asked = case.now();
        let guard = party.locks.lock("job").at_least(length).no_wait().await?;
        rises(last, guard.token())?;
        last = Some(guard.token());
        if dropped {
            drop(guard);
            party.locks.drain().await;
        } else {
            guard.release().await?;
        }
        let again = party.locks.try_lock("job").await?;
        ensure!(
            again.is_none(),
            "the backend",
            "the name is refused to its last holder too; it gave {again:?}"
        );
        case.is_taken_for(&other, "job", asked, length).await?;
    }
    // Held for longer than it was reserved: free with the release.
    let guard = party.locks.lock("short").at_least(Duration::from_millis(1)).await?;
    let start = case.now();
    case.eventually("the clock", "a millisecond passes", || {
        case.now().since(start) > Duration::from_millis(1)
    })
    .await?;
    guard.release().await?;
    case.is_free(&other, &case.name("short")).await
}

pub(crate) async fn those_who_wait_are_served_when_the_reservation_ends(case: Arc<Case>) -> Outcome {
    case.needs_reservations()?;
    let (here, there) = (case.party().await?, case.party().await?);
    let length = case.reservation();
    let asked = case.now();
    let guard = here.locks.lock("job").at_least(length).await?;
    let first = guard.token();
    let mut waits = JoinSet::new();
    for party in [&here, &there] {
        let (request, case) = (party.locks.lock("job").wait_for(case.hang_limit()), Arc::clone(&case));
        waits.spawn(async move {
            let granted = request.await?;
            let (token, at) = (granted.token(), case.now());
            granted.release().await.map(|_| (token, at))
        });
    }
    case.eventually("the clients", "both wait", || {
        [&here, &there].iter().all(|party| party.locks.stats().waiting == 1)
    })
    .await?;
    guard.release().await?;
    let limit = length + 2 * case.hang_limit();
    while let Some(granted) = case
        .within(limit, "each waiter gets its turn", waits.join_next())
        .await?
    {
        let (token, at) = granted??;
        ensure!(
            at.since(asked) >= length && token > first,
            "the backend",
            "no waiter is served before {length:?} have passed; one was after {:?}, token {token:?}",
            at.since(asked)
        );
    }
    Ok(())
}

pub(crate) async fn a_name_stays_taken_when_its_client_is_shut_down(case: Arc<Case>) -> Outcome {
    case.needs_reservations()?;
    let (party, other) = (case.party().await?, case.client().await?);
    let length = case.reservation();
    let asked = case.now();
    let guard = party.locks.lock("job").at_least(length).await?;
    party.locks.shutdown().await?;
    let told = case
        .soon("the guard is lost with its client", guard.lost().into_future())
        .await?;
    ensure!(
        told == LossReason::Shutdown,
        "the client",
        "the guard is lost with its client; it said {told:?}"
    );
    case.is_taken_for(&other, "job", asked, length).await
}

pub(crate) async fn a_name_stays_taken_when_its_process_is_killed(case: Arc<Case>) -> Outcome {
    case.needs_reservations()?;
    let (mut child, other) = (case.child().await?, case.client().await?);
    let length = case.reservation();
    let asked = case.now();
    let first = child.reserve("job", case.ttl_of(length * 3 / 4), length).await?;
    child.kill().await?;
    case.is_taken_for(&other, "job", asked, length).await?;
    let next = case.take(&other, &case.brief_claim("job")).await?;
    rises(first, next.token)?;
    other.release(&next.claim, None).await?;
    Ok(())
}

pub(crate) async fn a_name_stays_taken_when_its_holder_hangs_and_renewals_do_not_shorten_that(
    case: Arc<Case>,
) -> Outcome {
    case.needs_reservations()?;
    let (holder, other) = (case.client().await?, case.client().await?);
    let length = case.reservation() + case.ttl();
    let claim = case.brief_claim("job").with_at_least(length);
    let grant = case.take(&holder, &claim).await?;
    let asked = case.now();
    holder.reserve(&claim, length).await?;
    let renewed = holder.renew(&grant.lease).await?;
    ensure!(
        renewed == Renewal::Renewed,
        "the backend",
        "what is reserved is held and can be renewed; it said {renewed:?}"
    );
    // From here on nothing is heard of it.
    case.is_taken_for(&other, "job", asked, length).await
}

#[cfg(all(unix, feature = "faults"))]
pub(crate) async fn the_wall_clock_of_a_holder_changes_no_reservation(case: Arc<Case>) -> Outcome {
    use crate::faults::WallClock;

    const HOUR: i32 = 3600;
    case.needs_reservations()?;
    case.needs_processes()?;
    let clock = WallClock::new().map_err(|error| Stop::not_applicable(error.to_string()))?;
    let (other, length) = (case.client().await?, case.reservation());
    // Where the clock stands at the grant, and at the release.
    for steps in [[-HOUR, HOUR], [HOUR, -HOUR], [HOUR, HOUR]] {
        clock.set(steps[0])?;
        let mut child = case.child_with_clock(&clock).await?;
        let asked = case.now();
        child.reserve("job", case.ttl_of(length * 3 / 4), length).await?;
        clock.set(steps[1])?;
        child.release("job").await?;
        case.is_taken_for(&other, "job", asked, length).await?;
        child.end(false).await?;
    }
    Ok(())
}

#[cfg(not(all(unix, feature = "faults")))]
pub(crate) async fn the_wall_clock_of_a_holder_changes_no_reservation(_: Arc<Case>) -> Outcome {
    Err(Stop::not_applicable("the suite was built without its feature `faults`"))
}

pub(crate) async fn a_claim_that_is_released_for_good_reserves_nothing(case: Arc<Case>) -> Outcome {
    case.needs_reservations()?;
    let (client, other) = (case.client().await?, case.client().await?);
    let (name, length) = (case.name("job"), case.steady_ttl());
    let claim = case.claim("job").with_at_least(length);
    case.take(&client, &claim).await?;
    client.reserve(&claim, length).await?;
    let released = client.release(&claim, None).await?;
    ensure!(
        released == Released::Released,
        "the backend",
        "it was held; it said {released:?}"
    );
    case.is_free(&other, &name).await?;
    // Late requests of the same claim.
    let late = client.reserve(&claim, length).await?;
    ensure!(
        late == Renewal::NotHeld,
        "the backend",
        "a released claim reserves nothing; it said {late:?}"
    );
    case.is_free(&other, &name).await?;
    let successor = case.take(&other, &case.claim("job")).await?;
    let late = (
        client.reserve(&claim, length).await?,
        client.release(&claim, Some(length)).await?,
    );
    ensure!(
        late == (Renewal::NotHeld, Released::NotHeld),
        "the backend",
        "a claim that lost its name reserves nothing; it said {late:?}"
    );
    other.release(&successor.claim, None).await?;
    case.is_free(&client, &name).await
}

pub(crate) async fn a_reservation_is_shown_and_ends_by_force(case: Arc<Case>) -> Outcome {
    case.needs_reservations()?;
    let capabilities = case.capabilities().clone();
    case.needs(
        capabilities.holder && capabilities.list && capabilities.force_release,
        "the backend cannot inspect locks",
    )?;
    let (party, other) = (case.party().await?, case.client().await?);
    let (name, length) = (case.name("job"), case.ttl_of(Duration::from_secs(60)));
    let guard = party.locks.lock("job").label("nightly").at_least(length).await?;
    is_shown(&other, &name, false).await?;
    guard.release().await?;
    is_shown(&other, &name, true).await?;
    let forced = other.force_release(&name).await?;
    ensure!(
        !forced.is_empty(),
        "the backend",
        "a forced release tells what was reserved; it told of nothing"
    );
    case.is_free(&other, &name).await
}

/// The name is shown with its label, as held or as reserved.
async fn is_shown(client: &Link, name: &LockName, reserved: bool) -> Outcome {
    let shown = [client.holders(name).await?.pop(), client.list("job").await?.pop()];
    for holder in shown {
        let right = holder
            .as_ref()
            .is_some_and(|holder| holder.is_reserved == reserved && holder.label.as_deref() == Some("nightly"));
        ensure!(
            right,
            "the backend",
            "it shows {name:?} with its label, and reserved: {reserved}; it shows {holder:?}"
        );
    }
    Ok(())
}
