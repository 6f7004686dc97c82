//! Once the faults are over, every name can be acquired again.

use super::{Event, Record, by_name};

pub(super) fn violations(records: &[Record]) -> Vec<String> {
    let Some(healed) = records.iter().rfind(|r| r.event == Event::Healed).map(|r| r.at) else {
        return vec!["the history has no end: the faults were never healed".to_owned()];
    };
    let mut found = Vec::new();
    for (name, records) in by_name(records) {
        let asked = records.iter().any(|r| r.event == Event::Invoke);
        let granted = records
            .iter()
            .any(|r| r.at >= healed && matches!(r.event, Event::Ok(_)));
        if asked && !granted {
            found.push(format!(
                "{name:?} could not be acquired again after the faults were over"
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::hand_made::{at, token};
    use super::*;

    #[test]
    fn a_name_that_stays_stuck_is_a_violation() {
        let history = [
            at(1, 1, Event::Invoke),
            at(2, 1, Event::Ok(token(5))),
            at(3, 1, Event::Healed),
            at(4, 1, Event::Invoke),
            at(5, 1, Event::Busy),
        ];
        assert_eq!(violations(&history).len(), 1);
        assert_eq!(violations(&history[..2]).len(), 1, "never healed");
    }

    #[test]
    fn one_grant_after_the_healing_is_enough() {
        let history = [
            at(1, 1, Event::Invoke),
            at(2, 1, Event::Unknown),
            at(3, 1, Event::Healed),
            at(4, 1, Event::Invoke),
            at(5, 1, Event::Ok(token(5))),
        ];
        assert_eq!(violations(&history), Vec::<String>::new());
    }
}
