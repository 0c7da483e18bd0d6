//! Choice of the checkpoints that are kept.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::manifest::Manifest;
use super::read::Opened;
use super::{RunState, folder};
use crate::error::{Error, Result};

/// Numbers of checkpoints that are kept: the newest, and those with the lowest validation errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// Number of the newest; 0 keeps all.
    pub newest: usize,
    /// Number of the best besides.
    pub best: usize,
}

impl Keep {
    /// All of them.
    pub const ALL: Self = Self { newest: 0, best: 0 };
}

/// Removes the checkpoints of a folder that need not stay. Keeps `current`, and checkpoints that cannot be read, with a warning, since
/// they may be complete. Incomplete ones are not counted, and are removed once enough newer ones exist.
pub(super) fn prune(root: &Path, keep: Keep, current: &Path) -> Result<()> {
    if keep.newest == 0 {
        return Ok(());
    }
    let mut found: Vec<(PathBuf, Option<Manifest>)> = Vec::new();
    for path in folder::checkpoints(root)? {
        match Opened::folder(&path).and_then(|opened| opened.check_lengths().map(|()| opened)) {
            Ok(opened) => found.push((path, opened.manifest)),
            Err(Error::Io { source, .. }) if source.kind() != ErrorKind::NotFound => {
                tracing::warn!("{} stays, since it cannot be read: {source}", path.display());
            }
            Err(_) => found.push((path, None)),
        }
    }
    let errors = comparable(found.iter().map(|(_, manifest)| manifest.as_ref().map(|of| &of.state)));
    for at in superfluous(&errors, keep) {
        let path = &found[at].0;
        if path != current {
            folder::remove(path)?;
        }
    }
    Ok(())
}

/// Indices of what need not stay, among checkpoints from the newest to the oldest: of each its validation error, if it has
/// one; `None` where it is torn.
fn superfluous(errors: &[Option<Option<f64>>], keep: Keep) -> Vec<usize> {
    if keep.newest == 0 {
        return Vec::new();
    }
    let whole: Vec<usize> = (0..errors.len()).filter(|&at| errors[at].is_some()).collect();
    let Some(&last) = whole.get(keep.newest - 1) else { return Vec::new() };
    let best = best_first(errors);
    (last + 1..errors.len()).filter(|at| !best.iter().take(keep.best).any(|kept| kept == at)).collect()
}

/// Validation errors of checkpoints from the newest to the oldest, of the newest one's metric and data: others are left out, as
/// they are not comparable. `None` for a checkpoint that cannot be read.
pub(super) fn comparable<'a>(states: impl Iterator<Item = Option<&'a RunState>>) -> Vec<Option<Option<f64>>> {
    let states: Vec<_> = states.collect();
    let measured = states.iter().flatten().copied().find(|state| state.validation_error.is_some());
    let like = |state: &RunState, measured: &RunState| {
        state.validation_metric == measured.validation_metric && state.same_validation_data(measured)
    };
    let error = |state: &RunState| {
        state.validation_error.filter(|_| measured.is_some_and(|measured| like(state, measured)))
    };
    states.into_iter().map(|state| state.map(error)).collect()
}

/// Indices of those with a validation error, the lowest first, of equal ones the newest.
pub(super) fn best_first(errors: &[Option<Option<f64>>]) -> Vec<usize> {
    let mut known: Vec<(f64, usize)> = errors
        .iter()
        .enumerate()
        .filter_map(|(at, error)| Some(((*error)??, at)))
        .filter(|(error, _)| error.is_finite())
        .collect();
    known.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    known.into_iter().map(|(_, at)| at).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const OLD: Option<Option<f64>> = Some(None);
    const TORN: Option<Option<f64>> = None;

    fn error(error: f64) -> Option<Option<f64>> {
        Some(Some(error))
    }

    #[test]
    fn errors_of_another_metric_are_not_compared() {
        let state = |error: Option<f64>, metric: Option<&str>| RunState {
            validation_error: error,
            validation_metric: metric.map(str::to_owned),
            ..RunState::default()
        };
        let states = [state(None, None), state(Some(0.6), Some("mean")), state(Some(0.01), None)].map(Some);
        let errors = comparable(states.iter().map(Option::as_ref).chain([None]));
        assert_eq!(errors, [OLD, error(0.6), OLD, TORN]);
        assert_eq!(best_first(&errors), [1]);
    }

    #[test]
    fn errors_of_other_validation_data_are_not_compared() {
        let state = |error: f64, baseline: f64| RunState {
            validation_error: Some(error),
            extra: serde_json::json!({ "baseline": [{ "relative": baseline, "rmse": 1.0 }] }),
            ..RunState::default()
        };
        let states = [state(0.6, 2.0), state(0.01, 1.0)];
        assert_eq!(comparable(states.iter().map(Some)), [error(0.6), OLD]);
    }

    #[rstest]
    #[case::all(0, 0, &[OLD, OLD, OLD], &[])]
    #[case::newest(2, 0, &[OLD, OLD, OLD, error(0.1)], &[2, 3])]
    #[case::best(1, 1, &[error(0.3), error(0.2), error(0.1), error(0.4)], &[1, 3])]
    #[case::best_is_newest(1, 1, &[error(0.1), error(0.2)], &[1])]
    #[case::two_best(1, 2, &[OLD, error(0.3), error(f64::NAN), error(0.1), error(0.2)], &[1, 2])]
    #[case::torn_does_not_count(2, 0, &[TORN, OLD, TORN, OLD, TORN, OLD], &[4, 5])]
    #[case::too_few(3, 0, &[TORN, OLD, TORN], &[])]
    fn what_goes(
        #[case] newest: usize,
        #[case] best: usize,
        #[case] errors: &[Option<Option<f64>>],
        #[case] goes: &[usize],
    ) {
        assert_eq!(superfluous(errors, Keep { newest, best }), goes);
    }
}
