//! The command `isobar` with a training task, a loss, a metric, an optimizer and a learning-rate schedule of the program's own:
//! `[task] type = "poisson_residual"`, `train.loss = "latitude_mse"`, `metrics.report = ["peak_error"]`, `[optimizer] type =
//! "signum"` and `[schedule] type = "inverse_sqrt"`.

use std::f64::consts::FRAC_PI_2;

use isobar::array::{Reduction, Unary};
use isobar::prelude::*;
use isobar::schemars::JsonSchema;
use isobar::serde::{Deserialize, Serialize};
use isobar::train::loss::Loss;
use isobar::train::metric::{Forecast, Metric, MetricArray};
use isobar::train::objective::{Objective, ObjectiveArray, Setup, Training};
use isobar::train::optim::{Optimizer, OptimizerConfig, OptimizerState, refuse_unsummed};
use isobar::train::schedule::{LrSchedule, Moment};
use isobar::train::{Error, Parameters, Result};

/// Regression with the residual of the equation Δu = f on a periodic grid, in units of the grid's spacing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(crate = "isobar::serde", deny_unknown_fields, default)]
#[schemars(crate = "isobar::schemars")]
struct PoissonResidual {
    /// Weight of the mean square of the residual; at least 0.
    weight: f64,
    /// Right-hand side f, in the unit of the outputs.
    source: f64,
}

impl Default for PoissonResidual {
    fn default() -> Self {
        Self { weight: 0.1, source: 0.0 }
    }
}

impl Registered for PoissonResidual {
    const NAME: &'static str = "poisson_residual";
    const SUMMARY: &'static str = "Regression with the residual of Poisson's equation.";
}

impl Objective for PoissonResidual {
    fn loss<A: ObjectiveArray>(&self, training: &Training<'_, A>) -> std::result::Result<A, BoxError> {
        let outputs = training.roll_out()?;
        let mut loss = training.compare(&outputs)?;
        for output in &outputs {
            let field = training.physical(output)?;
            let mut residual = field.mul_scalar(-4.0)?.add_scalar(-self.source)?;
            for (shift, dim) in [(1, 2), (-1, 2), (1, 3), (-1, 3)] {
                residual = residual.add(&field.roll(&[shift], &[dim])?)?;
            }
            let mean = residual.unary(Unary::Square)?.mean()?;
            loss = loss.add(&mean.mul_scalar(self.weight / outputs.len() as f64)?)?;
        }
        Ok(loss)
    }

    fn check(&self, _setup: &Setup) -> std::result::Result<(), BoxError> {
        match self.weight >= 0.0 {
            true => Ok(()),
            false => {
                Err(format!("task.weight is {}, expected at least 0; --set task.weight=0.1", self.weight)
                    .into())
            }
        }
    }
}

/// Squared error weighted by the area of the cells, of rows from pole to pole.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(crate = "isobar::serde", deny_unknown_fields)]
#[schemars(crate = "isobar::schemars")]
struct LatitudeMse {}

impl Registered for LatitudeMse {
    const NAME: &'static str = "latitude_mse";
    const SUMMARY: &'static str =
        "Squared error weighted by the area of the cells, of rows from pole to pole.";
}

impl Loss for LatitudeMse {
    fn compute<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        let rows = target.extent(2)?;
        let pole = FRAC_PI_2 * (1.0 - 1.0 / rows as f64);
        let area = target.linspace_along(2, -pole, pole)?.unary(Unary::Cos)?.reshape(&[rows, 1])?;
        Ok(prediction.sub(target)?.unary(Unary::Square)?.mul(&area)?.mean()?)
    }
}

/// Difference of the highest values of forecast and truth, the mean over samples of its magnitude.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(crate = "isobar::serde", deny_unknown_fields)]
#[schemars(crate = "isobar::schemars")]
struct PeakError {}

impl Registered for PeakError {
    const NAME: &'static str = "peak_error";
    const SUMMARY: &'static str = "Difference of the highest values of forecast and truth.";
}

