//! The resource refuses holders that are late.

use std::sync::Arc;
use std::time::Duration;

use lock_core::{DistributedLock, FencingToken};

use super::{Entry, cases};
use crate::case::{Case, RESOURCE};
use crate::harness::Resource;
use crate::link::FaultMode;
use crate::outcome::{Outcome, ensure};
use crate::writers::{self, Written};

pub(crate) const CASES: &[Entry] = cases![
    a_stale_token_is_refused_and_an_equal_one_accepted,
    admission_before_the_read_saves_an_update,
    the_marks_survive_a_restart,
    no_write_is_accepted_below_a_token_that_was_seen,
    a_holder_cut_off_past_its_ttl_cannot_write_after_its_successor,
    a_holder_stopped_past_its_ttl_cannot_write_after_its_successor,
];

/// Tokens of grants of one name, in their order.
async fn tokens<const N: usize>(case: &Case) -> Outcome<[FencingToken; N]> {
    let client = case.client().await?;
    let mut tokens = [FencingToken::MAX; N];
    for token in &mut tokens {
        let claim = case.claim("n");
        *token = case.take(&client, &claim).await?.token;
        client.release(&claim, None).await?;
    }
    Ok(tokens)
}

/// The write must be accepted, or refused, and the resource must have that number afterwards.
async fn write(resource: &dyn Resource, token: FencingToken, number: i64, accepted: bool, left: i64) -> Outcome {
    let was = resource.write(token, number).await?;
    let now = resource.read().await?;
    ensure!(
        was == accepted && now == left,
        "the resource",
        "a write of {number} with {token} is accepted: {accepted}, and leaves {left}; it was {was} and left {now}"
    );
    Ok(())
}

pub(crate) async fn a_stale_token_is_refused_and_an_equal_one_accepted(case: Arc<Case>) -> Outcome {
    let [old, new] = tokens(&case).await?;
    let resource = &*case.resource().await?;
    write(resource, old, 1, true, 1).await?;
    write(resource, old, 2, true, 2).await?;
    write(resource, new, 3, true, 3).await?;
    write(resource, new, 4, true, 4).await?;
    write(resource, old, 5, false, 4).await?;
    ensure!(
        !resource.admit(old).await?,
        "the resource",
        "it does not admit a stale token"
    );
    ensure!(resource.admit(new).await?, "the resource", "it admits an equal token");
    write(resource, new, 6, true, 6).await
}

pub(crate) async fn admission_before_the_read_saves_an_update(case: Arc<Case>) -> Outcome {
    let [first, old, new, newer] = tokens(&case).await?;
    let resource = &*case.resource().await?;
    write(resource, first, 10, true, 10).await?;
    // The interleaving that loses an update: the successor reads, the old holder writes, the successor writes.
    let seen = resource.read().await?;
    write(resource, old, seen - 1, true, 9).await?;
    write(resource, new, seen - 1, true, 9).await?;
    // The same with an admission before the read.
    ensure!(resource.admit(newer).await?, "the resource", "it admits a newer holder");
    let seen = resource.read().await?;
    write(resource, new, seen - 1, false, 9).await?;
    write(resource, newer, seen - 1, true, 8).await
}

pub(crate) async fn the_marks_survive_a_restart(case: Arc<Case>) -> Outcome {
    let [old, new] = tokens(&case).await?;
    let resource = case.shipped_resource().await?;
    write(&*resource, new, 1, true, 1).await?;
    drop(resource);
    let resource = &*case.shipped_resource().await?;
    write(resource, old, 2, false, 1).await?;
    write(resource, new, 3, true, 3).await
}

const WRITERS: usize = 8;
const WRITES: usize = 10_000;
const WRITES_OF_A_TASK: usize = 2_000;
/// A resource that writes to several disks has this long; it is only the end of patience.
const TIME_TO_WRITE: Duration = Duration::from_secs(210);

