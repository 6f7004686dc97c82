//! B4: processes that all want the same name. How long after a release does the next one hold, and what is the server
//! asked for that?

use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::{Arena, TTL, name_for};
use crate::backend::{Commands, OURS, OURS_HERE, Place};
use crate::child::{Child, Job, Span, Task};
use crate::clock::now;
use crate::contestant::{Failure, threads};
use crate::figures::{Check, Kind, MICRO, Measure, Times};

/// How long a lock is held, and how long after a release its former holder asks again: all others wait meanwhile.
const HOLD: Duration = Duration::from_millis(5);
const PAUSE: Duration = Duration::from_millis(2);

pub(crate) const WAITERS: [usize; 3] = [2, 10, 100];

pub(crate) async fn measure(arena: &Arena) -> Result<Measure, Failure> {
    let mut measure = Measure::new(
        "B4",
        "Release to the next holder, in another process",
        &[
            ("p50", "µs"),
            ("p99", "µs"),
            ("commands per acquisition", ""),
            ("hand-overs", ""),
            ("two at once", ""),
        ],
    );
    let (there, here) = (arena.backend().background_push(), arena.backend().push());
    for (push, background) in [(there, true), (here.map(str::to_owned), false)] {
        let Some(push) = push else { continue };
        let times = pushes(arena, background).await?;
        let [p50, p99] = [0.5, 0.99].map(|quantile| times.quantile(quantile, MICRO));
        measure.row(
            &push,
            Kind::Floor,
            "",
            &[p50, p99, None, Some(times.count() as f64), None],
        );
    }
    let peers = arena.fit_peers(Check::is_fit_for_processes);
    let ours = [(OURS, Kind::Ours), (OURS_HERE, Kind::Ours)];
    let contestants = ours.into_iter().chain(peers.into_iter().map(|who| (who, Kind::Peer)));
    for (who, kind) in contestants {
        for waiters in arena.either(&WAITERS[..], &WAITERS[..2]) {
            let name = name_for(who, &format!("b4-{waiters}"));
            match contend(arena, who, &name, *waiters).await {
                Ok(seen) => measure.row(who, kind, &case(*waiters), &seen.values()),
                Err(error) if kind == Kind::Peer => {
                    measure.notes.push(format!("{who}, {}: {error}.", case(*waiters)));
                }
                Err(error) => return Err(error),
            }
        }
    }
    measure.notes.push(format!(
        "Each process holds the lock for {HOLD:?} and asks again {PAUSE:?} after its release. Counted from the first release \
         after which somebody else waited."
    ));
    Ok(measure)
}

pub(crate) fn case(waiters: usize) -> String {
    format!("{waiters} processes")
}

/// What was seen of processes that contend.
pub(crate) struct Seen {
    times: Times,
    commands: Option<f64>,
    overlaps: u64,
}

impl Seen {
    pub(crate) fn values(&self) -> [Option<f64>; 5] {
        [
            self.times.quantile(0.5, MICRO),
            self.times.quantile(0.99, MICRO),
            self.commands,
            Some(self.times.count() as f64),
            Some(self.overlaps as f64),
        ]
    }
}

pub(crate) async fn contend(arena: &Arena, who: &str, name: &str, processes: usize) -> Result<Seen, Failure> {
    let job = Job {
        place: arena.site.place.clone(),
        who: who.to_owned(),
        ttl: TTL,
        task: Task::Contend {
            name: name.to_owned(),
            hold: HOLD,
            pause: PAUSE,
        },
    };
    let mut children = start(&job, processes).await?;
    for child in &mut children {
        child.tell("go").await?;
    }
    // Until all of them wait.
    sleep(arena.either(Duration::from_millis(1500), Duration::from_millis(500))).await;
    let began = now();
    sleep(arena.either(Duration::from_secs(6), Duration::from_secs(2))).await;
    let timed = now();
    // What counts, costs: in a time of its own.
    let counted = count(
        &arena.site.place,
        arena.either(Duration::from_secs(3), Duration::from_secs(1)),
    )
    .await?;
    for child in &mut children {
        child.tell("stop").await?;
    }
    let mut spans = Vec::new();
    for (process, child) in children.iter_mut().enumerate() {
        let of_child: Vec<Span> = child.hear_of().await?;
        spans.extend(of_child.into_iter().map(|span| (process, span)));
    }
    spans.sort_unstable_by_key(|(_, span)| span.granted);
    let mut seen = hand_overs(&spans, began, timed)?;
    if let Some((from, to, commands)) = counted {
        let granted = spans.iter().filter(|(_, span)| (from..to).contains(&span.granted));
        seen.commands = Some(commands as f64 / granted.count().max(1) as f64);
    }
    Ok(seen)
}

