//! Stochastic gradient descent with momentum, with PyTorch's arithmetic.

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};
use tch::{TchError, Tensor};

use super::state::copy_into;
use super::{Optimizer, OptimizerConfig, OptimizerState, as_real, decays, default_no_decay};
use crate::error::{Context, Error, Result};
use crate::gradients::refuse_unsummed;
use crate::params::{Parameter, Parameters};

/// Settings of [`Sgd`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SgdConfig {
    /// Learning rate at its highest; `schedule` says how it changes.
    pub lr: f64,
    /// Share of the last step's direction that is kept, in [0, 1).
    pub momentum: f64,
    /// Weight decay, added to the gradient.
    pub weight_decay: f64,
    /// Uses Nesterov momentum; needs a momentum.
    pub nesterov: bool,
    /// Last components of the names of parameters that do not decay; those of one dim never do.
    pub no_decay: Vec<String>,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self { lr: 1e-2, momentum: 0.9, weight_decay: 0.0, nesterov: false, no_decay: default_no_decay() }
    }
}

impl Registered for SgdConfig {
    const NAME: &'static str = "sgd";
    const SUMMARY: &'static str = "Stochastic gradient descent with momentum.";
}

impl OptimizerConfig for SgdConfig {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn check(&self) -> Result<()> {
        check(self)
    }

    fn moments(&self) -> u64 {
        u64::from(self.momentum != 0.0)
    }

    fn build(&self, params: &Parameters) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(Sgd::new(params, self)?))
    }
}

crate::register_optimizer!(SgdConfig);

/// Stochastic gradient descent: with d = g + wd·p, b ← momentum·b + d (b = d at the first step), p ← p − lr·b, or with
/// Nesterov p ← p − lr·(d + momentum·b). If it continues from a state without momentum, b = d at its next step.
#[derive(Debug)]
pub struct Sgd {
    config: SgdConfig,
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    param: Parameter,
    momentum: Option<Tensor>,
    step: u64,
    decays: bool,
}

impl Sgd {
    /// An optimizer of these parameters.
    ///
    /// # Errors
    ///
    /// A setting is out of its range, or the state cannot be allocated.
    ///
    /// ```
    /// use isobar_train::optim::{Optimizer, Sgd, SgdConfig};
    /// use isobar_train::{Parameter, Parameters};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::f_from_slice(&[1.0f64])?.f_set_requires_grad(true)?;
    /// let params = Parameters::new(vec![Parameter::replicated("x", &x)])?;
    /// let mut sgd = Sgd::new(&params, &SgdConfig { momentum: 0.0, ..SgdConfig::default() })?;
    /// x.f_square()?.f_sum(None)?.f_backward()?; // the gradient is 2
    /// sgd.step(0.25)?;
    /// assert_eq!(x.f_double_value(&[0])?, 0.5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(params: &Parameters, config: &SgdConfig) -> Result<Self> {
        check(config)?;
        let slots = params.iter().map(|p| Slot::new(p, config)).collect::<Result<_>>()?;
        Ok(Self { config: config.clone(), slots })
    }
}

impl Optimizer for Sgd {
    fn step(&mut self, lr: f64) -> Result<()> {
        refuse_unsummed(self.slots.iter().map(|slot| &slot.param))?;
        let _no_grad = tch::no_grad_guard();
        for slot in &mut self.slots {
            let Some(grad) = slot.param.grad() else { continue };
            slot.step += 1;
            slot.update(&grad, lr, &self.config)
                .context(|| format!("the SGD step of parameter {:?}", slot.param.name))?;
        }
        Ok(())
    }

    fn state(&self) -> OptimizerState {
        let mut state = OptimizerState::new(KIND);
        for slot in &self.slots {
            state.steps.insert(slot.param.name.clone(), slot.step);
            if let Some(momentum) = &slot.momentum {
                state.push(MOMENTUM, &slot.param, momentum);
            }
        }
        state
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        state.expect_kind(KIND)?;
        // A run without momentum saved none.
        let saved = state.tensors.iter().any(|tensor| tensor.slot == MOMENTUM);
        for slot in &self.slots {
            if saved && slot.momentum.is_some() {
                state.find(MOMENTUM, &slot.param)?;
            }
            state.step_of(&slot.param)?;
        }
        for slot in &mut self.slots {
            match &slot.momentum {
                Some(momentum) if saved => copy_into(momentum, state.find(MOMENTUM, &slot.param)?, MOMENTUM)?,
                Some(momentum) => {
                    let zeros = momentum.shallow_clone().f_zero_().map(drop);
                    zeros.context(|| format!("{MOMENTUM} of parameter {:?}", slot.param.name))?;
                }
                None => {}
            }
            slot.step = state.step_of(&slot.param)?;
        }
        Ok(())
    }
}

const KIND: &str = "sgd";
const MOMENTUM: &str = "momentum_buffer";

impl Slot {
    fn new(param: &Parameter, config: &SgdConfig) -> Result<Self> {
        let _no_grad = tch::no_grad_guard();
        let momentum = match config.momentum == 0.0 {
            true => None,
            false => Some(
                param
                    .tensor
                    .f_zeros_like()
                    .context(|| format!("optimizer state of parameter {:?}", param.name))?,
            ),
        };
        Ok(Self { momentum, step: 0, decays: decays(param, &config.no_decay), param: param.clone() })
    }

    fn update(&self, grad: &Tensor, lr: f64, config: &SgdConfig) -> std::result::Result<(), TchError> {
        let mut param = as_real(&self.param.tensor)?;
        let mut direction = as_real(grad)?;
        if self.decays && config.weight_decay != 0.0 {
            direction = direction.f_add(&param.f_mul_scalar(config.weight_decay)?)?;
        }
        if let Some(momentum) = &self.momentum {
            // From zero, as from nothing, the first step's momentum is the gradient itself.
            let mut momentum = as_real(momentum)?;
            let _ = momentum.f_mul_scalar_(config.momentum)?.f_add_(&direction)?;
            direction = match config.nesterov {
                true => direction.f_add(&momentum.f_mul_scalar(config.momentum)?)?,
                false => momentum,
            };
        }
        let _ = param.f_add_(&direction.f_mul_scalar(-lr)?)?;
        Ok(())
    }
}

fn check(config: &SgdConfig) -> Result<()> {
    if !(0.0..1.0).contains(&config.momentum) {
        return Err(Error::setting("optimizer.momentum", config.momentum, "a number in [0, 1)", 0.9));
    }
    if !(config.weight_decay.is_finite() && config.weight_decay >= 0.0) {
        let expected = "a finite number of 0 or more";
        return Err(Error::setting("optimizer.weight_decay", config.weight_decay, expected, "0.0"));
    }
    if config.nesterov && config.momentum == 0.0 {
        return Err(Error::setting("optimizer.nesterov", true, "false if optimizer.momentum is 0", false));
    }
    Ok(())
}
