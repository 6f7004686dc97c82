//! The drawing: a few clients over a short time, with every label in the drawing itself.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use conformance_tests::oracle::{Event, Record};
use conformance_tests::torture::{Belief, End, beliefs};

use super::picture::{Fault, faults};

const LEFT: f64 = 92.0;
const RIGHT: f64 = 744.0;
const WIDTH: f64 = 760.0;
const TOP: f64 = 14.0;
const ROW: f64 = 52.0;
const BAR: f64 = 30.0;

const STYLE: &str = "text{font:14px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#1f2328}\
    .bar{fill:#fff;font-weight:600}.tick{fill:#59636e;font-size:12px}.refused{fill:#cf222e;font-weight:600}\
    .h0{fill:#0969da}.h1{fill:#8250df}.h2{fill:#1a7f37}.h3{fill:#9a6700}\
    .rule{stroke:#d1d9e0}.cross{stroke:#cf222e;stroke-width:3}.fall{stroke:#cf222e;stroke-dasharray:3 4}\
    .paused{fill:url(#paused);stroke:#59636e}.line{stroke:#59636e;stroke-width:2}\
    @media(prefers-color-scheme:dark){text{fill:#f0f6fc}.bar{fill:#0d1117}.tick{fill:#9198a1}.refused{fill:#ff7b72}\
    .h0{fill:#58a6ff}.h1{fill:#bc8cff}.h2{fill:#3fb950}.h3{fill:#d29922}.rule{stroke:#3d444d}\
    .cross,.fall{stroke:#ff7b72}.paused,.line{stroke:#9198a1}}";

/// A row for each client, with what it held, its pauses meanwhile and its tokens; below, the writes that the register took and refused.
/// It ends with the faults: the requests after them only show that all is well again.
pub(super) fn drawing(records: &[Record]) -> String {
    let last = records.iter().position(|record| matches!(record.event, Event::Healed));
    let records = &records[..last.unwrap_or(records.len())];
    let beliefs = beliefs(records);
    let mut rows: BTreeMap<usize, usize> = BTreeMap::new();
    for belief in &beliefs {
        let next = rows.len();
        rows.entry(belief.actor).or_insert(next);
    }
    let end = records.last().map_or(Duration::ZERO, |record| record.at);
    let x = |at: Duration| LEFT + (RIGHT - LEFT) * at.as_secs_f64() / end.as_secs_f64().max(0.001);
    let y = |row: usize| TOP + row as f64 * ROW;
    let register = y(rows.len()) + BAR / 2.0;
    let bottom = register + 42.0;
    let mut drawn = axis(end, bottom, &x);
    for (actor, row) in &rows {
        let name = char::from(b'A' + u8::try_from(row % 26).unwrap_or_default());
        drawn += &text("", LEFT - 10.0, y(*row) + 20.0, "end", &format!("holder {name}"));
        for fault in faults(records).iter().filter(|fault| fault.actor == *actor) {
            if let Some(belief) = interrupted(&beliefs, fault) {
                drawn += &bar(row % 4, x(belief.from), x(fault.from), y(*row), "");
                let _ = write!(
                    drawn,
                    "<rect class='paused' x='{:.1}' y='{:.1}' width='{:.1}' height='{BAR}'/>",
                    x(fault.from),
                    y(*row),
                    x(fault.to) - x(fault.from)
                );
                let middle = f64::midpoint(x(fault.from), x(fault.to));
                drawn += &text("", middle, y(*row) + 20.0, "middle", "paused");
            }
        }
        for belief in beliefs.iter().filter(|belief| belief.actor == *actor) {
            let label = format!("token {}", short(belief.token.get()));
            drawn += &bar(row % 4, x(belief.from), x(belief.to), y(*row), &label);
        }
    }
    drawn += &text("", LEFT - 10.0, register + 5.0, "end", "resource");
    let _ = write!(drawn, "<path class='line' d='M{LEFT} {register}H{RIGHT}'/>");
    let mut refused = String::new();
    for record in records {
        let Event::Write { token, accepted } = record.event else {
            continue;
        };
        let row = rows.get(&record.actor).copied().unwrap_or_default();
        let at = x(record.at);
        if accepted {
            let _ = write!(
                drawn,
                "<circle class='h{}' cx='{at:.1}' cy='{register}' r='5'/>",
                row % 4
            );
            continue;
        }
        let _ = write!(
            refused,
            "<path class='fall' d='M{at:.1} {:.1}V{:.1}'/><path class='cross' d='M{:.1} {:.1}l16 16m0 -16l-16 16'/>",
            y(row) + BAR,
            register - 8.0,
            at - 8.0,
            register - 8.0
        );
        let label = format!("write with token {} refused", short(token.get()));
        refused += &text("refused", at + 8.0, register + 28.0, "end", &label);
    }
    drawn += &refused;
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:.0}' width='{WIDTH}' height='{height:.0}' role='img'>\
         <title>Who held the lock, and which writes the resource took</title><style>{STYLE}</style><defs><pattern id='paused' width='8' \
         height='8' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'><path d='M0 0V8' stroke='#8c959f' stroke-width='3' \
         stroke-opacity='.45'/></pattern></defs>{drawn}</svg>\n",
        height = bottom + 26.0
    )
}

