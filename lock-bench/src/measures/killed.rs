//! B5: a holder is killed. When does who waits hold the lock?

use std::time::Duration;

use tokio::time::sleep;

use super::{Arena, name_for};
use crate::backend::OURS;
use crate::child::{Child, Job, Task};
use crate::clock::now;
use crate::contestant::Failure;
use crate::figures::{Check, Kind, MILLI, Measure, median};

/// The least that all backends grant to the letter.
const TTL: Duration = Duration::from_secs(3);
/// How long after the other one has asked the holder is killed.
const BEFORE: Duration = Duration::from_millis(300);

pub(crate) async fn measure(arena: &Arena) -> Result<Measure, Failure> {
    let mut measure = Measure::new(
        "B5",
        "The holder is killed: until the next one holds",
        &[
            ("after the ttl, median", "ms"),
            ("most", "ms"),
            ("after the kill, median", "ms"),
        ],
    );
    let peers = arena.fit_peers(Check::is_fit_for_processes);
    let contestants = std::iter::once((OURS, Kind::Ours)).chain(peers.into_iter().map(|who| (who, Kind::Peer)));
    for (who, kind) in contestants {
        let (mut late, mut waited) = (Vec::new(), Vec::new());
        for round in 0..arena.either(3, 1) {
            match once(arena, who, &name_for(who, &format!("b5-{round}"))).await {
                Ok((after_ttl, after_kill)) => {
                    late.push(after_ttl);
                    waited.push(after_kill);
                }
                // It would fail, or be waited for, as long in the other rounds.
                Err(error) if kind == Kind::Peer => {
                    measure.notes.push(format!("{who}: {error}."));
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        let most = late.iter().copied().reduce(f64::max);
        measure.row(who, kind, "", &[median(late), most, median(waited)]);
    }
    measure.notes.push(format!(
        "A ttl of {TTL:?}, counted from the grant; the holder is killed {BEFORE:?} later, before it has renewed. Below zero: the \
         server noticed before the ttl was over."
    ));
    Ok(measure)
}

/// Milliseconds between the end of the ttl and the next grant, and between the kill and that.
async fn once(arena: &Arena, who: &str, name: &str) -> Result<(f64, f64), Failure> {
    let job = |task| Job {
        place: arena.site.place.clone(),
        who: who.to_owned(),
        ttl: TTL,
        task,
    };
    let take = Task::Hold { name: name.to_owned() };
    let mut holder = Child::start(&job(take.clone()))?;
    let granted: u64 = holder.hear_of().await?;
    let mut waiter = Child::start(&job(take))?;
    sleep(BEFORE).await;
    let killed = now();
    holder.kill().await?;
    let next: u64 = waiter.hear_of().await?;
    waiter.kill().await?;
    let milliseconds = |from: u64| (next as f64 - from as f64) / MILLI;
    Ok((
        milliseconds(granted + u64::try_from(TTL.as_nanos())?),
        milliseconds(killed),
    ))
}
