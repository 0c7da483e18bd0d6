//! Warnings about probable mistakes that are not errors: one line each, by rank 0.

use std::path::Path;

use serde_json::{Value, json};

use super::FitConfig;
use crate::checkpoint::RunState;
use crate::difference::differences;
use crate::schedule::Schedule;

/// Settings that a resumed run may change although they influence training.
pub(super) fn settings(config: &FitConfig) -> Value {
    let train = &config.train;
    json!({
        "train": {
            "epochs": train.epochs,
            "loss": train.loss,
            "weights": train.weights,
            "precision": train.precision,
            "clip_norm": train.clip_norm,
            "average_decay": train.average_decay,
            // Null is as good as a key that earlier versions did not have.
            "average_widths": (!train.average_widths.is_empty()).then_some(&train.average_widths),
        },
        "optimizer": config.optimizer,
        "schedule": config.schedule,
        "task": config.task,
        "data": config.data,
    })
}

/// Sizes of a run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Extent<'a> {
    /// Training samples.
    pub(super) samples: usize,
    /// Ranks that share the samples of a batch.
    pub(super) sharing: usize,
    /// Number of ranks along the axis `data`.
    pub(super) data: usize,
    /// Name of a batch norm's running mean, if the model has one.
    pub(super) norm: Option<&'a str>,
}

/// Warnings about the settings of a run, for the sizes that it has.
pub(super) fn warnings(config: &FitConfig, extent: Extent<'_>) -> Vec<String> {
    let mut found = Vec::new();
    let train = &config.train;
    let Extent { samples, sharing, data, norm } = extent;
    if let Some(norm) = norm.filter(|_| data > 1) {
        found.push(format!(
            "batch norm ({norm}) uses the statistics of each rank's samples, so the loss depends on the size of the axis data \
             ({data}); on a mesh with the axis shard in its place, it uses those of the batch (distributed.mesh.names)"
        ));
    }
    if let Some(norm) = norm.filter(|_| train.accumulate > 1) {
        found.push(format!(
            "batch norm ({norm}) uses the statistics of each micro-batch, so the loss depends on train.accumulate ({}); for \
             those of the batch: --set train.accumulate=1",
            train.accumulate
        ));
    }
    let (warmup, epochs) = (config.schedule.warmup_epochs(), train.epochs);
    if epochs > 0 && warmup > epochs as f64 {
        found.push(format!(
            "the warm-up of {warmup} epochs (schedule.warmup_epochs) is longer than the run of {epochs} (train.epochs): the \
             learning rate comes to {:.0} % of optimizer.lr only; --set schedule.warmup_epochs={}",
            100.0 * epochs as f64 / warmup,
            epochs as f64 / 10.0
        ));
    }
    let batch = train.batch_size.min(samples);
    if train.batch_size > samples {
        found.push(format!(
            "train.batch_size is {}, but there are {samples} training samples: an epoch is one step; --set \
             train.batch_size={}",
            train.batch_size,
            samples.max(1)
        ));
    }
    if batch < sharing {
        found.push(format!(
            "a batch has {batch} samples (train.batch_size {}), but {sharing} ranks share them: {} of them compute nothing in a \
             step; --set train.batch_size={sharing}, or use fewer ranks along the axes data and shard",
            train.batch_size,
            sharing - batch
        ));
    }
    let own = batch.div_ceil(sharing.max(1));
    if train.accumulate > own {
        found.push(format!(
            "train.accumulate is {}, but a rank takes {own} samples of a batch at most: {} of its micro-batches are empty; --set \
             train.accumulate={}",
            train.accumulate,
            train.accumulate - own,
            own.max(1)
        ));
    }
    let keep = config.checkpoint.keep;
    if !train.average_widths.is_empty() && keep > 0 {
        found.push(format!(
            "train.average_widths makes an average of any width of those in all checkpoints, but {keep} are kept; --set checkpoint.keep=0"
        ));
    }
    found
}

/// Returns whether a run at this state has nothing left to train.
pub(super) fn is_finished(state: &RunState, config: &FitConfig) -> bool {
    let train = &config.train;
    state.epoch >= train.epochs || train.max_steps.is_some_and(|limit| state.step >= limit)
}

