//! Figures as pictures: a bar per row, which stands on its own in light and in dark.

use std::fmt::Write as _;

use crate::figures::{Kind, Measure, Report};
use crate::table::{machine, number};

const LABELS: f64 = 400.0;
const CHART: f64 = 520.0;
const VALUES: f64 = 120.0;
const TOP: f64 = 64.0;
const ROW: f64 = 26.0;
const BAR: f64 = 16.0;
const AXIS: f64 = 64.0;

const STYLE: &str = "\
svg{font:13px system-ui,sans-serif;background:#fff}text{fill:#222}.title{font-size:16px;font-weight:600}\
.quiet{fill:#666;font-size:12px}.grid{stroke:#ddd}.axis{stroke:#888}.ours{fill:#1769aa}.peer{fill:#c2571a}\
.floor{fill:#8a8a8a}.late{stroke:#222;stroke-width:1.5;fill:none}\
@media(prefers-color-scheme:dark){svg{background:#15181c}text{fill:#e6e6e6}.quiet{fill:#a0a0a0}.grid{stroke:#33383f}\
.axis{stroke:#777}.ours{fill:#5aaef0}.peer{fill:#f0935a}.floor{fill:#9a9a9a}.late{stroke:#e6e6e6}}";

/// The first column of a measure, and the second as a mark if it is the tail of the first.
pub(crate) fn picture(report: &Report, measure: &Measure) -> Option<String> {
    let column = measure.columns.first()?;
    let tail = measure.columns.get(1).filter(|second| second.unit == column.unit);
    let rows: Vec<_> = measure
        .rows
        .iter()
        .filter_map(|row| {
            let late = tail.and_then(|_| row.values.get(1).copied().flatten());
            Some((row, row.values.first().copied().flatten()?, late))
        })
        .collect();
    let values = rows.iter().flat_map(|(_, value, late)| [Some(*value), *late]).flatten();
    let scale = Scale::of(&values.collect::<Vec<_>>())?;
    let bottom = TOP + rows.len() as f64 * ROW + 6.0;
    let (width, height) = (LABELS + CHART + VALUES, bottom + AXIS);
    let unit = match (column.unit.as_str(), tail) {
        ("", _) => column.name.clone(),
        (unit, None) => format!("{}, {unit}", column.name),
        (unit, Some(tail)) => format!("{} (bar) and {} (line), {unit}", column.name, tail.name),
    };
    let mut drawn = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' \
         role='img' aria-label='{title}'><style>{STYLE}</style><title>{title}</title>\
         <text class='title' x='16' y='26'>{title}</text><text class='quiet' x='16' y='46'>{}; {}{}</text>",
        escaped(&report.server),
        escaped(&machine(&report.machine)),
        if report.quick {
            "; measured for a short time"
        } else {
            ""
        },
        title = escaped(&format!("{}, {}: {}", report.backend, measure.id, measure.title)),
    );
    for (at, text) in scale.ticks() {
        let _ = write!(
            drawn,
            "<line class='grid' x1='{at:.1}' x2='{at:.1}' y1='{TOP}' y2='{bottom:.1}'/>\
             <text class='quiet' x='{at:.1}' y='{:.1}' text-anchor='middle'>{text}</text>",
            bottom + 18.0
        );
    }
    for (i, (row, value, late)) in rows.iter().enumerate() {
        let top = TOP + i as f64 * ROW + (ROW - BAR) / 2.0;
        let text = top + BAR * 0.8;
        let label = if row.case.is_empty() {
            row.who.clone()
        } else {
            format!("{}, {}", row.who, row.case)
        };
        let class = match row.kind {
            Kind::Ours => "ours",
            Kind::Peer => "peer",
            Kind::Floor => "floor",
        };
        let (from, to) = (scale.x(scale.origin()), scale.x(*value));
        let _ = write!(
            drawn,
            "<text x='{:.1}' y='{text:.1}' text-anchor='end'>{}</text>\
             <rect class='{class}' x='{:.1}' y='{top:.1}' width='{:.1}' height='{BAR}' rx='2'/>",
            LABELS - 10.0,
            escaped(&shortened(&label)),
            from.min(to),
            (to - from).abs().max(1.0),
        );
        let mut end = from.max(to);
        if let Some(late) = late {
            let at = scale.x(*late);
            let middle = top + BAR / 2.0;
            let _ = write!(
                drawn,
                "<path class='late' d='M{to:.1} {middle:.1}H{at:.1}M{at:.1} {:.1}v{BAR}'/>",
                top
            );
            end = end.max(at);
        }
        let told = late.map_or(number(*value), |late| format!("{} / {}", number(*value), number(late)));
        let _ = write!(
            drawn,
            "<text class='quiet' x='{:.1}' y='{text:.1}'>{told}</text>",
            end + 8.0
        );
    }
    let _ = writeln!(
        drawn,
        "<line class='axis' x1='{LABELS}' x2='{:.1}' y1='{bottom:.1}' y2='{bottom:.1}'/>\
         <text class='quiet' x='{:.1}' y='{:.1}' text-anchor='middle'>{}{}</text></svg>",
        LABELS + CHART,
        LABELS + CHART / 2.0,
        bottom + 42.0,
        escaped(&unit),
        if scale.is_logarithmic() {
            ", each step is ten times the one before"
        } else {
            ""
        },
    );
    Some(drawn)
}

