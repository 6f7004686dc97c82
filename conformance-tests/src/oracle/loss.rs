//! No holder believes longer than the server has promised, and what is lost stays lost.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::{Event, Record, by_name};

pub(super) fn violations(records: &[Record]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, records) in by_name(records) {
        let mut promised: HashMap<_, Duration> = HashMap::new();
        let mut lost = HashSet::new();
        for record in records {
            match record.event {
                Event::Refreshed { token, sent, ttl } => {
                    let until = promised.entry(token).or_default();
                    *until = (*until).max(sent + ttl);
                }
                Event::Lost(token) => {
                    lost.insert((record.actor, token));
                }
                Event::Held(token) => {
                    let until = promised.get(&token);
                    if until.is_some_and(|until| record.at > *until) {
                        found.push(format!(
                            "{token} of {name:?} was believed in at {:.4?}, although the server had promised it only \
                             until {until:.4?}",
                            record.at
                        ));
                    }
                    if lost.contains(&(record.actor, token)) {
                        found.push(format!(
                            "{token} of {name:?} was lost and came back at {:.4?}",
                            record.at
                        ));
                    }
                }
                _ => {}
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::hand_made::{at, refreshed, token};
    use super::*;

    #[test]
    fn belief_beyond_the_promise_is_a_violation() {
        let history = [
            at(1, 9, refreshed(5, 0)),
            at(2, 1, Event::Ok(token(5))),
            at(101, 1, Event::Held(token(5))),
        ];
        assert_eq!(violations(&history).len(), 1);
    }

    #[test]
    fn an_acknowledged_renewal_lengthens_the_promise_from_its_sending_on() {
        let held_at = |ms| {
            let held = at(ms, 1, Event::Held(token(5)));
            violations(&[at(1, 9, refreshed(5, 0)), at(70, 9, refreshed(5, 60)), held]).len()
        };
        assert_eq!((held_at(150), held_at(161)), (0, 1));
    }

    #[test]
    fn what_is_lost_does_not_come_back() {
        let history = [
            at(1, 9, refreshed(5, 0)),
            at(2, 1, Event::Lost(token(5))),
            at(3, 1, Event::Held(token(5))),
        ];
        assert_eq!(violations(&history).len(), 1);
    }
}
