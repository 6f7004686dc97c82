//! What a history comes to, in numbers.

use std::collections::BTreeMap;
use std::time::Duration;

use lock_core::{FencingToken, LockName};

use crate::oracle::{Event, Record};

/// From a grant to the last moment at which its holder is known to have believed in it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Belief {
    /// The lock.
    pub name: LockName,
    /// The holder.
    pub actor: usize,
    /// The grant.
    pub token: FencingToken,
    /// When it was granted.
    pub from: Duration,
    /// The last look at which it was held, or its release.
    pub to: Duration,
    /// How it ended.
    pub end: End,
}

/// How a belief ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// The holder let go.
    Released,
    /// The holder learnt that it had lost the lock.
    Lost,
    /// Nothing more was heard: the holder was killed, or the history ends.
    Silent,
}

/// Who believed to hold what, and when, in the order of the grants.
#[must_use]
pub fn beliefs(records: &[Record]) -> Vec<Belief> {
    let mut beliefs: Vec<Belief> = Vec::new();
    let mut open: BTreeMap<(usize, FencingToken, &str), usize> = BTreeMap::new();
    for record in records {
        let Some(name) = &record.name else { continue };
        let (actor, at) = (record.actor, record.at);
        match record.event {
            Event::Ok(token) => {
                open.insert((actor, token, name.as_str()), beliefs.len());
                let name = name.clone();
                let end = End::Silent;
                beliefs.push(Belief {
                    name,
                    actor,
                    token,
                    from: at,
                    to: at,
                    end,
                });
            }
            Event::Held(token) | Event::Lost(token) | Event::Released(token) => {
                let Some(belief) = open
                    .get(&(actor, token, name.as_str()))
                    .and_then(|i| beliefs.get_mut(*i))
                else {
                    continue;
                };
                match record.event {
                    Event::Lost(_) => belief.end = End::Lost,
                    Event::Released(_) => (belief.to, belief.end) = (at, End::Released),
                    _ => belief.to = at,
                }
            }
            _ => {}
        }
    }
    beliefs
}

/// The numbers of a history.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Figures {
    /// Locks that were granted.
    pub grants: usize,
    /// Holders that learnt that they had lost their lock.
    pub losses: usize,
    /// From the end of a lost belief to the next grant: the least of them, if there was any.
    pub smallest_margin: Option<Duration>,
    /// The longest time in which a name had no holder, between two grants.
    pub longest_idle: Duration,
    /// How often a lock was granted while somebody else believed to hold it, permitted or not.
    pub overlaps: usize,
    /// Writes with a stale token that a register refused.
    pub refused: usize,
    /// Releases to somebody who waited, while there was no fault anywhere.
    pub calm: HandOvers,
    /// The others.
    pub stormy: HandOvers,
    /// How often each kind of fault was injected.
    pub faults: BTreeMap<String, usize>,
}

/// From releases to the next grants, for those who had asked before.
#[derive(Clone, Debug, Default)]
pub struct HandOvers(Vec<Duration>);

impl HandOvers {
    /// How many there were.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The time that `percent` of them did not exceed.
    #[must_use]
    pub fn percentile(&self, percent: usize) -> Option<Duration> {
        let last = self.0.len().checked_sub(1)?;
        self.0.get(last * percent.min(100) / 100).copied()
    }
}

impl Figures {
    /// The numbers of these records, which are in the order of their times.
    #[must_use]
    pub fn of(records: &[Record]) -> Self {
        let mut figures = Self::default();
        for record in records {
            match &record.event {
                Event::Ok(_) => figures.grants += 1,
                Event::Lost(_) => figures.losses += 1,
                Event::Write { accepted: false, .. } => figures.refused += 1,
                Event::Fault { what, .. } => {
                    let kind = match what.split_once(": ") {
                        Some(("server", fault)) => format!("server {fault}"),
                        Some((kind, _)) => kind.to_owned(),
                        None => what.clone(),
                    };
                    *figures.faults.entry(kind).or_default() += 1;
                }
                _ => {}
            }
        }
        let mut names: BTreeMap<LockName, Vec<Belief>> = BTreeMap::new();
        for belief in beliefs(records) {
            names.entry(belief.name.clone()).or_default().push(belief);
        }
        let asked = asked(records);
        let storms = storms(records);
        for beliefs in names.values() {
            let overlaps = |(i, first): (usize, &Belief)| {
                let later = beliefs[i + 1..].iter();
                later.take_while(|second| second.from < first.to).count()
            };
            figures.overlaps += beliefs.iter().enumerate().map(overlaps).sum::<usize>();
            for (last, next) in beliefs.iter().zip(&beliefs[1..]) {
                let took = next.from.saturating_sub(last.to);
                figures.longest_idle = figures.longest_idle.max(took);
                match last.end {
                    End::Lost => {
                        figures.smallest_margin = Some(figures.smallest_margin.map_or(took, |least| least.min(took)));
                    }
                    End::Released
                        if asked
                            .get(&(next.actor, next.from))
                            .is_some_and(|asked| *asked <= last.to) =>
                    {
                        let stormy = storms.iter().any(|(from, to)| *from <= next.from && *to >= last.to);
                        let hand_overs = if stormy { &mut figures.stormy } else { &mut figures.calm };
                        hand_overs.0.push(took);
                    }
                    _ => {}
                }
            }
        }
        figures.calm.0.sort_unstable();
        figures.stormy.0.sort_unstable();
        figures
    }
}

