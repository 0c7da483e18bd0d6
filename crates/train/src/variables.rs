//! Variables of a forecast, and errors per variable.

use std::collections::BTreeSet;

use serde::{Deserialize, Deserializer, Serialize};

/// Variable that a model predicts: one channel of its output.
///
/// Each component of a vector or tensor field is a variable of its own, named as in The Well: `velocity_x`,
/// `stress_xy`. A single error over variables of different magnitudes would hide the small ones.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Variable {
    /// Name in reports and in columns of metrics.
    pub name: String,
    /// Unit, if the data have one.
    #[serde(default)]
    pub unit: Option<String>,
    /// Name of the variable of the data that it is a component or a level of; `None` if it has the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<String>,
}

impl Variable {
    /// A variable without a unit.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// A number of this variable with its unit, of four significant digits.
    ///
    /// ```
    /// use isobar_train::Variable;
    ///
    /// let height = Variable { unit: Some("m".into()), ..Variable::new("height") };
    /// assert_eq!(height.quantity(136.52), "136.5 m");
    /// assert_eq!(Variable::new("u").quantity(0.25), "0.2500");
    /// ```
    pub fn quantity(&self, value: f64) -> String {
        match &self.unit {
            Some(unit) => format!("{} {unit}", significant(value)),
            None => significant(value),
        }
    }

    /// The name as a part of a metric's name: without what separates columns of CSV or lines.
    pub(crate) fn key(&self) -> String {
        let plain = |letter: char| match letter {
            ',' | '"' | '\'' => '_',
            letter if letter.is_control() => '_',
            letter => letter,
        };
        self.name.chars().map(plain).collect()
    }
}

/// Gives variables of one name, which would share a column of metrics, names of their own: `u`, `u_2`, `u_3`.
///
/// ```
/// use isobar_train::{Variable, unique_names};
///
/// let variables = ["u", "v", "u"].map(Variable::new).to_vec();
/// let names: Vec<String> = unique_names(variables).into_iter().map(|variable| variable.name).collect();
/// assert_eq!(names, ["u", "v", "u_2"]);
/// ```
pub fn unique_names(mut variables: Vec<Variable>) -> Vec<Variable> {
    let mut keys = BTreeSet::new();
    for variable in variables.iter_mut().filter(|variable| !variable.name.is_empty()) {
        let name = variable.name.clone();
        let mut number = 1;
        while !keys.insert(variable.key()) {
            number += 1;
            variable.name = format!("{name}_{number}");
        }
    }
    variables
}

/// The error of a forecast in one variable: of a sample, or the mean over samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct VariableError {
    /// ‖p − t‖ / ‖t‖ over the points of a sample, averaged over samples. Infinite where only the truth is zero.
    #[serde(deserialize_with = "number_or_nan")]
    pub relative: f64,
    /// Root mean square error in the unit of the variable: over the points of a sample, or over those of all samples.
    #[serde(deserialize_with = "number_or_nan")]
    pub rmse: f64,
    /// True if all values of the truth are missing: both errors are NaN, and means leave them out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub missing: bool,
}

/// Reads a number that JSON holds as `null` where it is not finite.
fn number_or_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

impl VariableError {
    /// The error where all values of the truth are missing.
    pub const MISSING: Self = Self { relative: f64::NAN, rmse: f64::NAN, missing: true };

    /// Makes an error of numbers.
    pub const fn new(relative: f64, rmse: f64) -> Self {
        Self { relative, rmse, missing: false }
    }

    /// Returns whether this error is below that of a baseline. Compares relative errors, or RMSEs where the truth is zero and
    /// relative errors are infinite. True where one is missing: there is nothing to compare.
    ///
    /// ```
    /// use isobar_train::VariableError;
    ///
    /// // A model against persistence: relative error and RMSE.
    /// let (model, persistence) = (VariableError::new(0.1, 2.0), VariableError::new(0.3, 6.0));
    /// assert!(model.beats(&persistence) && !persistence.beats(&model));
    /// ```
    pub fn beats(&self, baseline: &Self) -> bool {
        if self.missing || baseline.missing {
            return true;
        }
        match self.relative.is_finite() && baseline.relative.is_finite() {
            true => self.relative < baseline.relative,
            false => self.rmse < baseline.rmse,
        }
    }
}

