//! The page: one file, with nothing from elsewhere.

use std::collections::BTreeSet;
use std::fmt::Write;

use conformance_tests::oracle::Event;

use super::picture::{COLOURS, picture};
use super::result::Outcome;

/// How many violations are listed.
const LISTED: usize = 100;

/// The page as HTML.
pub(super) fn page(outcome: &Outcome) -> String {
    let violations = &outcome.verdict.violations;
    let (class, verdict) = match violations.len() {
        0 => ("good", "No violation".to_owned()),
        1 => ("bad", "1 violation".to_owned()),
        n => ("bad", format!("{n} violations")),
    };
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' \
         content='width=device-width'><meta name='color-scheme' content='light dark'><title>fencelock torture: \
         {verdict}</title><style>{STYLE}</style></head><body>\n<h1>fencelock torture</h1>\n<p class='verdict \
         {class}'><strong>{verdict}</strong> <span>{}</span></p>\n",
        outcome.headline()
    );
    if !violations.is_empty() {
        page += "<ul class='violations'>";
        for violation in violations.iter().take(LISTED) {
            let _ = write!(page, "<li>{}</li>", escaped(violation));
        }
        if violations.len() > LISTED {
            let _ = write!(page, "<li>and {} more</li>", violations.len() - LISTED);
        }
        page += "</ul>\n";
    }
    page += "<div class='tables'>";
    page += &table(outcome.rows().iter().map(|(name, value)| (*name, value.as_str())));
    page += &table(
        outcome
            .history
            .about
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str())),
    );
    page += "</div>\n<h2>Who believed to hold which lock</h2>\n";
    page += &legend(outcome);
    page += &picture(&outcome.history.records);
    page += "\n<p class='note'>Point at anything to read what it is. A bar goes from the moment at which a client knew that it \
             had the lock to the last one at which it looked and believed, or let go.</p>\n</body></html>\n";
    page
}

/// A text that no browser takes for a tag.
pub(super) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            c => escaped.push(c),
        }
    }
    escaped
}

fn table<'a>(rows: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut table = "<table>".to_owned();
    for (name, value) in rows {
        let _ = write!(table, "<tr><th>{}</th><td>{}</td></tr>", escaped(name), escaped(value));
    }
    table + "</table>"
}

/// What is in the picture, and nothing else.
fn legend(outcome: &Outcome) -> String {
    let mut actors = BTreeSet::new();
    let mut kinds = BTreeSet::new();
    let (mut lost, mut refused) = (false, false);
    for record in &outcome.history.records {
        match &record.event {
            Event::Ok(_) => drop(actors.insert(record.actor)),
            Event::Fault { what, .. } => drop(kinds.insert(what.split(':').next().unwrap_or_default())),
            Event::Lost(_) => lost = true,
            Event::Write { accepted: false, .. } => refused = true,
            _ => {}
        }
    }
    let mut legend = "<p class='legend'>".to_owned();
    let mut item = |drawing: &str, text: &str| {
        let _ = write!(
            legend,
            "<span><svg width='18' height='14'>{drawing}</svg>{}</span>",
            escaped(text)
        );
    };
    let patch = |class: &str| format!("<rect class='{class}' width='18' height='14'/>");
    for actor in actors.iter().take(COLOURS) {
        item(&patch(&format!("c{}", actor % COLOURS)), &format!("client {actor}"));
    }
    item(&patch("many"), "several, shorter than a pixel");
    if lost {
        item("<rect class='lost' x='8' width='3' height='14'/>", "lost");
    }
    if refused {
        item("<path class='refused' d='M3 2h12l-6 11z'/>", "stale write refused");
    }
    if outcome.figures.overlaps > 0 {
        item(&patch("bad"), "two believed");
    }
    for (kind, text) in [
        ("pause", "paused"),
        ("kill", "killed"),
        ("partition", "partition"),
        ("latency", "latency"),
        ("clock", "wall clock off"),
        ("server", "fault of the server"),
    ] {
        if kinds.contains(kind) {
            item(&patch(kind), text);
        }
    }
    legend + "</p>\n"
}

const STYLE: &str = include_str!("page.css");

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use conformance_tests::oracle::{History, Record};

    use super::*;

    #[test]
    fn nothing_that_a_history_holds_is_taken_for_a_tag() {
        let name = "<script>alert('1')</script>".parse::<fencelock::LockName>().unwrap();
        let token = fencelock::FencingToken::new(1).unwrap();
        let records = vec![
            Record::new(Duration::ZERO, 1, name.clone(), Event::Ok(token)),
            Record::new(Duration::ZERO, 1, name.clone(), Event::Write { token, accepted: false }),
            Record::new(Duration::ZERO, 1, None, Event::fault("<script>")),
        ];
        let mut history = History::new(records);
        history.about = vec![("<script>".to_owned(), "<script>".to_owned())];
        let page = page(&Outcome::of(history));
        assert!(!page.contains("<script"), "{page}");
        assert!(page.contains("&lt;script&gt;"));
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere() {
        let page = page(&Outcome::of(History::default()));
        for foreign in ["http:", "https:", "src=", "url(\"", "@import"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }
}
