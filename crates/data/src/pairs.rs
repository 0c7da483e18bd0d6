//! Data sets of inputs and of targets that belong together.

use std::sync::Arc;

use crate::adapt::{time_text, times_in};
use crate::dataset::Dataset;
use crate::grid::Dim;
use crate::{Error, Result};

/// The data sets of training, validation and test samples, of inputs or of targets.
#[derive(Debug)]
pub(crate) struct Sets {
    pub(crate) train: Arc<dyn Dataset>,
    pub(crate) validation: Option<Arc<dyn Dataset>>,
    pub(crate) test: Option<Arc<dyn Dataset>>,
}

impl Sets {
    /// Applies a change to each.
    pub(crate) fn map(self, change: impl Fn(Arc<dyn Dataset>) -> Arc<dyn Dataset>) -> Self {
        Self {
            train: change(self.train),
            validation: self.validation.map(&change),
            test: self.test.map(&change),
        }
    }
}

/// Rejects targets that do not belong to the inputs: another number of spatial dims or of samples, or different times.
///
/// # Errors
/// The first difference.
pub(crate) fn check_pairs(inputs: &Sets, targets: &Sets) -> Result<()> {
    check_pair(&*inputs.train, &*targets.train)?;
    let others =
        [("validation", &inputs.validation, &targets.validation), ("test", &inputs.test, &targets.test)];
    for (set, inputs, targets) in others {
        match (inputs, targets) {
            (Some(inputs), Some(targets)) => check_pair(&**inputs, &**targets)?,
            (None, None) => (),
            (inputs, _) => {
                let (known, missing) = match inputs {
                    Some(_) => ("data", "data.target"),
                    None => ("data.target", "data"),
                };
                return Err(Error::Config(format!(
                    "{known}.{set}_path names a {set} set, but {missing}.{set}_path names none; --set {missing}.{set}_path=FILE"
                )));
            }
        }
    }
    Ok(())
}

fn check_pair(inputs: &dyn Dataset, targets: &dyn Dataset) -> Result<()> {
    let (from, to) = (inputs.path().display(), targets.path().display());
    let misfit = |what: &str, found: String, other: String| {
        Err(Error::Config(format!(
            "{what}: the inputs of {from} have {found}, and the targets of {to} {other}; name files that belong together in \
             data.path and data.target.path"
        )))
    };
    let names = |data: &dyn Dataset| -> String {
        let names: Vec<&str> = data.dims().iter().map(|dim| &*dim.name).collect();
        format!("{} ({})", names.len(), names.join(", "))
    };
    if inputs.dims().len() != targets.dims().len() {
        return misfit("different numbers of spatial dims", names(inputs), names(targets));
    }
    for (own, other) in inputs.dims().iter().zip(targets.dims()) {
        if own.is_latitude() && other.is_latitude() && own.descends() != other.descends() {
            let from = |dim: &Dim| match &dim.coordinates[..] {
                [first, .., last] => format!("{} from {first} to {last}", dim.name),
                _ => dim.name.clone(),
            };
            return misfit("opposite directions", from(own), from(other));
        }
    }
    let word = |data: &dyn Dataset| match data.times() {
        Some(times) => format!("{} times", times.len()),
        None => "none".to_owned(),
    };
    // Names other calendars, which may be why there are other times.
    let others = match (inputs.time_unit(), targets.time_unit()) {
        (Some(unit), Some(other)) if targets.times().is_some() && unit != other => times_in(targets, unit)?,
        _ => targets.times().unwrap_or_default().to_vec(),
    };
    if inputs.times().map(<[f64]>::len) != targets.times().map(<[f64]>::len) {
        return misfit("different times", word(inputs), word(targets));
    }
    if inputs.samples() != targets.samples() {
        return misfit(
            "different numbers of samples",
            inputs.samples().to_string(),
            targets.samples().to_string(),
        );
    }
    let times = inputs.times().unwrap_or_default();
    // Conversion rounds times: by less than a thousandth of a step, or of the unit for a single time.
    let steps = times.windows(2).map(|pair| (pair[1] - pair[0]).abs());
    let step = steps.reduce(f64::min).unwrap_or(1.0).min(1e3);
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-3 * step;
    match times.iter().zip(&others).position(|pair| !near(pair)) {
        None => Ok(()),
        Some(at) => {
            let text = |time| format!("{} at index {at}", time_text(inputs.time_unit(), time));
            misfit("different times", text(times.get(at)), text(others.get(at)))
        }
    }
}