/// When each grant was asked for, by its actor and time.
fn asked(records: &[Record]) -> BTreeMap<(usize, Duration), Duration> {
    let mut asking = BTreeMap::new();
    let mut asked = BTreeMap::new();
    for record in records {
        match record.event {
            Event::Invoke => drop(asking.insert(record.actor, record.at)),
            Event::Ok(_) => asked.extend(asking.remove(&record.actor).map(|at| ((record.actor, record.at), at))),
            _ => {}
        }
    }
    asked
}

/// When there were faults.
fn storms(records: &[Record]) -> Vec<(Duration, Duration)> {
    let mut open = BTreeMap::new();
    let mut storms = Vec::new();
    for record in records {
        match record.event {
            Event::Fault { .. } => drop(open.insert(record.actor, record.at)),
            Event::Over { .. } => storms.extend(open.remove(&record.actor).map(|from| (from, record.at))),
            _ => {}
        }
    }
    storms.extend(open.into_values().map(|from| (from, Duration::MAX)));
    storms
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64, actor: usize, event: Event) -> Record {
        Record::new(Duration::from_millis(ms), actor, LockName::new("n").unwrap(), event)
    }

    fn token(value: u64) -> FencingToken {
        FencingToken::new(value).unwrap()
    }

    fn history() -> Vec<Record> {
        vec![
            at(0, 1, Event::Invoke),
            at(1, 1, Event::Ok(token(1))),
            at(2, 2, Event::Invoke),
            at(5, 1, Event::Released(token(1))),
            at(7, 2, Event::Ok(token(2))),
            at(10, 2, Event::Held(token(2))),
            at(11, 3, Event::fault("partition: replies lost")),
            at(12, 2, Event::Lost(token(2))),
            at(13, 1, Event::Invoke),
            at(30, 1, Event::Ok(token(3))),
            at(
                31,
                2,
                Event::Write {
                    token: token(2),
                    accepted: false,
                },
            ),
            at(32, 3, Event::Invoke),
            at(40, 1, Event::Released(token(3))),
            at(49, 3, Event::Ok(token(4))),
            at(
                50,
                3,
                Event::Over {
                    what: "partition: replies lost".to_owned(),
                },
            ),
        ]
    }

    #[test]
    fn hand_overs_are_counted_apart_in_calm_and_storm() {
        let figures = Figures::of(&history());
        assert_eq!((figures.calm.count(), figures.stormy.count()), (1, 1));
        assert_eq!(figures.calm.percentile(50), Some(Duration::from_millis(2)));
        assert_eq!(figures.stormy.percentile(99), Some(Duration::from_millis(9)));
        assert_eq!(HandOvers::default().percentile(50), None);
    }

    #[test]
    fn the_margin_of_a_loss_is_from_the_last_belief_to_the_next_grant() {
        let figures = Figures::of(&history());
        assert_eq!((figures.grants, figures.losses, figures.refused), (4, 1, 1));
        assert_eq!(figures.smallest_margin, Some(Duration::from_millis(20)));
        assert_eq!(figures.longest_idle, Duration::from_millis(20));
        assert_eq!(figures.faults, BTreeMap::from([("partition".to_owned(), 1)]));
    }

    #[test]
    fn who_asked_after_the_release_did_not_wait_for_it() {
        let mut late = history();
        late.retain(|record| record.at != Duration::from_millis(2));
        late.insert(3, at(6, 2, Event::Invoke));
        assert_eq!(Figures::of(&late).calm.count(), 0);
    }
}