async fn start(job: &Job, processes: usize) -> Result<Vec<Child>, Failure> {
    let children: Result<Vec<_>, _> = (0..processes).map(|_| Child::start(job)).collect();
    let mut children = children?;
    try_join_all(children.iter_mut().map(Child::ready)).await?;
    Ok(children)
}

/// From when to when, and the commands in between.
async fn count(place: &Place, time: Duration) -> Result<Option<(u64, u64, u64)>, Failure> {
    let Some(commands) = Commands::start(place).await? else {
        return Ok(None);
    };
    let (before, from) = (commands.count().await?, now());
    sleep(time).await;
    let (after, to) = (commands.count().await?, now());
    commands.stop().await?;
    Ok(Some((from, to, after - before)))
}

/// What happened within that time, of spans in the order of their grants.
fn hand_overs(spans: &[(usize, Span)], from: u64, to: u64) -> Result<Seen, Failure> {
    let mut seen = Seen {
        times: Times::new()?,
        commands: None,
        overlaps: 0,
    };
    let Some((&(mut holder, first), rest)) = spans.split_first() else {
        return Ok(seen);
    };
    // A holder may take the lock again and again before others who wait.
    let mut first_release = first.released;
    let mut last_release = first.released;
    for &(process, span) in rest {
        if span.granted < last_release {
            seen.overlaps += 1;
        }
        if process != holder {
            if (from..to).contains(&span.granted) {
                seen.times.add(span.granted.saturating_sub(first_release).max(1))?;
            }
            (holder, first_release) = (process, span.released);
        }
        last_release = last_release.max(span.released);
    }
    Ok(seen)
}

/// How long the barest hand-over takes, from a caller to another.
async fn pushes(arena: &Arena, background: bool) -> Result<Times, Failure> {
    let count = arena.either(1500, 200);
    let (order, orders) = unbounded_channel();
    let (ready, is_ready) = oneshot::channel();
    let place = arena.site.place.clone();
    let saying = threads(background)?.spawn(async move {
        let ready = || {
            let _ = ready.send(());
        };
        place.say(ready, orders).await
    });
    is_ready.await?;
    let mut listener = Child::start(&Job {
        place: arena.site.place.clone(),
        who: String::new(),
        ttl: TTL,
        task: Task::Hear {
            times: count,
            background,
        },
    })?;
    listener.ready().await?;
    let mut said = Vec::with_capacity(count);
    for _ in 0..count {
        sleep(HOLD).await;
        let (done, is_done) = oneshot::channel();
        said.push(now());
        order.send(done)?;
        is_done.await?;
    }
    drop(order);
    saying.await??;
    let heard: Vec<u64> = listener.hear_of().await?;
    let mut times = Times::new()?;
    for (said, heard) in said.into_iter().zip(heard) {
        times.add(heard.saturating_sub(said).max(1))?;
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(spans: &[(usize, u64, u64)]) -> Vec<(usize, Span)> {
        spans
            .iter()
            .map(|&(process, granted, released)| (process, Span { granted, released }))
            .collect()
    }

    #[test]
    fn a_hand_over_is_counted_from_the_first_release_that_others_waited_for() {
        let turns = spans(&[(0, 10, 20), (0, 22, 30), (1, 35, 40), (0, 42, 50)]);
        let seen = hand_overs(&turns, 0, 100).unwrap();
        assert_eq!(seen.overlaps, 0);
        assert_eq!(seen.times.count(), 2);
        assert_eq!(seen.times.quantile(1.0, 1.0), Some(15.0));
        assert_eq!(seen.times.quantile(0.0, 1.0), Some(2.0));
    }

    #[test]
    fn two_holders_at_once_are_seen() {
        let turns = spans(&[(0, 10, 20), (1, 15, 25), (2, 30, 40)]);
        assert_eq!(hand_overs(&turns, 0, 100).unwrap().overlaps, 1);
    }
}
