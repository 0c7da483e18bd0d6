//! Origin of a prediction: its checkpoint, and the attributes of the file.

use std::path::PathBuf;

use isobar_train::checkpoint::{CheckpointSelector, RunState};
use isobar_train::checkpoint_error;

/// The checkpoint that a network's parameters come from.
pub(super) struct Origin {
    pub(super) path: PathBuf,
    pub(super) which: CheckpointSelector,
    pub(super) step: u64,
    pub(super) epoch: u64,
    pub(super) validation_error: Option<f64>,
    /// Name of the metric, if it covers several variables.
    pub(super) metric: Option<String>,
}

impl Origin {
    pub(super) fn new(path: PathBuf, which: CheckpointSelector, state: &RunState) -> Self {
        Self {
            path,
            which,
            step: state.step,
            epoch: state.epoch,
            validation_error: state.validation_error,
            metric: state.validation_metric.clone(),
        }
    }

    /// Returns the line that is printed.
    pub(super) fn line(&self) -> String {
        let mut text =
            format!("checkpoint  {} (step {}, epoch {}", self.path.display(), self.step, self.epoch);
        if let Some(error) = self.validation_error {
            text += &format!(", validation error {}", checkpoint_error(error, self.metric.as_deref()));
            if let Some(metric) = &self.metric {
                text += &format!(": {metric}");
            }
        }
        text += match self.which {
            CheckpointSelector::Best => "; the lowest validation error)",
            CheckpointSelector::Newest => "; the latest)",
            CheckpointSelector::At(_) => ")",
        };
        text
    }

    /// Attributes of the file, besides those of its schema.
    pub(super) fn attributes(&self) -> Vec<(&'static str, String)> {
        let mut attributes = vec![
            ("isobar_version", env!("CARGO_PKG_VERSION").to_owned()),
            ("isobar_checkpoint", self.path.display().to_string()),
            ("isobar_step", self.step.to_string()),
            ("isobar_epoch", self.epoch.to_string()),
        ];
        if let Some(error) = self.validation_error {
            attributes.push(("isobar_validation_error", error.to_string()));
            let metric = self.metric.clone().unwrap_or_else(|| "relative L2 error".to_owned());
            attributes.push(("isobar_validation_metric", metric));
        }
        attributes
    }
}
