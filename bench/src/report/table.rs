//! The table for people.

use super::{Report, Row, Target};
use anyhow::{Result, ensure};
use serde_json::Value;

/// The table with the facts of its run above it.
pub(crate) fn markdown(report: &Report) -> String {
    let fact = |name: &str| match &report.machine[name] {
        Value::String(text) => text.clone(),
        Value::Null => "unknown".to_owned(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => report.machine[name].to_string(),
    };
    let mut text = format!(
        "A `{}` run of {:.0} s on {} cores ({}), Linux {}, {}, disk {}. Load average before: {}.\n\n\
         | what | target | measured | spread | met |\n|---|---|---|---|---|\n",
        report.plan,
        report.took_s,
        fact("cores"),
        fact("cpu"),
        fact("kernel"),
        fact("rustc"),
        fact("disk").split_whitespace().collect::<Vec<_>>().join(" "),
        fact("load_average_before"),
    );
    for row in &report.rows {
        let note = if row.note.is_empty() { String::new() } else { format!("<br>{}", cell(&row.note)) };
        text.push_str(&format!(
            "| {}{note} | {} | {} | {} | {} |\n",
            row.what,
            target(row),
            measured(row),
            spread(row),
            match row.met() {
                Some(true) => "yes",
                Some(false) => "**no**",
                None => "–",
            }
        ));
    }
    text
}

/// Puts `table` between the markers of a document.
pub(crate) fn between_markers(document: &str, table: &str) -> Result<String> {
    let begin = document.find(BEGIN).map(|at| at + BEGIN.len());
    let end = document.find(END);
    ensure!(begin.zip(end).is_some_and(|(begin, end)| begin <= end), "the document has no `{BEGIN}` before `{END}`");
    let (begin, end) = (begin.unwrap_or_default(), end.unwrap_or_default());
    let (before, after) = (document.get(..begin).unwrap_or_default(), document.get(end..).unwrap_or_default());
    Ok(format!("{before}\n{}\n{after}", table.trim()))
}

fn target(row: &Row) -> String {
    match row.target {
        Target::AtLeast(target) => format!("≥ {}", figure(target, row.unit)),
        Target::AtMost(target) => format!("≤ {}", figure(target, row.unit)),
        Target::None => "–".to_owned(),
    }
}

fn measured(row: &Row) -> String {
    row.measured.map_or("not measured".to_owned(), |spread| figure(spread.median, row.unit))
}

fn spread(row: &Row) -> String {
    match row.measured {
        Some(spread) if spread.rounds > 1 => {
            format!("{} to {}", figure(spread.low, row.unit), figure(spread.high, row.unit))
        }
        _ => "–".to_owned(),
    }
}

fn figure(figure: f64, unit: &str) -> String {
    let whole = figure.fract().abs() < f64::EPSILON;
    let digits = match figure.abs() {
        _ if whole && unit != "×" => 0,
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        _ => 2,
    };
    let space = if unit.is_empty() { "" } else { " " };
    format!("{figure:.digits$}{space}{unit}")
}

/// A text in a cell must not end it.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

const BEGIN: &str = "<!-- benchmark -->";
const END: &str = "<!-- /benchmark -->";

#[cfg(test)]
mod tests {
    use super::{between_markers, figure, measured, spread};
    use crate::report::{Row, Target};
    use crate::spread::Spread;

    #[test]
    fn a_table_replaces_the_one_between_the_markers() {
        let document = "a\n<!-- benchmark -->\nold\n<!-- /benchmark -->\nb\n";
        let once = between_markers(document, "new\n").unwrap();
        assert_eq!(once, "a\n<!-- benchmark -->\nnew\n<!-- /benchmark -->\nb\n");
        assert_eq!(between_markers(&once, "new").unwrap(), once);
        assert!(between_markers("no markers", "new").is_err());
    }

    #[test]
    fn a_row_is_met_by_its_median_and_without_a_figure_it_is_neither() {
        let row = Row::new("x", "x", Target::AtLeast(0.8)).ratio(Spread::of(&[0.5, 0.8, 0.9]));
        assert_eq!((measured(&row).as_str(), spread(&row).as_str()), ("0.80 ×", "0.50 × to 0.90 ×"));
        assert_eq!(row.met(), Some(true));
        assert_eq!(Row::new("x", "x", Target::AtMost(0.0)).plain(1.0, "").met(), Some(false));
        assert_eq!(Row::new("x", "x", Target::AtMost(0.0)).met(), None);
        assert_eq!(Row::new("x", "x", Target::None).plain(1.0, "").met(), None);
        assert_eq!(
            (figure(0.0, ""), figure(147.3, "ms"), figure(50.0, "ms")),
            ("0".into(), "147 ms".into(), "50 ms".into())
        );
    }
}
