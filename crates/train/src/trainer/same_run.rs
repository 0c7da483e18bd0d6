//! What a run refuses to go on with, or to start from.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::RunState;
use crate::config::{CheckpointConfig, Resume};
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
        "it was trained with {}; give the same, or start anew (another run.name, or checkpoint.resume = \"never\")",
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

/// Refuses to start from weights that are removed before they are read.
pub(super) fn refuse_init_that_goes(config: &CheckpointConfig, folder: &Path) -> Result<()> {
    let (Resume::Never, Some(init)) = (config.resume, &config.init) else { return Ok(()) };
    let inside = match (init.canonicalize(), folder.canonicalize()) {
        (Ok(init), Ok(folder)) => init.starts_with(folder),
        _ => false,
    };
    match inside {
        false => Ok(()),
        true => Err(Error::invalid(
            "checkpoint.init",
            format!("{}, in the folder of this run", init.display()),
            "a place elsewhere, as checkpoint.resume = \"never\" removes the checkpoints of that folder; copy it, or give the \
             run another name",
        )),
    }
}
