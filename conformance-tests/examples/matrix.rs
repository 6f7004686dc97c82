//! Writes a page in Markdown of what the last runs of the suite showed, from the reports that they left beside what cargo builds:
//!
//! ```sh
//! cargo run -p conformance-tests --example matrix -- docs/conformance.md
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::Value;

const INTRODUCTION: &str = "# What every backend showed

Made by `make matrix` from the reports of the last run of the suite on each backend, on the server that is named. What a harness cannot bring about, or a
backend does not claim, is *not applicable*; which cases that are is listed in `conformance-tests/tests/suite/skips`, and a run that skips anything else
fails.
";

fn main() -> Result<(), Box<dyn Error>> {
    let page = std::env::args().nth(1).ok_or("name the page to write")?;
    let program = std::env::current_exe()?;
    let target = program
        .ancestors()
        .nth(3)
        .ok_or("this program lies in no target folder")?;
    let folder = target.join("conformance");
    let reports = read(&folder)?;
    if reports.is_empty() {
        return Err(format!("there is no report in {}: run the suite first", folder.display()).into());
    }
    Ok(fs::write(page, render(&reports))?)
}

/// One column of the table.
struct Report {
    backend: String,
    setting: Option<String>,
    margin: Option<f64>,
    overlaps: Vec<String>,
    cases: BTreeMap<String, Value>,
    bugs: BTreeMap<String, Value>,
}

fn read(folder: &Path) -> Result<Vec<Report>, Box<dyn Error>> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut reports = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let report = serde_json::from_slice(&fs::read(&path)?);
            let report = report.map_err(|error| format!("{}: {error}", path.display()))?;
            reports.push(Report::of(&report));
        }
    }
    reports.sort_by(|a, b| a.backend.cmp(&b.backend));
    Ok(reports)
}

impl Report {
    fn of(report: &Value) -> Self {
        let rows = |list: &str, key: &str| {
            let rows = report[list].as_array().into_iter().flatten();
            rows.map(|row| (text(&row[key]), row.clone())).collect()
        };
        Self {
            backend: text(&report["backend"]),
            setting: report["setting"].as_str().map(without_port),
            margin: report["smallest_margin_ms"].as_f64(),
            overlaps: report["overlaps_after"]
                .as_array()
                .into_iter()
                .flatten()
                .map(text)
                .collect(),
            cases: rows("cases", "case"),
            bugs: rows("planted_bugs", "bug"),
        }
    }
}

fn render(reports: &[Report]) -> String {
    let mut page = INTRODUCTION.to_owned();
    servers(&mut page, reports);
    cases(&mut page, reports);
    not_applicable(&mut page, reports);
    overlaps(&mut page, reports);
    bugs(&mut page, reports);
    page
}

/// Each case with the number of backends on which it passed, by group.
fn cases(page: &mut String, reports: &[Report]) {
    let mut group = "";
    for case in rows(reports, |report| &report.cases) {
        let (of, sentence) = case.split_once("::").unwrap_or(("", case));
        if of != group {
            group = of;
            let _ = writeln!(
                page,
                "\n## {group}\n\n| case | passed on | not applicable |\n|---|--:|--:|"
            );
        }
        let count = |outcome: &str| {
            let of_case = reports.iter().filter_map(|report| report.cases.get(case));
            of_case.filter(|row| row["outcome"] == outcome).count()
        };
        let (passed, skipped) = (count("passed"), count("not applicable"));
        let shown = match reports.iter().filter(|report| report.cases.contains_key(case)).count() - skipped {
            judged if judged == passed => passed.to_string(),
            judged => format!("{passed}, **{} FAILED**", judged - passed),
        };
        let _ = writeln!(page, "| {} | {shown} | {skipped} |", sentence.replace('_', " "));
    }
}