/// The hold that a pause interrupts. Pauses of clients that hold no lock are not drawn.
fn interrupted<'a>(beliefs: &'a [Belief], fault: &Fault<'_>) -> Option<&'a Belief> {
    let of_client = |belief: &&Belief| belief.actor == fault.actor && belief.from <= fault.from;
    let belief = beliefs.iter().rfind(of_client)?;
    let held = belief.end != End::Released || fault.from <= belief.to;
    (held && fault.what.starts_with("pause")).then_some(belief)
}

fn bar(colour: usize, from: f64, to: f64, top: f64, label: &str) -> String {
    let width = (to - from).max(1.0);
    let mut bar = format!("<rect class='h{colour}' x='{from:.1}' y='{top:.1}' width='{width:.1}' height='{BAR}'/>");
    if !label.is_empty() {
        bar += &text("bar", from + 10.0, top + 20.0, "start", label);
    }
    bar
}

fn text(class: &str, x: f64, y: f64, anchor: &str, text: &str) -> String {
    format!("<text class='{class}' x='{x:.1}' y='{y:.1}' text-anchor='{anchor}'>{text}</text>")
}

/// The last digits of a token: the ones in which those of a short time differ.
fn short(token: u64) -> String {
    format!("…{:03}", token % 1_000)
}

fn axis(end: Duration, bottom: f64, x: &dyn Fn(Duration) -> f64) -> String {
    let steps = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];
    let step = steps
        .into_iter()
        .find(|step| end.as_secs_f64() / step <= 10.0)
        .unwrap_or(120.0);
    let mut drawn = String::new();
    let mut at = 0.0;
    while at <= end.as_secs_f64() {
        let place = x(Duration::from_secs_f64(at));
        let _ = write!(drawn, "<path class='rule' d='M{place:.1} {TOP}V{bottom:.1}'/>");
        drawn += &text("tick", place, bottom + 16.0, "middle", &format!("{at} s"));
        at += step;
    }
    drawn
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use conformance_tests::oracle::{History, judge};

    use super::*;

    #[test]
    fn the_drawing_in_the_documentation_is_that_of_the_history_beside_it() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let read = |name: &str| std::fs::read_to_string(docs.join(name)).unwrap();
        let history = History::from_json(&read("stale-write.json")).unwrap();
        let verdict = judge(&history.records);
        assert!(verdict.violations.is_empty(), "{verdict}");
        assert_eq!(drawing(&history.records), read("stale-write.svg"));
    }
}
