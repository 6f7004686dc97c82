//! The picture: who believed to hold what, and which faults there were meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

use conformance_tests::oracle::{Event, Record};
use conformance_tests::torture::{Belief, End, beliefs};

use super::page::escaped;

/// How many colours there are for clients; after that they come again.
pub(super) const COLOURS: usize = 10;

const LABELS: f64 = 120.0;
const TOP: f64 = 10.0;
/// A name: room for marks, then the bars.
const NAME: f64 = 38.0;
const MARKS: f64 = 12.0;
const BAR: f64 = 20.0;
const HEADING: f64 = 30.0;
const CLIENT: f64 = 18.0;
const BAND: f64 = 12.0;
const AXIS: f64 = 24.0;
/// What is narrower than that is drawn together with its neighbours.
const NARROW: f64 = 1.5;
/// Marks that are closer than that are one.
const MARK: f64 = 4.0;

/// The picture as two drawings side by side: the labels, which stay, and the rest, which may be scrolled.
pub(super) fn picture(records: &[Record]) -> String {
    let beliefs = beliefs(records);
    let mut names: BTreeMap<&str, Row<'_>> = BTreeMap::new();
    let mut clients: BTreeMap<usize, Vec<Fault<'_>>> = BTreeMap::new();
    for belief in &beliefs {
        names.entry(belief.name.as_str()).or_default().beliefs.push(belief);
    }
    for record in records {
        if let (Some(name), Event::Write { accepted: false, .. }) = (&record.name, &record.event) {
            names.entry(name.as_str()).or_default().refused.push(record);
        }
    }
    for fault in faults(records) {
        clients.entry(fault.actor).or_default().push(fault);
    }
    let of_server = clients.remove(&Record::NOBODY).unwrap_or_default();
    let end = records.last().map_or(Duration::ZERO, |record| record.at);
    let scale = Scale::of(end);
    let clients_top = TOP + names.len() as f64 * NAME + HEADING;
    let bottom = clients_top + clients.len() as f64 * CLIENT;
    let (mut labels, mut chart) = (String::new(), String::new());
    chart += &axis(&scale, end, bottom);
    for fault in of_server {
        chart += &band(&fault, &scale, TOP, bottom - TOP, "server");
    }
    let prefix = common_prefix(names.keys().copied());
    for (i, (name, row)) in names.iter().enumerate() {
        let top = TOP + i as f64 * NAME;
        let short: String = name[prefix..].chars().take(14).collect();
        let _ = write!(
            labels,
            "<text x='{}' y='{:.0}' text-anchor='end'>{}<title>{}</title></text>",
            LABELS - 10.0,
            top + MARKS + BAR * 0.7,
            escaped(&short),
            escaped(name)
        );
        chart += &row.drawn(&scale, top);
    }
    for (i, (client, faults)) in clients.iter().enumerate() {
        let top = clients_top + i as f64 * CLIENT;
        let _ = write!(
            labels,
            "<rect class='c{}' x='14' y='{top:.0}' width='12' height='{BAND}'/><text x='{}' y='{:.0}' \
             text-anchor='end'>client {client}</text>",
            client % COLOURS,
            LABELS - 10.0,
            top + BAND * 0.9,
        );
        for fault in faults {
            let kind = fault.what.split(':').next().unwrap_or_default();
            chart += &band(fault, &scale, top, BAND, kind);
        }
    }
    let heading = |y: f64, text: &str| format!("<text class='heading' x='0' y='{y:.0}'>{text}</text>");
    if !clients.is_empty() {
        chart += &heading(clients_top - 8.0, "faults of each client");
    }
    let (width, height) = (scale.x(end).ceil() + 20.0, bottom + AXIS);
    format!(
        "<div class='picture'><svg width='{LABELS}' height='{height:.0}'>{labels}</svg><div class='scroll'><svg \
         width='{width:.0}' height='{height:.0}' role='img' aria-label='Who believed to hold which lock, and \
         when'>{PATTERNS}{chart}</svg></div></div>"
    )
}

const PATTERNS: &str = "<defs><pattern id='stripes' width='6' height='6' patternUnits='userSpaceOnUse' \
    patternTransform='rotate(45)'><rect class='stripes-back' width='6' height='6'/><rect class='stripes' width='3' \
    height='6'/></pattern><pattern id='dots' width='5' height='5' patternUnits='userSpaceOnUse'><rect \
    class='dots-back' width='5' height='5'/><circle class='dots' cx='2.5' cy='2.5' r='1.3'/></pattern><pattern id='bars' width='5' height='5' \
    patternUnits='userSpaceOnUse'><rect class='bars-back' width='5' height='5'/><rect class='bars' width='2' \
    height='5'/></pattern></defs>";

