//! Whether what is measured is a lock: does it keep others out, and does it wait?

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::{TTL, name_for};
use crate::backend::{OURS, Place};
use crate::contestant::{Contestant, Failure, nothing};
use crate::figures::{Check, Finding};

/// How long a lock is held under which somebody else must not come in.
const HELD: Duration = Duration::from_millis(500);
/// How long who waits may take after that.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) async fn check(place: &Place) -> Result<Vec<Check>, Failure> {
    let peers = place.backend.peers().iter().map(|peer| (peer.name, peer.one_task));
    let mut checks = Vec::new();
    for (who, one_task) in std::iter::once((OURS, false)).chain(peers) {
        let first = place.connect(who, TTL).await?;
        let second = place.connect(who, TTL).await?;
        let (clients, waits) = meet(&first, &second, &name_for(who, "check-clients")).await?;
        let tasks = if one_task {
            Finding::NotApplicable
        } else {
            meet(&first, &first, &name_for(who, "check-tasks")).await?.0
        };
        checks.push(Check {
            who: who.to_owned(),
            clients,
            tasks,
            waits,
        });
    }
    Ok(checks)
}

/// Lets the second ask for what the first holds: whether it is kept out, and whether it gets it when it is free.
async fn meet(
    first: &Arc<dyn Contestant>,
    second: &Arc<dyn Contestant>,
    name: &str,
) -> Result<(Finding, Finding), Failure> {
    let inside = Arc::new(AtomicBool::new(false));
    let release = Arc::new(Notify::new());
    let (held, holds) = oneshot::channel();
    let holder: JoinHandle<Result<(), Failure>> = {
        let (first, inside, release) = (Arc::clone(first), Arc::clone(&inside), Arc::clone(&release));
        let name = name.to_owned();
        tokio::spawn(async move {
            let body = async move {
                inside.store(true, Ordering::SeqCst);
                let _ = held.send(());
                release.notified().await;
                inside.store(false, Ordering::SeqCst);
            };
            first.section(&name, Box::pin(body)).await
        })
    };
    holds.await.map_err(|_| "a lock that is free could not be taken")?;
    let (told, mut came) = oneshot::channel();
    let start = Instant::now();
    let mut other = {
        let (second, inside) = (Arc::clone(second), Arc::clone(&inside));
        let name = name.to_owned();
        tokio::spawn(async move {
            let body = async move {
                let _ = told.send(inside.load(Ordering::SeqCst));
            };
            second.section(&name, Box::pin(body)).await
        })
    };
    let early = tokio::select! {
        // Whoever was let in has told so before it ended.
        biased;
        Ok(two) = &mut came => Some(Ok(two)),
        ended = &mut other => Some(ended?.map(|()| false)),
        () = sleep(HELD) => None,
    };
    let taken = start.elapsed();
    release.notify_one();
    holder.await??;
    Ok(match early {
        None => {
            let waits = match timeout(PATIENCE, came).await {
                Ok(Ok(_)) => Finding::Yes,
                _ => Finding::No(format!("got nothing within {PATIENCE:?} of the release")),
            };
            other.abort();
            (Finding::Yes, waits)
        }
        Some(Ok(true)) => {
            let seen = format!("two at once, {taken:.1?} after the second asked");
            (Finding::No(seen), Finding::NotApplicable)
        }
        Some(Ok(false)) => (
            Finding::Yes,
            Finding::No(format!("ended without the lock after {taken:.1?}")),
        ),
        Some(Err(error)) => (
            Finding::Yes,
            Finding::No(format!("{error}, after {taken:.1?} of a wait without limit")),
        ),
    })
}

/// Waits out whatever a client keeps for a while after its first lock.
pub(crate) async fn warm(contestant: &dyn Contestant) -> Result<(), Failure> {
    contestant.section("warm", nothing()).await
}
