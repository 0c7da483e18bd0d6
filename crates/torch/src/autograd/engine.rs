//! The backward pass.

use tch::Tensor;

use super::{handles, optional_handles, take};
use crate::error::{Error, Result, call};
use crate::ffi;

/// Options of a backward pass. The default frees the graph and creates no new one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BackwardOptions {
    /// Keeps the graph, so that it can be gone through again. Implied by `create_graph`.
    pub retain_graph: bool,
    /// Records the graph of the pass itself, for gradients of gradients.
    pub create_graph: bool,
    /// [`grad`] gives `None` for an input that the outputs do not depend on, instead of an error.
    pub allow_unused: bool,
}

/// Adds the gradients of `tensors` to the `grad` of the leaves that they were computed from.
///
/// `grads` holds the gradient that each tensor starts with; `None` stands for one and needs a tensor of one element.
/// An empty `grads` is all `None`.
///
/// # Errors
///
/// If the lengths differ, a gradient is missing or has another shape, the graph was freed, or a function's backward
/// or a hook failed or panicked (the error holds theirs).
pub fn backward(tensors: &[&Tensor], grads: &[Option<Tensor>], options: BackwardOptions) -> Result<()> {
    run(tensors, grads, &[], options)
}

/// As [`backward`], but adds gradients to `inputs` only, whether leaves or not; other leaves stay as they are.
///
/// # Errors
///
/// As [`backward`], and if `inputs` is empty or one of them requires no gradient.
pub fn backward_into(
    tensors: &[&Tensor],
    grads: &[Option<Tensor>],
    inputs: &[&Tensor],
    options: BackwardOptions,
) -> Result<()> {
    if inputs.is_empty() {
        return Err(Error::Argument("backward_into needs at least one input to add gradients to".into()));
    }
    run(tensors, grads, inputs, options)
}

/// As [`backward`], from within a custom function's backward that computes a part of its graph again: leaves that the part has
/// found elsewhere than among the function's inputs get their gradients, and their hooks run. What
/// [`after_backward`](super::after_backward) is given waits for the outer pass's end.
///
/// # Errors
///
/// As [`backward`], and where the outer pass adds to the gradients of some inputs only, or returns them
/// ([`grad`], [`backward_into`]).
pub fn backward_within(tensors: &[&Tensor], grads: &[Option<Tensor>]) -> Result<()> {
    check_count(tensors, grads)?;
    let roots = handles(tensors.iter().copied());
    let grads = root_grads(tensors, grads);
    // SAFETY: the handles are valid during the call and the arrays as long as said.
    call(|error| unsafe {
        ffi::isobar_backward_within(roots.as_ptr(), roots.len(), grads.as_ptr(), error);
    })
}

fn run(
    tensors: &[&Tensor],
    grads: &[Option<Tensor>],
    inputs: &[&Tensor],
    options: BackwardOptions,
) -> Result<()> {
    check_count(tensors, grads)?;
    let [roots, inputs] = [tensors, inputs].map(|list| handles(list.iter().copied()));
    let grads = root_grads(tensors, grads);
    // SAFETY: the handles are valid during the call and the arrays as long as said.
    call(|error| unsafe {
        ffi::isobar_backward(
            roots.as_ptr(),
            roots.len(),
            grads.as_ptr(),
            inputs.as_ptr(),
            inputs.len(),
            options.retain_graph || options.create_graph,
            options.create_graph,
            error,
        );
    })
}

/// The gradients of `outputs` with respect to `inputs`, in their order; no `grad` field changes.
///
/// `grad_outputs` holds the gradient that each output starts with, as in [`backward`].
///
/// # Errors
///
/// As [`backward`], and if an input is not part of the graph and `allow_unused` is off.
pub fn grad(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    grad_outputs: &[Option<Tensor>],
    options: BackwardOptions,
) -> Result<Vec<Option<Tensor>>> {
    check_count(outputs, grad_outputs)?;
    if inputs.is_empty() {
        return Err(Error::Argument("grad needs at least one input".into()));
    }
    let grads = root_grads(outputs, grad_outputs);
    let [outputs, inputs] = [outputs, inputs].map(|list| handles(list.iter().copied()));
    let mut results = vec![std::ptr::null_mut(); inputs.len()];
    // SAFETY: the handles are valid during the call and the arrays as long as said.
    call(|error| unsafe {
        ffi::isobar_grad(
            outputs.as_ptr(),
            outputs.len(),
            inputs.as_ptr(),
            inputs.len(),
            grads.as_ptr(),
            options.retain_graph || options.create_graph,
            options.create_graph,
            options.allow_unused,
            results.as_mut_ptr(),
            error,
        );
    })?;
    // SAFETY: each result is null or a handle that we own.
    Ok(results.into_iter().map(|handle| unsafe { take(handle) }).collect())
}

fn check_count(tensors: &[&Tensor], grads: &[Option<Tensor>]) -> Result<()> {
    if grads.is_empty() || grads.len() == tensors.len() {
        return Ok(());
    }
    let (got, expected) = (grads.len(), tensors.len());
    Err(Error::Argument(format!("{got} gradients were given for {expected} tensors; give one each, or none")))
}

fn root_grads(tensors: &[&Tensor], grads: &[Option<Tensor>]) -> Vec<*const ffi::C_tensor> {
    if grads.is_empty() { vec![std::ptr::null(); tensors.len()] } else { optional_handles(grads) }
}

/// Forgets the gradient of a leaf: its `grad` is undefined, and its memory given back.
///
/// # Errors
///
/// An error of libtorch.
pub fn clear_grad(leaf: &Tensor) -> Result<()> {
    // SAFETY: the handle is valid during the call.
    call(|error| unsafe { ffi::isobar_clear_grad(leaf.as_ptr(), error) })
}
