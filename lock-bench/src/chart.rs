//! The chart of the page: what lock + release costs on each backend, as a multiple of two raw round trips there.

use std::fmt::Write as _;

use crate::measures::PAIR;
use crate::page::number;
use crate::report::Report;

const LABELS: f64 = 290.0;
const SCALE: f64 = 480.0;
const WIDTH: f64 = LABELS + SCALE + 80.0;
const TOP: f64 = 64.0;
const ROW: f64 = 22.0;
const BAR: f64 = 14.0;
/// The end of the scale. Longer bars are cut, and their numbers tell.
const MOST: f64 = 6.0;

const STYLE: &str = "\
svg{font:13px system-ui,sans-serif;background:#fff}text{fill:#222}.title{font-size:16px;font-weight:600}\
.backend{font-weight:600}.quiet{fill:#666;font-size:12px}.grid{stroke:#ddd}.floor{stroke:#222}\
.ours{fill:#1769aa}.peer{fill:#c2571a}\
@media(prefers-color-scheme:dark){svg{background:#15181c}text{fill:#e6e6e6}.quiet{fill:#a0a0a0}.grid{stroke:#33383f}\
.floor{stroke:#e6e6e6}.ours{fill:#5aaef0}.peer{fill:#f0935a}}";

/// As SVG, in light and in dark.
pub(crate) fn chart(reports: &[Report]) -> String {
    let mut bars = String::new();
    let mut y = TOP;
    for report in reports {
        let Some(pair) = report.row(PAIR) else { continue };
        let floor = format!("{}: 1 is {}", report.backend, report.backend.floor());
        let _ = write!(
            bars,
            "<text class='backend' x='16' y='{:.0}'>{}</text>",
            y + BAR,
            escaped(&floor)
        );
        y += ROW;
        for who in &report.contestants {
            let Some(ratio) = pair.ratio(who) else { continue };
            let class = if who.starts_with("fencelock") { "ours" } else { "peer" };
            let length = ratio.min(MOST) / MOST * SCALE;
            let _ = write!(
                bars,
                "<text x='{:.0}' y='{:.1}' text-anchor='end'>{}</text>\
                 <rect class='{class}' x='{LABELS}' y='{y:.1}' width='{length:.1}' height='{BAR}' rx='2'/>\
                 <text class='quiet' x='{:.1}' y='{:.1}'>{}</text>",
                LABELS - 10.0,
                y + BAR * 0.85,
                escaped(who),
                LABELS + length + 8.0,
                y + BAR * 0.85,
                number(ratio),
            );
            y += ROW;
        }
        y += ROW / 2.0;
    }
    let mut grid = String::new();
    for tick in 0..=MOST as u32 {
        let x = LABELS + f64::from(tick) / MOST * SCALE;
        let class = if tick == 1 { "floor" } else { "grid" };
        let _ = write!(
            grid,
            "<line class='{class}' x1='{x:.1}' x2='{x:.1}' y1='{TOP}' y2='{y:.1}'/>\
             <text class='quiet' x='{x:.1}' y='{:.1}' text-anchor='middle'>{tick}</text>",
            y + 18.0
        );
    }
    let height = y + 32.0;
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' role='img' \
         aria-label='Cost of lock and release'><style>{STYLE}</style>\
         <text class='title' x='16' y='26'>Lock + release without contention, as a multiple of raw round trips</text>\
         <text class='quiet' x='16' y='46'>Median of one task; less is faster. Blue: fencelock. Orange: other libraries.</text>\
         {grid}{bars}</svg>\n"
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn a_bar_is_as_long_as_its_ratio_and_ends_with_the_scale() {
        let mut report = report();
        for (who, value) in [("fencelock", 20.0), ("2 x PING", 10.0), ("a & b", 1e6)] {
            report.add(PAIR, "µs", Some("2 x PING"), who, value);
        }
        let chart = chart(&[report]);
        let lengths: Vec<_> = chart
            .split(" width='")
            .skip(2)
            .filter_map(|rest| rest.split('\'').next())
            .collect();
        assert_eq!(lengths, [format!("{:.1}", 2.0 / MOST * SCALE), format!("{SCALE:.1}")]);
        assert!(chart.contains(">a &amp; b<") && chart.contains(">100000<"), "{chart}");
    }
}
