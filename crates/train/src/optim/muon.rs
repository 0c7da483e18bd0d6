//! Muon: momenta made orthogonal (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024), in steps of
//! AdamW's size (Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982).

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};
use tch::{Kind, TchError, Tensor};

use super::adam::{self, AdamWConfig, Decay, Moments};
use super::gathered::GatheredParams;
use super::state::copy_into;
use super::{Optimizer, OptimizerConfig, OptimizerState, decays, default_no_decay};
use crate::error::{Context, Error, Result};
use crate::gradients::refuse_unsummed;
use crate::params::{Parameter, Parameters};

/// Settings of [`Muon`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MuonConfig {
    /// Learning rate at its highest; `schedule` says how it changes. One that fits AdamW fits here.
    pub lr: f64,
    /// Decay rate of the running mean of gradients, in [0, 1).
    pub momentum: f64,
    /// Look ahead by one step of the running mean.
    pub nesterov: bool,
    /// Newton–Schulz iterations that make a momentum orthogonal.
    #[schemars(range(min = 1, max = 100))]
    pub iterations: u32,
    /// Decoupled weight decay: a step multiplies weights by 1 − lr · weight_decay.
    pub weight_decay: f64,
    /// Last components of the names of parameters that do not decay; those of one dim never do.
    pub no_decay: Vec<String>,
    /// Matrices that AdamW steps all the same, by name or its beginning up to a dot: often the first and the last layer.
    pub adamw: Vec<String>,
    /// AdamW's decay rate of the running mean of gradients, in [0, 1).
    pub beta1: f64,
    /// AdamW's decay rate of the running mean of squared gradients, in [0, 1).
    pub beta2: f64,
    /// Added to AdamW's denominator, against division by zero; above 0.
    pub eps: f64,
}

impl Default for MuonConfig {
    fn default() -> Self {
        let AdamWConfig { lr, beta1, beta2, eps, weight_decay, .. } = AdamWConfig::default();
        Self {
            lr,
            momentum: 0.95,
            nesterov: true,
            iterations: 5,
            weight_decay,
            no_decay: default_no_decay(),
            adamw: Vec::new(),
            beta1,
            beta2,
            eps,
        }
    }
}

impl MuonConfig {
    /// Returns the settings of AdamW for the parameters that are no matrices.
    fn of_rest(&self) -> AdamWConfig {
        let Self { lr, beta1, beta2, eps, weight_decay, ref no_decay, .. } = *self;
        AdamWConfig { lr, beta1, beta2, eps, weight_decay, no_decay: no_decay.clone() }
    }
}

impl Registered for MuonConfig {
    const NAME: &'static str = "muon";
    const SUMMARY: &'static str =
        "Momenta made orthogonal for matrices, with half of AdamW's state; AdamW for the rest.";
}

impl OptimizerConfig for MuonConfig {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn check(&self) -> Result<()> {
        check(self)
    }

    fn moments(&self) -> u64 {
        // Parameters that are no matrices have two.
        2
    }

    fn build(&self, params: &Parameters) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(Muon::new(params, self)?))
    }
}

crate::register_optimizer!(MuonConfig);

/// Muon for matrices, AdamW for all other parameters.
///
/// Matrices are the real parameters named `weight`, of two dims and more, in which both the first extent and the product of the
/// others are above 1, but for those of norms (`norm1.weight`): weights of linear layers and of convolutions. Spectral weights
/// are AdamW's. With gradient g and learning rate lr:
/// m ← m + (1 − μ)(g − m); u = (1 − μ) g + μ m (without `nesterov`: m); p ← p (1 − lr·wd) − lr · 0.2 √max(rows, columns) · O(u).
/// O(u) has u's singular vectors and singular values near 1, by the iteration X ← a X + (b XXᵀ + c (XXᵀ)²) X from u / ‖u‖ with
/// (a, b, c) = (3.4445, −4.7750, 2.0315), in float32 at least.
///
/// A matrix that is in parts on several ranks is brought to one of them for that, each to another rank, and its parts handed out
/// again: all ranks of the parameters' group step together, with gradients of the same parameters.
///
/// ```
/// use isobar_train::optim::{Muon, MuonConfig, Optimizer};
/// use isobar_train::{Parameter, Parameters};
/// use tch::Tensor;
///
/// let weight = Tensor::f_from_slice(&[3.0f64, 0.0, 0.0, 4.0])?.f_view([2, 2])?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("layer.weight", &weight)])?;
/// let mut muon = Muon::new(&params, &MuonConfig { weight_decay: 0.0, ..Default::default() })?;
/// weight.f_square()?.f_sum(None)?.f_backward()?;
/// muon.step(0.1)?;
/// // Both directions move alike, however large their gradients are.
/// let (first, second) = (3.0 - weight.f_double_value(&[0, 0])?, 4.0 - weight.f_double_value(&[1, 1])?);
/// assert!(first > 0.015 && second > 0.015 && first < 0.035 && second < 0.035);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Muon {
    config: MuonConfig,
    slots: Vec<Slot>,
    gathered: GatheredParams,
    rest: Moments,
}

