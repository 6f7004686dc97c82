//! A fenced register never takes a lower token after a higher one, and never refuses the highest.

use super::{Event, Record, by_name};

pub(super) fn violations(records: &[Record]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, records) in by_name(records) {
        let mut mark = None;
        for record in records {
            let Event::Write { token, accepted } = record.event else {
                continue;
            };
            let stale = mark.is_some_and(|mark| token < mark);
            if accepted == stale {
                let did = if accepted { "took" } else { "refused" };
                found.push(format!(
                    "the register {name:?} {did} a write with {token} at {:.4?}, although its mark was {}",
                    record.at,
                    mark.map_or_else(|| "not set".to_owned(), |mark| mark.to_string())
                ));
            }
            if accepted {
                mark = mark.max(Some(token));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::hand_made::{at, write};
    use super::*;

    fn wrong(writes: &[(u64, bool)]) -> usize {
        let record = |(ms, (token, accepted)): (u64, &(u64, bool))| at(ms, 1, write(*token, *accepted));
        violations(&(1..).zip(writes).map(record).collect::<Vec<_>>()).len()
    }

    #[test]
    fn a_stale_write_that_was_taken_is_a_violation() {
        assert_eq!(wrong(&[(5, true), (6, true), (5, true)]), 1);
    }

    #[test]
    fn a_current_write_that_was_refused_is_a_violation() {
        assert_eq!(wrong(&[(5, true), (5, false)]), 1);
    }

    #[test]
    fn equal_and_higher_tokens_are_taken_and_lower_ones_refused() {
        assert_eq!(wrong(&[(5, true), (5, true), (8, true), (5, false)]), 0);
    }
}
