//! Custom autograd functions, hooks, and the backward pass with every option.
//!
//! A function whose backward is a Rust closure, differentiable twice because its backward uses differentiable
//! operations:
//!
//! Nothing here depends on groups or layouts.
//!
//! ```
//! use isobar_torch::autograd::{self, BackwardOptions, Function};
//! use isobar_torch::guard::NoGrad;
//! use tch::{Device, Kind, Tensor};
//!
//! fn square(x: &Tensor) -> isobar_torch::Result<Tensor> {
//!     let y = {
//!         let _no_grad = NoGrad::new();
//!         x.f_mul(x)?
//!     };
//!     let mut outputs = Function::new("square").save(&[x]).apply(&[x], vec![y], |ctx, grads| {
//!         let Some(grad) = &grads[0] else { return Ok(vec![None]) };
//!         Ok(vec![Some(grad.f_mul(&ctx.saved(0)?)?.f_mul_scalar(2.0)?)])
//!     })?;
//!     Ok(outputs.remove(0))
//! }
//!
//! let x = Tensor::from_slice(&[3.0f64]).set_requires_grad(true);
//! let create = BackwardOptions { create_graph: true, ..Default::default() };
//! let first = autograd::grad(&[&square(&x)?], &[&x], &[None], create)?.remove(0).unwrap();
//! assert_eq!(first.double_value(&[0]), 6.0);
//! let second = autograd::grad(&[&first], &[&x], &[None], BackwardOptions::default())?.remove(0).unwrap();
//! assert_eq!(second.double_value(&[0]), 2.0);
//! # Ok::<(), isobar_torch::Error>(())
//! ```

mod engine;
mod function;
mod hook;

pub use engine::{BackwardOptions, backward, backward_into, backward_within, clear_grad, grad};
pub use function::{Context, Function};
pub use hook::{HookHandle, after_backward, register_hook, register_post_accumulate_grad_hook};

use tch::Tensor;

use crate::ffi::C_tensor;

/// The handles of a list of tensors, valid while the tensors are.
fn handles<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<*const C_tensor> {
    tensors.into_iter().map(Tensor::as_ptr).collect()
}

/// Returns the handles, with null for an absent tensor.
fn optional_handles(tensors: &[Option<Tensor>]) -> Vec<*const C_tensor> {
    tensors.iter().map(|tensor| tensor.as_ref().map_or(std::ptr::null(), Tensor::as_ptr)).collect()
}

/// Takes over a handle from the shim; null is an absent tensor.
///
/// # Safety
///
/// The handle must be null or owned by the caller, who gives it up.
unsafe fn take(handle: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: the caller's promise.
    (!handle.is_null()).then(|| unsafe { Tensor::from_ptr(handle) })
}

/// Gives a tensor away to the shim.
fn give(tensor: Tensor) -> *mut C_tensor {
    std::mem::ManuallyDrop::new(tensor).as_mut_ptr()
}

#[cfg(test)]
mod tests;
