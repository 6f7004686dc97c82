//! The picture: who held what and when, which faults there were meanwhile, and which writes the registers took and refused.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use conformance_tests::oracle::{Event, Record};
use lock_core::{FencingToken, LockName};

const LEFT: f64 = 96.0;
const TOP: f64 = 14.0;
/// The height of a register's row.
const REGISTER: f64 = 46.0;

const STYLE: &str = "text{font:14px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#1f2328}\
    .bar{fill:#fff;font-weight:600}.tick{fill:#59636e;font-size:12px}.refused{fill:#cf222e;font-weight:600}\
    .h0{fill:#0969da}.h1{fill:#8250df}.h2{fill:#1a7f37}.h3{fill:#9a6700}.h4{fill:#bf3989}.h5{fill:#0a7480}\
    .rule{stroke:#d1d9e0}.cross{stroke:#cf222e;stroke-width:3}.fall{stroke:#cf222e;stroke-dasharray:3 4}\
    .fault{fill:url(#fault);stroke:#59636e}.server{fill:#9198a1;fill-opacity:.2}.line{stroke:#59636e;stroke-width:2}.two{fill:#cf222e}\
    @media(prefers-color-scheme:dark){text{fill:#f0f6fc}.bar{fill:#0d1117}.tick{fill:#9198a1}.refused{fill:#ff7b72}\
    .h0{fill:#58a6ff}.h1{fill:#bc8cff}.h2{fill:#3fb950}.h3{fill:#d29922}.h4{fill:#f778ba}.h5{fill:#39c5cf}\
    .rule{stroke:#3d444d}.cross,.fall{stroke:#ff7b72}.two{fill:#ff7b72}.fault,.line{stroke:#9198a1}}";

/// From a grant to the last moment at which its holder is known to have believed in it.
struct Hold<'a> {
    name: &'a LockName,
    actor: usize,
    token: FencingToken,
    from: Duration,
    to: Duration,
}

fn holds(records: &[Record]) -> Vec<Hold<'_>> {
    let (mut holds, mut open) = (Vec::<Hold<'_>>::new(), BTreeMap::new());
    for record in records {
        let (Some(name), actor, from) = (&record.name, record.actor, record.at) else {
            continue;
        };
        match record.event {
            Event::Ok(token) => {
                open.insert((actor, name, token), holds.len());
                holds.push(Hold {
                    name,
                    actor,
                    token,
                    from,
                    to: from,
                });
            }
            Event::Held(token) | Event::Released(token) => {
                if let Some(hold) = open.get(&(actor, name, token)) {
                    holds[*hold].to = record.at;
                }
            }
            _ => {}
        }
    }
    holds
}

/// Where things are drawn.
struct Frame<'a> {
    /// The row of each holder.
    rows: BTreeMap<usize, usize>,
    /// The row of each register, below those of the holders.
    registers: BTreeMap<&'a LockName, usize>,
    /// The heights of a row and of what is in it. With few holders there is room for words.
    row: f64,
    bar: f64,
    right: f64,
    scale: f64,
}

impl Frame<'_> {
    fn x(&self, at: Duration) -> f64 {
        LEFT + at.as_secs_f64() * self.scale
    }

    fn y(&self, row: usize) -> f64 {
        TOP + row as f64 * self.row
    }

    /// The middle of a register's row.
    fn register(&self, name: Option<&LockName>) -> f64 {
        let number = name
            .and_then(|name| self.registers.get(name))
            .copied()
            .unwrap_or_default();
        self.y(self.rows.len()) + number as f64 * REGISTER + 15.0
    }

    fn bottom(&self) -> f64 {
        self.y(self.rows.len()) + self.registers.len() as f64 * REGISTER + 11.0
    }

    /// Something in a row, with what a pointer is told of it, and the words in it if they fit.
    fn bar(&self, class: &str, row: usize, from: Duration, to: Duration, told: &str, words: &str) -> String {
        let (x, y, width) = (self.x(from), self.y(row), (self.x(to) - self.x(from)).max(1.0));
        let (bar, told) = (self.bar, escaped(told));
        let mut drawn = format!(
            "<rect class='{class}' x='{x:.1}' y='{y:.1}' width='{width:.1}' height='{bar}'><title>{told}</title></rect>"
        );
        if self.bar > 20.0 && width > 90.0 {
            let class = if class == "fault" { "" } else { "bar" };
            drawn += &text(class, x + width / 2.0, y + 20.0, "middle", words);
        }
        drawn
    }

    fn axis(&self, end: f64) -> String {
        let steps = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];
        let step = steps
            .into_iter()
            .find(|step| step * self.scale >= 60.0)
            .unwrap_or(120.0);
        let (mut drawn, mut at, bottom) = (String::new(), 0.0, self.bottom());
        while at <= end {
            let x = LEFT + at * self.scale;
            let _ = write!(drawn, "<path class='rule' d='M{x:.1} {TOP}V{bottom:.1}'/>");
            drawn += &text("tick", x, bottom + 16.0, "middle", &format!("{at} s"));
            at += step;
        }
        drawn
    }
}

