//! Figures as tables, in Markdown.

use std::fmt::Write as _;

use crate::figures::{Finding, Machine, Measure, Report};

/// All of a run.
pub(crate) fn page(report: &Report) -> String {
    let mut page = format!(
        "## {}\n\n{}; {}.\n",
        report.backend,
        report.server,
        machine(&report.machine)
    );
    if report.quick {
        page.push_str("\n**Measured for a short time (`--quick`): orders of magnitude only.**\n");
    }
    bars(&mut page, report);
    for one in &report.measures {
        page.push('\n');
        page.push_str(&measure(one));
    }
    checks(&mut page, report);
    page
}

pub(crate) fn machine(machine: &Machine) -> String {
    let stolen = machine.stolen.filter(|stolen| *stolen >= 0.001);
    let stolen = stolen.map(|stolen| format!(", {:.1} % of whose time its host took away", 100.0 * stolen));
    format!(
        "{}, {} cores{}, Linux {}, load {:.1} before and {:.1} after",
        machine.processor,
        machine.cores,
        stolen.unwrap_or_default(),
        machine.kernel,
        machine.load[0],
        machine.load[1]
    )
}

fn bars(page: &mut String, report: &Report) {
    if report.bars.is_empty() {
        return;
    }
    page.push_str("\n| | figure | seen | bar | |\n|---|---|--:|--:|---|\n");
    for bar in &report.bars {
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} |",
            bar.of,
            bar.figure,
            number(bar.value),
            bar.bar,
            if bar.met { "met" } else { "**missed**" }
        );
    }
}

pub(crate) fn measure(measure: &Measure) -> String {
    let mut page = format!("### {}: {}\n\n", measure.id, measure.title);
    let has_cases = measure.rows.iter().any(|row| !row.case.is_empty());
    page.push_str(if has_cases { "| | |" } else { "| |" });
    for column in &measure.columns {
        let _ = match column.unit.as_str() {
            "" => write!(page, " {} |", column.name),
            unit => write!(page, " {}, {unit} |", column.name),
        };
    }
    page.push_str(if has_cases { "\n|---|---|" } else { "\n|---|" });
    page.push_str(&"--:|".repeat(measure.columns.len()));
    page.push('\n');
    for row in &measure.rows {
        let _ = write!(page, "| {} |", row.who);
        if has_cases {
            let _ = write!(page, " {} |", row.case);
        }
        for value in &row.values {
            let _ = write!(page, " {} |", value.map(number).unwrap_or_default());
        }
        page.push('\n');
    }
    for note in &measure.notes {
        let _ = write!(page, "\n{note}\n");
    }
    page
}

fn checks(page: &mut String, report: &Report) {
    page.push_str("\n### Is it a lock?\n\n| | another client is kept out | another task of the client is kept out | who waits gets it |\n|---|---|---|---|\n");
    for check in &report.checks {
        let [clients, tasks, waits] = [&check.clients, &check.tasks, &check.waits].map(finding);
        let _ = writeln!(page, "| {} | {clients} | {tasks} | {waits} |", check.who);
    }
}

fn finding(finding: &Finding) -> String {
    match finding {
        Finding::Yes => "yes".to_owned(),
        Finding::No(seen) => format!("**no**: {seen}"),
        Finding::NotApplicable => String::new(),
    }
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
    use super::number;

    #[test]
    fn numbers_have_as_many_digits_as_mean_something() {
        for (value, text) in [
            (0.0, "0"),
            (1.234, "1.23"),
            (-0.5, "-0.50"),
            (12.34, "12.3"),
            (123.4, "123"),
            (98_765.4, "98765"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}