/// Mean over variables of their relative errors: the validation error, by which the best checkpoint is chosen. Variables whose
/// truth is zero in a sample are left out, since their relative error is infinite, and those that are missing. NaN where no variable
/// is left, and where an RMSE is not finite.
///
/// ```
/// use isobar_train::{VariableError, mean_relative};
///
/// let errors = [0.01, 1.29].map(|relative| VariableError::new(relative, 1.0));
/// assert_eq!(mean_relative(&errors), 0.65);
/// ```
pub fn mean_relative(errors: &[VariableError]) -> f64 {
    if errors.iter().any(|error| !error.missing && !error.rmse.is_finite()) {
        return f64::NAN;
    }
    let relative = errors.iter().map(|error| error.relative).filter(|error| error.is_finite());
    let (sum, count) = relative.fold((0.0, 0), |(sum, count), error| (sum + error, count + 1));
    sum / f64::from(count)
}

/// Errors of each variable over several samples: the mean of the relative errors, and the RMSE over all points. Samples have
/// equally many points; a variable that is missing in a sample does not count there. Empty for no samples.
///
/// ```
/// use isobar_train::{VariableError, mean_errors};
///
/// // One variable in two samples.
/// let samples = [vec![VariableError::new(0.1, 3.0)], vec![VariableError::new(0.3, 4.0)]];
/// let mean = mean_errors(&samples);
/// assert!((mean[0].relative - 0.2).abs() < 1e-12);
/// assert!((mean[0].rmse - 12.5f64.sqrt()).abs() < 1e-12); // √((3² + 4²) / 2)
/// ```
pub fn mean_errors<'a>(samples: impl IntoIterator<Item = &'a Vec<VariableError>>) -> Vec<VariableError> {
    let mut sums: Vec<f64> = Vec::new();
    for sample in samples {
        sums.resize(sample.len() * MOMENTS, 0.0);
        sums.iter_mut().zip(moments(sample)).for_each(|(sum, number)| *sum += number);
    }
    means(&sums)
}

/// Number of [`moments`] of a variable.
pub(crate) const MOMENTS: usize = 3;

/// Returns the summands over samples of each variable: relative error, mean square error, and 1; all 0 where it is missing.
pub(crate) fn moments(errors: &[VariableError]) -> impl Iterator<Item = f64> + '_ {
    errors.iter().flat_map(|error| match error.missing {
        true => [0.0; MOMENTS],
        false => [error.relative, error.rmse * error.rmse, 1.0],
    })
}

/// Errors over samples from the sums of their [`moments`].
pub(crate) fn means(sums: &[f64]) -> Vec<VariableError> {
    let mean = |sums: &[f64]| match sums[2] > 0.0 {
        true => VariableError::new(sums[0] / sums[2], (sums[1] / sums[2]).sqrt()),
        false => VariableError::MISSING,
    };
    sums.chunks_exact(MOMENTS).map(mean).collect()
}

/// Name of the validation metric for several variables.
pub(crate) fn metric(variables: usize) -> Option<String> {
    (variables > 1).then(|| format!("mean over {variables} variables of the {RELATIVE}"))
}

/// Formats the number by which checkpoints are compared: in percent if it is a relative error, whose metric has no name or that of
/// a mean over variables; else the cost of the named metric.
///
/// ```
/// use isobar_train::checkpoint_error;
///
/// assert_eq!(checkpoint_error(0.0321, None), "3.21 %");
/// assert_eq!(checkpoint_error(412.3, Some("h/rmse")), "412.3");
/// ```
pub fn checkpoint_error(error: f64, metric: Option<&str>) -> String {
    match metric.is_none_or(|metric| metric.ends_with(RELATIVE)) {
        true => percent(error),
        false => significant(error),
    }
}

const RELATIVE: &str = "relative L2 error";

/// Columns of metrics for the errors of each variable; none for a variable without a name.
pub(crate) fn columns<'a>(
    kind: &'static str,
    variables: &'a [Variable],
) -> impl Iterator<Item = [String; 2]> + 'a {
    let named = variables.iter().filter(|variable| !variable.name.is_empty());
    named.map(move |variable| {
        let key = variable.key();
        [format!("{kind}_error/{key}"), format!("{kind}_rmse/{key}")]
    })
}

/// Columns of metrics for the spectrum error of each variable; none for a variable without a name.
pub(crate) fn spectrum_columns(variables: &[Variable]) -> impl Iterator<Item = String> + '_ {
    let named = variables.iter().filter(|variable| !variable.name.is_empty());
    named.map(|variable| format!("spectrum_error/{}", variable.key()))
}

/// Formats relative errors for one line: that of a single variable; of a few the mean and each, `-` for one that is missing; of many
/// the mean over those that are not, and the worst.
///
/// ```
/// use isobar_train::{Variable, VariableError, errors_line};
///
/// let variables = ["u", "v"].map(Variable::new);
/// let errors = [0.01, 1.29].map(|relative| VariableError::new(relative, 1.0));
/// assert_eq!(errors_line(&variables, &errors), "65.00 % (mean of u 1.00 %, v 129.00 %)");
/// assert_eq!(errors_line(&variables[..1], &errors[..1]), "1.00 %");
/// ```
pub fn errors_line(variables: &[Variable], errors: &[VariableError]) -> String {
    let relative: Vec<Option<f64>> =
        errors.iter().map(|error| (!error.missing).then_some(error.relative)).collect();
    mean_and_each(variables, mean_relative(errors), &relative)
}

