//! Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015) and AdamW (Loshchilov and Hutter, "Decoupled Weight
//! Decay Regularization", 2019), with PyTorch's arithmetic.

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};
use tch::{Device, TchError, Tensor};

use super::state::copy_into;
use super::{Optimizer, OptimizerConfig, OptimizerState, as_real, decays, default_no_decay};
use crate::error::{Context, Error, Result};
use crate::gradients::refuse_unsummed;
use crate::params::{Parameter, Parameters};

/// Settings of [`AdamW`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Learning rate at its highest; `schedule` says how it changes.
    pub lr: f64,
    /// Decay rate of the running mean of gradients, in [0, 1).
    pub beta1: f64,
    /// Decay rate of the running mean of squared gradients, in [0, 1).
    pub beta2: f64,
    /// Added to the denominator, against division by zero; above 0.
    pub eps: f64,
    /// Decoupled weight decay: a step multiplies weights by 1 − lr · weight_decay.
    pub weight_decay: f64,
    /// Last components of the names of parameters that do not decay; those of one dim never do.
    pub no_decay: Vec<String>,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            no_decay: default_no_decay(),
        }
    }
}

impl Registered for AdamWConfig {
    const NAME: &'static str = "adamw";
    const SUMMARY: &'static str = "Adam with decoupled weight decay.";
}

impl OptimizerConfig for AdamWConfig {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn check(&self) -> Result<()> {
        check(self)
    }

    fn moments(&self) -> u64 {
        2
    }

    fn build(&self, params: &Parameters) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(AdamW::new(params, self)?))
    }
}

crate::register_optimizer!(AdamWConfig);

/// Settings of [`Adam`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdamConfig {
    /// Learning rate at its highest; `schedule` says how it changes.
    pub lr: f64,
    /// Decay rate of the running mean of gradients, in [0, 1).
    pub beta1: f64,
    /// Decay rate of the running mean of squared gradients, in [0, 1).
    pub beta2: f64,
    /// Added to the denominator, against division by zero; above 0.
    pub eps: f64,
    /// Penalty on the square of weights: its gradient, weight_decay · w, is added to theirs.
    pub weight_decay: f64,
    /// Last components of the names of parameters that do not decay; those of one dim never do.
    pub no_decay: Vec<String>,
}

impl AdamConfig {
    /// Converts to AdamW without weight decay.
    fn into_adamw(self) -> AdamWConfig {
        let Self { lr, beta1, beta2, eps, weight_decay, no_decay } = self;
        AdamWConfig { lr, beta1, beta2, eps, weight_decay, no_decay }
    }
}

impl Default for AdamConfig {
    fn default() -> Self {
        let AdamWConfig { lr, beta1, beta2, eps, no_decay, .. } = AdamWConfig::default();
        Self { lr, beta1, beta2, eps, weight_decay: 0.0, no_decay }
    }
}

impl Registered for AdamConfig {
    const NAME: &'static str = "adam";
    const SUMMARY: &'static str = "Adam, whose weight decay is part of the gradient.";
}

impl OptimizerConfig for AdamConfig {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn check(&self) -> Result<()> {
        check(&self.clone().into_adamw())
    }

    fn moments(&self) -> u64 {
        2
    }

    fn build(&self, params: &Parameters) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(Adam::new(params, self)?))
    }
}

crate::register_optimizer!(AdamConfig);

/// Adam. Its weight decay goes through the running means, as the gradient of a penalty; [`AdamW`]'s does not.
///
/// With gradient g of the loss, which weight decay makes g + wd·p, and otherwise as [`AdamW`]: m ← m + (1 − β₁)(g − m);
/// v ← β₂ v + (1 − β₂) g²; p ← p − lr/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε).
///
/// ```
/// use isobar_train::optim::{Adam, AdamConfig, Optimizer};
/// use isobar_train::{Parameter, Parameters};
/// use tch::Tensor;
///
/// let x = Tensor::f_from_slice(&[1.0f64, -2.0])?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("x", &x)])?;
/// let mut adam = Adam::new(&params, &AdamConfig::default())?;
/// x.f_square()?.f_sum(None)?.f_backward()?;
/// adam.step(0.1)?;
/// assert!((x.f_double_value(&[0])? - 0.9).abs() < 1e-6); // the first step moves by lr against the sign
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Adam(Moments);

impl Adam {
    /// An optimizer of these parameters, its state at zero.
    ///
    /// # Errors
    ///
    /// A setting is out of its range, or the state cannot be allocated.
    pub fn new(params: &Parameters, config: &AdamConfig) -> Result<Self> {
        Ok(Self(Moments::new(params, config.clone().into_adamw(), Decay::OfGradient)?))
    }
}

impl Optimizer for Adam {
    fn step(&mut self, lr: f64) -> Result<()> {
        self.0.step(lr)
    }

    fn state(&self) -> OptimizerState {
        self.0.state()
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        self.0.load_state(state)
    }
}

