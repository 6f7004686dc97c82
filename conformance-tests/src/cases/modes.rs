//! Shared locks and semaphores: names that several hold at once.

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use lock_core::{Attempt, Claim, DistributedLock, Grant, LockError, LockGuard, Mode, Renew, SemaphoreRequest};
use tokio::task::JoinSet;

use super::tokens::Rising;
use super::waiting::{waits, waits_after_busy};
use super::{Entry, cases};
use crate::case::Case;
use crate::link::Link;
use crate::outcome::{Outcome, checked, ensure, fail};

pub(crate) const CASES: &[Entry] = cases![
    an_exclusive_lock_excludes_readers_and_writers_and_readers_admit_each_other,
    fifty_readers_of_several_clients_hold_at_once,
    a_reader_that_comes_after_a_waiting_writer_is_served_after_it,
    a_writer_among_a_stream_of_readers_gets_its_turns,
    a_semaphore_has_no_permit_too_many_over_a_thousand_random_holds,
    permits_of_holders_that_expire_come_back_within_a_ttl,
    a_name_has_one_kind_while_it_is_held,
    tokens_rise_over_both_modes_in_the_order_of_grants,
    a_downgrade_lets_no_writer_in_between,
    the_loss_or_release_of_one_reader_leaves_the_others,
    a_list_has_every_holder_with_its_mode,
    a_writer_that_gives_up_holds_no_reader_up,
    a_waiter_gets_the_permit_of_a_holder_that_expires_before_others,
    the_resource_refuses_stale_holders_of_both_kinds_and_no_reader_for_another,
];

pub(crate) const NO_SHARES: &str = "the backend has no shared locks";
pub(crate) const NO_PERMITS: &str = "the backend has no semaphores";

impl Case {
    fn needs_shares(&self) -> Outcome {
        self.needs(self.capabilities().shared, NO_SHARES)
    }

    fn needs_permits(&self) -> Outcome {
        self.needs(self.capabilities().permits, NO_PERMITS)
    }

    /// A claim of the name `n` that outlasts every wait of a case.
    fn claim_as(&self, mode: Mode) -> Claim {
        Claim::new(self.name("n"), self.kept_ttl()).with_mode(mode)
    }
}

