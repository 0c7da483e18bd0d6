//! Hooks on the gradients of tensors.

use std::ffi::c_void;
use std::mem::ManuallyDrop;

use tch::Tensor;

use super::give;
use crate::error::{BoxError, Result, call, catch, drop_box};
use crate::ffi::{self, RawFailure};

/// Removes its hook on request, from any thread. Dropping it leaves the hook in place.
#[derive(Debug)]
pub struct HookHandle {
    slot: *mut ffi::HookSlot,
}

// SAFETY: the slot is a shared pointer to a place behind a mutex, and the closure in it is `Send`.
unsafe impl Send for HookHandle {}
// SAFETY: `&HookHandle` gives no access to anything.
unsafe impl Sync for HookHandle {}

impl HookHandle {
    /// Removes the hook: it is not called again, and its closure is dropped (after the call that is running, if any).
    pub fn remove(self) {
        // SAFETY: the slot lives until this handle is dropped.
        unsafe { ffi::isobar_hook_remove(self.slot) };
    }
}

impl Drop for HookHandle {
    fn drop(&mut self) {
        // SAFETY: the slot is ours, and not used after this.
        unsafe { ffi::isobar_hook_free(self.slot) };
    }
}

/// Calls `hook` with the gradient of `tensor` in each backward pass that computes it.
///
/// The hook's result replaces the gradient; `None` keeps it. Hooks run in the order of registration, before the
/// gradient is passed on or accumulated into `grad`, possibly on another thread. A hook that keeps its own tensor alive
/// makes a reference cycle. An error or panic in a hook is the error of the pass.
///
/// # Errors
///
/// If `tensor` requires no gradient.
///
/// ```
/// use isobar_torch::autograd::{BackwardOptions, backward, register_hook};
/// use tch::Tensor;
///
/// let x = Tensor::from_slice(&[2.0f64]).set_requires_grad(true);
/// let hook = register_hook(&x, |grad| Ok(Some(grad.f_clamp(-1.0, 1.0)?)))?;
/// backward(&[&x.f_square()?], &[], BackwardOptions::default())?;
/// assert_eq!(x.grad().double_value(&[0]), 1.0);
/// hook.remove();
/// # Ok::<(), isobar_torch::Error>(())
/// ```
pub fn register_hook<F>(tensor: &Tensor, hook: F) -> Result<HookHandle>
where
    F: Fn(&Tensor) -> Result<Option<Tensor>, BoxError> + Send + 'static,
{
    let closure: Boxed = Box::new(hook);
    let closure = Box::into_raw(Box::new(closure)).cast();
    // SAFETY: the tensor's handle is valid during the call, and the shim owns the closure in every case.
    let slot = call(|error| unsafe {
        ffi::isobar_register_hook(tensor.as_ptr(), closure, drop_box::<Boxed>, run::<false>, error)
    })?;
    Ok(HookHandle { slot })
}

/// Calls `hook` with `leaf` after each time a gradient was added to its `grad`: where a gradient can be reduced over
/// ranks, or an optimizer step taken, while backward goes on.
///
/// # Errors
///
/// If `leaf` is no leaf that requires a gradient.
pub fn register_post_accumulate_grad_hook<F>(leaf: &Tensor, hook: F) -> Result<HookHandle>
where
    F: Fn(&Tensor) -> Result<(), BoxError> + Send + 'static,
{
    let closure: Boxed = Box::new(move |leaf| hook(leaf).map(|()| None));
    let closure = Box::into_raw(Box::new(closure)).cast();
    // SAFETY: the tensor's handle is valid during the call, and the shim owns the closure in every case.
    let slot = call(|error| unsafe {
        let drop = drop_box::<Boxed>;
        ffi::isobar_register_post_accumulate_hook(leaf.as_ptr(), closure, drop, run::<true>, error)
    })?;
    Ok(HookHandle { slot })
}

/// Calls `f` once at the end of the backward pass that is running, after all gradients are in place: where work that
/// hooks have begun is waited for. To be called from a hook or a custom function's backward.
///
/// An error or panic in `f` is the error of the pass.
///
/// # Errors
///
/// If no backward pass is running on this thread.
pub fn after_backward<F>(f: F) -> Result<()>
where
    F: Fn() -> Result<(), BoxError> + Send + 'static,
{
    let closure: BoxedCallback = Box::new(f);
    let closure = Box::into_raw(Box::new(closure)).cast();
    // SAFETY: the shim owns the closure in every case.
    call(|error| unsafe {
        ffi::isobar_after_backward(closure, drop_box::<BoxedCallback>, run_callback, error);
    })
}

type BoxedCallback = Box<dyn Fn() -> Result<(), BoxError> + Send + 'static>;

extern "C" fn run_callback(boxed: *mut c_void, failure: *mut RawFailure) {
    // SAFETY: the closure is kept alive during the call, and one thread is let in at a time.
    let callback = unsafe { &*boxed.cast::<BoxedCallback>() };
    // SAFETY: the failure is valid and ours during the call.
    let failure = unsafe { &mut *failure };
    catch(|| "a callback after backward".to_owned(), failure, callback);
}

type Boxed = Box<dyn Fn(&Tensor) -> Result<Option<Tensor>, BoxError> + Send + 'static>;

extern "C" fn run<const POST_ACCUMULATE: bool>(
    boxed: *mut c_void,
    grad: *const ffi::C_tensor,
    failure: *mut RawFailure,
) -> *mut ffi::C_tensor {
    // SAFETY: the closure is kept alive during the call, and one thread is let in at a time.
    let hook = unsafe { &*boxed.cast::<Boxed>() };
    // SAFETY: the failure is valid and ours during the call.
    let failure = unsafe { &mut *failure };
    // SAFETY: the handle is valid during the call; it is C++'s, so we don't drop it.
    let grad = ManuallyDrop::new(unsafe { Tensor::from_ptr(grad.cast_mut()) });
    let what = || if POST_ACCUMULATE { "a post-accumulate hook" } else { "a tensor hook" }.to_owned();
    catch(what, failure, || hook(&grad)).map_or(std::ptr::null_mut(), give)
}
