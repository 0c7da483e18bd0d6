//! Checks that a run may resume a checkpoint.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::RunState;
use crate::error::{Error, Result};

/// Key of an identity that is compared as far as both sides have it.
const CHANNELS: &str = "channels";

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

/// Finds channels that differ, of two identities that both have some.
pub(super) fn other_channels(saved: &Value, now: &Value) -> Vec<String> {
    let mut found = Vec::new();
    differences(CHANNELS, &saved[CHANNELS], &now[CHANNELS], &mut found);
    found
}

/// Finds differences of two values, key by key.
pub(super) fn differences(key: &str, saved: &Value, now: &Value, found: &mut Vec<String>) {
    match (saved, now) {
        (Value::Object(a), Value::Object(b)) => {
            let more = b.keys().filter(|name| !a.contains_key(*name));
            for name in a.keys().chain(more) {
                // The full name is given only if one side has no value.
                let inner =
                    if matches!(key, "" | "identity") { name.clone() } else { format!("{key}.{name}") };
                let of =
                    |object: &serde_json::Map<String, Value>| object.get(name).cloned().unwrap_or_default();
                differences(&inner, &of(a), &of(b), found);
            }
        }
        _ if saved == now => {}
        // Checkpoints of earlier versions have no channels, and some files no units.
        _ if key.split('.').next() == Some(CHANNELS) && (saved.is_null() || now.is_null()) => {}
        _ => found.push(format!("{key} {}, this run has {}", shown(saved), shown(now))),
    }
}

/// A value in words; an option without one is `unset`.
fn shown(value: &Value) -> String {
    if value.is_null() { "unset".to_owned() } else { value.to_string() }
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
            let mut found = Vec::new();
            differences("identity", &saved, &now, &mut found);
            found
        };
        assert!(found(json!({ "model": { "type": "fno" } })).is_empty());
        let other =
            found(json!({ "model": { "type": "fno" }, "channels": { "inputs": ["z_850", "z_500"] } }));
        assert_eq!(other, [r#"channels.inputs ["z_850","z_500"], this run has ["z_500","z_850"]"#]);
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
