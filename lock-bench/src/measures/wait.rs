//! B7: a wait with a limit, for a lock that stays busy. How long after the limit does it end?

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::{Arena, TTL, name_for};
use crate::backend::OURS;
use crate::contestant::{Failure, nothing};
use crate::figures::{Kind, MILLI, Measure, median};

const LIMIT: Duration = Duration::from_millis(200);

pub(crate) async fn measure(arena: &Arena) -> Result<Measure, Failure> {
    let mut measure = Measure::new(
        "B7",
        &format!("Overshoot of a wait of {LIMIT:?}"),
        &[("median", "ms"), ("most", "ms"), ("least", "ms")],
    );
    let peers = arena.backend().peers().iter().map(|peer| (peer.name, Kind::Peer));
    for (who, kind) in std::iter::once((OURS, Kind::Ours)).chain(peers) {
        match overshoots(arena, who).await? {
            None => measure.notes.push(format!("{who} has no limit for a wait.")),
            Some(times) => {
                let most = times.iter().copied().reduce(f64::max);
                let least = times.iter().copied().reduce(f64::min);
                measure.row(who, kind, "", &[median(times), most, least]);
            }
        }
    }
    measure
        .notes
        .push("Below zero: it did not wait as long as it was asked to.".to_owned());
    Ok(measure)
}

/// Milliseconds beyond the limit.
async fn overshoots(arena: &Arena, who: &str) -> Result<Option<Vec<f64>>, Failure> {
    // Of one client the waits would end before they reach the server.
    let holder = arena.site.place.connect(who, TTL).await?;
    let waiter = arena.site.place.connect(who, TTL).await?;
    super::check::warm(&*waiter).await?;
    let name = name_for(who, "b7");
    let (held, holds) = oneshot::channel();
    let body = async move {
        let _ = held.send(());
        std::future::pending::<()>().await;
    };
    let holding = {
        let (holder, name) = (Arc::clone(&holder), name.clone());
        tokio::spawn(async move { holder.section(&name, Box::pin(body)).await })
    };
    holds.await.map_err(|_| "a lock that is free could not be taken")?;
    let mut times = Vec::new();
    for _ in 0..arena.either(30, 5) {
        let start = Instant::now();
        let Some(outcome) = waiter.within(&name, LIMIT, nothing()).await else {
            holding.abort();
            return Ok(None);
        };
        let time = start.elapsed();
        if outcome? {
            return Err(format!("{who} was let in beside a holder").into());
        }
        times.push((time.as_nanos() as f64 - LIMIT.as_nanos() as f64) / MILLI);
    }
    holding.abort();
    Ok(Some(times))
}
