//! Comparison of training runs that must agree up to rounding, on any processor.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// Relative tolerance between runs on two layouts in double precision.
pub const DOUBLE: f64 = 1e-9;

/// Relative tolerance of the first steps in single precision.
pub const SINGLE: f64 = 1e-5;

/// Number of first steps, which are compared with [`SINGLE`] alone.
const FIRST: usize = 4;

/// Largest ratio of the deviation of a run on another layout to that of a perturbed run. A perturbed run
/// differs by one rounding of its start, another layout by roundings in every operator of every step.
const FACTOR: f64 = 30.0;

/// Compares the losses, norms or errors of two runs in double precision, after any number of steps.
///
/// Rounding differences grow at a rate that depends on the model and the processor, but they start at 10⁻¹⁶.
///
/// # Panics
///
/// If two numbers differ by more than [`DOUBLE`], relatively, or the runs have different lengths.
#[track_caller]
pub fn assert_same_run(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "numbers of two runs");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(within(DOUBLE, *got, *want), "number {at}: {got} instead of {want}");
    }
}

/// Reads the losses of a run's steps: see [`metric`].
///
/// # Panics
///
/// See [`metric`].
#[track_caller]
pub fn losses(run: &Path) -> Vec<f64> {
    metric(run, "loss")
}

/// Reads the values of a metric from `metrics.jsonl` in a run's folder. A last line that was cut off, as on a full disk, is left
/// out.
///
/// # Panics
///
/// If the file cannot be read, or another line is no JSON.
#[track_caller]
pub fn metric(run: &Path, name: &str) -> Vec<f64> {
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    let records = whole.lines().map(|line| match serde_json::from_str::<Value>(line) {
        Ok(record) => record,
        Err(error) => panic!("{}: {error}: {line}", path.display()),
    });
    records.filter_map(|record| record[name].as_f64()).collect()
}

/// Numbers of a run in single precision, with the deviation that rounding explains.
///
/// The first steps agree to [`SINGLE`]. The tolerance of later steps is measured, not assumed: it follows
/// from runs on the same processor whose initial weights are perturbed by one unit in the last place.
#[derive(Clone, Debug)]
pub struct SingleRun {
    numbers: Vec<f64>,
    allowed: Vec<f64>,
}

impl SingleRun {
    /// Takes the numbers of a run, and those of one or more runs from perturbed initial weights.
    ///
    /// # Panics
    ///
    /// If there is no perturbed run, or one has a different length.
    #[track_caller]
    pub fn new(numbers: Vec<f64>, perturbed: &[Vec<f64>]) -> Self {
        assert!(!perturbed.is_empty(), "no perturbed run");
        let mut grown = 0.0;
        let mut allowed = Vec::with_capacity(numbers.len());
        for other in perturbed {
            assert_eq!(other.len(), numbers.len(), "numbers of a perturbed run");
        }
        for (at, number) in numbers.iter().enumerate() {
            let far = perturbed.iter().map(|other| difference(other[at], *number));
            grown = far.fold(grown, f64::max);
            allowed.push(if at < FIRST { SINGLE } else { f64::max(SINGLE, FACTOR * grown) });
        }
        Self { numbers, allowed }
    }

    /// The numbers.
    pub fn numbers(&self) -> &[f64] {
        &self.numbers
    }

    /// Compares another run with this one.
    ///
    /// # Panics
    ///
    /// If a number deviates by more than rounding explains, or the runs have different lengths.
    #[track_caller]
    pub fn assert_same(&self, got: &[f64]) {
        assert_eq!(got.len(), self.numbers.len(), "numbers of two runs");
        for (at, ((got, want), allowed)) in got.iter().zip(&self.numbers).zip(&self.allowed).enumerate() {
            assert!(
                within(*allowed, *got, *want),
                "number {at}: {got} instead of {want}, of which rounding explains a share of {allowed:.1e}"
            );
        }
    }
}

fn within(tolerance: f64, got: f64, want: f64) -> bool {
    got == want || difference(got, want) <= tolerance
}

fn difference(got: f64, want: f64) -> f64 {
    (got - want).abs() / want.abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "number 1: 2.00000001 instead of 2")]
    fn runs_in_double_precision_are_the_same_to_nine_digits() {
        assert_same_run(&[1.0, 2.0 + 1e-9, 0.0], &[1.0 + 1e-12, 2.0, 0.0]);
        assert_same_run(&[1.0, 2.0 + 1e-8], &[1.0, 2.0]);
    }

    /// Of a run whose perturbation grows tenfold a step.
    fn run() -> SingleRun {
        let numbers = vec![1.0; 8];
        let perturbed = (0..8).map(|step| 1.0 + 1e-8 * 10f64.powi(step)).collect();
        SingleRun::new(numbers, &[perturbed])
    }

    fn at(step: usize, difference: f64) -> Vec<f64> {
        (0..8).map(|at| if at == step { 1.0 + difference } else { 1.0 }).collect()
    }

    #[test]
    fn later_steps_may_differ_as_rounding_grows() {
        run().assert_same(&at(0, 0.9e-5));
        run().assert_same(&at(7, 1e-8 * 1e7 * 29.0));
    }

    #[test]
    #[should_panic(expected = "number 3: ")]
    fn first_steps_may_not() {
        run().assert_same(&at(3, 1.1e-5));
    }

    #[test]
    #[should_panic(expected = "number 6: ")]
    fn nor_may_steps_differ_by_more() {
        run().assert_same(&at(6, 1e-8 * 1e6 * 31.0));
    }

    /// A small model may round the perturbation away: the bound of the first steps holds throughout.
    #[test]
    #[should_panic(expected = "number 6: ")]
    fn a_perturbation_that_changes_nothing_allows_nothing_more() {
        let run = SingleRun::new(vec![1.0; 8], &[vec![1.0; 8]]);
        run.assert_same(&at(7, 0.9e-5));
        run.assert_same(&at(6, 1.1e-5));
    }
}
