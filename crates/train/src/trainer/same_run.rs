//! Checks that a run may resume a checkpoint.

use std::path::Path;

use isobar_data::Normalizer;
use serde_json::Value;

use crate::checkpoint::RunState;
use crate::difference::{Difference, MODEL, identity_differences};
use crate::error::{Error, Result};

/// Key of the channels in an identity.
const CHANNELS: &str = "channels";

/// Normalizations in `extra`, and whose they are.
const SCALES: [(&str, &str); 5] = [
    ("input", "inputs"),
    ("target", "targets"),
    ("change", "changes"),
    ("forcing", "forcings"),
    ("fixed", "static fields"),
];

/// Refuses to go on with another run: with other global batches than those so far, of which some would be left out or
/// repeated, or with other fields, other normalizations or another model.
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
    found.extend(identities(&saved.identity, &now.identity).iter().map(ToString::to_string));
    found.extend(other_scales(&saved.extra, &now.extra));
    if found.is_empty() {
        return Ok(());
    }
    let reason = format!(
        "it was trained with {}; give the same, choose another name (--set run.name=NAME), or start from the beginning in its place (--overwrite)",
        found.join("; with ")
    );
    Err(Error::CheckpointUnfit { path: path.to_owned(), reason })
}

/// Rejects counts that are impossible for epochs of `batches` batches: a digest shows that they were written
/// like this, not that they are consistent.
pub(super) fn check_counts(saved: &RunState, batches: u64, path: &Path) -> Result<()> {
    let RunState { step, epoch, batch, loss_samples, .. } = *saved;
    let steps = epoch.checked_mul(batches).and_then(|steps| steps.checked_add(batch));
    let samples = batch.saturating_mul(saved.batch_size).min(saved.samples);
    let problem = if batch > batches {
        format!("batch {batch} of epoch {epoch}, but an epoch has {batches} batches")
    } else if steps != Some(step) {
        format!("step {step}, but batch {batch} of epoch {epoch} with {batches} batches an epoch")
    } else if loss_samples != samples {
        format!("losses of {loss_samples} samples, but {samples} samples in {batch} batches")
    } else if saved.loss_scale.is_some_and(|scale| !scale.is_possible()) {
        format!("the loss scale {:?}", saved.loss_scale)
    } else {
        return Ok(());
    };
    let reason = format!("it contradicts itself: it has {problem}; resume from another checkpoint");
    Err(Error::checkpoint(path, reason))
}

/// Channels that differ, of two identities that both have some.
pub(super) fn other_channels(saved: &Value, now: &Value) -> Vec<Difference> {
    let found = identities(saved, now).into_iter();
    found.filter(|difference| group(&difference.key) == CHANNELS).collect()
}

/// Differences of two identities.
fn identities(saved: &Value, now: &Value) -> Vec<Difference> {
    let mut found = identity_differences(saved, now);
    found.retain(|difference| {
        let Difference { key, saved, now } = difference;
        // Checkpoints of earlier versions have no channels or no model, and some files no units.
        let is_unknown = match group(key) {
            CHANNELS => saved.is_null() || now.is_null(),
            _ => key == MODEL && saved.is_null(),
        };
        !is_unknown
    });
    if let Some(whole) = found.iter_mut().find(|difference| difference.key.is_empty()) {
        whole.key = "identity".to_owned();
    }
    found
}

/// The first part of a key.
fn group(key: &str) -> &str {
    key.split('.').next().unwrap_or_default()
}

