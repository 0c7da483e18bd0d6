//! The rows of models: those of `benches/models.json`, which `isobar bench` and `benches/models.py` read, too.

use std::fs;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use super::{Peer, Row};
use crate::run::ROOT;

/// Minimum ratio of PyTorch's step time to that of Isobar on one rank: equal, with 5 % for the noise of the measurement.
const ONE_RANK: f64 = 1.0 / 1.05;
/// Minimum ratio of the step time of one-rank runs, of which one runs on each core, to that of one step over two ranks. The goal is
/// 1/0.58; 1/0.6 allows for the noise of the measurement.
const SCALING: f64 = 1.0 / 0.6;

/// The two cases of a model's training step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Cases {
    /// Over all ranks.
    pub(super) shared: &'static str,
    /// Each rank for itself.
    pub(super) alone: &'static str,
}

/// Reads the table: a model each.
pub(super) fn table() -> Result<Map<String, Value>> {
    let text = fs::read_to_string(ROOT.join("benches/models.json")).context("benches/models.json")?;
    serde_json::from_str(&text).context("benches/models.json")
}

/// Returns two rows for each model: its step on one rank beside PyTorch's, where the table names its class, and over all
/// ranks beside that on one.
pub(super) fn rows() -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (name, row) in table()? {
        // Rows for the peak of memory alone.
        if row.get("timed").is_some_and(|timed| timed == false) {
            continue;
        }
        // Names live as long as the program.
        let fixed = |text: String| -> &'static str { text.leak() };
        let shared = fixed(format!("models/{name}"));
        let alone = fixed(format!("models/{name}/one_rank"));
        if row.get("peer").is_some() {
            rows.push(Row {
                name: fixed(format!("{shared} on 1")),
                peer: Peer::OneProcess(shared),
                least: Some(ONE_RANK),
            });
        }
        let peer = Peer::Scaling(Cases { shared, alone });
        rows.push(Row { name: fixed(format!("{shared} on N")), peer, least: Some(SCALING) });
    }
    Ok(rows)
}
