//! Optimizers with readable state, a file each, which registers its settings; and the rule that says which parameters decay.
//!
//! An optimizer depends on no trainer, model or loss; it takes parameters whose gradients are complete.

mod adam;
mod average_rule;
mod averaged;
mod gathered;
mod lion;
mod muon;
mod registry;
mod sgd;
mod state;

pub use self::adam::{Adam, AdamConfig, AdamW, AdamWConfig};
pub use self::average_rule::AverageRule;
pub(crate) use self::average_rule::exponent;
pub use self::averaged::Averaged;
pub(crate) use self::averaged::{average_slot, continued};
pub use self::lion::{Lion, LionConfig};
pub use self::muon::{Muon, MuonConfig};
pub use self::registry::{OptimizerConfig, OptimizerEntry, OptimizerKind, Optimizers, register, registered};
pub use self::sgd::{Sgd, SgdConfig};
pub use self::state::{AverageState, OptimizerState, StateTensor};
use crate::error::Result;
pub use crate::gradients::refuse_unsummed;
use crate::params::Parameter;

/// Optimizer: updates parameters from gradients.
///
/// Every rank of the model-parallel and data-parallel groups steps with the same `lr` and, over the data-parallel
/// group, the same gradients; the parameters then stay equal over it without any communication ([`Muon`], which multiplies
/// matrices: on processors and numbers of threads that are alike).
pub trait Optimizer: Send {
    /// One step with the learning rate `lr`. A parameter without a gradient is left as it is, its step count too. All ranks of the
    /// parameters' group call, with gradients of the same parameters.
    ///
    /// # Errors
    ///
    /// An error of libtorch, for instance if a gradient is on another device; an error of the communication;
    /// [`Error::WrongGradients`](crate::Error::WrongGradients) if gradients are still to be summed over ranks.
    fn step(&mut self, lr: f64) -> Result<()>;

    /// Everything that must be saved to go on bitwise as if there had been no interruption.
    fn state(&self) -> OptimizerState;

    /// Puts back what [`Optimizer::state`] gave, or a checkpoint's copy of it.
    ///
    /// # Errors
    ///
    /// The state is of another optimizer, or a tensor is missing, or has another shape or dtype.
    fn load_state(&mut self, state: &OptimizerState) -> Result<()>;
}

/// Returns whether weight decay applies to a parameter: not to those of one dim or none (biases, norms, scales), and not to
/// those whose name ends in one of `no_decay` (the last component, after the last dot).
pub fn decays(param: &Parameter, no_decay: &[String]) -> bool {
    let last = param.name.rsplit('.').next().unwrap_or(&param.name);
    param.tensor.dim() > 1 && !no_decay.iter().any(|name| name == last)
}

/// Names that are biases by convention whatever their shape: the AFNO's spectral biases and position embedding.
pub(crate) fn default_no_decay() -> Vec<String> {
    ["bias", "b1", "b2", "pos_embed"].map(String::from).to_vec()
}

/// A tensor as an optimizer treats it: complex elements as pairs of real ones.
pub(crate) fn as_real(tensor: &tch::Tensor) -> std::result::Result<tch::Tensor, tch::TchError> {
    match tensor.f_is_complex()? {
        true => tensor.f_view_as_real(),
        false => Ok(tensor.shallow_clone()),
    }
}

#[cfg(test)]
mod tests;