#[derive(Debug)]
struct Slot {
    param: Parameter,
    momentum: Tensor,
    step: u64,
    decays: bool,
}

const KIND: &str = "muon";
const MOMENTUM: &str = "momentum_buffer";

impl Muon {
    /// An optimizer of these parameters, its state at zero. All ranks of their group call.
    ///
    /// # Errors
    ///
    /// A setting is out of its range, a name in `adamw` is not a parameter, the state cannot be allocated, or the communication
    /// fails.
    pub fn new(params: &Parameters, config: &MuonConfig) -> Result<Self> {
        check(config)?;
        if let Some(name) =
            config.adamw.iter().find(|name| !params.iter().any(|p| begins_with(&p.name, name)))
        {
            let mut expected = "names of parameters, or their beginnings".to_owned();
            if let Some(param) = params.iter().next() {
                expected += &format!("; for instance --set 'optimizer.adamw=[{:?}]'", param.name);
            }
            return Err(Error::invalid("optimizer.adamw", format!("{name:?}"), expected));
        }
        let (matrices, others): (Vec<_>, Vec<_>) = params.iter().partition(|p| is_matrix(p, &config.adamw));
        Ok(Self {
            rest: Moments::new(others, config.of_rest(), Decay::OfWeights)?,
            gathered: GatheredParams::new(&matrices, params.model_group())?,
            slots: matrices.into_iter().map(|p| Slot::new(p, config)).collect::<Result<_>>()?,
            config: config.clone(),
        })
    }
}

impl Optimizer for Muon {
    fn step(&mut self, lr: f64) -> Result<()> {
        refuse_unsummed(self.slots.iter().map(|slot| &slot.param))?;
        let _no_grad = tch::no_grad_guard();
        let MuonConfig { iterations, weight_decay, .. } = self.config;
        let mut in_parts = Vec::new();
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let Some(grad) = slot.param.grad() else { continue };
            slot.step += 1;
            let update = slot.update(&grad, &self.config).context(|| slot.what())?;
            if self.gathered.are_in_parts(index) {
                in_parts.push((index, update));
                continue;
            }
            let direction = orthogonalized(&update, iterations);
            direction
                .and_then(|direction| slot.apply(&direction, lr, weight_decay))
                .context(|| slot.what())?;
        }
        let directions = self.gathered.map(&in_parts, |index, whole| {
            orthogonalized(whole, iterations).context(|| self.slots[index].what())
        })?;
        for ((index, _), direction) in in_parts.iter().zip(directions) {
            let slot = &self.slots[*index];
            slot.apply(&direction, lr, weight_decay).context(|| slot.what())?;
        }
        self.rest.step(lr)
    }

    fn state(&self) -> OptimizerState {
        let mut state = OptimizerState::new(KIND);
        for slot in &self.slots {
            state.steps.insert(slot.param.name.clone(), slot.step);
            state.push(MOMENTUM, &slot.param, &slot.momentum);
        }
        self.rest.add_to(&mut state);
        state
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        state.expect_kind(KIND)?;
        for slot in &self.slots {
            state.find(MOMENTUM, &slot.param)?;
            state.step_of(&slot.param)?;
        }
        self.rest.load(state)?;
        for slot in &mut self.slots {
            copy_into(&slot.momentum, state.find(MOMENTUM, &slot.param)?, MOMENTUM)?;
            slot.step = state.step_of(&slot.param)?;
        }
        Ok(())
    }
}

