//! Report of a run, for the terminal and as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::mesh::Mesh;

/// Verdict on a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// Right on every layout.
    Pass,
    /// Wrong on some layout, or an error.
    Fail,
    /// There is no such operator.
    Unsupported,
}

/// One layout that was run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LayoutReport {
    /// The ranks.
    pub(crate) ranks: Mesh,
    /// Its number within the case and the ranks, as in the names of dumped files.
    pub(crate) n: usize,
    /// The layout in a few words.
    pub(crate) title: String,
    /// The rule by which extents were split, or the sizes that the case gives.
    pub(crate) sizes: Value,
    /// Placements of each sharded input and weight.
    pub(crate) placements: BTreeMap<String, Vec<String>>,
    /// The shapes that the ranks have of them; of all tensors where the case names them rank by rank.
    pub(crate) shapes: BTreeMap<String, Vec<Vec<i64>>>,
    /// The bytes that each rank received, forward and backward.
    pub(crate) bytes: Vec<u64>,
    /// The bytes that each rank may receive.
    pub(crate) budget: Vec<u64>,
    /// Worst of |got − want| / (atol + rtol·|want|), at most [`f64::MAX`].
    pub(crate) error: f64,
    /// The error with which the layout was refused on all ranks, as it must be.
    pub(crate) refused: Option<String>,
    /// Problems; empty if the layout passed.
    pub(crate) problems: Vec<String>,
}

/// One case.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CaseReport {
    /// The case's name.
    pub(crate) name: String,
    /// Its operator.
    pub(crate) op: String,
    /// Verdict.
    pub(crate) verdict: Verdict,
    /// The worst error of all layouts.
    pub(crate) error: f64,
    /// Notes.
    pub(crate) notes: Vec<String>,
    /// An error that ended the case.
    pub(crate) problem: Option<String>,
    /// Every layout that was run.
    pub(crate) layouts: Vec<LayoutReport>,
}

/// A whole run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The backend.
    pub(crate) backend: String,
    /// All cases.
    pub(crate) cases: Vec<CaseReport>,
    /// Number of cases that passed.
    pub(crate) passed: usize,
    /// Number of cases that did not, unsupported ones among them.
    pub(crate) failed: usize,
    /// Number of cases whose operator there is not.
    pub(crate) unsupported: usize,
}

impl Report {
    /// Counts the cases.
    pub(crate) fn new(backend: &str, cases: Vec<CaseReport>) -> Self {
        let count = |verdict| cases.iter().filter(|case| case.verdict == verdict).count();
        let (passed, unsupported) = (count(Verdict::Pass), count(Verdict::Unsupported));
        Self { backend: backend.to_owned(), passed, failed: cases.len() - passed, unsupported, cases }
    }

    /// The last line.
    pub(crate) fn summary(&self) -> String {
        let layouts: usize = self.cases.iter().map(|case| case.layouts.len()).sum();
        let unsupported = match self.unsupported {
            0 => String::new(),
            some => format!(", of which {some} unsupported"),
        };
        format!(
            "{}: {} of {} cases passed, {} failed{unsupported}; {layouts} layouts",
            self.backend,
            self.passed,
            self.cases.len(),
            self.failed
        )
    }
}

impl CaseReport {
    /// The case's line, its name padded to `width`; below it what is wrong.
    pub(crate) fn line(&self, width: usize) -> String {
        let layouts = match self.layouts.len() {
            1 => "1 layout".to_owned(),
            some => format!("{some} layouts"),
        };
        let verdict = match self.verdict {
            Verdict::Pass => "pass",
            Verdict::Fail => "FAIL",
            Verdict::Unsupported => "unsupported",
        };
        let mut line =
            format!("{:width$}  {layouts:>11}  worst {:>8}  {verdict}", self.name, number(self.error));
        if !self.notes.is_empty() {
            line += &format!("  ({})", self.notes.join("; "));
        }
        for layout in self.layouts.iter().filter(|layout| !layout.problems.is_empty()).take(MAX_SHOWN) {
            line += &format!("\n    {}: {}", layout.title, layout.problems.join("; "));
        }
        if let Some(problem) = &self.problem {
            line += &format!("\n    {problem}");
        }
        let wrong = self.layouts.iter().filter(|layout| !layout.problems.is_empty()).count();
        if wrong > MAX_SHOWN {
            line += &format!("\n    … and {} layouts more", wrong - MAX_SHOWN);
        }
        line
    }
}

/// More failed layouts of one case are counted, not shown.
const MAX_SHOWN: usize = 5;

/// An error in a few digits.
pub(crate) fn number(error: f64) -> String {
    match error {
        f64::MAX => "inf".to_owned(),
        0.0 => "0".to_owned(),
        small if small < 1e-3 => format!("{small:.1e}"),
        large if large >= 1e4 => format!("{large:.1e}"),
        _ => format!("{error:.3}"),
    }
}
