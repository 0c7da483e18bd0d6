//! Lion: the sign of a momentum (Chen et al., "Symbolic discovery of optimization algorithms", 2023).

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};
use tch::{TchError, Tensor};

use super::state::copy_into;
use super::{Optimizer, OptimizerConfig, OptimizerState, as_real, decays, default_no_decay};
use crate::error::{Context, Error, Result};
use crate::gradients::refuse_unsummed;
use crate::params::{Parameter, Parameters};

/// Settings of [`Lion`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LionConfig {
    /// Learning rate at its highest; `schedule` says how it changes. A third to a tenth of AdamW's.
    pub lr: f64,
    /// Share of the momentum in the direction of a step, in [0, 1).
    pub beta1: f64,
    /// Share of the momentum that is kept after it, in [0, 1).
    pub beta2: f64,
    /// Weight decay, decoupled from the gradient. Three to ten times AdamW's.
    pub weight_decay: f64,
    /// Last components of the names of parameters that do not decay; those of one dim never do.
    pub no_decay: Vec<String>,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, no_decay: default_no_decay() }
    }
}

impl Registered for LionConfig {
    const NAME: &'static str = "lion";
    const SUMMARY: &'static str = "The sign of a momentum: half of the state of AdamW.";
}

impl OptimizerConfig for LionConfig {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn check(&self) -> Result<()> {
        check(self)
    }

    fn moments(&self) -> u64 {
        1
    }

    fn build(&self, params: &Parameters) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(Lion::new(params, self)?))
    }
}

crate::register_optimizer!(LionConfig);

/// Lion, whose state is half of AdamW's: p ← p − lr·(sign(β₁ m + (1 − β₁) g) + wd·p), then m ← β₂ m + (1 − β₂) g. Of complex
/// parameters real and imaginary parts are numbers of their own.
#[derive(Debug)]
pub struct Lion {
    config: LionConfig,
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    param: Parameter,
    exp_avg: Tensor,
    step: u64,
    decays: bool,
}

impl Lion {
    /// An optimizer of these parameters.
    ///
    /// # Errors
    ///
    /// A setting is out of its range, or the state cannot be allocated.
    pub fn new(params: &Parameters, config: &LionConfig) -> Result<Self> {
        check(config)?;
        let slots = params.iter().map(|p| Slot::new(p, config)).collect::<Result<_>>()?;
        Ok(Self { config: config.clone(), slots })
    }
}

impl Optimizer for Lion {
    fn step(&mut self, lr: f64) -> Result<()> {
        refuse_unsummed(self.slots.iter().map(|slot| &slot.param))?;
        let _no_grad = tch::no_grad_guard();
        for slot in &mut self.slots {
            let Some(grad) = slot.param.grad() else { continue };
            slot.step += 1;
            slot.update(&grad, lr, &self.config)
                .context(|| format!("the Lion step of parameter {:?}", slot.param.name))?;
        }
        Ok(())
    }

    fn state(&self) -> OptimizerState {
        let mut state = OptimizerState::new(KIND);
        for slot in &self.slots {
            state.steps.insert(slot.param.name.clone(), slot.step);
            state.push("exp_avg", &slot.param, &slot.exp_avg);
        }
        state
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        state.expect_kind(KIND)?;
        for slot in &self.slots {
            state.find("exp_avg", &slot.param)?;
            state.step_of(&slot.param)?;
        }
        for slot in &mut self.slots {
            copy_into(&slot.exp_avg, state.find("exp_avg", &slot.param)?, "exp_avg")?;
            slot.step = state.step_of(&slot.param)?;
        }
        Ok(())
    }
}

const KIND: &str = "lion";

impl Slot {
    fn new(param: &Parameter, config: &LionConfig) -> Result<Self> {
        let _no_grad = tch::no_grad_guard();
        let zeros = param.tensor.f_zeros_like();
        let exp_avg = zeros.context(|| format!("optimizer state of parameter {:?}", param.name))?;
        Ok(Self { exp_avg, step: 0, decays: decays(param, &config.no_decay), param: param.clone() })
    }

    fn update(&self, grad: &Tensor, lr: f64, config: &LionConfig) -> std::result::Result<(), TchError> {
        let (mut param, mut exp_avg) = (as_real(&self.param.tensor)?, as_real(&self.exp_avg)?);
        let grad = as_real(grad)?;
        let LionConfig { beta1, beta2, weight_decay, .. } = *config;
        let direction = exp_avg.f_lerp(&grad, 1.0 - beta1)?.f_sign()?;
        if self.decays && weight_decay != 0.0 {
            let _ = param.f_mul_scalar_(1.0 - lr * weight_decay)?;
        }
        let _ = param.f_add_(&direction.f_mul_scalar(-lr)?)?;
        let _ = exp_avg.f_lerp_(&grad, 1.0 - beta2)?;
        Ok(())
    }
}

fn check(config: &LionConfig) -> Result<()> {
    let betas = [("optimizer.beta1", config.beta1, 0.9), ("optimizer.beta2", config.beta2, 0.99)];
    for (name, beta, usual) in betas {
        if !(0.0..1.0).contains(&beta) {
            return Err(Error::setting(name, beta, "a number in [0, 1)", usual));
        }
    }
    match config.weight_decay.is_finite() && config.weight_decay >= 0.0 {
        true => Ok(()),
        false => {
            let expected = "a finite number of 0 or more";
            Err(Error::setting("optimizer.weight_decay", config.weight_decay, expected, "0.0"))
        }
    }
}