/// Adam with decoupled weight decay.
///
/// With gradient g, step t (from 1) and learning rate lr: p ← p (1 − lr·wd); m ← m + (1 − β₁)(g − m);
/// v ← β₂ v + (1 − β₂) g²; p ← p − lr/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε). Complex parameters are treated as pairs
/// of real ones, as PyTorch does.
///
/// ```
/// use isobar_train::optim::{AdamW, AdamWConfig, Optimizer};
/// use isobar_train::{Parameter, Parameters};
/// use tch::Tensor;
///
/// let x = Tensor::f_from_slice(&[1.0f64, -2.0])?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("x", &x)])?;
/// let mut adamw = AdamW::new(&params, &AdamWConfig { weight_decay: 0.0, ..Default::default() })?;
/// x.f_square()?.f_sum(None)?.f_backward()?;
/// adamw.step(0.1)?;
/// assert!((x.f_double_value(&[0])? - 0.9).abs() < 1e-6); // the first step moves by lr against the sign
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct AdamW(Moments);

/// Kind of weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decay {
    /// It is added to the gradient, and enters the running means.
    OfGradient,
    /// It is subtracted from the weights, apart from the step.
    OfWeights,
}

impl Decay {
    /// The kind of optimizer that has it so.
    fn kind(self) -> &'static str {
        match self {
            Self::OfGradient => "adam",
            Self::OfWeights => "adamw",
        }
    }
}

/// Running means of gradients and their squares, and the steps by them.
#[derive(Debug)]
pub(super) struct Moments {
    config: AdamWConfig,
    decay: Decay,
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    param: Parameter,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: u64,
    decays: bool,
}

impl AdamW {
    /// An optimizer of these parameters, its state at zero.
    ///
    /// # Errors
    ///
    /// A setting is out of its range, or the state cannot be allocated.
    pub fn new(params: &Parameters, config: &AdamWConfig) -> Result<Self> {
        Ok(Self(Moments::new(params, config.clone(), Decay::OfWeights)?))
    }
}

impl Optimizer for AdamW {
    fn step(&mut self, lr: f64) -> Result<()> {
        self.0.step(lr)
    }

    fn state(&self) -> OptimizerState {
        self.0.state()
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        self.0.load_state(state)
    }
}

impl Moments {
    pub(super) fn new<'a>(
        params: impl IntoIterator<Item = &'a Parameter>,
        config: AdamWConfig,
        decay: Decay,
    ) -> Result<Self> {
        check(&config)?;
        let slots = params.into_iter().map(|p| Slot::new(p, &config)).collect::<Result<_>>()?;
        Ok(Self { config, decay, slots })
    }

    pub(super) fn step(&mut self, lr: f64) -> Result<()> {
        refuse_unsummed(self.slots.iter().map(|slot| &slot.param))?;
        let _no_grad = tch::no_grad_guard();
        for slot in &mut self.slots {
            let Some(grad) = slot.param.grad() else { continue };
            slot.step += 1;
            slot.update(&grad, lr, &self.config, self.decay)
                .context(|| format!("the {} step of parameter {:?}", self.decay.kind(), slot.param.name))?;
        }
        Ok(())
    }

    fn state(&self) -> OptimizerState {
        let mut state = OptimizerState::new(self.decay.kind());
        self.add_to(&mut state);
        state
    }

    pub(super) fn add_to(&self, state: &mut OptimizerState) {
        for slot in &self.slots {
            state.steps.insert(slot.param.name.clone(), slot.step);
            state.push("exp_avg", &slot.param, &slot.exp_avg);
            state.push("exp_avg_sq", &slot.param, &slot.exp_avg_sq);
        }
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        state.expect_kind(self.decay.kind())?;
        self.load(state)
    }

    pub(super) fn load(&mut self, state: &OptimizerState) -> Result<()> {
        for slot in &self.slots {
            state.find("exp_avg", &slot.param)?;
            state.find("exp_avg_sq", &slot.param)?;
            state.step_of(&slot.param)?;
        }
        for slot in &mut self.slots {
            let exp_avg = state.find("exp_avg", &slot.param)?;
            let exp_avg_sq = state.find("exp_avg_sq", &slot.param)?;
            slot.step = state.step_of(&slot.param)?;
            copy_into(&slot.exp_avg, exp_avg, "exp_avg")?;
            copy_into(&slot.exp_avg_sq, exp_avg_sq, "exp_avg_sq")?;
        }
        Ok(())
    }
}

impl Slot {
    fn new(param: &Parameter, config: &AdamWConfig) -> Result<Self> {
        let zeros = || {
            let _no_grad = tch::no_grad_guard();
            param.tensor.f_zeros_like().context(|| format!("optimizer state of parameter {:?}", param.name))
        };
        Ok(Self {
            exp_avg: zeros()?,
            exp_avg_sq: zeros()?,
            step: 0,
            decays: decays(param, &config.no_decay),
            param: param.clone(),
        })
    }

