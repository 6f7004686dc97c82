//! Names that several hold at once: shared locks here, semaphores beside them.

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, Grant, LockError, LockGuard, Mode, Renew};
use tokio::task::JoinSet;

use super::tokens::Rising;
use super::waiting::{waits, waits_after_busy};
use super::{Entry, cases, semaphores};
use crate::case::Case;
use crate::link::Link;
use crate::outcome::{Outcome, checked, ensure, fail};

pub(crate) const CASES: &[Entry] = cases![
    an_exclusive_lock_excludes_readers_and_writers_and_readers_admit_each_other,
    fifty_readers_of_several_clients_hold_at_once,
    a_reader_that_comes_after_a_waiting_writer_is_served_after_it,
    a_writer_among_a_stream_of_readers_gets_its_turns,
    semaphores::a_semaphore_has_no_permit_too_many_over_a_thousand_random_holds,
    semaphores::permits_of_holders_that_expire_come_back_within_a_ttl,
    semaphores::a_name_has_one_kind_while_it_is_held,
    tokens_rise_over_both_modes_in_the_order_of_grants,
    a_downgrade_lets_no_writer_in_between,
    the_loss_or_release_of_one_reader_leaves_the_others,
    semaphores::a_list_has_every_holder_with_its_mode,
    a_writer_that_gives_up_holds_no_reader_up,
    semaphores::a_waiter_gets_the_permit_of_a_holder_that_expires_before_others,
    the_resource_refuses_stale_holders_of_both_kinds_and_no_reader_for_another,
];

pub(crate) const NO_SHARES: &str = "the backend has no shared locks";
pub(crate) const NO_PERMITS: &str = "the backend has no semaphores";

impl Case {
    pub(super) fn needs_shares(&self) -> Outcome {
        self.needs(self.capabilities().shared, NO_SHARES)
    }

    pub(super) fn needs_permits(&self) -> Outcome {
        self.needs(self.capabilities().permits, NO_PERMITS)
    }

    /// A claim of the name `n` that outlasts every wait of a case.
    pub(super) fn claim_as(&self, mode: Mode) -> Claim {
        Claim::new(self.name("n"), self.kept_ttl()).with_mode(mode)
    }
}

/// The claim must be granted beside those that hold its name.
pub(super) async fn admitted(client: &Link, claim: &Claim, why: &str) -> Outcome<Grant> {
    checked();
    match client.try_acquire(claim).await? {
        Attempt::Granted(grant) => Ok(grant),
        other => fail!("the backend", "{why}; it said {other:?}"),
    }
}

/// A new claim in that mode must be busy.
async fn refused(case: &Case, client: &Link, mode: Mode, why: &str) -> Outcome {
    let claim = case.claim_as(mode);
    let attempt = client.try_acquire(&claim).await?;
    ensure!(
        matches!(attempt, Attempt::Busy(_)),
        "the backend",
        "{why}; it said {attempt:?}"
    );
    client.release(&claim, None).await?;
    Ok(())
}

pub(crate) async fn an_exclusive_lock_excludes_readers_and_writers_and_readers_admit_each_other(
    case: Arc<Case>,
) -> Outcome {
    case.needs_shares()?;
    let (first, second) = (case.client().await?, case.client().await?);
    let writer = case.claim_as(Mode::Exclusive);
    case.take(&first, &writer).await?;
    for client in [&first, &second] {
        refused(&case, client, Mode::Exclusive, "a writer excludes writers").await?;
        refused(&case, client, Mode::Shared, "a writer excludes readers").await?;
    }
    first.release(&writer, None).await?;
    let clients = [&first, &second, &first];
    let readers = clients.map(|_| case.claim_as(Mode::Shared));
    for (client, reader) in clients.iter().zip(&readers) {
        admitted(client, reader, "readers admit each other").await?;
    }
    for (client, reader) in clients.into_iter().zip(&readers) {
        refused(
            &case,
            &second,
            Mode::Exclusive,
            "each of several readers excludes writers",
        )
        .await?;
        client.release(reader, None).await?;
    }
    case.is_free(&second, writer.name()).await
}

