//! Losses, weights and metrics as a TOML file names them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_manager::config::{Sources, load, reference_markdown, reference_toml};
use isobar_train::Lead;
use isobar_train::config::{MetricsConfig, TrainConfig};
use isobar_train::loss::Sum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Sections of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct Config {
    /// The loop.
    train: TrainConfig,
    /// Metrics.
    metrics: MetricsConfig,
}

fn read(text: &str) -> Result<Config, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    std::fs::write(&path, text).unwrap();
    let loaded = load::<Config>(&Sources::default().file(&path)).map_err(|error| error.to_string())?;
    // What a run keeps in its folder means what the file did.
    std::fs::write(&path, loaded.to_toml_with_origins().unwrap()).unwrap();
    let again = load::<Config>(&Sources::default().file(&path)).map_err(|error| error.to_string())?;
    assert_eq!(again.value, loaded.value);
    Ok(loaded.value)
}

#[test]
fn the_reference_loads_to_the_defaults() {
    let reference = reference_toml::<Config>().unwrap();
    assert_eq!(read(&reference).unwrap(), Config::default());
    for words in ["[train.weights]", "report = []", "best = \"relative\"", "\"spread_skill\""] {
        assert!(reference.contains(words), "{words} in\n{reference}");
    }
    assert!(reference_markdown::<Config>().unwrap().contains("latitude"));
}

#[test]
fn losses_weights_and_metrics_are_named() {
    let config = read(
        r#"
[train]
loss = [{ type = "mse" }, { type = "spectral", weight = 0.1 }, "mae"]
best = "h/rmse"
[train.weights]
variables = { u = 2.0 }
levels = { "500" = 1.5 }
latitude = true
lead = [1, 0.5]
[metrics]
report = ["rmse", { type = "acc" }]
"#,
    )
    .unwrap();
    assert_eq!(config.train.loss.name(), "sum");
    assert_eq!(config.train.weights.lead, Some(Lead::Steps(vec![1.0, 0.5])));
    assert_eq!(config.train.weights.levels["500"], 1.5);
    assert_eq!(config.metrics.report.iter().map(|metric| metric.name()).collect::<Vec<_>>(), ["rmse", "acc"]);
    config.train.weights.check(&config.train.loss).unwrap();
    assert!(
        config.train.weights.check_steps(1, 2).is_ok() && config.train.weights.check_steps(1, 3).is_err()
    );
    let late = read("[train]\nweights = { lead = [0, 1] }").unwrap().train.weights;
    assert!(late.check_steps(2, 2).is_ok());
    let error = late.check_steps(1, 2).unwrap_err().to_string();
    assert!(error.contains("a weight above 0 among the first 1, the fewest steps"), "{error}");
    let decayed =
        read("[train]\nweights = { lead = 0.9 }\nloss = { type = \"sum\", terms = [\"mse\"] }").unwrap();
    assert_eq!(decayed.train.weights.lead, Some(Lead::Decay(0.9)));
    let mse: Sum = serde_json::from_str(r#"{ "terms": ["mse"] }"#).unwrap();
    assert_eq!(decayed.train.loss, mse.into());
}

#[test]
fn unknown_names_are_refused() {
    let error = read("[metrics]\nreport = [\"rsme\"]").unwrap_err();
    assert!(error.contains("did you mean \"rmse\"?"), "{error}");
    let error = read("[train]\nloss = [\"mse\", { type = \"spectrum\" }]").unwrap_err();
    assert!(error.contains("no loss is called \"spectrum\""), "{error}");
}
