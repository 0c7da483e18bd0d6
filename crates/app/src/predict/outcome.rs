//! Errors of a prediction, as text and as a CSV file.

use std::path::Path;

use anyhow::Result;
use isobar_train::metric::{Scoreboard, Spectra};
use isobar_train::{Variable, VariableError, mean_errors, mean_relative, percent};

use super::divergence::Divergence;
use crate::run::chart::{self, COLOURS, Chart, Curve, GREY, lead_time};
use crate::run::errors::{Compared, UNWEIGHTED_RMSE, aligned};
use crate::run::picture::Shown;
use isobar_command::exit::{Because, Exit};

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
    /// Energy spectra, if `metrics.report` contains `spectrum`.
    pub(super) spectra: Option<Spectra>,
    /// Samples with values that are not finite.
    pub(super) divergence: Divergence,
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

    /// Returns whether all samples are finite after a step.
    pub(super) fn is_finite(&self, step: usize) -> bool {
        self.divergence.first_step().is_none_or(|first| step < first)
    }

    /// Returns the errors after each step whose truth is known and after which all samples are finite.
    fn finite_steps(&self) -> Vec<Step> {
        self.steps().into_iter().filter(|step| self.is_finite(step.step)).collect()
    }

    /// Formats the errors of forecasts after the first and the last finite step whose truth is known. Also returns a warning if
    /// they are no better than persistence.
    pub(super) fn forecast(&self, variables: &[Variable]) -> (Vec<String>, Option<String>) {
        let steps = self.finite_steps();
        let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
            let reason = match self.is_finite(1) {
                true => "the data have no frames to compare with",
                false => "not finite after 1 step",
            };
            return (vec![format!("forecast    {reason}")], None);
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
            mean_over(variables, &ends),
            each(&|step| percent(mean_relative(&step.persistence))),
        )];
        let over_all = |of: fn(&Step) -> Vec<VariableError>| {
            // Steps count alike, whatever the number of samples in which a variable is missing.
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
        let Some(Step { errors, .. }) = self.finite_steps().into_iter().next() else {
            let reason = (!self.is_finite(1)).then(|| "error       not finite".to_owned());
            return (reason.into_iter().collect(), None);
        };
        let compared = Compared { errors: &errors, baseline: mean_field };
        let baseline = "predicting the mean field of the training samples";
        (
            vec![format!("error       {}", compared.summary(variables, baseline))],
            compared.no_better(variables, "on these samples", baseline),
        )
    }

    /// Draws the relative error of each variable against the lead time, next to that of predicting no change; returns false if
    /// fewer than two steps have a ground truth. `times` are those of the start and of each step.
    pub(super) fn draw_errors(&self, path: &Path, variables: &[Variable], times: &[f64]) -> Result<bool> {
        let steps = self.steps();
        if steps.len() < 2 {
            return Ok(false);
        }
        let value = |error: Option<&VariableError>| {
            error.filter(|error| !error.missing).map(|error| 100.0 * error.relative)
        };
        let forecast = |of: &Step, at: usize| value(of.errors.get(at).filter(|_| self.is_finite(of.step)));
        let chart = |(at, variable): (usize, &Variable)| Chart {
            title: format!("{}: relative L2 error in %", variable.name),
            axis: "lead time".to_owned(),
            places: steps.iter().map(|of| lead_time(times, of.step)).collect(),
            curves: vec![
                Curve {
                    name: "forecast".to_owned(),
                    colour: COLOURS[0],
                    values: steps.iter().map(|of| forecast(of, at)).collect(),
                },
                Curve {
                    name: "no change".to_owned(),
                    colour: GREY,
                    values: steps.iter().map(|of| value(of.persistence.get(at))).collect(),
                },
            ],
            include_zero: true,
        };
        let charts: Vec<Chart> = variables.iter().enumerate().map(chart).collect();
        chart::save(&charts, path)?;
        Ok(true)
    }

    /// Writes a line for each step and variable, without errors where it is missing, and with NaN where the forecast is not finite. `times` are those of the start and of each step, for
    /// trajectories; `mean_field` are the errors of the baseline of other samples.
    pub(super) fn write_csv(
        &self,
        path: &Path,
        variables: &[Variable],
        times: &[f64],
        mean_field: &[VariableError],
    ) -> Result<()> {
        let mut text = "step,time,variable,unit,error,rmse,baseline_error,baseline_rmse\n".to_owned();
        for Step { step, errors, persistence } in self.steps() {
            let time = times.get(step).map(f64::to_string).unwrap_or_default();
            for (at, (variable, error)) in variables.iter().zip(&errors).enumerate() {
                let (name, unit) =
                    (quoted(&variable.name), quoted(variable.unit.as_deref().unwrap_or_default()));
                let numbers = |error: Option<&VariableError>| match error.filter(|error| !error.missing) {
                    Some(error) => format!("{},{}", error.relative, error.rmse),
                    None => ",".to_owned(),
                };
                let error = if self.is_finite(step) { numbers(Some(error)) } else { "NaN,NaN".to_owned() };
                let baseline = numbers(persistence.get(at).or_else(|| mean_field.get(at)));
                text += &format!("{step},{time},{name},{unit},{error},{baseline}\n");
            }
        }
        isobar_files::write(path, text)
            .map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", path.display())).into())
    }
}