/// From time to place.
struct Scale(f64);

impl Scale {
    /// A minute is as wide as a window; what is longer is scrolled, up to a limit.
    fn of(end: Duration) -> Self {
        let seconds = end.as_secs_f64().max(0.001);
        Self((1_160.0 / seconds).max(19.0).min(24_000.0 / seconds))
    }

    fn x(&self, at: Duration) -> f64 {
        at.as_secs_f64() * self.0
    }
}

/// Whatever happened to one name.
#[derive(Default)]
struct Row<'a> {
    beliefs: Vec<&'a Belief>,
    refused: Vec<&'a Record>,
}

/// Beliefs that are drawn as one bar.
struct Run<'a> {
    beliefs: Vec<&'a Belief>,
    from: Duration,
    to: Duration,
}

impl Row<'_> {
    fn drawn(&self, scale: &Scale, top: f64) -> String {
        let bars = top + MARKS;
        let mut drawn = format!(
            "<line class='rule' x1='0' x2='100%' y1='{0:.1}' y2='{0:.1}'/>",
            bars + BAR + 2.5
        );
        for run in self.runs(scale) {
            drawn += &run.drawn(scale, bars);
        }
        for (i, first) in self.beliefs.iter().enumerate() {
            for second in self.beliefs[i + 1..].iter().take_while(|second| second.from < first.to) {
                let to = first.to.min(second.to);
                let _ = write!(
                    drawn,
                    "<rect class='bad' x='{:.1}' y='{top:.1}' width='{:.1}' height='{:.1}'><title>two believed: client {} \
                     with {}, client {} with {}, from {}</title></rect>",
                    scale.x(second.from) - 1.5,
                    (scale.x(to) - scale.x(second.from)).max(0.0) + 3.0,
                    MARKS + BAR + 4.0,
                    first.actor,
                    first.token,
                    second.actor,
                    second.token,
                    seconds(second.from),
                );
            }
        }
        drawn + &self.marks(scale, bars)
    }

    fn runs(&self, scale: &Scale) -> Vec<Run<'_>> {
        let width = |from, to| scale.x(to) - scale.x(from);
        let mut runs: Vec<Run<'_>> = Vec::new();
        let mut last_is_narrow = false;
        for belief in &self.beliefs {
            let narrow = width(belief.from, belief.to) < NARROW && belief.end != End::Lost;
            match runs.last_mut() {
                Some(run) if narrow && last_is_narrow && width(run.to, belief.from) < 1.0 => {
                    run.to = run.to.max(belief.to);
                    run.beliefs.push(belief);
                }
                _ => runs.push(Run {
                    beliefs: vec![belief],
                    from: belief.from,
                    to: belief.to,
                }),
            }
            last_is_narrow = narrow;
        }
        runs
    }

    /// A triangle above the bar for each stale write, or for some that came in one moment.
    fn marks(&self, scale: &Scale, bars: f64) -> String {
        let mut groups: Vec<Vec<&Record>> = Vec::new();
        for record in &self.refused {
            match groups.last_mut() {
                Some(group) if scale.x(record.at) - scale.x(group[0].at) < MARK => group.push(record),
                _ => groups.push(vec![record]),
            }
        }
        let mut drawn = String::new();
        for group in groups {
            let x = scale.x(group[0].at);
            let told: Vec<_> = group.iter().map(|record| refusal(record)).collect();
            let _ = write!(
                drawn,
                "<path class='refused' d='M{:.1} {:.1}h10l-5 9z'><title>{}</title></path>",
                x - 5.0,
                bars - 11.0,
                told.join("\n")
            );
        }
        drawn
    }
}

fn refusal(record: &Record) -> String {
    let token = match record.event {
        Event::Write { token, .. } => token.to_string(),
        _ => String::new(),
    };
    format!(
        "client {}: stale write with {token} refused at {}",
        record.actor,
        seconds(record.at)
    )
}