/// A row for each holder, with what it held, its tokens and the faults of its process; below, a row for each register with the writes that it
/// took and refused. What two held at once is red. The picture ends with the faults: the requests after them only show that all is well again.
pub(crate) fn picture(records: &[Record]) -> String {
    let last = records.iter().position(|record| matches!(record.event, Event::Healed));
    let records = &records[..last.unwrap_or(records.len())];
    let holds = holds(records);
    let (mut rows, mut registers) = (BTreeMap::new(), BTreeMap::new());
    for hold in &holds {
        let next = (rows.len(), registers.len());
        rows.entry(hold.actor).or_insert(next.0);
        registers.entry(hold.name).or_insert(next.1);
    }
    let end = records.last().map_or(0.0, |record| record.at.as_secs_f64()).max(0.001);
    let right = (end * 20.0).clamp(744.0, 24_000.0);
    let (row, bar) = if rows.len() <= 4 { (52.0, 30.0) } else { (18.0, 14.0) };
    let scale = (right - LEFT) / end;
    let frame = Frame {
        rows,
        registers,
        row,
        bar,
        right,
        scale,
    };
    let (width, height) = (right + 16.0, frame.bottom() + 26.0);
    let drawn = frame.axis(end) + &rows_of(&frame, &holds, records) + &writes(&frame, records);
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0} {height:.0}' width='{width:.0}' height='{height:.0}' role='img'>\
         <title>Who held the lock, and which writes the resource took</title><style>{STYLE}</style><defs><pattern id='fault' width='8' \
         height='8' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'><path d='M0 0V8' stroke='#8c959f' stroke-width='3' \
         stroke-opacity='.45'/></pattern></defs>{drawn}</svg>\n"
    )
}

fn rows_of(frame: &Frame<'_>, holds: &[Hold<'_>], records: &[Record]) -> String {
    let mut drawn = String::new();
    for row in frame.rows.values() {
        let name = char::from(b'A' + u8::try_from(row % 26).unwrap_or_default());
        let y = frame.y(*row) + frame.bar * 0.67;
        drawn += &text("", LEFT - 10.0, y, "end", &format!("holder {name}"));
    }
    let seconds = |from: Duration, to: Duration| format!("{:.3} s to {:.3} s", from.as_secs_f64(), to.as_secs_f64());
    // What was held longest of each name so far.
    let mut longest: BTreeMap<&LockName, &Hold<'_>> = BTreeMap::new();
    for hold in holds {
        let Hold {
            name, token, from, to, ..
        } = hold;
        let told = format!("{name}, token {token}\n{}", seconds(*from, *to));
        let row = frame.rows[&hold.actor];
        let words = format!("token {}", short(*token));
        drawn += &frame.bar(&format!("h{}", row % 6), row, *from, *to, &told, &words);
        let before = longest.entry(*name).or_insert(hold);
        if before.to > *from && before.token != *token {
            let (until, told) = ((*to).min(before.to).max(*from), format!("two hold {name}"));
            for row in [row, frame.rows[&before.actor]] {
                drawn += &frame.bar("two", row, *from, until, &told, "two hold it");
            }
        }
        if before.to <= *to {
            *before = hold;
        }
    }
    let mut open = BTreeMap::new();
    for record in records {
        match &record.event {
            Event::Fault { what, .. } => drop(open.insert((record.actor, what), record.at)),
            Event::Over { what } => {
                let Some(from) = open.remove(&(record.actor, what)) else {
                    continue;
                };
                let told = format!("{what}\n{}", seconds(from, record.at));
                if let Some(row) = frame.rows.get(&record.actor) {
                    drawn += &frame.bar("fault", *row, from, record.at, &told, &escaped(what));
                } else if record.actor == Record::NOBODY {
                    let whole = Frame {
                        rows: BTreeMap::new(),
                        registers: BTreeMap::new(),
                        bar: frame.bottom() - TOP,
                        ..*frame
                    };
                    drawn += &whole.bar("server", 0, from, record.at, &told, "");
                }
            }
            _ => {}
        }
    }
    drawn
}

