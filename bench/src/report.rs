//! The results: rows against their targets, as JSON, as a table in Markdown, and as a plot.

mod plot;
mod table;

pub(crate) use table::{between_markers, markdown};

use crate::spread::{Spread, round};
use crate::stand::Way;
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::path::Path;

/// What a row must reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// It is shown for comparison.
    None,
}

/// One row of the table.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    id: &'static str,
    what: &'static str,
    target: Target,
    /// None if it could not be measured here.
    measured: Option<Spread>,
    unit: &'static str,
    note: String,
}

impl Row {
    /// A row that was not measured yet.
    pub(crate) fn new(id: &'static str, what: &'static str, target: Target) -> Row {
        Row { id, what, target, measured: None, unit: "", note: String::new() }
    }

    /// It is a ratio.
    pub(crate) fn ratio(self, spread: Spread) -> Row {
        self.figure(spread, "×")
    }

    /// It is a figure with a unit. Without a round there is no figure.
    pub(crate) fn figure(mut self, spread: Spread, unit: &'static str) -> Row {
        self.measured = (spread.rounds > 0).then_some(spread);
        self.unit = unit;
        self
    }

    /// It was measured once.
    pub(crate) fn plain(self, figure: f64, unit: &'static str) -> Row {
        self.figure(Spread::once(figure), unit)
    }

    /// What the figure stands for.
    pub(crate) fn note(mut self, note: String) -> Row {
        self.note = note;
        self
    }

    /// Whether the target is met; none if there is no target or no figure.
    fn met(&self) -> Option<bool> {
        let median = self.measured?.median;
        match self.target {
            Target::AtLeast(target) => Some(median >= target),
            Target::AtMost(target) => Some(median <= target),
            Target::None => None,
        }
    }

    fn json(&self) -> Value {
        let (kind, target) = match self.target {
            Target::AtLeast(target) => (json!("at_least"), json!(target)),
            Target::AtMost(target) => (json!("at_most"), json!(target)),
            Target::None => (Value::Null, Value::Null),
        };
        json!({"id": self.id, "what": self.what, "target_kind": kind, "target": target, "unit": self.unit,
            "measured": self.measured.map(|spread| spread.json()), "met": self.met(), "note": self.note})
    }
}

/// One bar of the plot: a way's throughput as a ratio to the plain hop's.
#[derive(Debug, Clone)]
pub(crate) struct Bar {
    pub(crate) case: &'static str,
    pub(crate) way: Way,
    pub(crate) ratio: Spread,
}

/// Everything that a run found out.
#[derive(Debug)]
pub(crate) struct Report {
    /// The plan's name.
    pub(crate) plan: &'static str,
    /// The machine.
    pub(crate) machine: Value,
    pub(crate) rows: Vec<Row>,
    pub(crate) bars: Vec<Bar>,
    /// The figures behind the rows, part by part.
    pub(crate) parts: Value,
    /// How long all of it took, in seconds.
    pub(crate) took_s: f64,
}

impl Report {
    /// Writes `results.json`, `results.md` and `throughput.svg`.
    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).with_context(|| format!("making `{}`", dir.display()))?;
        let json = json!({"plan": self.plan, "took_s": round(self.took_s), "machine": self.machine,
            "rows": self.rows.iter().map(Row::json).collect::<Vec<_>>(), "parts": self.parts});
        let files = [
            ("results.json", format!("{json:#}\n")),
            ("results.md", markdown(self)),
            ("throughput.svg", plot::svg(&self.bars)),
        ];
        for (name, text) in files {
            let path = dir.join(name);
            std::fs::write(&path, text).with_context(|| format!("writing `{}`", path.display()))?;
        }
        Ok(())
    }
}
