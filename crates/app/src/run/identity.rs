//! Identity of a run: the settings of its model and the meaning of its data. Resuming, predicting and a second stage require an
//! equal identity.
//!
//! The identity is computed from the configuration alone.

use anyhow::Result;
use isobar_data::Missing;
use isobar_train::config::{DataConfig, ScalarsAs};
use isobar_train::{Difference, differences};
use serde_json::{Value, json};

use crate::config::Config;

/// Keys that say how data are stored, not what they mean.
const STORED: [&str; 2] = ["format", "target.format"];

/// The model and the meaning of its data, as checkpoints keep them.
pub(crate) fn identity(config: &Config) -> Result<Value> {
    Ok(json!({ "data": meaning(&config.data), "model": serde_json::to_value(&config.model)? }))
}

/// The meaning of the data. Keys that are not set are left out, so that runs of earlier versions resume.
pub(crate) fn meaning(data: &DataConfig) -> Value {
    let mut meaning = json!({
        "format": data.format_name(),
        "fields": data.fields,
        "predict": data.predict,
        "positions": data.positions,
    });
    let names = [
        ("inputs", &data.inputs),
        ("targets", &data.targets),
        ("forcings", &data.forcings),
        ("statics", &data.statics),
        ("scalars", &data.scalars),
        ("diagnostics", &data.diagnostics),
    ];
    for (key, names) in names.into_iter().filter(|(_, names)| !names.is_empty()) {
        meaning[key] = json!(names);
    }
    if let Some(target) = &data.target {
        meaning["target"] = json!({ "format": target.format, "levels": target.levels });
    }
    if data.scalars_as != ScalarsAs::default() {
        meaning["scalars_as"] = json!(data.scalars_as);
    }
    if data.history != 1 {
        meaning["history"] = data.history.into();
    }
    if !data.levels.is_empty() {
        meaning["levels"] = json!(data.levels);
    }
    if data.missing == Missing::Fill {
        meaning["fill"] = data.fill.into();
    }
    if let Some(fill) = data.masks() {
        meaning["mask"] = fill.into();
    }
    meaning
}

/// Differences in the meaning of data, wherever they are stored. `saved` may be of a checkpoint.
pub(crate) fn other_meaning(saved: &Value, now: &Value) -> Vec<Difference> {
    let mut found = differences(saved, now);
    // What training adds to the meaning of its data follows from the rest.
    let ignored = [&STORED[..], &["statistics", "changes"]].concat();
    found.retain(|difference| !ignored.contains(&&*difference.key));
    for difference in &mut found {
        // Masked points have the value of `data.fill`.
        if difference.key == "mask" && !difference.saved.is_null() && !difference.now.is_null() {
            difference.key = "fill".to_owned();
        }
    }
    found
}

/// A value as the command line takes it.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Null => "unset".to_owned(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(keys: Value) -> Value {
        meaning(&serde_json::from_value(keys).unwrap())
    }

    #[test]
    fn data_mean_the_same_wherever_they_are_stored() {
        let fields = json!(["u", "v"]);
        let hdf5 = data(json!({ "path": "a.h5", "format": "hdf5", "fields": fields }));
        let zarr = data(json!({ "path": "b.zarr", "format": "zarr", "fields": fields }));
        assert_ne!(hdf5, zarr);
        assert_eq!(other_meaning(&hdf5, &zarr), []);
        let mut saved = hdf5.clone();
        saved["statistics"] = "weighted by cell area".into();
        assert_eq!(other_meaning(&saved, &zarr), []);
    }

    #[test]
    fn another_meaning_is_found() {
        let one = data(json!({ "path": "a.h5", "format": "hdf5", "fields": ["u"] }));
        for (key, value) in [
            ("fields", json!(["v"])),
            ("history", json!(2)),
            ("levels", json!([500.0])),
            ("statics", json!(["orography"])),
            ("predict", json!("change")),
            ("missing", json!("fill")),
        ] {
            let mut keys = json!({ "path": "a.h5", "format": "hdf5", "fields": ["u"] });
            keys[key] = value;
            let other = other_meaning(&one, &data(keys)).remove(0);
            let key = if key == "missing" { "fill" } else { key };
            assert_eq!(other.key, key);
        }
    }
}