    fn update(
        &self,
        grad: &Tensor,
        lr: f64,
        config: &AdamWConfig,
        decay: Decay,
    ) -> std::result::Result<(), TchError> {
        let of = |one: Decay, factor: f64| {
            (self.decays && config.weight_decay != 0.0 && decay == one).then_some(factor)
        };
        let rule = Rule {
            decay: of(Decay::OfWeights, 1.0 - lr * config.weight_decay),
            penalty: of(Decay::OfGradient, config.weight_decay),
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.eps,
            step_size: lr / (1.0 - config.beta1.powf(self.step as f64)),
            correction2_sqrt: (1.0 - config.beta2.powf(self.step as f64)).sqrt(),
        };
        let [param, grad, exp_avg, exp_avg_sq] =
            [&self.param.tensor, grad, &self.exp_avg, &self.exp_avg_sq].map(as_real);
        let whole = [param?, grad?, exp_avg?, exp_avg_sq?];
        let elements = whole[0].numel() as i64;
        if !in_chunks(whole[0].device(), elements) || !whole.iter().all(Tensor::is_contiguous) {
            return rule.apply(&whole);
        }
        let [param, grad, exp_avg, exp_avg_sq] = whole.map(|tensor| tensor.f_view([-1]));
        let flat = [param?, grad?, exp_avg?, exp_avg_sq?];
        (0..elements).step_by(CHUNK as usize).try_for_each(|start| {
            let part = |tensor: &Tensor| tensor.f_narrow(0, start, CHUNK.min(elements - start));
            rule.apply(&[part(&flat[0])?, part(&flat[1])?, part(&flat[2])?, part(&flat[3])?])
        })
    }
}

/// Number of elements updated at a time on a CPU: so few that they stay in the cache from one operation to the next, which more
/// than halves the time of a step.
const CHUNK: i64 = 1 << 15;

/// Returns whether a parameter is updated in chunks. On a GPU each chunk would launch kernels of its own.
fn in_chunks(device: Device, elements: i64) -> bool {
    device == Device::Cpu && elements > CHUNK
}

/// The numbers of one parameter's step.
struct Rule {
    /// The weights are multiplied by it.
    decay: Option<f64>,
    /// So many weights are added to the gradient.
    penalty: Option<f64>,
    beta1: f64,
    beta2: f64,
    eps: f64,
    step_size: f64,
    correction2_sqrt: f64,
}

impl Rule {
    /// Updates a parameter and its running means, given its gradient. The order of operations, and so the rounding, is
    /// that of PyTorch's loop over single tensors.
    fn apply(&self, [param, grad, exp_avg, exp_avg_sq]: &[Tensor; 4]) -> std::result::Result<(), TchError> {
        let [mut param, mut exp_avg, mut exp_avg_sq] =
            [param, exp_avg, exp_avg_sq].map(Tensor::shallow_clone);
        if let Some(decay) = self.decay {
            let _ = param.f_mul_scalar_(decay)?;
        }
        let penalized = self.penalty.map(|penalty| param.f_mul_scalar(penalty)?.f_add_(grad));
        let penalized = penalized.transpose()?;
        let grad = penalized.as_ref().unwrap_or(grad);
        let _ = exp_avg.f_lerp_(grad, 1.0 - self.beta1)?;
        let scratch = grad.f_mul_scalar(1.0 - self.beta2)?;
        let _ = exp_avg_sq.f_mul_scalar_(self.beta2)?.f_addcmul_(&scratch, grad)?;
        let denominator =
            exp_avg_sq.f_sqrt_out(&scratch)?.f_div_scalar_(self.correction2_sqrt)?.f_add_scalar_(self.eps)?;
        let _ = param.f_addcdiv_(&exp_avg.f_mul_scalar(-self.step_size)?, &denominator)?;
        Ok(())
    }
}

pub(super) fn check(config: &AdamWConfig) -> Result<()> {
    let betas = [("optimizer.beta1", config.beta1, 0.9), ("optimizer.beta2", config.beta2, 0.999)];
    for (name, beta, usual) in betas {
        if !(0.0..1.0).contains(&beta) {
            return Err(Error::setting(name, beta, "a number in [0, 1)", usual));
        }
    }
    let AdamWConfig { eps, weight_decay, .. } = *config;
    // A gradient that is 0 would be divided by 0.
    if !(eps.is_finite() && eps > 0.0) {
        return Err(Error::setting("optimizer.eps", eps, "a finite number above 0", "1e-8"));
    }
    if !(weight_decay.is_finite() && weight_decay >= 0.0) {
        let expected = "a finite number of 0 or more";
        return Err(Error::setting("optimizer.weight_decay", weight_decay, expected, "0.0"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_cpu_updates_in_chunks() {
        assert!(in_chunks(Device::Cpu, CHUNK + 1) && !in_chunks(Device::Cpu, CHUNK));
        assert!(!in_chunks(Device::Cuda(0), 1 << 24));
    }
}
