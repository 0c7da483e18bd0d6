//! Errors of a prediction, as text and as a CSV file.

use std::path::Path;

use anyhow::Result;
use isobar_train::metric::Scoreboard;
use isobar_train::{Variable, VariableError, mean_errors, mean_relative, percent};

use crate::exit::{Because, Exit};
use crate::run::errors::{Compared, aligned};
use crate::run::picture::Shown;

/// Prediction and its errors.
pub(super) struct Outcome {
    /// Fields of the first sample, for the picture.
    pub(super) first: Option<Shown>,
    /// For each step, errors per variable of the samples whose truth is known.
    pub(super) errors: Vec<Vec<Vec<VariableError>>>,
    /// Errors of persistence per step, for trajectories.
    pub(super) persistence: Vec<Vec<Vec<VariableError>>>,
    /// Metrics of the configuration.
    pub(super) board: Scoreboard,
}

/// Errors after one step, means over samples.
struct Step {
    /// The first is 1.
    step: usize,
    errors: Vec<VariableError>,
    persistence: Vec<VariableError>,
}

impl Outcome {
    /// Errors after each step whose truth is known.
    fn steps(&self) -> Vec<Step> {
        let known = self.errors.iter().enumerate().filter(|(_, errors)| !errors.is_empty());
        let step = |(at, errors): (usize, &Vec<Vec<VariableError>>)| Step {
            step: at + 1,
            errors: mean_errors(errors),
            persistence: self.persistence.get(at).map(mean_errors).unwrap_or_default(),
        };
        known.map(step).collect()
    }

    /// Errors of forecasts after the first and the last step whose truth is known, and a warning where they are no better than
    /// persistence.
    pub(super) fn forecast(&self, variables: &[Variable]) -> (Vec<String>, Option<String>) {
        let steps = self.steps();
        let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
            return (vec!["forecast    the data have no frames to compare with".to_owned()], None);
        };
        let ends = if steps.len() == 1 { vec![first] } else { vec![first, last] };
        let after = |step: &Step| {
            let plural = if step.step == 1 { "step" } else { "steps" };
            format!("after {} {plural}", step.step)
        };
        let each = |number: &dyn Fn(&Step) -> String| {
            ends.iter().map(|step| number(step)).collect::<Vec<_>>().join(", ")
        };
        let mut lines = vec![format!(
            "forecast    relative L2 error {}{}; predicting no change gives {}",
            each(&|step| format!("{} {}", percent(mean_relative(&step.errors)), after(step))),
            if variables.len() > 1 {
                format!(", mean over {} variables", variables.len())
            } else {
                String::new()
            },
            each(&|step| percent(mean_relative(&step.persistence))),
        )];
        let over_all = |of: fn(&Step) -> Vec<VariableError>| {
            // Each step has as many samples.
            mean_errors(&steps.iter().map(of).collect::<Vec<_>>())
        };
        let (errors, baseline) =
            (over_all(|step| step.errors.clone()), over_all(|step| step.persistence.clone()));
        let compared = Compared { errors: &errors, baseline: &baseline };
        if variables.len() > 1 {
            lines.extend(table(variables, &ends, &after, &compared));
        }
        let count = steps.len();
        let what = if count == 1 { "after 1 step".to_owned() } else { format!("over {count} steps") };
        (lines, compared.no_better(variables, &what, "predicting no change"))
    }

    /// Errors of samples that are no trajectories.
    pub(super) fn mapping(
        &self,
        variables: &[Variable],
        mean_field: &[VariableError],
    ) -> (Vec<String>, Option<String>) {
        let Some(Step { errors, .. }) = self.steps().into_iter().next() else { return (Vec::new(), None) };
        let compared = Compared { errors: &errors, baseline: mean_field };
        let baseline = "predicting the mean field of the training samples";
        (
            vec![format!("error       {}", compared.summary(variables, baseline))],
            compared.no_better(variables, "on these samples", baseline),
        )
    }

    /// Writes a line for each step and variable. `times` are those of the start and of each step, for trajectories.
    pub(super) fn write_csv(&self, path: &Path, variables: &[Variable], times: &[f64]) -> Result<()> {
        let mut text = "step,time,variable,unit,error,rmse,baseline_error,baseline_rmse\n".to_owned();
        for Step { step, errors, persistence } in self.steps() {
            let time = times.get(step).map(f64::to_string).unwrap_or_default();
            for (at, (variable, error)) in variables.iter().zip(&errors).enumerate() {
                let (name, unit) =
                    (quoted(&variable.name), quoted(variable.unit.as_deref().unwrap_or_default()));
                let baseline = persistence
                    .get(at)
                    .map_or_else(|| ",".to_owned(), |of| format!("{},{}", of.relative, of.rmse));
                text +=
                    &format!("{step},{time},{name},{unit},{},{},{baseline}\n", error.relative, error.rmse);
            }
        }
        isobar_files::write(path, text)
            .map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", path.display())).into())
    }
}

fn table(
    variables: &[Variable],
    ends: &[&Step],
    after: &dyn Fn(&Step) -> String,
    over_all: &Compared<'_>,
) -> Vec<String> {
    let [first, last] = [ends[0], ends[ends.len() - 1]];
    let mut rows = vec![[
        "variable".to_owned(),
        after(first),
        "no change".to_owned(),
        after(last),
        "no change".to_owned(),
        "RMSE".to_owned(),
        String::new(),
    ]];
    for (at, variable) in variables.iter().enumerate() {
        let beats = over_all.errors[at].beats(&over_all.baseline[at]);
        rows.push([
            variable.name.clone(),
            percent(first.errors[at].relative),
            percent(first.persistence[at].relative),
            percent(last.errors[at].relative),
            percent(last.persistence[at].relative),
            variable.quantity(last.errors[at].rmse),
            if beats { "" } else { "no better" }.to_owned(),
        ]);
    }
    match ends {
        [_] => aligned(
            &rows.iter().map(|[a, b, c, _, _, d, e]| [a, b, c, d, e].map(Clone::clone)).collect::<Vec<_>>(),
        ),
        _ => aligned(&rows),
    }
}

/// A cell of CSV.
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}
