//! Figures as a table, and the page that shows those of all backends: docs/performance.md.

use std::fmt::Write as _;
use std::path::Path;

use crate::chart::chart;
use crate::contestant::Result;
use crate::report::Report;

/// What stands before this line in the page is written by hand.
const MARK: &str = "<!-- Below: written by make bench. -->\n";

/// A section of the page, with the table of a run.
pub(crate) fn section(report: &Report) -> String {
    let mut page = format!(
        "## {}\n\n{}; {}; load {:.1} before and {:.1} after.\n\n| |",
        report.backend, report.server, report.machine, report.load[0], report.load[1],
    );
    for who in &report.contestants {
        let _ = write!(page, " {who} |");
    }
    let _ = writeln!(page, "\n|---|{}", "--:|".repeat(report.contestants.len()));
    for row in &report.rows {
        let comma = if row.unit.is_empty() { "" } else { ", " };
        let _ = write!(page, "| {}{comma}{} |", row.title, row.unit);
        for who in &report.contestants {
            let _ = match (row.median(who), row.ratio(who)) {
                (Some(value), Some(ratio)) => write!(page, " {} ({}) |", number(value), number(ratio)),
                (Some(value), None) => write!(page, " {} |", number(value)),
                (None, _) => write!(page, " |"),
            };
        }
        page.push('\n');
    }
    for note in &report.notes {
        let _ = write!(page, "\n{note}\n");
    }
    page
}

/// Writes the runs below what is written by hand, and the chart beside the page.
pub(crate) fn write(path: &Path, reports: &[Report]) -> Result {
    let page = std::fs::read_to_string(path)?;
    std::fs::write(path, below(&page, reports)?)?;
    Ok(std::fs::write(path.with_extension("svg"), chart(reports))?)
}

fn below(page: &str, reports: &[Report]) -> Result<String> {
    let (by_hand, _) = page
        .split_once(MARK)
        .ok_or("the page has no line after which tables go")?;
    let sections: Vec<_> = reports.iter().map(section).collect();
    Ok(format!("{by_hand}{MARK}\n{}", sections.join("\n")))
}

/// With as many digits as mean something.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ if value == value.trunc() => format!("{value:.0}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn a_cell_is_a_median_with_its_ratio_to_the_reference() {
        let page = section(&report());
        assert!(
            page.contains("| | fencelock | 2 x PING | a & b |\n|---|--:|--:|--:|\n"),
            "{page}"
        );
        assert!(page.ends_with("| pair, µs | 20.0 (2) | 10.0 | |\n"), "{page}");
    }

    #[test]
    fn what_is_written_by_hand_stays() {
        let page = format!("# Title\n\nText.\n\n{MARK}\nold\n");
        let once = below(&page, &[report()]).unwrap();
        assert!(
            once.starts_with(&format!("# Title\n\nText.\n\n{MARK}\n## Redis\n")),
            "{once}"
        );
        assert_eq!(below(&once, &[report()]).unwrap(), once);
        assert!(below("no mark", &[]).is_err());
    }

    #[test]
    fn numbers_have_as_many_digits_as_mean_something() {
        let texts = [0.0, 1.234, -0.5, 12.34, 123.4, 98_765.4].map(number);
        assert_eq!(texts, ["0", "1.23", "-0.50", "12.3", "123", "98765"]);
    }
}
