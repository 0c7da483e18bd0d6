//! Differences of two values, such as the settings of a checkpoint and those of the run that resumes it.

use std::fmt;

use isobar_models::ModelConfig;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Key of the model in an identity.
pub(crate) const MODEL: &str = "model";

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
pub(crate) struct Shown<'a>(pub(crate) &'a Value);

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

/// Compares two identities of runs, or two models. Settings of memory use, in a model or one inside it, are ignored, and so are
/// keys that the model does not read ([`Architecture::unread`](isobar_models::Architecture::unread)).
pub fn identity_differences(saved: &Value, now: &Value) -> Vec<Difference> {
    let unread = [saved, now].map(unread_keys).concat();
    let [saved, now] = [saved, now].map(|identity| {
        let mut read = identity.clone();
        unread.iter().for_each(|path| remove(&mut read, path));
        read
    });
    let mut found = differences(&saved, &now);
    found.retain(|difference| difference.key.rsplit('.').next() != Some("gradient_checkpointing"));
    found
}

/// Paths in an identity, or in a model, of the keys that its model does not read; none if this program does not know the model.
fn unread_keys(identity: &Value) -> Vec<Vec<String>> {
    let (prefix, model) = match identity.get(MODEL) {
        // The identity of a run. A model may have another in it, and names its own type beside it.
        Some(model) if identity.get("type").is_none() => (Some(MODEL.to_owned()), model),
        _ => (None, identity),
    };
    let unread = ModelConfig::deserialize(model).map_or_else(|_| Vec::new(), |model| model.unread());
    let path = |key: &String| prefix.iter().cloned().chain(key.split('.').map(str::to_owned)).collect();
    unread.iter().map(path).collect()
}

/// Removes the key at `path`, in each table of a list on the way.
fn remove(value: &mut Value, path: &[String]) {
    match (value, path) {
        (Value::Array(list), _) => list.iter_mut().for_each(|inner| remove(inner, path)),
        (Value::Object(table), [key]) => drop(table.remove(key)),
        (Value::Object(table), [key, rest @ ..]) => {
            if let Some(inner) = table.get_mut(key) {
                remove(inner, rest);
            }
        }
        _ => {}
    }
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

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    /// `song_unet` accepts `amp_mode` and does not read it; `dropout` it does.
    fn song_unet(keys: &Value) -> Value {
        let mut model =
            json!({ "type": "song_unet", "img_resolution": 8, "in_channels": 1, "out_channels": 1 });
        for (key, value) in keys.as_object().into_iter().flatten() {
            model[key] = value.clone();
        }
        model
    }

    #[rstest]
    #[case::left_out(json!({ "amp_mode": true }), json!({}), &[])]
    #[case::default(json!({ "amp_mode": true }), json!({ "amp_mode": false }), &[])]
    #[case::added(json!({}), json!({ "amp_mode": true, "profile_mode": true }), &[])]
    #[case::read(json!({ "amp_mode": true, "dropout": 0.2 }), json!({ "dropout": 0.1 }), &["dropout 0.2, this run has 0.1"])]
    fn keys_that_the_model_does_not_read_are_no_difference(
        #[case] saved: Value,
        #[case] now: Value,
        #[case] expected: &[&str],
        #[values(false, true)] inside: bool,
    ) {
        let model = |keys: &Value| match inside {
            false => song_unet(keys),
            true => json!({ "type": "edm_preconditioner", "model": song_unet(keys) }),
        };
        let (saved, now) = (model(&saved), model(&now));
        let texts = |found: Vec<Difference>| found.iter().map(ToString::to_string).collect::<Vec<_>>();
        let prefixed =
            |prefix: &str| expected.iter().map(|text| format!("{prefix}{text}")).collect::<Vec<_>>();
        let own = if inside { "model." } else { "" };
        assert_eq!(texts(identity_differences(&saved, &now)), prefixed(own));
        let run = |model: Value| json!({ "data": { "fields": ["u"] }, "model": model });
        assert_eq!(texts(identity_differences(&run(saved), &run(now))), prefixed(&format!("model.{own}")));
    }

    /// A list of tables has its keys compared one by one, too.
    #[test]
    fn keys_in_lists_are_removed() {
        let mut value = json!({ "a": [{ "b": 1, "c": 2 }, { "c": 3 }], "b": 4 });
        remove(&mut value, &["a".to_owned(), "c".to_owned()]);
        assert_eq!(value, json!({ "a": [{ "b": 1 }, {}], "b": 4 }));
    }
}
