//! How many cases and planted bugs there are, where pages say so.

use std::fs;
use std::path::Path;

use crate::broken::Bug;
use crate::cases::GROUPS;

#[test]
fn pages_state_the_number_of_cases_and_of_planted_bugs_as_it_is() {
    let cases: usize = GROUPS.iter().map(|group| group.cases.len()).sum();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let pages = fs::read_dir(&docs).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    for page in pages.chain([docs.join("../README.md")]) {
        let text = fs::read_to_string(&page).unwrap();
        let words: Vec<_> = text.split_whitespace().collect();
        for three in words.windows(3) {
            let Ok(number) = three[0].parse::<usize>() else {
                continue;
            };
            // Fewer are those of a group.
            if number >= 100 && three[1].starts_with("cases") {
                assert_eq!(number, cases, "cases in {}", page.display());
            }
            if number >= 20 && three[1] == "planted" && three[2].starts_with("bugs") {
                assert_eq!(number, Bug::all().count(), "planted bugs in {}", page.display());
            }
        }
    }
}
