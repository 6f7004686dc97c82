//! B6: locks that are held. What do they cost while nothing happens?

use std::time::Duration;

use tokio::time::sleep;

use super::Arena;
use crate::backend::{Backend, Commands, OURS, Place};
use crate::child::{Child, Job, Kept, Task};
use crate::contestant::Failure;
use crate::figures::{Kind, Measure};
use crate::redis;

/// Who else keeps locks alive without being told to.
const KEEPING: [&str; 2] = ["distkit 0.7", "ash-lock 0.1"];

pub(crate) async fn measure(arena: &Arena) -> Result<Measure, Failure> {
    let locks = arena.either(10_000, 1_000);
    let ttl = arena.either(Duration::from_secs(30), Duration::from_secs(6));
    let mut measure = Measure::new(
        "B6",
        &format!("{locks} held locks, for two ttls of {ttl:?}"),
        &[
            ("of a core, client", "%"),
            ("memory of the client per lock", "bytes"),
            ("memory of the server per lock", "bytes"),
            ("commands", "/s"),
            ("renewals per ttl/3", ""),
        ],
    );
    let peers = arena.backend().peers().iter().map(|peer| peer.name);
    let peers = peers.filter(|name| KEEPING.contains(name));
    for (who, kind) in std::iter::once((OURS, Kind::Ours)).chain(peers.map(|who| (who, Kind::Peer))) {
        match hold(&arena.site.place, who, locks, ttl).await {
            Ok(values) => measure.row(who, kind, "", &values),
            Err(error) if kind == Kind::Peer => measure.notes.push(format!("{who}: {error}.")),
            Err(error) => return Err(error),
        }
    }
    Ok(measure)
}

async fn hold(place: &Place, who: &str, locks: usize, ttl: Duration) -> Result<[Option<f64>; 5], Failure> {
    let before = memory(place).await?;
    let job = Job {
        place: place.clone(),
        who: who.to_owned(),
        ttl,
        task: Task::Keep { locks },
    };
    let mut child = Child::start(&job)?;
    child.ready().await?;
    let bytes: u64 = child.hear_of().await?;
    let of_server = memory(place).await?.zip(before);
    let commands = Commands::start(place).await?;
    let already = match &commands {
        Some(commands) => commands.count().await?,
        None => 0,
    };
    child.tell("go").await?;
    sleep(2 * ttl).await;
    // Before it stops, and lets go of all.
    let asked = match commands {
        Some(commands) => {
            let asked = commands.count().await? - already;
            commands.stop().await?;
            Some(asked)
        }
        None => None,
    };
    child.tell("stop").await?;
    let kept: Kept = child.hear_of().await?;
    let seconds = kept.time as f64 / 1e9;
    let thirds = 3.0 * seconds / ttl.as_secs_f64();
    child.kill().await?;
    // What a killed client held is gone before the next one is measured.
    sleep(ttl).await;
    Ok([
        Some(100.0 * kept.processor as f64 / kept.time as f64),
        Some(bytes as f64),
        of_server.map(|(after, before)| (after as f64 - before as f64) / locks as f64),
        asked.map(|asked| asked as f64 / seconds),
        kept.renewals.map(|renewals| renewals as f64 / thirds),
    ])
}

async fn memory(place: &Place) -> Result<Option<u64>, Failure> {
    match place.backend {
        Backend::Redis | Backend::Redlock => redis::memory(&place.redis_urls()).await.map(Some),
        _ => Ok(None),
    }
}