/// Warnings about resuming a checkpoint with these settings.
pub(super) fn resumed(state: &RunState, config: &FitConfig, now: &Value, path: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let differing: Vec<String> = match state.settings.is_null() {
        true => Vec::new(),
        false => {
            let now = kept_by(&state.settings, now);
            let found = differences(&state.settings, &now);
            // More epochs are the usual reason to resume: see `other_rate`.
            let told = found.iter().filter(|difference| difference.key != EPOCHS);
            told.map(ToString::to_string).collect()
        }
    };
    if !differing.is_empty() {
        found.push(format!(
            "{} was trained with {}; the run continues with its own settings",
            path.display(),
            differing.join("; with ")
        ));
    }
    found.extend(other_rate(state, config));
    let train = &config.train;
    if let Some(limit) = train.max_steps.filter(|limit| state.step >= *limit) {
        found.push(format!(
            "this run is finished already: {} is of step {}, and train.max_steps is {limit}; nothing is trained; to continue, --set \
             train.max_steps={}",
            path.display(),
            state.step,
            state.step.max(1) * 2
        ));
    } else if is_finished(state, config) {
        found.push(format!(
            "this run is finished already: {} is of epoch {}, step {}, and train.epochs is {}; nothing is trained; to continue, --set \
             train.epochs={}",
            path.display(),
            state.epoch,
            state.step,
            train.epochs,
            state.epoch.max(1) * 2
        ));
    }
    found
}

/// Key of the number of epochs in the settings.
const EPOCHS: &str = "train.epochs";

/// Warns if another number of epochs moves the run to another place of its schedule.
fn other_rate(state: &RunState, config: &FitConfig) -> Option<String> {
    let (before, now) = (state.settings["train"]["epochs"].as_u64()?, config.train.epochs);
    let batches = state.samples.div_ceil(state.batch_size.max(1));
    let rate = |epochs: u64| {
        let schedule = Schedule::new(config.schedule.clone(), config.optimizer.lr(), batches, epochs).ok()?;
        Some(schedule.lr(state.step))
    };
    let (old, new) = (rate(before)?, rate(now)?);
    ((old - new).abs() > 0.01 * old.max(new)).then(|| {
        format!(
            "{EPOCHS} changed from {before} to {now}, so the schedule changes: at step {} the learning rate jumps from \
             {old:.3e} to {new:.3e}; for a constant rate, --set schedule.type=constant",
            state.step
        )
    })
}

