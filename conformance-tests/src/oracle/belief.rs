//! No two believe to hold one name at the same time, unless a fault that permits it was injected; and even then the
//! register told them apart.

use std::collections::BTreeMap;
use std::time::Duration;

use lock_core::FencingToken;

use super::{Event, Record, by_name};

/// From when a grant is known to the last look at which its holder believed, if there was one.
struct Interval {
    token: FencingToken,
    from: Duration,
    to: Option<Duration>,
}

/// How often two believed.
#[derive(Debug, Default)]
pub(super) struct Overlaps {
    /// Because of a fault that permits it.
    pub(super) permitted: usize,
    /// For no such reason.
    pub(super) violations: Vec<String>,
}

pub(super) fn overlaps(records: &[Record]) -> Overlaps {
    let permitted = permitted(records);
    let mut found = Overlaps::default();
    for (name, records) in by_name(records) {
        let mut intervals = intervals(&records);
        intervals.sort_by_key(|i| i.from);
        for (i, first) in intervals.iter().enumerate() {
            let Some(first_to) = first.to else { continue };
            for second in intervals[i + 1..].iter().take_while(|second| second.from < first_to) {
                // The earlier of the two grants, but known late, as when the process that reports it was not scheduled. It may have
                // ended before the later one began, unless a look shows belief.
                if second.token < first.token && second.to.is_none() {
                    continue;
                }
                if permitted
                    .iter()
                    .any(|(from, to)| *from <= second.from && *to >= first.from)
                {
                    found.permitted += 1;
                } else {
                    found.violations.push(format!(
                        "two held {name:?} at {:.4?}: {} from {:.4?} to {:.4?}, {} from {:.4?}",
                        second.from, first.token, first.from, first_to, second.token, second.from
                    ));
                }
            }
        }
    }
    found
}

/// When there was a fault that permits it. A server that has been replaced may still grant until it learns of that, so the whole time counts.
fn permitted(records: &[Record]) -> Vec<(Duration, Duration)> {
    let mut permitted = Vec::new();
    for (i, record) in records.iter().enumerate() {
        let Event::Fault { what, overlap: true } = &record.event else {
            continue;
        };
        let is_end = |later: &&Record| {
            later.actor == record.actor && matches!(&later.event, Event::Over { what: over } if over == what)
        };
        let end = records[i..].iter().find(is_end).map_or(record.at, |over| over.at);
        permitted.push((record.at, end));
    }
    permitted
}

fn intervals(records: &[&Record]) -> Vec<Interval> {
    // One actor holds one grant of a name at a time, so actor and token tell grants apart even if tokens repeat.
    let mut open: BTreeMap<(usize, FencingToken), Interval> = BTreeMap::new();
    let mut closed = Vec::new();
    for record in records {
        let at = record.at;
        match record.event {
            Event::Ok(token) => {
                let interval = Interval {
                    token,
                    from: at,
                    to: None,
                };
                closed.extend(open.insert((record.actor, token), interval));
            }
            Event::Held(token) => {
                if let Some(interval) = open.get_mut(&(record.actor, token)) {
                    interval.to = Some(at);
                }
            }
            _ => {}
        }
    }
    closed.extend(open.into_values());
    closed
}

#[cfg(test)]
mod tests {
    use super::super::hand_made::{at, failover, token};
    use super::*;

    fn two_believers(overlap: bool) -> Vec<Record> {
        vec![
            at(1, 1, Event::Ok(token(5))),
            at(2, 1, failover(overlap)),
            at(3, 2, Event::Ok(token(6))),
            at(4, 1, Event::Held(token(5))),
        ]
    }

    fn violations(records: &[Record]) -> Vec<String> {
        overlaps(records).violations
    }

    #[test]
    fn two_who_believe_at_once_are_a_violation() {
        assert_eq!(violations(&two_believers(false)).len(), 1);
    }

    #[test]
    fn a_fault_that_permits_it_excuses_an_overlap_and_it_is_counted() {
        let overlaps = overlaps(&two_believers(true));
        assert_eq!((overlaps.violations.len(), overlaps.permitted), (0, 1));
    }

    #[test]
    fn a_fault_that_is_under_way_excuses_what_begins_in_its_time_and_nothing_after_its_end() {
        let overlaps_until = |end: u64| {
            let what = "failover".to_owned();
            let mut history = vec![at(0, 9, failover(true)), at(end, 9, Event::Over { what })];
            history.extend(two_believers(false));
            history.sort_by_key(|record| record.at);
            let overlaps = overlaps(&history);
            (overlaps.permitted, overlaps.violations.len())
        };
        assert_eq!(overlaps_until(2), (1, 0));
        assert_eq!(overlaps_until(0), (0, 1));
    }

    #[test]
    fn a_fault_long_before_excuses_nothing() {
        let mut history = vec![at(0, 1, failover(true))];
        history.extend(two_believers(false));
        assert_eq!(violations(&history).len(), 1);
    }

    #[test]
    fn an_earlier_grant_that_is_known_late_overlaps_only_if_its_holder_still_believes() {
        let known_late = |look| {
            vec![
                at(1, 2, Event::Ok(token(6))),
                at(2, 1, Event::Ok(token(5))),
                at(3, 1, look),
                at(4, 2, Event::Held(token(6))),
            ]
        };
        assert_eq!(violations(&known_late(Event::Lost(token(5)))), Vec::<String>::new());
        assert_eq!(violations(&known_late(Event::Held(token(5)))).len(), 1);
    }

    #[test]
    fn the_same_token_granted_twice_is_still_two_holders() {
        let history = [
            at(1, 1, Event::Ok(token(5))),
            at(2, 2, Event::Ok(token(5))),
            at(3, 1, Event::Held(token(5))),
        ];
        assert_eq!(violations(&history).len(), 1);
    }

    #[test]
    fn whoever_only_learns_of_its_loss_after_the_next_grant_did_not_believe_meanwhile() {
        let history = [
            at(1, 1, Event::Ok(token(5))),
            at(2, 1, Event::Held(token(5))),
            at(3, 2, Event::Ok(token(6))),
            at(4, 1, Event::Lost(token(5))),
        ];
        assert_eq!(violations(&history), Vec::<String>::new());
    }
}
