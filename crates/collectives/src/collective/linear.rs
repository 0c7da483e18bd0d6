//! A collective is a linear map, declared together with its adjoint; one function makes any of them differentiable.
//!
//! Backward of a map is its adjoint, which is again such a map: gradients of gradients follow, and no backward is
//! written by hand.

use std::sync::{Arc, Mutex, PoisonError};

use isobar_torch::autograd::Function;
use isobar_torch::guard::{NoGrad, is_grad_enabled};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::observe::label::Label;

/// A linear map of this rank's tensor, and of all other ranks' together with it.
pub trait LinearMap: Send + Sync + 'static {
    /// The name that errors and profiles have.
    fn name(&self) -> &'static str;

    /// The map's value. Runs without gradients; every rank of the map's group calls.
    ///
    /// # Errors
    ///
    /// Those of the collective.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;

    /// The map that carries the gradient back.
    fn adjoint(&self) -> Arc<dyn LinearMap>;
}

/// The value of `map` at `x`, attached to autograd.
///
/// Returns whether `x` requires a gradient must be the same on all ranks, and all must call backward: the adjoint is a
/// collective too.
///
/// # Errors
///
/// Those of the map.
pub fn differentiable(map: Arc<dyn LinearMap>, x: &Tensor) -> Result<Tensor> {
    if !x.defined() {
        return Err(Error::Input { operation: map.name(), problem: "the tensor is undefined".into() });
    }
    let y = {
        let _guard = NoGrad::new();
        map.forward(&x.detach())?
    };
    if !records(x) {
        return Ok(y);
    }
    attach(map, x, y)
}

/// `y`, the value of `map` at `x` that was computed otherwise, attached to autograd; the same conditions hold.
///
/// # Errors
///
/// An error of libtorch.
pub fn attach(map: Arc<dyn LinearMap>, x: &Tensor, y: Tensor) -> Result<Tensor> {
    let label = Label::current();
    let mut outputs = Function::new(map.name()).apply(&[x], vec![y], move |context, gradients| {
        let _label = label.backward();
        // A rank that nothing depends on still takes part in the adjoint.
        let gradient = context.grad_or_zeros(gradients, 0)?;
        Ok(vec![Some(differentiable(map.adjoint(), &gradient)?)])
    })?;
    outputs.pop().ok_or_else(|| Error::Torch("a custom function lost its output".into()))
}

/// Returns whether results computed from `tensor` must be attached to autograd.
pub(crate) fn records(tensor: &Tensor) -> bool {
    is_grad_enabled() && tensor.defined() && tensor.requires_grad()
}

/// A map times a number.
pub(crate) struct Scaled {
    pub(crate) by: f64,
    pub(crate) map: Arc<dyn LinearMap>,
}

impl LinearMap for Scaled {
    fn name(&self) -> &'static str {
        self.map.name()
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.map.forward(x)?.f_mul_scalar(self.by)?)
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(Scaled { by: self.by, map: self.map.adjoint() })
    }
}

/// A map whose value is there already.
pub(crate) struct Computed {
    pub(crate) value: Mutex<Option<Tensor>>,
    pub(crate) map: Arc<dyn LinearMap>,
}

impl LinearMap for Computed {
    fn name(&self) -> &'static str {
        self.map.name()
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner).take();
        value.map_or_else(|| self.map.forward(x), Ok)
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        self.map.adjoint()
    }
}

/// Applies `map` to `tensor` and attaches the result to autograd.
pub(crate) fn run(tensor: &Tensor, map: impl LinearMap) -> Result<Tensor> {
    differentiable(Arc::new(map), tensor)
}

/// On a group of one, the tensor with its history; else the result.
pub(crate) fn keep(tensor: &Tensor, result: Tensor) -> Tensor {
    match records(tensor) {
        true => tensor.shallow_clone(),
        false => result,
    }
}