impl Slot {
    fn new(param: &Parameter, config: &MuonConfig) -> Result<Self> {
        let _no_grad = tch::no_grad_guard();
        let zeros = param.tensor.f_zeros_like();
        let momentum = zeros.context(|| format!("optimizer state of parameter {:?}", param.name))?;
        Ok(Self { momentum, step: 0, decays: decays(param, &config.no_decay), param: param.clone() })
    }

    /// Takes the gradient into the running mean; what is to be made orthogonal.
    fn update(&mut self, grad: &Tensor, config: &MuonConfig) -> std::result::Result<Tensor, TchError> {
        let _ = self.momentum.f_lerp_(grad, 1.0 - config.momentum)?;
        match config.nesterov {
            true => grad.f_lerp(&self.momentum, config.momentum),
            false => Ok(self.momentum.shallow_clone()),
        }
    }

    fn apply(&self, direction: &Tensor, lr: f64, weight_decay: f64) -> std::result::Result<(), TchError> {
        let mut param = self.param.tensor.shallow_clone();
        if self.decays && weight_decay != 0.0 {
            let _ = param.f_mul_scalar_(1.0 - lr * weight_decay)?;
        }
        let [rows, columns] = extents(&self.param.global_shape());
        let size = 0.2 * (rows.max(columns) as f64).sqrt();
        let _ = param.f_add_(&direction.f_mul_scalar(-lr * size)?)?;
        Ok(())
    }

    fn what(&self) -> String {
        format!("the {KIND} step of parameter {:?}", self.param.name)
    }
}

/// A parameter as a matrix: its first dim, and the others together.
fn extents(shape: &[i64]) -> [i64; 2] {
    [shape.first().copied().unwrap_or(1), shape.iter().skip(1).product()]
}

fn is_matrix(param: &Parameter, adamw: &[String]) -> bool {
    let mut names = param.name.rsplit('.');
    let is_weight = names.next() == Some("weight");
    let is_norm = names.next().is_some_and(|layer| layer.starts_with("norm"));
    let excluded = is_norm || adamw.iter().any(|name| begins_with(&param.name, name));
    let shape = param.global_shape();
    let extended = extents(&shape).iter().all(|&extent| extent > 1);
    is_weight && !excluded && shape.len() > 1 && extended && !param.tensor.is_complex()
}

/// Returns whether a name equals `beginning`, or continues it after a dot.
fn begins_with(name: &str, beginning: &str) -> bool {
    name.strip_prefix(beginning).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// A matrix with the singular vectors of this one, and singular values near 1.
fn orthogonalized(tensor: &Tensor, iterations: u32) -> std::result::Result<Tensor, TchError> {
    let kind = if tensor.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let [rows, columns] = extents(&tensor.size());
    let matrix = tensor.f_reshape([rows, columns])?.f_to_kind(kind)?;
    // The products are of the shorter side's square.
    let turned = rows > columns;
    let matrix = if turned { matrix.f_tr()? } else { matrix };
    let norm = matrix.f_norm()?.f_clamp_min(SMALLEST)?;
    let mut x = matrix.f_div(&norm)?;
    let [a, b, c] = QUINTIC;
    for _ in 0..iterations {
        let square = x.f_matmul(&x.f_tr()?)?;
        let polynomial = square.f_matmul(&square)?.f_mul_scalar_(c)?.f_add_(&square.f_mul_scalar(b)?)?;
        x = polynomial.f_matmul(&x)?.f_add_(&x.f_mul_scalar_(a)?)?;
    }
    let x = if turned { x.f_tr()? } else { x };
    x.f_to_kind(tensor.kind())?.f_reshape(tensor.size())
}

/// Coefficients that bring singular values of at most 1 near 1 in few iterations.
const QUINTIC: [f64; 3] = [3.4445, -4.7750, 2.0315];

/// Against division by zero.
const SMALLEST: f64 = 1e-7;

fn check(config: &MuonConfig) -> Result<()> {
    if !(0.0..1.0).contains(&config.momentum) {
        return Err(Error::setting("optimizer.momentum", config.momentum, "a number in [0, 1)", 0.95));
    }
    // Five are usual, and a step takes time in proportion.
    if !(1..=100).contains(&config.iterations) {
        return Err(Error::setting("optimizer.iterations", config.iterations, "1 to 100", 5));
    }
    adam::check(&config.of_rest())
}