/// Returns the settings of this run without those that checkpoints of earlier versions do not keep.
fn kept_by(saved: &Value, now: &Value) -> Value {
    let mut now = now.clone();
    let keep = |saved: Option<&Value>, now: Option<&mut Value>| {
        if let (Some(saved), Some(now)) =
            (saved.and_then(Value::as_object), now.and_then(Value::as_object_mut))
        {
            now.retain(|key, _| saved.contains_key(key));
        }
    };
    keep(saved.get("train"), now.get_mut("train"));
    keep(Some(saved), Some(&mut now));
    now
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::config::{OptimizerKind, TrainConfig};
    use crate::loss::Mse;
    use crate::optim::AdamWConfig;
    use crate::schedule::{Constant, Cosine, ScheduleKind};

    fn config(epochs: u64, batch_size: usize, accumulate: usize, warmup_epochs: f64) -> FitConfig {
        FitConfig {
            train: TrainConfig { epochs, batch_size, accumulate, ..TrainConfig::default() },
            schedule: Constant { warmup_epochs }.into(),
            ..FitConfig::default()
        }
    }

    #[rstest]
    #[case::well(config(10, 16, 2, 10.0), 2, &[])]
    #[case::warm_up(config(2, 16, 1, 4.0), 1, &["the warm-up of 4 epochs (schedule.warmup_epochs) is longer than the run of 2 (train.epochs): the learning rate comes to 50 %"])]
    #[case::batch(config(10, 500, 1, 1.0), 1, &["train.batch_size is 500, but there are 224 training samples"])]
    #[case::ranks(config(10, 1, 1, 1.0), 4, &["a batch has 1 samples (train.batch_size 1), but 4 ranks share them: 3 of them compute nothing"])]
    #[case::passes(config(10, 8, 8, 1.0), 2, &["train.accumulate is 8, but a rank takes 4 samples of a batch at most: 4 of its micro-batches are empty; --set train.accumulate=4"])]
    #[case::all(config(1, 300, 300, 3.0), 300, &["the warm-up of 3", "train.batch_size is 300", "a batch has 224 samples", "train.accumulate is 300"])]
    fn mistakes_get_a_line_each(#[case] config: FitConfig, #[case] sharing: usize, #[case] words: &[&str]) {
        let found = warnings(&config, Extent { samples: 224, sharing, ..Extent::default() });
        assert_eq!(found.len(), words.len(), "{found:?}");
        for (found, words) in found.iter().zip(words) {
            assert!(found.starts_with(words), "{found}");
        }
    }

    #[rstest]
    #[case::ranks(1, 2, true)]
    #[case::passes(2, 1, true)]
    #[case::whole(1, 1, false)]
    fn a_batch_norm_of_parts_is_told(#[case] accumulate: usize, #[case] data: usize, #[case] told: bool) {
        let extent = Extent { samples: 224, sharing: data, data, norm: Some("bn.running_mean") };
        let found = warnings(&config(10, 16, accumulate, 1.0), extent);
        assert_eq!(found.iter().any(|found| found.starts_with("batch norm (bn.running_mean)")), told);
    }

    #[test]
    fn what_a_resumed_run_changes_is_told() {
        let before = config(10, 16, 1, 1.0);
        let saved = RunState { step: 84, epoch: 6, settings: settings(&before), ..RunState::default() };
        let path = Path::new("step_00000084");
        let say = |now: &FitConfig| resumed(&saved, now, &settings(now), path);
        assert_eq!(say(&before), [""; 0]);
        let mut now = before.clone();
        now.train.loss = Mse {}.into();
        now.train.weights.latitude = true;
        now.optimizer = OptimizerKind::from(AdamWConfig { lr: 0.5, ..AdamWConfig::default() });
        now.task = json!({ "type": "regression" });
        now.data = json!({ "augment": "square" });
        now.train.average_decay = Some(0.9);
        let found = say(&now);
        assert_eq!(found.len(), 1, "{found:?}");
        for words in [
            "step_00000084 was trained with",
            "optimizer.lr 0.001, this run has 0.5",
            "train.loss \"relative_l2\", this run has \"mse\"",
            "train.weights.latitude false, this run has true",
            "task unset, this run has {\"type\":\"regression\"}",
            "data unset, this run has {\"augment\":\"square\"}",
            "train.average_decay unset, this run has 0.9",
        ] {
            assert!(found[0].contains(words), "{found:?}");
        }
        // Of earlier versions, with fewer settings or none.
        let fewer =
            json!({ "train": { "loss": "mse" }, "optimizer": now.optimizer, "schedule": now.schedule });
        for kept in [fewer, Value::Null] {
            let old = RunState { settings: kept, ..saved.clone() };
            assert_eq!(resumed(&old, &now, &settings(&now), path), [""; 0]);
        }
    }

    #[test]
    fn more_epochs_are_told_where_the_learning_rate_jumps() {
        let longer = |schedule: ScheduleKind| {
            let of = |epochs| FitConfig { schedule: schedule.clone(), ..config(epochs, 16, 1, 0.0) };
            let settings = settings(&of(6));
            let saved = RunState {
                step: 84,
                epoch: 6,
                samples: 224,
                batch_size: 16,
                settings,
                ..RunState::default()
            };
            resumed(&saved, &of(12), &super::settings(&of(12)), Path::new("step_84"))
        };
        assert_eq!(longer(Constant { warmup_epochs: 0.0 }.into()), [""; 0]);
        let found = longer(Cosine { warmup_epochs: 0.0, min_factor: 0.0 }.into());
        assert_eq!(found.len(), 1, "{found:?}");
        let words = "train.epochs changed from 6 to 12, so the schedule changes: at step 84 the learning rate jumps from 0.000e0 to 5.000e-4";
        assert!(found[0].starts_with(words), "{found:?}");
    }

    #[test]
    fn a_finished_run_says_so() {
        let at = |epoch, step| RunState { epoch, step, ..RunState::default() };
        let say =
            |state: &RunState, config: &FitConfig| resumed(state, config, &Value::Null, Path::new("step_84"));
        let mut config = config(6, 16, 1, 1.0);
        assert!(
            say(&at(6, 84), &config)[0]
                .contains("step_84 is of epoch 6, step 84, and train.epochs is 6; nothing is trained")
        );
        assert_eq!(say(&at(5, 84), &config), [""; 0]);
        config.train.max_steps = Some(84);
        assert!(say(&at(5, 84), &config)[0].contains("train.max_steps is 84"));
    }
}
