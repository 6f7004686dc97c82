//! Tokens rise in real time: what was asked for after a grant was known carries a higher token than that grant.

use std::time::Duration;

use lock_core::FencingToken;

use super::{Event, Record, by_name};

pub(super) fn violations(records: &[Record]) -> Vec<String> {
    by_name(records)
        .flat_map(|(_, records)| of_one_name(&records))
        .collect()
}

fn of_one_name(records: &[&Record]) -> Vec<String> {
    let mut found = Vec::new();
    // In the order of their ends, the highest token so far.
    let mut ended: Vec<(Duration, FencingToken)> = Vec::new();
    for (i, record) in records.iter().enumerate() {
        let Event::Ok(token) = record.event else { continue };
        let invoked = records[..i]
            .iter()
            .rfind(|r| r.actor == record.actor && r.event == Event::Invoke)
            .map_or(record.at, |r| r.at);
        let known = ended.partition_point(|(at, _)| *at < invoked);
        if let Some(&(at, highest)) = known.checked_sub(1).and_then(|i| ended.get(i))
            && token <= highest
        {
            found.push(format!(
                "tokens do not rise: {:?} was asked for at {invoked:.4?} and granted with {token}, but {highest} was \
                 known at {at:.4?}",
                record.name
            ));
        }
        let highest = ended.last().map_or(token, |(_, highest)| token.max(*highest));
        ended.push((record.at, highest));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::hand_made::{at, token};
    use super::*;

    fn grant(from: u64, to: u64, actor: usize, value: u64) -> [Record; 2] {
        [at(from, actor, Event::Invoke), at(to, actor, Event::Ok(token(value)))]
    }

    #[test]
    fn a_lower_or_equal_token_after_a_known_grant_is_a_violation() {
        for second in [4, 5] {
            let history = [grant(1, 2, 1, 5), grant(3, 4, 2, second)].concat();
            assert_eq!(violations(&history).len(), 1, "token {second}");
        }
    }

    #[test]
    fn grants_that_overlap_in_time_may_come_in_any_order() {
        let history = [
            at(1, 1, Event::Invoke),
            at(1, 2, Event::Invoke),
            at(2, 1, Event::Ok(token(9))),
            at(3, 2, Event::Ok(token(8))),
        ];
        assert_eq!(violations(&history), Vec::<String>::new());
    }

    #[test]
    fn a_low_token_is_found_behind_later_higher_ones() {
        let history = [grant(1, 2, 1, 50), grant(3, 4, 2, 60), grant(5, 6, 3, 55)].concat();
        assert_eq!(violations(&history).len(), 1);
    }
}