/// The claim must be granted beside those that hold its name.
async fn admitted(client: &Link, claim: &Claim, why: &str) -> Outcome<Grant> {
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
        .within(
            case.hang_limit(),
            "a writer that waits behind readers is served",
            writing,
        )
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
        .within(
            case.hang_limit(),
            "readers behind a writer are served together",
            later.join_next(),
        )
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
        case.eventually(
            "the backend",
            "the stream of readers goes on",
            case.hang_limit(),
            goes_on,
        )
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

/// How many hold a permit now, as far as they know.
struct Inside(AtomicUsize);

const PERMITS: u32 = 3;

impl Inside {
    /// Holds a permit for a while, if the request is granted in time; then releases or drops it. Says whether it was granted.
    async fn hold(&self, request: SemaphoreRequest) -> Outcome<bool> {
        let is_patient = fastrand::u8(..4) > 0;
        let permit = if is_patient {
            request.await?
        } else {
            // Cancelled somewhere on its way.
            let limit = Duration::from_micros(fastrand::u64(..2000));
            match tokio::time::timeout(limit, request.into_future()).await {
                Ok(permit) => permit?,
                Err(_) => return Ok(false),
            }
        };
        let others = self.0.fetch_add(1, Ordering::SeqCst);
        ensure!(
            others < PERMITS as usize || !permit.is_held(),
            "the backend",
            "at most {PERMITS} hold a permit at once; {others} were inside when {permit:?} came"
        );
        tokio::time::sleep(Duration::from_micros(fastrand::u64(..1000))).await;
        self.0.fetch_sub(1, Ordering::SeqCst);
        if fastrand::bool() {
            permit.release().await?;
        }
        Ok(true)
    }
}

pub(crate) async fn a_semaphore_has_no_permit_too_many_over_a_thousand_random_holds(case: Arc<Case>) -> Outcome {
    const CLIENTS: usize = 4;
    const TASKS: usize = 12;
    const HOLDS: usize = 84;
    case.needs_permits()?;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(case.party().await?.locks);
    }
    let inside = Arc::new(Inside(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (locks, inside) = (clients[task % CLIENTS].clone(), Arc::clone(&inside));
        tasks.spawn(async move {
            let mut holds = 0;
            while holds < HOLDS {
                holds += usize::from(inside.hold(locks.semaphore("n", PERMITS)).await?);
            }
            Outcome::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    // None is missing after it either.
    let mut permits = Vec::new();
    for (locks, _) in clients.iter().zip(0..PERMITS) {
        permits.push(locks.semaphore("n", PERMITS).wait_for(case.hang_limit()).await?);
    }
    let next = clients[0].semaphore("n", PERMITS).no_wait().await;
    ensure!(
        next.as_ref().is_err_and(LockError::is_busy),
        "the backend",
        "of {PERMITS} permits {PERMITS} are held and no more; it gave {next:?}"
    );
    for permit in permits {
        permit.release().await?;
    }
    Ok(())
}

pub(crate) async fn permits_of_holders_that_expire_come_back_within_a_ttl(case: Arc<Case>) -> Outcome {
    let mode = Mode::Permit { of: 3 };
    case.needs_permits()?;
    let (silent, other) = (case.client().await?, case.client().await?);
    // One of a guard that is not renewed, two of a client that shows no sign of life.
    let locks = case.party().await?.locks;
    let guard = locks.semaphore("n", 3).ttl(case.ttl()).renew(Renew::Never).await?;
    let mut belief_end = case.now() + guard.remaining();
    for _ in 0..2 {
        let claim = case.brief_claim("n").with_mode(mode);
        let grant = admitted(&silent, &claim, "a semaphore of three has three permits").await?;
        belief_end = belief_end.min(grant.lease.deadline());
    }
    let mut claims = Vec::new();
    for turn in 0..3 {
        let claim = case.claim_as(mode);
        let limit = case.ttl() + case.hang_limit();
        let (_, granted) = case.take_within(&other, &claim, limit).await?;
        if turn == 0 {
            case.in_turn(belief_end, granted)?;
        }
        claims.push(claim);
    }
    ensure!(
        !guard.is_held(),
        "the client",
        "a permit that is not renewed ends with its ttl"
    );
    for claim in claims {
        other.release(&claim, None).await?;
    }
    Ok(())
}

pub(crate) async fn a_name_has_one_kind_while_it_is_held(case: Arc<Case>) -> Outcome {
    const TWO: Mode = Mode::Permit { of: 2 };
    const THREE: Mode = Mode::Permit { of: 3 };
    case.needs_shares()?;
    case.needs_permits()?;
    let (holder, other) = (case.client().await?, case.client().await?);
    let locks = case.party().await?.locks;
    for (held, others) in [
        (TWO, &[Mode::Exclusive, Mode::Shared, THREE][..]),
        (Mode::Exclusive, &[TWO]),
        (Mode::Shared, &[TWO]),
    ] {
        let claim = case.claim_as(held);
        case.take(&holder, &claim).await?;
        for &mode in others {
            let asked = case.claim_as(mode);
            let answer = other.try_acquire(&asked).await;
            ensure!(
                matches!(answer, Err(LockError::InvalidMode { found, .. }) if found == held),
                "the backend",
                "a request for {mode} is refused for good where there is {held}; it said {answer:?}"
            );
            other.release(&asked, None).await?;
        }
        // Nor does a request wait for the end of the other kind.
        let waits = if held == TWO {
            locks.lock("n").wait_for(case.hang_limit()).await.map(drop)
        } else {
            locks.semaphore("n", 2).wait_for(case.hang_limit()).await.map(drop)
        };
        ensure!(
            matches!(waits, Err(LockError::InvalidMode { .. })),
            "the client",
            "a request for what {held} is not is refused for good; it said {waits:?}"
        );
        holder.release(&claim, None).await?;
    }
    case.is_free(&other, &case.name("n")).await
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
    let reading = case
        .within(case.hang_limit(), "a downgrade ends", guard.downgrade())
        .await?;
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
    let written = case
        .within(case.hang_limit(), "the writer is served after the reader", writing)
        .await???;
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

pub(crate) async fn a_list_has_every_holder_with_its_mode(case: Arc<Case>) -> Outcome {
    const THREE: Mode = Mode::Permit { of: 3 };
    case.needs_shares()?;
    case.needs_permits()?;
    case.needs(case.capabilities().list, "the backend cannot list locks")?;
    let clients = [case.client().await?, case.client().await?];
    let (mut held, mut wanted) = (Vec::new(), Vec::new());
    for (place, (name, mode)) in [
        ("c", THREE),
        ("a", Mode::Shared),
        ("b", Mode::Exclusive),
        ("c", THREE),
        ("a", Mode::Shared),
        ("c", THREE),
    ]
    .into_iter()
    .enumerate()
    {
        let claim = Claim::new(case.name(name), case.kept_ttl()).with_mode(mode);
        let client = &clients[place % 2];
        let grant = admitted(client, &claim, "what several may hold is granted to them").await?;
        wanted.push((name, mode, grant.token));
        held.push((client, claim));
    }
    // Those of one name have no order.
    wanted.sort_unstable_by_key(|(name, _, token)| (*name, *token));
    for prefix in ["", "c"] {
        let listed = clients[0].list(prefix).await?;
        let name = |at: usize| listed[at].name.as_ref().map_or("", |name| name.as_str());
        let mut found: Vec<_> = (0..listed.len())
            .map(|at| (name(at), listed[at].mode, listed[at].token))
            .collect();
        ensure!(
            found.is_sorted_by_key(|(name, ..)| *name),
            "the backend",
            "a list is in the order of names; it was {found:?}"
        );
        found.sort_unstable_by_key(|(name, _, token)| (*name, *token));
        let mut wanted = wanted.iter().filter(|(name, ..)| name.starts_with(prefix));
        let is_as_wanted = found.iter().all(|(name, mode, token)| {
            wanted
                .next()
                .is_some_and(|held| (*name, *mode) == (held.0, held.1) && token.is_none_or(|token| token == held.2))
        });
        ensure!(
            is_as_wanted && wanted.next().is_none(),
            "the backend",
            "a list has each holder, with its mode; under {prefix:?} it has {found:?}"
        );
    }
    for (client, claim) in held {
        client.release(&claim, None).await?;
    }
    Ok(())
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
            .within(
                case.hang_limit(),
                "a reader behind a writer that gave up is served",
                reading,
            )
            .await???;
        guard.release().await?;
    }
    held.release().await?;
    Ok(())
}

pub(crate) async fn a_waiter_gets_the_permit_of_a_holder_that_expires_before_others(case: Arc<Case>) -> Outcome {
    let mode = Mode::Permit { of: 2 };
    case.needs_permits()?;
    let (silent, waiter) = (case.client().await?, case.party().await?.locks);
    // The one that came first ends last.
    let claims = [case.claim_as(mode), case.brief_claim("n").with_mode(mode)];
    for claim in &claims {
        admitted(&silent, claim, "a semaphore of two has two permits").await?;
    }
    let limit = case.ttl() + case.hang_limit();
    let permit = case
        .within(
            limit,
            "a waiter gets the permit that expired",
            waiter.semaphore("n", 2).into_future(),
        )
        .await??;
    permit.release().await?;
    for claim in &claims {
        silent.release(claim, None).await?;
    }
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