impl Metric for PeakError {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        let peak = |fields: &A| fields.reduce(Reduction::Max, &forecast.spatial(), false);
        Ok(vec![peak(forecast.prediction())?.sub(&peak(forecast.target())?)?.unary(Unary::Abs)?])
    }

    fn has_unit(&self) -> bool {
        true
    }
}

/// A rate that falls with the root of the time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(crate = "isobar::serde", deny_unknown_fields)]
#[schemars(crate = "isobar::schemars")]
struct InverseSqrt {
    /// Epochs of linear warm-up.
    warmup_epochs: f64,
}

impl Registered for InverseSqrt {
    const NAME: &'static str = "inverse_sqrt";
    const SUMMARY: &'static str = "A rate that falls with the root of the time.";
}

impl LrSchedule for InverseSqrt {
    fn warmup_epochs(&self) -> f64 {
        self.warmup_epochs
    }

    fn factor(&self, at: &Moment) -> f64 {
        let warmup = at.steps(self.warmup_epochs).max(1.0);
        (warmup / (at.step + 1.0)).sqrt()
    }
}

/// Steps of one size against the sign of a running mean of gradients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(crate = "isobar::serde", deny_unknown_fields, default)]
#[schemars(crate = "isobar::schemars")]
struct SignumConfig {
    /// Learning rate at its highest; `schedule` says how it changes.
    lr: f64,
    /// Decay rate of the running mean, in [0, 1).
    momentum: f64,
}

impl Default for SignumConfig {
    fn default() -> Self {
        Self { lr: 1e-4, momentum: 0.9 }
    }
}

struct Signum {
    momentum: f64,
    params: Parameters,
    means: Vec<Tensor>,
    steps: u64,
}

fn refused(source: isobar::tch::TchError) -> Error {
    Error::Tensor { context: "a step of signum".to_owned(), source }
}

impl Registered for SignumConfig {
    const NAME: &'static str = "signum";
    const SUMMARY: &'static str = "The sign of a running mean of gradients.";
}

impl OptimizerConfig for SignumConfig {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn moments(&self) -> u64 {
        1
    }

    fn build(&self, params: &Parameters) -> Result<Box<dyn Optimizer>> {
        let means = params.iter().map(|param| param.tensor.detach().f_zeros_like().map_err(refused));
        let means = means.collect::<Result<_>>()?;
        Ok(Box::new(Signum { momentum: self.momentum, params: params.clone(), means, steps: 0 }))
    }
}

impl Optimizer for Signum {
    fn step(&mut self, lr: f64) -> Result<()> {
        refuse_unsummed(&self.params)?;
        let _no_grad = isobar::tch::no_grad_guard();
        for (param, mean) in self.params.iter().zip(&mut self.means) {
            let Some(gradient) = param.grad() else { continue };
            *mean = mean.f_lerp(&gradient, 1.0 - self.momentum).map_err(refused)?;
            let step = mean.f_sign().and_then(|sign| sign.f_mul_scalar(-lr)).map_err(refused)?;
            let _ = param.tensor.shallow_clone().f_add_(&step).map_err(refused)?;
        }
        self.steps += 1;
        Ok(())
    }

    fn state(&self) -> OptimizerState {
        let mut state = OptimizerState::new(SignumConfig::NAME);
        for (param, mean) in self.params.iter().zip(&self.means) {
            state.steps.insert(param.name.clone(), self.steps);
            state.push("mean", param, mean);
        }
        state
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        state.expect_kind(SignumConfig::NAME)?;
        for (param, mean) in self.params.iter().zip(&mut self.means) {
            *mean = state.find("mean", param)?.f_detach_copy().map_err(refused)?;
            self.steps = state.step_of(param)?;
        }
        Ok(())
    }
}

fn main() -> std::process::ExitCode {
    let app = isobar::App::new().task::<PoissonResidual>().optimizer::<SignumConfig>();
    app.loss::<LatitudeMse>().metric::<PeakError>().schedule::<InverseSqrt>().main()
}
