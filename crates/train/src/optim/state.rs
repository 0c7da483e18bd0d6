//! An optimizer's state in a form that checkpoints can write.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::AverageRule;
use crate::error::{Context, Error, Result};
use crate::params::{ParamPlacement, Parameter};

/// The state of an optimizer: its kind, how many steps each parameter has taken, and tensors by slot and parameter.
#[derive(Debug, Default)]
pub struct OptimizerState {
    /// Name of the optimizer that wrote it, for example `adamw`.
    pub kind: String,
    /// Steps taken, by parameter name.
    pub steps: BTreeMap<String, u64>,
    /// The averages of parameters, in the order of their slots.
    pub averages: Vec<AverageState>,
    /// The tensors, those of a parameter one after another. They are second handles, not
    /// copies: they change with the next step.
    pub tensors: Vec<StateTensor>,
}

/// An average of the parameters in an optimizer's state.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AverageState {
    /// Its update rule.
    pub rule: AverageRule,
    /// Number of steps in it.
    pub steps: u64,
    /// Step of the run after which it began; `None` in files of earlier versions, and if the run does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<u64>,
}

/// A tensor of an optimizer's state, shaped and placed as its parameter is.
#[derive(Debug)]
pub struct StateTensor {
    /// Name of the slot, for example `exp_avg`.
    pub slot: String,
    /// The parameter that it belongs to.
    pub param: String,
    /// Its values.
    pub tensor: Tensor,
    /// Placement over the model-parallel group.
    pub placement: ParamPlacement,
}

impl OptimizerState {
    /// Makes the state of an optimizer without tensors.
    pub fn new(kind: &str) -> Self {
        Self { kind: kind.to_owned(), steps: BTreeMap::new(), averages: Vec::new(), tensors: Vec::new() }
    }

    /// Adds a tensor of a parameter's shape and placement.
    pub fn push(&mut self, slot: &str, param: &Parameter, tensor: &Tensor) {
        self.tensors.push(StateTensor {
            slot: slot.to_owned(),
            param: param.name.clone(),
            tensor: tensor.shallow_clone(),
            placement: param.placement.clone(),
        });
    }

    /// Returns the tensor of `slot` for `param`.
    ///
    /// # Errors
    ///
    /// No such tensor, or one of another shape or dtype than the parameter.
    pub fn find(&self, slot: &str, param: &Parameter) -> Result<&Tensor> {
        let refused = |reason: String| Error::OptimizerState { reason };
        let found = self
            .tensors
            .iter()
            .find(|t| t.slot == slot && t.param == param.name)
            .ok_or_else(|| refused(format!("{slot} of parameter {:?} is missing", param.name)))?;
        let (shape, kind) = (found.tensor.size(), found.tensor.kind());
        if shape != param.tensor.size() || kind != param.tensor.kind() {
            return Err(refused(format!(
                "{slot} of parameter {:?} is {kind:?} {shape:?}, expected {:?} {:?}",
                param.name,
                param.tensor.kind(),
                param.tensor.size(),
            )));
        }
        Ok(&found.tensor)
    }

    /// Returns the number of steps that a parameter has taken.
    ///
    /// # Errors
    ///
    /// A parameter that the state does not have.
    pub fn step_of(&self, param: &Parameter) -> Result<u64> {
        self.steps.get(&param.name).copied().ok_or_else(|| Error::OptimizerState {
            reason: format!("the step count of parameter {:?} is missing", param.name),
        })
    }

    /// Checks that the state was written by the optimizer `kind`.
    ///
    /// # Errors
    ///
    /// Another optimizer, with the `--set` that uses it.
    pub fn expect_kind(&self, kind: &str) -> Result<()> {
        if self.kind == kind {
            return Ok(());
        }
        Err(Error::OptimizerState {
            reason: format!(
                "it was written by {:?}, this run uses {kind:?}; --set optimizer.type={}",
                self.kind, self.kind
            ),
        })
    }
}

/// Overwrites `target` with `source`'s values.
pub(crate) fn copy_into(target: &Tensor, source: &Tensor, what: &str) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    target.shallow_clone().f_copy_(source).context(|| format!("copying {what}"))
}
