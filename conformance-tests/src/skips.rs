//! What is known not to be applicable to a backend.

use std::collections::{BTreeMap, BTreeSet};

/// The list of a harness. A trial that is skipped without being listed fails, and so does one that is listed and not skipped.
pub(crate) struct Skips(Option<BTreeMap<String, String>>);

impl Skips {
    /// Without a list, whatever is not applicable is skipped.
    pub(crate) fn of(list: Option<&str>) -> Self {
        let entry = |line: &str| {
            let (name, reason) = line.split_once(": ").unwrap_or((line, ""));
            (name.to_owned(), reason.to_owned())
        };
        let entries = |list: &str| list.lines().filter(|line| !line.is_empty()).map(entry).collect();
        Self(list.map(entries))
    }

    /// What is wrong with a trial that was skipped for that reason, or with one that was not skipped.
    pub(crate) fn object(&self, trial: &str, skipped: Option<&str>) -> Option<String> {
        let list = self.0.as_ref()?;
        match (list.get(trial).map(String::as_str), skipped) {
            (listed, seen) if listed == seen => None,
            (None, Some(reason)) => Some(format!(
                "not applicable, which the list of skips does not have: {reason}"
            )),
            (Some(listed), Some(reason)) => Some(format!(
                "not applicable because {reason}; the list of skips says {listed}"
            )),
            (Some(listed), None) => Some(format!(
                "it is applicable; take it out of the list of skips, which says {listed}"
            )),
            (None, None) => None,
        }
    }

    /// What is listed and is no trial.
    pub(crate) fn unknown(&self, trials: impl Iterator<Item = String>) -> Vec<String> {
        let trials: BTreeSet<_> = trials.collect();
        let listed = self.0.iter().flat_map(BTreeMap::keys);
        listed.filter(|name| !trials.contains(*name)).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_listed_is_not_skipped_and_what_is_listed_is() {
        let skips = Skips::of(Some("tokens::a: no fault: none\n\nplanted_bugs::b: no room\n"));
        assert_eq!(skips.object("tokens::a", Some("no fault: none")), None);
        assert_eq!(skips.object("tokens::c", None), None);
        let of = |trial, skipped| skips.object(trial, skipped).unwrap();
        assert!(of("tokens::a", Some("the server is down")).contains("the list of skips says no fault: none"));
        assert!(of("tokens::a", None).contains("take it out of the list"));
        assert!(of("tokens::c", Some("no fault: none")).contains("does not have: no fault: none"));
        assert_eq!(
            skips.unknown(["tokens::a", "tokens::c"].map(str::to_owned).into_iter()),
            ["planted_bugs::b"]
        );
    }

    #[test]
    fn without_a_list_all_is_skipped_that_is_not_applicable() {
        let skips = Skips::of(None);
        assert_eq!(skips.object("tokens::a", Some("no fault")), None);
        assert!(skips.unknown(std::iter::empty()).is_empty());
    }
}
