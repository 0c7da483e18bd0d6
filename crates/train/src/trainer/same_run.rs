//! What a run refuses to resume.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::RunState;
use crate::error::{Error, Result};

/// Refuses to go on with another run: with other global batches than those so far, of which some would be left out or
/// repeated, or with other fields or another model.
pub(super) fn check_same_run(saved: &RunState, now: &RunState, path: &Path) -> Result<()> {
    let mut found = Vec::new();
    let pairs = [
        ("seed", saved.seed, now.seed),
        ("train.batch_size", saved.batch_size, now.batch_size),
        ("a number of training samples of", saved.samples, now.samples),
    ];
    for (what, saved, now) in pairs.into_iter().filter(|(_, saved, now)| saved != now) {
        found.push(format!("{what} {saved}, this run has {now}"));
    }
    differences("identity", &saved.identity, &now.identity, &mut found);
    if found.is_empty() {
        return Ok(());
    }
    let reason = format!(
        "it was trained with {}; give the same, choose another run.name, or start from the beginning in its place (--overwrite)",
        found.join("; with ")
    );
    Err(Error::CheckpointUnfit { path: path.to_owned(), reason })
}

/// Where two values differ, key by key.
fn differences(key: &str, saved: &Value, now: &Value, found: &mut Vec<String>) {
    match (saved, now) {
        (Value::Object(a), Value::Object(b)) => {
            let more = b.keys().filter(|name| !a.contains_key(*name));
            for name in a.keys().chain(more) {
                // What it is all called is said only where one side has nothing.
                let inner = if key == "identity" { name.clone() } else { format!("{key}.{name}") };
                let of =
                    |object: &serde_json::Map<String, Value>| object.get(name).cloned().unwrap_or_default();
                differences(&inner, &of(a), &of(b), found);
            }
        }
        _ if saved == now => {}
        _ => found.push(format!("{key} {saved}, this run has {now}")),
    }
}