/// Says over how many of several variables the mean after these steps is: those that are not missing there.
fn mean_over(variables: &[Variable], steps: &[&Step]) -> String {
    let all = variables.len();
    let counts = steps.iter().map(|step| step.errors.iter().filter(|error| !error.missing).count());
    let least = counts.clone().min().unwrap_or(all);
    match (least, counts.max().unwrap_or(all)) {
        _ if all < 2 => String::new(),
        (least, _) if least == all => format!(", mean over {all} variables"),
        (least, most) if least == most => format!(", mean over {least} of {all} variables"),
        (least, most) => format!(", mean over {least} to {most} of {all} variables"),
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
        UNWEIGHTED_RMSE.to_owned(),
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

/// Quotes a cell of CSV if it contains a comma, a quote or a line break.
pub(super) fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(steps: [[VariableError; 2]; 2]) -> Outcome {
        let errors: Vec<_> = steps.iter().map(|errors| vec![errors.to_vec()]).collect();
        let half = |errors: &[VariableError]| {
            errors.iter().map(|of| VariableError { relative: of.relative / 2.0, ..*of }).collect()
        };
        let persistence = steps.iter().map(|errors| vec![half(errors)]).collect();
        let (board, divergence) = (Scoreboard::new(&[], 2), Divergence::default());
        Outcome { first: None, errors, persistence, board, spectra: None, divergence }
    }

    /// Cells of a variable that is missing stay empty, and a mean does not count it.
    #[test]
    fn what_is_missing_is_left_out() {
        let height = Variable { unit: Some("m".to_owned()), ..Variable::new("h") };
        let variables = [Variable::new("u"), height];
        let (known, missing) = (VariableError::new(0.5, 2.0), VariableError::MISSING);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prediction.csv");
        outcome([[known, known], [known, missing]])
            .write_csv(&path, &variables, &[0.0, 6.0, 12.0], &[])
            .unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        insta::assert_snapshot!(text, @r"
        step,time,variable,unit,error,rmse,baseline_error,baseline_rmse
        1,6,u,,0.5,2,0.25,2
        1,6,h,m,0.5,2,0.25,2
        2,12,u,,0.5,2,0.25,2
        2,12,h,m,,,,
        ");
        let picture = folder.path().join("prediction.errors.png");
        let drawn =
            outcome([[known, known], [known, missing]]).draw_errors(&picture, &variables, &[0.0, 6.0, 12.0]);
        assert!(drawn.unwrap() && picture.is_file());
        let first = |steps| outcome(steps).forecast(&variables).0.swap_remove(0);
        let whole = first([[known, known], [known, known]]);
        assert!(whole.contains("after 2 steps, mean over 2 variables;"), "{whole}");
        let one = first([[known, missing], [known, missing]]);
        assert!(one.contains("after 2 steps, mean over 1 of 2 variables;"), "{one}");
        let some = first([[known, known], [known, missing]]);
        assert!(some.contains("after 2 steps, mean over 1 to 2 of 2 variables;"), "{some}");
    }
}