/// Formats errors of energy spectra for one line, as [`errors_line`] does relative errors.
///
/// ```
/// use isobar_train::{Variable, spectra_line};
///
/// let variables = ["u", "v"].map(Variable::new);
/// assert_eq!(spectra_line(&variables, &[Some(0.01), Some(0.03)]), "2.00 % (mean of u 1.00 %, v 3.00 %)");
/// ```
pub fn spectra_line(variables: &[Variable], errors: &[Option<f64>]) -> String {
    mean_and_each(variables, mean_spectrum(errors), errors)
}

/// Mean over variables of the errors of their energy spectra. Variables that are missing are left out, and those whose truth is zero,
/// since their error is infinite; NaN where no variable is left, and where an error is NaN.
pub fn mean_spectrum(errors: &[Option<f64>]) -> f64 {
    let finite = errors.iter().flatten().filter(|error| !error.is_infinite());
    let (sum, count) = finite.fold((0.0, 0), |(sum, count), error| (sum + error, count + 1));
    sum / f64::from(count)
}

fn mean_and_each(variables: &[Variable], mean: f64, errors: &[Option<f64>]) -> String {
    let mean = percent(mean);
    let named = |(variable, error): (&Variable, Option<f64>)| {
        format!("{} {}", variable.name, error.map_or_else(|| "-".to_owned(), percent))
    };
    let pairs = || variables.iter().zip(errors.iter().copied());
    match errors.len() {
        0 | 1 => mean,
        2..=FEW => format!("{mean} (mean of {})", pairs().map(named).collect::<Vec<_>>().join(", ")),
        all => {
            let known = || pairs().filter_map(|(variable, error)| Some((variable, error?)));
            let count = match known().count() {
                count if count == all => all.to_string(),
                count => format!("{count} of {all}"),
            };
            let worst = known().max_by(|(_, one), (_, other)| one.total_cmp(other));
            let worst = worst.map(|(variable, error)| format!(", worst {}", named((variable, Some(error)))));
            format!("{mean} (mean of {count} variables{})", worst.unwrap_or_default())
        }
    }
}

/// Names the variables that are predicted no better than by a baseline, which is described in words (such as "predicting no
/// change"), as is what was predicted; `None` if there are none.
///
/// ```
/// use isobar_train::{Variable, VariableError, no_better_than};
///
/// let variables = ["u", "v"].map(Variable::new);
/// let errors = |relative: [f64; 2]| relative.map(|relative| VariableError::new(relative, relative));
/// assert_eq!(
///     no_better_than(&variables, &errors([0.01, 1.29]), &errors([1.0, 1.0]), "predicting no change", "one step ahead"),
///     Some("no better than predicting no change, one step ahead: v (129.00 % against 100.00 %)".to_owned())
/// );
/// ```
pub fn no_better_than(
    variables: &[Variable],
    errors: &[VariableError],
    of_baseline: &[VariableError],
    baseline: &str,
    what: &str,
) -> Option<String> {
    let pairs = variables.iter().zip(errors.iter().zip(of_baseline));
    let worse: Vec<String> = pairs
        .filter(|(_, (error, baseline))| !error.beats(baseline))
        .map(|(variable, (error, baseline))| {
            let numbers = format!("{} against {}", percent(error.relative), percent(baseline.relative));
            match variable.name.is_empty() {
                true => numbers,
                false => format!("{} ({numbers})", variable.name),
            }
        })
        .collect();
    (!worse.is_empty()).then(|| format!("no better than {baseline}, {what}: {}", worse.join(", ")))
}

/// Largest number of variables named on one line.
const FEW: usize = 4;

/// A relative error in percent.
pub fn percent(error: f64) -> String {
    format!("{:.2} %", error * 100.0)
}