/// Why cases are not applicable, and to how many of each backend's cases that applies.
fn not_applicable(page: &mut String, reports: &[Report]) {
    page.push_str("\n## Not applicable\n\n| reason | backends, with the number of cases |\n|---|---|\n");
    let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for report in reports {
        let mut of_backend: BTreeMap<String, usize> = BTreeMap::new();
        for row in report.cases.values().filter(|row| row["outcome"] == "not applicable") {
            *of_backend.entry(text(&row["reason"])).or_default() += 1;
        }
        for (reason, cases) in of_backend {
            let backend = format!("{} ({cases})", report.backend);
            reasons.entry(reason).or_default().push(backend);
        }
    }
    for (reason, backends) in reasons {
        let _ = writeln!(page, "| {reason} | {} |", backends.join(", "));
    }
}

fn servers(page: &mut String, reports: &[Report]) {
    page.push_str("\n| backend | on | cases | not applicable | planted bugs caught | smallest loss margin |\n");
    page.push_str("|---|---|--:|--:|--:|--:|\n");
    for report in reports {
        let count = |rows: &BTreeMap<String, Value>, outcome: &str| {
            rows.values().filter(|row| row["outcome"] == outcome).count()
        };
        let planted = report.bugs.len() - count(&report.bugs, "not applicable");
        let caught = match planted {
            0 => "shown above".to_owned(),
            _ => format!("{} of {planted}", count(&report.bugs, "caught")),
        };
        let margin = report
            .margin
            .map(|margin| format!("{margin:.1} ms"))
            .unwrap_or_default();
        let _ = writeln!(
            page,
            "| {} | {} | {} of {} | {} | {caught} | {margin} |",
            report.backend,
            report.setting.as_deref().unwrap_or("this process"),
            count(&report.cases, "passed"),
            report.cases.len() - count(&report.cases, "not applicable"),
            count(&report.cases, "not applicable"),
        );
    }
}

fn overlaps(page: &mut String, reports: &[Report]) {
    page.push_str(
        "\n## Faults after which two may believe\n\nThe server lets go of a lock early, and its holder has not been told \
         yet. The fence refused the earlier holder each time.\n\n| backend | faults |\n|---|---|\n",
    );
    for report in reports {
        let faults = match &report.overlaps[..] {
            [] => "none was seen".to_owned(),
            faults => faults.join(", "),
        };
        let _ = writeln!(page, "| {} | {faults} |", report.backend);
    }
}

fn bugs(page: &mut String, reports: &[Report]) {
    let reports: Vec<_> = reports.iter().filter(|report| !report.bugs.is_empty()).collect();
    page.push_str(
        "\n## Planted bugs\n\nA backend with that bug fails the suite, in the case that is named.\n\n| bug | caught by | on |\n|---|---|---|\n",
    );
    for bug in rows(reports.iter().copied(), |report| &report.bugs) {
        let mut by: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for report in &reports {
            let Some(row) = report.bugs.get(bug) else { continue };
            let outcome = match row["outcome"].as_str() {
                Some("caught") => format!("`{}`", text(&row["by"])),
                Some("not applicable") => continue,
                Some("not judged") => "**not judged**".to_owned(),
                _ => "**ESCAPED**".to_owned(),
            };
            by.entry(outcome).or_default().push(&report.backend);
        }
        for (outcome, backends) in by {
            let _ = writeln!(page, "| {bug} | {outcome} | {} |", backends.join(", "));
        }
    }
}

/// What stands in the first column: whatever any of them has.
fn rows<'a>(
    reports: impl IntoIterator<Item = &'a Report>,
    of: fn(&Report) -> &BTreeMap<String, Value>,
) -> BTreeSet<&'a str> {
    reports
        .into_iter()
        .flat_map(|report| of(report).keys().map(String::as_str))
        .collect()
}

/// Which free ports servers were given is of no interest.
fn without_port(setting: &str) -> String {
    let mut pieces = setting.split(" at 127.0.0.1:");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |shown, piece| {
        shown + piece.trim_start_matches(|c: char| c.is_ascii_digit())
    })
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().replace('|', "\\|")
}