/// From values to places.
enum Scale {
    /// From the least to the most.
    Linear { from: f64, to: f64 },
    /// In powers of ten.
    Logarithmic { from: i32, to: i32 },
}

impl Scale {
    /// None if there is nothing to show.
    fn of(values: &[f64]) -> Option<Self> {
        let most = values.iter().copied().reduce(f64::max)?;
        let least = values.iter().copied().reduce(f64::min)?;
        // What differs by more is one long bar and many stumps.
        if least > 0.0 && most / least > 30.0 {
            return Some(Self::Logarithmic {
                from: least.log10().floor() as i32,
                to: most.log10().ceil() as i32,
            });
        }
        let (from, to) = (least.min(0.0), most.max(0.0));
        Some(Self::Linear {
            from,
            to: if to > from { to } else { from + 1.0 },
        })
    }

    fn is_logarithmic(&self) -> bool {
        matches!(self, Self::Logarithmic { .. })
    }

    /// Where bars begin.
    fn origin(&self) -> f64 {
        match self {
            Self::Linear { .. } => 0.0,
            Self::Logarithmic { from, .. } => 10_f64.powi(*from),
        }
    }

    fn x(&self, value: f64) -> f64 {
        let part = match self {
            Self::Linear { from, to } => (value - from) / (to - from),
            Self::Logarithmic { from, to } => (value.log10() - f64::from(*from)) / f64::from((to - from).max(1)),
        };
        LABELS + part.clamp(0.0, 1.0) * CHART
    }

    fn ticks(&self) -> Vec<(f64, String)> {
        match self {
            Self::Logarithmic { from, to } => (*from..=*to)
                .map(|power| 10_f64.powi(power))
                .map(|value| (self.x(value), number(value)))
                .collect(),
            Self::Linear { from, to } => {
                let rough = (to - from) / 6.0;
                let power = 10_f64.powf(rough.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
                let step = step.into_iter().find(|step| *step >= rough).unwrap_or(rough);
                let first = (from / step).ceil() as i64;
                let last = (to / step).floor() as i64;
                (first..=last)
                    .map(|i| i as f64 * step)
                    .map(|value| (self.x(value), number(value)))
                    .collect()
            }
        }
    }
}

/// As much of a label as there is room for.
fn shortened(label: &str) -> String {
    const ROOM: usize = 60;
    if label.chars().count() <= ROOM {
        return label.to_owned();
    }
    let start: String = label.chars().take(ROOM - 1).collect();
    format!("{start}…")
}

fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}