pub(crate) async fn no_write_is_accepted_below_a_token_that_was_seen(case: Arc<Case>) -> Outcome {
    let resource = case.resource().await?;
    let start = case.now();
    let in_processes = case.needs_processes().is_ok() && case.shipped_resource().await.is_ok();
    let written = if in_processes {
        written_by_processes(&case).await?
    } else {
        written_by_tasks(&case, &resource).await?
    };
    let took = case.now().since(start);
    let refused = written.iter().filter(|write| !write.accepted).count();
    let highest = written
        .iter()
        .filter(|write| write.accepted)
        .map(|write| write.token)
        .max();
    let (who, each) = if in_processes {
        ("processes", WRITES)
    } else {
        ("tasks", WRITES_OF_A_TASK)
    };
    case.remark(format!(
        "guarded writes: {} by {WRITERS} {who} in {took:.1?}, {refused} refused",
        written.len()
    ));
    let violations = writers::violations(&written);
    let some = &violations[..violations.len().min(5)];
    ensure!(
        violations.is_empty(),
        "the resource",
        "of {} writes none is accepted below a token that was seen, nor refused without one; {} were, such as {some:#?}",
        written.len(),
        violations.len()
    );
    let left = resource.read().await?;
    ensure!(
        Some(left) == highest.map(FencingToken::as_i64),
        "the resource",
        "the write with the highest token stays, {highest:?}; it is {left}"
    );
    ensure!(
        written.len() >= WRITERS * each && refused > each / 100,
        "the suite",
        "enough writes came too late; of {} {refused} were refused",
        written.len()
    );
    Ok(())
}

async fn written_by_processes(case: &Case) -> Outcome<Vec<Written>> {
    let mut children = Vec::new();
    for _ in 0..WRITERS {
        children.push(case.child().await?);
    }
    for child in &mut children {
        child.write("n", RESOURCE, WRITES).await?;
    }
    let mut written = Vec::new();
    for child in &mut children {
        written.extend(child.written(TIME_TO_WRITE).await?);
    }
    Ok(written)
}

async fn written_by_tasks(case: &Case, resource: &Arc<dyn Resource>) -> Outcome<Vec<Written>> {
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..WRITERS {
        let (party, resource) = (case.party().await?, Arc::clone(resource));
        tasks.spawn(async move { writers::write_on(&party.locks, &resource, "n", WRITES_OF_A_TASK).await });
    }
    let mut written = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        written.extend(ended??);
    }
    Ok(written)
}

pub(crate) async fn a_holder_cut_off_past_its_ttl_cannot_write_after_its_successor(case: Arc<Case>) -> Outcome {
    let (cut_off, other) = (case.party().await?, case.party().await?);
    let resource = &*case.resource().await?;
    let guard = cut_off.locks.lock("n").ttl(case.ttl()).await?;
    write(resource, guard.token(), 1, true, 1).await?;
    cut_off.link.set(FaultMode::Silent);
    let limit = 2 * guard.ttl() + case.hang_limit();
    let next = other.locks.lock("n").wait_for(limit).await?;
    write(resource, next.token(), 2, true, 2).await?;
    write(resource, guard.token(), 3, false, 2).await?;
    cut_off.link.set(FaultMode::None);
    next.release().await?;
    Ok(())
}

pub(crate) async fn a_holder_stopped_past_its_ttl_cannot_write_after_its_successor(case: Arc<Case>) -> Outcome {
    case.needs_processes()?;
    let (mut child, other) = (case.child().await?, case.party().await?);
    let resource = &*case.resource().await?;
    let old = child.lock("n", case.ttl()).await?;
    write(resource, old, 1, true, 1).await?;
    child.stop()?;
    let limit = 2 * case.ttl() + case.hang_limit();
    let next = other.locks.lock("n").wait_for(limit).await;
    child.wake()?;
    let next = next?;
    write(resource, next.token(), 2, true, 2).await?;
    // The woken process may still be between its last look and its write: only the resource can stop that.
    write(resource, old, 3, false, 2).await?;
    ensure!(next.is_held(), "the client", "the woken process does no harm");
    next.release().await?;
    Ok(())
}