impl Run<'_> {
    fn drawn(&self, scale: &Scale, top: f64) -> String {
        let actors: BTreeSet<usize> = self.beliefs.iter().map(|belief| belief.actor).collect();
        let class = match actors.first() {
            Some(actor) if actors.len() == 1 => format!("c{}", actor % COLOURS),
            _ => "many".to_owned(),
        };
        let (x, width) = (scale.x(self.from), (scale.x(self.to) - scale.x(self.from)).max(1.0));
        let mut drawn = format!(
            "<rect class='{class}' x='{x:.1}' y='{top:.0}' width='{width:.1}' height='{BAR}'><title>{}</title></rect>",
            self.told(&actors)
        );
        if let [belief] = self.beliefs[..]
            && belief.end == End::Lost
        {
            let _ = write!(
                drawn,
                "<rect class='lost' x='{:.1}' y='{:.0}' width='2.5' height='{}'/>",
                x + width - 1.0,
                top - 2.0,
                BAR + 4.0
            );
        }
        drawn
    }

    fn told(&self, actors: &BTreeSet<usize>) -> String {
        let when = format!("{} to {}", seconds(self.from), seconds(self.to));
        match self.beliefs[..] {
            [belief] => {
                let end = match belief.end {
                    End::Released => "released",
                    End::Lost => "then lost",
                    _ => "not heard of again",
                };
                format!("client {}, token {}\n{when}, {end}", belief.actor, belief.token)
            }
            [first, .., last] => {
                let actors: Vec<_> = actors.iter().map(usize::to_string).collect();
                format!(
                    "{} grants, tokens {} to {}\nclients {}\n{when}",
                    self.beliefs.len(),
                    first.token,
                    last.token,
                    actors.join(", ")
                )
            }
            [] => when,
        }
    }
}

/// A fault, from its beginning to its end.
pub(super) struct Fault<'a> {
    pub(super) actor: usize,
    pub(super) what: &'a str,
    pub(super) from: Duration,
    pub(super) to: Duration,
}

pub(super) fn faults(records: &[Record]) -> Vec<Fault<'_>> {
    let end = records.last().map_or(Duration::ZERO, |record| record.at);
    let mut faults: Vec<Fault<'_>> = Vec::new();
    let mut open = BTreeMap::new();
    for record in records {
        match &record.event {
            Event::Fault { what, .. } => {
                open.insert((record.actor, what), faults.len());
                let (actor, from) = (record.actor, record.at);
                faults.push(Fault {
                    actor,
                    what,
                    from,
                    to: end,
                });
            }
            Event::Over { what } => {
                if let Some(fault) = open.remove(&(record.actor, what)).and_then(|i| faults.get_mut(i)) {
                    fault.to = record.at;
                }
            }
            _ => {}
        }
    }
    faults
}

fn band(fault: &Fault<'_>, scale: &Scale, top: f64, height: f64, class: &str) -> String {
    let x = scale.x(fault.from);
    let known = ["pause", "kill", "partition", "latency", "clock", "server"];
    let class = if known.contains(&class) { class } else { "other" };
    format!(
        "<rect class='{class}' x='{x:.1}' y='{top:.0}' width='{:.1}' height='{height:.0}'><title>{}\n{} to \
         {}</title></rect>",
        (scale.x(fault.to) - x).max(2.0),
        escaped(fault.what),
        seconds(fault.from),
        seconds(fault.to)
    )
}

fn axis(scale: &Scale, end: Duration, bottom: f64) -> String {
    let steps = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];
    let step = steps.into_iter().find(|step| step * scale.0 >= 55.0).unwrap_or(1_800.0);
    let mut drawn = String::new();
    let mut i = 0.0;
    while i * step <= end.as_secs_f64() {
        let x = i * step * scale.0;
        let text = (i * step * 10.0).round() / 10.0;
        let anchor = if i == 0.0 { "start" } else { "middle" };
        let _ = write!(
            drawn,
            "<line class='grid' x1='{x:.1}' x2='{x:.1}' y1='{TOP}' y2='{bottom:.0}'/><text class='tick' x='{x:.1}' \
             y='{:.0}' text-anchor='{anchor}'>{text} s</text>",
            bottom + 16.0
        );
        i += 1.0;
    }
    drawn
}

/// How many bytes, up to a slash, all names begin with.
fn common_prefix<'a>(mut names: impl Iterator<Item = &'a str>) -> usize {
    let Some(first) = names.next() else { return 0 };
    let mut length = first.rfind('/').map_or(0, |slash| slash + 1);
    for name in names {
        while !name.starts_with(&first[..length]) {
            length = first[..length - 1].rfind('/').map_or(0, |slash| slash + 1);
        }
    }
    length
}

fn seconds(at: Duration) -> String {
    format!("{:.3} s", at.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_names_begin_with_is_not_repeated() {
        for (names, length) in [
            (&["torture/1/0", "torture/1/1"][..], 10),
            (&["a/b", "c/b"], 0),
            (&["a/b/c", "a/d"], 2),
            (&["plain"], 0),
            (&[], 0),
        ] {
            assert_eq!(common_prefix(names.iter().copied()), length, "{names:?}");
        }
    }
}