pub(crate) async fn fifty_readers_of_several_clients_hold_at_once(case: Arc<Case>) -> Outcome {
    const CLIENTS: usize = 5;
    const READERS: usize = 50;
    case.needs_shares()?;
    let other = case.client().await?;
    let mut reading = JoinSet::new();
    for _ in 0..CLIENTS {
        let locks = case.party().await?.locks;
        for _ in 0..READERS / CLIENTS {
            reading.spawn(locks.lock("n").shared().wait_for(case.hang_limit()).into_future());
        }
    }
    let mut guards = Vec::new();
    while let Some(guard) = reading.join_next().await {
        guards.push(guard??);
    }
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    ensure!(
        held == READERS,
        "the client",
        "all {READERS} are held at once; {held} are"
    );
    let mut tokens: Vec<_> = guards.iter().map(LockGuard::token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    ensure!(tokens.len() == READERS, "the backend", "no token is given twice");
    while let Some(guard) = guards.pop() {
        if guards.len() % 10 == 0 {
            refused(
                &case,
                &other,
                Mode::Exclusive,
                "the last of many readers excludes writers",
            )
            .await?;
        }
        guard.release().await?;
    }
    case.is_free(&other, &case.name("n")).await
}

pub(crate) async fn a_reader_that_comes_after_a_waiting_writer_is_served_after_it(case: Arc<Case>) -> Outcome {
    const LATER: usize = 3;
    case.needs_shares()?;
    case.needs(
        case.capabilities().fair,
        "the backend promises no order among processes",
    )?;
    let unseen = "the harness does not show who is in line, so nobody knows who came first";
    let (reader, writer, other) = (
        case.party().await?.locks,
        case.party().await?.locks,
        case.client().await?,
    );
    let reading = reader.lock("n").shared().await?;
    let writing = tokio::spawn(writer.lock("n").into_future());
    case.needs(case.in_line("n", 1).await?, unseen)?;
    refused(&case, &other, Mode::Shared, "no reader passes a waiting writer").await?;
    let mut later = JoinSet::new();
    for place in 0..LATER {
        let locks = case.party().await?.locks;
        later.spawn(locks.lock("n").shared().into_future());
        case.in_line("n", place + 2).await?;
    }
    let token = reading.token();
    reading.release().await?;
    let written = case
        .soon("a writer that waits behind readers is served", writing)
        .await???;
    ensure!(
        written.token() > token,
        "the backend",
        "a later grant carries a higher token"
    );
    case.in_line("n", LATER).await?;
    let token = written.token();
    written.release().await?;
    // All of them at once.
    let mut guards = Vec::new();
    while let Some(guard) = case
        .soon("readers behind a writer are served together", later.join_next())
        .await?
    {
        guards.push(guard??);
    }
    ensure!(
        guards.iter().all(|guard| guard.is_held() && guard.token() > token),
        "the backend",
        "readers that came after a writer hold after it; it granted {guards:?} after {token}"
    );
    for guard in guards {
        guard.release().await?;
    }
    Ok(())
}

pub(crate) async fn a_writer_among_a_stream_of_readers_gets_its_turns(case: Arc<Case>) -> Outcome {
    const TURNS: usize = 5;
    case.needs_shares()?;
    let writer = case.party().await?.locks;
    let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut stream = JoinSet::new();
    for _ in 0..3 {
        let locks = case.party().await?.locks;
        for _ in 0..3 {
            let (locks, stop, reads) = (locks.clone(), Arc::clone(&stop), Arc::clone(&reads));
            stream.spawn(async move {
                while !stop.load(Ordering::SeqCst) {
                    let guard = locks.lock("n").shared().await?;
                    reads.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(1..5))).await;
                    guard.release().await?;
                }
                Outcome::Ok(())
            });
        }
    }
    let mut served = 0;
    for _ in 0..TURNS {
        let before = reads.load(Ordering::SeqCst);
        let goes_on = || reads.load(Ordering::SeqCst) > before;
        case.eventually("the backend", "the stream of readers goes on", goes_on)
            .await?;
        let Ok(guard) = writer.lock("n").wait_for(case.hang_limit()).await else {
            break;
        };
        served += 1;
        guard.release().await?;
    }
    stop.store(true, Ordering::SeqCst);
    while let Some(ended) = stream.join_next().await {
        ended??;
    }
    ensure!(
        served == TURNS,
        "the backend",
        "readers do not starve a writer; {} of them left it {served} of {TURNS} turns",
        reads.load(Ordering::SeqCst)
    );
    Ok(())
}

