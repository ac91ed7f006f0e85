//! The plot, drawn by hand: bars of throughput as ratios to the plain hop, with their spread. Its colours are readable on a
//! light and on a dark page.

use super::Bar;
use crate::stand::Way;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The whole picture.
pub(super) fn svg(bars: &[Bar]) -> String {
    let mut cases: BTreeMap<usize, (&str, Vec<&Bar>)> = BTreeMap::new();
    let mut order: Vec<&str> = Vec::new();
    for bar in bars {
        let at = order.iter().position(|case| *case == bar.case).unwrap_or_else(|| {
            order.push(bar.case);
            order.len() - 1
        });
        cases.entry(at).or_insert((bar.case, Vec::new())).1.push(bar);
    }
    let highest = bars.iter().map(|bar| bar.ratio.high).fold(1.1, f64::max);
    let scale = PLOT_WIDTH / highest;
    let mut drawn = String::new();
    let mut top = HEAD_HEIGHT;
    for (case, bars) in cases.values() {
        text(&mut drawn, (LABEL_WIDTH - GAP, top + BAR_HEIGHT - 4.0), "end", case);
        for bar in bars {
            one(&mut drawn, bar, top, scale);
            top += BAR_HEIGHT + 2.0;
        }
        top += GAP;
    }
    let mut rules = String::new();
    for (ratio, label) in [(0.8, "target 0.8"), (1.0, "pass-through")] {
        let x = LABEL_WIDTH + ratio * scale;
        let anchor = if ratio < 1.0 { "end" } else { "start" };
        // The formatter writes into memory only.
        let _infallible = write!(
            rules,
            r#"<line x1="{x:.1}" y1="{HEAD_HEIGHT}" x2="{x:.1}" y2="{top:.1}" stroke="{TEXT}" stroke-dasharray="3 3"/>"#
        );
        text(&mut rules, (x, HEAD_HEIGHT - 6.0), anchor, label);
    }
    text(&mut rules, (4.0, 14.0), "start", "Throughput, relative to a minimal pass-through hop in the same run");
    let (width, height) = (LABEL_WIDTH + PLOT_WIDTH + VALUE_WIDTH, top + GAP);
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif" font-size="12">{drawn}{rules}</svg>
"#
    )
}

fn one(drawn: &mut String, bar: &Bar, top: f64, scale: f64) {
    let length = bar.ratio.median * scale;
    let colour = if bar.way == Way::Mainstay { OWN } else { OTHER };
    let middle = top + BAR_HEIGHT / 2.0;
    let (low, high) = (LABEL_WIDTH + bar.ratio.low * scale, LABEL_WIDTH + bar.ratio.high * scale);
    let _infallible = write!(
        drawn,
        r#"<rect x="{LABEL_WIDTH}" y="{top:.1}" width="{length:.1}" height="{BAR_HEIGHT}" fill="{colour}"/><line x1="{low:.1}" y1="{middle:.1}" x2="{high:.1}" y2="{middle:.1}" stroke="{TEXT}" stroke-width="2"/>"#
    );
    let said = format!("{} {:.2}", bar.way.name(), bar.ratio.median);
    text(drawn, (LABEL_WIDTH + PLOT_WIDTH + 6.0, top + BAR_HEIGHT - 4.0), "start", &said);
}

fn text(drawn: &mut String, (x, y): (f64, f64), anchor: &str, said: &str) {
    let said = said.replace('&', "&amp;").replace('<', "&lt;");
    let _infallible =
        write!(drawn, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" fill="{TEXT}">{said}</text>"#);
}

const LABEL_WIDTH: f64 = 250.0;
const PLOT_WIDTH: f64 = 380.0;
const VALUE_WIDTH: f64 = 110.0;
const HEAD_HEIGHT: f64 = 44.0;
const BAR_HEIGHT: f64 = 16.0;
const GAP: f64 = 10.0;
const TEXT: &str = "#808080";
const OWN: &str = "#3b82f6";
const OTHER: &str = "#c08a3e";

#[cfg(test)]
mod tests {
    use super::svg;
    use crate::report::Bar;
    use crate::spread::Spread;
    use crate::stand::Way;

    #[test]
    fn every_case_has_its_bars_and_the_picture_holds_them() {
        let bar = |case, way, ratio| Bar { case, way, ratio: Spread::once(ratio) };
        let drawn = svg(&[bar("a", Way::Nginx, 0.5), bar("a", Way::Mainstay, 0.75), bar("b < c", Way::Mainstay, 2.0)]);
        assert_eq!(drawn.matches("<rect").count(), 3);
        assert!(drawn.contains("mainstay 0.75") && drawn.contains("b &lt; c"));
        assert!(drawn.starts_with("<svg") && drawn.trim_end().ends_with("</svg>"));
        assert!(!svg(&[]).contains("NaN"));
    }
}