/// A number of four significant digits: in fixed point from 0.001 to 99999, else with an exponent.
///
/// ```
/// use isobar_train::significant;
///
/// assert_eq!([0.99286, 12.5, 9800.4, 0.0].map(significant), ["0.9929", "12.50", "9800", "0.0000"]);
/// assert_eq!([2.1e-5, 3.0e7, f64::NAN].map(significant), ["2.100e-5", "3.000e7", "NaN"]);
/// ```
pub fn significant(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        return "0.0000".to_owned();
    }
    if !size.is_finite() || !(1e-3..1e5).contains(&size) {
        return format!("{value:.3e}");
    }
    let decimals = (3.0 - size.log10().floor()).clamp(0.0, 6.0) as usize;
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(relative: f64, rmse: f64) -> VariableError {
        VariableError::new(relative, rmse)
    }

    #[test]
    fn means_are_of_relative_errors_and_of_squares() {
        let samples = [vec![error(0.1, 3.0), error(1.0, 0.0)], vec![error(0.3, 4.0), error(0.0, 0.0)]];
        let mean = mean_errors(&samples);
        assert_eq!(mean[0], error(0.2, (12.5f64).sqrt()));
        assert_eq!(mean[1], error(0.5, 0.0));
        assert_eq!(mean_relative(&mean), 0.35);
        assert!(mean_errors(&[]).is_empty());
        let missing = VariableError::MISSING;
        let mean = mean_errors(&[vec![error(0.1, 3.0), missing], vec![missing, missing]]);
        assert!(mean[0] == error(0.1, 3.0) && mean[1].missing, "{mean:?}");
        assert_eq!(mean_relative(&mean), 0.1);
    }

    #[test]
    fn a_baseline_is_beaten_by_less_only() {
        assert!(error(0.1, 1.0).beats(&error(0.2, 0.5)));
        assert!(!error(0.2, 1.0).beats(&error(0.2, 1.0)));
        assert!(!error(f64::NAN, f64::NAN).beats(&error(0.2, 1.0)));
        assert!(error(f64::INFINITY, 1.0).beats(&error(f64::INFINITY, 2.0)));
    }

    #[test]
    fn many_variables_are_the_mean_and_the_worst() {
        let variables: Vec<Variable> = (0..6).map(|at| Variable::new(format!("q{at}"))).collect();
        let errors: Vec<VariableError> = (0..6).map(|at| error(f64::from(at) * 0.1, 1.0)).collect();
        assert_eq!(errors_line(&variables, &errors), "25.00 % (mean of 6 variables, worst q5 50.00 %)");
        let with_gap: Vec<_> = [&errors[..5], &[VariableError::MISSING]].concat();
        let line = errors_line(&variables, &with_gap);
        assert_eq!(line, "20.00 % (mean of 5 of 6 variables, worst q4 40.00 %)");
        assert_eq!(errors_line(&variables[..2], &with_gap[4..]), "40.00 % (mean of q0 40.00 %, q1 -)");
        let diverged: Vec<_> = [&errors[..5], &[error(f64::NAN, f64::NAN)]].concat();
        assert!(errors_line(&variables, &diverged).ends_with("(mean of 6 variables, worst q5 NaN %)"));
    }

    #[test]
    fn variables_of_one_name_get_columns_of_their_own() {
        let names = ["u", "u", "u_2", "", "", "a,b", "a_b"];
        let variables = unique_names(names.map(Variable::new).to_vec());
        let names: Vec<&str> = variables.iter().map(|variable| &*variable.name).collect();
        assert_eq!(names, ["u", "u_2", "u_2_2", "", "", "a,b", "a_b_2"]);
    }

    #[test]
    fn spectra_of_zero_leave_the_mean() {
        let mean = |errors: &[f64]| mean_spectrum(&errors.iter().copied().map(Some).collect::<Vec<_>>());
        assert_eq!(mean(&[0.25, f64::INFINITY, 0.75]), 0.5);
        assert!(mean(&[f64::NAN, 0.5]).is_nan() && mean(&[f64::INFINITY]).is_nan());
        assert_eq!(mean_spectrum(&[None, Some(0.5)]), 0.5);
    }

    #[test]
    fn names_cannot_tear_columns() {
        let variables = [Variable::new("a,b\n\"c\""), Variable::default()];
        let found: Vec<_> = columns("validation", &variables).collect();
        assert_eq!(found, [["validation_error/a_b__c_", "validation_rmse/a_b__c_"].map(str::to_owned)]);
    }

    #[test]
    fn errors_that_are_not_finite_survive_json_and_leave_the_mean() {
        let errors = [error(f64::INFINITY, 0.5), error(0.2, 1.0), error(f64::NAN, 0.0)];
        assert_eq!(mean_relative(&errors), 0.2);
        assert!(
            mean_relative(&[error(0.2, f64::NAN), error(0.1, 1.0)]).is_nan(),
            "a forecast that is not finite"
        );
        assert!(mean_relative(&errors[..1]).is_nan());
        let read: Vec<VariableError> = serde_json::from_value(serde_json::to_value(errors).unwrap()).unwrap();
        assert!(read[0].relative.is_nan() && read[0].rmse == 0.5 && read[1] == errors[1]);
    }
}