/// Normalizations that differ by more than rounding: the network would go on with other numbers for the same fields.
fn other_scales(saved: &Value, now: &Value) -> Vec<String> {
    let scales =
        |extra: &Value, key: &str| serde_json::from_value::<Normalizer>(extra.get(key)?.clone()).ok();
    let differing = SCALES.iter().filter_map(|(key, what)| {
        let (saved, now) = (scales(saved, key)?, scales(now, key)?);
        (!saved.is_close_to(&now)).then(|| {
            format!(
                "{what} of mean {:?} and standard deviation {:?}, this run has {:?} and {:?}: its training data differ",
                saved.mean(),
                saved.std(),
                now.mean(),
                now.std()
            )
        })
    });
    differing.collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::loss_scale::LossScale;

    /// Ten samples in batches of four: three batches an epoch, the last of two samples.
    fn state(epoch: u64, batch: u64, loss_samples: u64) -> RunState {
        let step = epoch * 3 + batch;
        RunState { step, epoch, batch, loss_samples, samples: 10, batch_size: 4, ..RunState::default() }
    }

    #[rstest]
    #[case::fresh(0, 0, 0)]
    #[case::within(2, 2, 8)]
    #[case::at_the_end_of_an_epoch(1, 3, 10)]
    fn counts_of_runs_are_taken(#[case] epoch: u64, #[case] batch: u64, #[case] losses: u64) {
        let state = RunState { loss_scale: Some(LossScale::default()), ..state(epoch, batch, losses) };
        check_counts(&state, 3, Path::new("step")).unwrap();
    }

    #[test]
    fn channels_are_compared_where_a_checkpoint_names_them() {
        let found = |saved: Value| {
            let now = json!({ "model": { "type": "fno" }, "channels": { "inputs": ["z_500", "z_850"] } });
            identities(&saved, &now).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert!(found(json!({ "model": { "type": "fno" } })).is_empty());
        let other =
            found(json!({ "model": { "type": "fno" }, "channels": { "inputs": ["z_850", "z_500"] } }));
        assert_eq!(other, [r#"channels.inputs ["z_850","z_500"], this run has ["z_500","z_850"]"#]);
    }

    /// A mean of 0 is compared on the scale of the deviation.
    #[rstest]
    #[case::same(json!({ "mean": [1e-17], "std": [2.0] }), None)]
    #[case::other(json!({ "mean": [0.5], "std": [2.0] }), Some("inputs of mean [0.0] and standard deviation [2.0], this run has [0.5] and [2.0]"))]
    #[case::more_channels(json!({ "mean": [0.0, 0.0], "std": [2.0, 2.0] }), Some("inputs of mean [0.0]"))]
    #[case::none(Value::Null, None)]
    fn data_with_another_normalization_are_refused(#[case] now: Value, #[case] words: Option<&str>) {
        let extra = |input: Value| json!({ "input": input, "change": null });
        let saved = extra(json!({ "mean": [0.0], "std": [2.0] }));
        let state = |extra: Value| RunState { extra, ..RunState::default() };
        let checked = check_same_run(&state(saved), &state(extra(now)), Path::new("step"));
        match words {
            None => checked.unwrap(),
            Some(words) => {
                let error = checked.unwrap_err().to_string();
                assert!(error.contains(words) && error.contains("its training data differ"), "{error}");
            }
        }
    }

    #[rstest]
    #[case::endless_batch(|s: &mut RunState| s.batch = u64::MAX, "batch 18446744073709551615 of epoch 1")]
    #[case::endless_epoch(|s: &mut RunState| s.epoch = u64::MAX, "step 5, but batch 2 of epoch 18446744073709551615")]
    #[case::step(|s: &mut RunState| s.step = 4, "step 4, but batch 2 of epoch 1 with 3 batches")]
    #[case::no_losses(|s: &mut RunState| s.loss_samples = 0, "losses of 0 samples, but 8 samples in 2 batches")]
    #[case::scale(
        |s: &mut RunState| s.loss_scale = serde_json::from_str(r#"{"factor": 1e300, "steps": 0}"#).unwrap(),
        "the loss scale"
    )]
    fn counts_that_no_run_has_are_refused(#[case] change: fn(&mut RunState), #[case] words: &str) {
        let mut state = state(1, 2, 8);
        change(&mut state);
        let error = check_counts(&state, 3, Path::new("step")).unwrap_err().to_string();
        assert!(error.contains("it contradicts itself") && error.contains(words), "{error}");
    }
}