pub(crate) async fn tokens_rise_over_both_modes_in_the_order_of_grants(case: Arc<Case>) -> Outcome {
    case.needs_shares()?;
    let clients = [case.client().await?, case.client().await?];
    let mut rising = Rising::default();
    for turn in 0..8 {
        // Readers of both clients at once, then a writer of each.
        let readers = [0, 1, 1].map(|client| (&clients[client], case.claim_as(Mode::Shared)));
        for (client, reader) in &readers {
            rising.grant(&admitted(client, reader, "readers admit each other").await?)?;
        }
        for (client, reader) in &readers {
            (*client).release(reader, None).await?;
        }
        let (client, writer) = (&clients[turn % 2], case.claim_as(Mode::Exclusive));
        rising.grant(&case.take(client, &writer).await?)?;
        client.release(&writer, None).await?;
    }
    Ok(())
}

pub(crate) async fn a_downgrade_lets_no_writer_in_between(case: Arc<Case>) -> Outcome {
    case.needs_shares()?;
    let (holder, writer, other) = (case.party().await?, case.party().await?, case.client().await?);
    let guard = holder.locks.lock("n").await?;
    let token = guard.token();
    let writing = tokio::spawn(writer.locks.lock("n").into_future());
    waits(&case, &writer, 1).await?;
    let reading = case.soon("a downgrade ends", guard.downgrade()).await?;
    let reading = match reading {
        Ok(reading) if !writing.is_finished() => reading,
        other => fail!("the backend", "a downgrade lets no writer in; it ended with {other:?}"),
    };
    ensure!(
        reading.is_held() && reading.token() == token,
        "the backend",
        "a downgrade keeps the lock and its token {token}; there is {reading:?}"
    );
    refused(&case, &other, Mode::Exclusive, "a downgraded lock excludes writers").await?;
    reading.release().await?;
    let written = case.soon("the writer is served after the reader", writing).await???;
    written.release().await?;
    // By a claim that asks again, with other readers after it.
    let claim = case.claim_as(Mode::Exclusive);
    let granted = case.take(&other, &claim).await?;
    let claim = claim.with_mode(Mode::Shared);
    let again = admitted(&other, &claim, "a writer becomes a reader").await?;
    ensure!(
        again.token == granted.token,
        "the backend",
        "the same owner gets the same token again; it got {again:?} after {granted:?}"
    );
    let reader = case.claim_as(Mode::Shared);
    admitted(&holder.link, &reader, "a downgraded lock admits readers").await?;
    other.release(&claim, None).await?;
    holder.link.release(&reader, None).await?;
    case.is_free(&other, claim.name()).await
}

