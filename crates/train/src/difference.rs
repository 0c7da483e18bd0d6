//! Differences of two values, such as the settings of a checkpoint and those of the run that resumes it.

use std::fmt;

use serde_json::{Map, Value};

/// Key whose value differs between a checkpoint and this run. Displays as `KEY SAVED, this run has NOW`.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The key, such as `model.depth`; inner keys are named as far as both sides have the table.
    pub key: String,
    /// The value of the checkpoint; null if it has none.
    pub saved: Value,
    /// The value of this run; null if it has none.
    pub now: Value,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}, this run has {}", self.key, Shown(&self.saved), Shown(&self.now))
    }
}

/// A value in words; an option without one is `unset`.
struct Shown<'a>(&'a Value);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Value::Null => f.write_str("unset"),
            value => value.fmt(f),
        }
    }
}

/// Compares two values key by key, in the order of the keys.
///
/// ```
/// use isobar_train::differences;
/// use serde_json::json;
///
/// let saved = json!({ "model": { "type": "fno", "depth": 4 }, "seed": 1 });
/// let now = json!({ "model": { "type": "fno", "depth": 6 }, "seed": 1 });
/// let found: Vec<String> = differences(&saved, &now).iter().map(ToString::to_string).collect();
/// assert_eq!(found, ["model.depth 4, this run has 6"]);
/// ```
pub fn differences(saved: &Value, now: &Value) -> Vec<Difference> {
    let mut found = Vec::new();
    collect("", saved, now, &mut found);
    found
}

/// Compares two identities of runs. How much memory a run may take, in a model or one inside it, is no part of them.
pub fn identity_differences(saved: &Value, now: &Value) -> Vec<Difference> {
    let mut found = differences(saved, now);
    found.retain(|difference| difference.key.rsplit('.').next() != Some("gradient_checkpointing"));
    found
}

fn collect(key: &str, saved: &Value, now: &Value, found: &mut Vec<Difference>) {
    match (saved, now) {
        (Value::Object(a), Value::Object(b)) => {
            let more = b.keys().filter(|name| !a.contains_key(*name));
            let of = |table: &Map<String, Value>, name: &str| table.get(name).cloned().unwrap_or_default();
            for name in a.keys().chain(more) {
                let inner = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                collect(&inner, &of(a, name), &of(b, name), found);
            }
        }
        _ if saved == now => {}
        _ => found.push(Difference { key: key.to_owned(), saved: saved.clone(), now: now.clone() }),
    }
}