fn writes(frame: &Frame<'_>, records: &[Record]) -> String {
    let (mut drawn, mut refused) = (String::new(), String::new());
    let right = frame.right;
    for name in frame.registers.keys() {
        let y = frame.register(Some(name));
        let last = name.as_str().rsplit('/').next().unwrap_or_default();
        let label = if frame.registers.len() == 1 { "resource" } else { last };
        drawn += &text("", LEFT - 10.0, y + 5.0, "end", &escaped(label));
        let _ = write!(drawn, "<path class='line' d='M{LEFT} {y}H{right}'/>");
    }
    // The last circle of each register: those that would lie on each other are one.
    let mut last = BTreeMap::new();
    for record in records {
        let Event::Write { token, accepted } = record.event else {
            continue;
        };
        let row = frame.rows.get(&record.actor).copied().unwrap_or_default();
        let (x, y) = (frame.x(record.at), frame.register(record.name.as_ref()));
        if accepted {
            if last
                .get(&record.name)
                .is_none_or(|(other, by)| x - other > 3.0 || *by != row)
            {
                let _ = write!(drawn, "<circle class='h{}' cx='{x:.1}' cy='{y}' r='5'/>", row % 6);
                last.insert(record.name.clone(), (x, row));
            }
            continue;
        }
        let (from, to, left) = (frame.y(row) + frame.bar, y - 8.0, x - 8.0);
        let _ = write!(
            refused,
            "<path class='fall' d='M{x:.1} {from:.1}V{to:.1}'/><path class='cross' d='M{left:.1} {to:.1}l16 16m0 -16l-16 16'/>"
        );
        if frame.bar > 20.0 {
            let label = format!("write with token {} refused", short(token));
            refused += &text("refused", x + 8.0, y + 28.0, "end", &label);
        }
    }
    drawn + &refused
}

fn text(class: &str, x: f64, y: f64, anchor: &str, text: &str) -> String {
    format!("<text class='{class}' x='{x:.1}' y='{y:.1}' text-anchor='{anchor}'>{text}</text>")
}

/// The last digits of a token: the ones in which those of a short time differ.
fn short(token: FencingToken) -> String {
    format!("…{:03}", token.get() % 1_000)
}

/// A text that is not taken for a tag.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::result::{History, Outcome};

    use super::*;

    #[test]
    fn the_drawing_in_the_documentation_is_that_of_the_history_beside_it() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let read = |name: &str| std::fs::read_to_string(docs.join(name)).unwrap();
        let history = History::read(&read("stale-write.json")).unwrap();
        assert!(Outcome::of(&history.records).verdict.violations.is_empty());
        assert_eq!(picture(&history.records), read("stale-write.svg"));
    }

    #[test]
    fn no_text_of_a_history_is_taken_for_a_tag() {
        let name: LockName = "<script>".parse().unwrap();
        let token = FencingToken::new(1).unwrap();
        let at = |ms, name: Option<&LockName>, event| Record::new(Duration::from_millis(ms), 1, name.cloned(), event);
        let what = "<script>".to_owned();
        let records = [
            at(0, Some(&name), Event::Ok(token)),
            at(1, None, Event::fault("<script>")),
            at(900, None, Event::Over { what }),
        ];
        let picture = picture(&records);
        assert!(
            !picture.contains("<script") && picture.contains("&lt;script&gt;"),
            "{picture}"
        );
    }
}