pub(crate) async fn the_loss_or_release_of_one_reader_leaves_the_others(case: Arc<Case>) -> Outcome {
    const LEFT: &str = "the end of one reader leaves the others";
    case.needs_shares()?;
    let (one, two, three) = (
        case.party().await?.locks,
        case.party().await?.locks,
        case.party().await?.locks,
    );
    let other = case.client().await?;
    let lost = one.lock("n").shared().ttl(case.ttl()).renew(Renew::Never).await?;
    let released = two.lock("n").shared().await?;
    let beside = two.lock("n").shared().await?;
    let kept = three.lock("n").shared().await?;
    let limit = case.ttl() + case.hang_limit();
    released.release().await?;
    refused(&case, &other, Mode::Exclusive, LEFT).await?;
    case.within(limit, "the loss is seen", lost.lost().wait()).await?;
    // The server has ended it, too, by then.
    tokio::time::sleep(case.ttl() / 2).await;
    refused(&case, &other, Mode::Exclusive, LEFT).await?;
    for guard in [&beside, &kept] {
        guard.renew_now().await?;
        ensure!(guard.is_held(), "the client", "{LEFT}; it ended {guard:?}");
    }
    two.shutdown().await?;
    refused(&case, &other, Mode::Exclusive, LEFT).await?;
    ensure!(kept.is_held(), "the client", "{LEFT}; it ended {kept:?}");
    kept.release().await?;
    case.is_free_within(&other, &case.name("n"), limit).await.map(drop)
}

pub(crate) async fn a_writer_that_gives_up_holds_no_reader_up(case: Arc<Case>) -> Outcome {
    case.needs_shares()?;
    let (holder, writer, reader) = (case.party().await?.locks, case.party().await?, case.party().await?);
    let held = holder.lock("n").shared().await?;
    for is_cancelled in [true, false] {
        let limit = if is_cancelled {
            case.hang_limit()
        } else {
            Duration::from_secs(2)
        };
        let before = writer.link.counts().waits();
        let writing = tokio::spawn(writer.locks.lock("n").wait_for(limit).into_future());
        waits_after_busy(&case, &writer, before).await?;
        let reading = tokio::spawn(reader.locks.lock("n").shared().into_future());
        waits(&case, &reader, 2).await?;
        if is_cancelled {
            writing.abort();
        } else {
            let busy = writing.await?;
            ensure!(
                busy.as_ref().is_err_and(LockError::is_busy),
                "the client",
                "a writer waits for the readers before it; it said {busy:?}"
            );
        }
        let guard = case
            .soon("a reader behind a writer that gave up is served", reading)
            .await???;
        guard.release().await?;
    }
    held.release().await?;
    Ok(())
}

pub(crate) async fn the_resource_refuses_stale_holders_of_both_kinds_and_no_reader_for_another(
    case: Arc<Case>,
) -> Outcome {
    case.needs_shares()?;
    let client = case.client().await?;
    let resource = &*case.resource().await?;
    let mut tokens = Vec::new();
    for modes in [
        &[Mode::Exclusive][..],
        &[Mode::Shared, Mode::Shared],
        &[Mode::Exclusive],
        &[Mode::Shared],
    ] {
        let claims: Vec<_> = modes.iter().map(|mode| case.claim_as(*mode)).collect();
        for claim in &claims {
            tokens.push(admitted(&client, claim, "a free name is granted").await?.token);
        }
        for claim in &claims {
            client.release(claim, None).await?;
        }
    }
    let [old_writer, old_reader, reader, writer, new_reader] = tokens[..] else {
        fail!("the suite", "there are five grants; {tokens:?}");
    };
    for (shared, token, accepted, why) in [
        (false, old_writer, true, "it admits the first writer"),
        (true, reader, true, "it admits a reader"),
        (true, old_reader, true, "it admits an older reader beside a newer one"),
        (false, old_writer, false, "it refuses a writer after a newer reader"),
        (false, writer, true, "it admits a newer writer"),
        (true, reader, false, "it refuses a reader after a newer writer"),
        (true, new_reader, true, "it admits a newer reader"),
    ] {
        let was = match shared {
            true => resource.admit_shared(token).await?,
            false => resource.admit(token).await?,
        };
        ensure!(
            was == accepted,
            "the resource",
            "{why}; of {tokens:?} it did not do so with {token}"
        );
    }
    Ok(())
}
