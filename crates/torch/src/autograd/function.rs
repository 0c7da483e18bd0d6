//! Custom functions: one node of the graph whose backward is a closure.

use std::ffi::{CString, c_void};
use std::marker::PhantomData;

use tch::Tensor;

use super::{give, handles, take};
use crate::error::{BoxError, Error, Result, call, catch, drop_box};
use crate::ffi::{self, RawFailure};

/// A differentiable function under construction: name it, say what its backward needs, attach it to its outputs.
///
/// The forward computation is the caller's, done under [`NoGrad`](crate::guard::NoGrad) (a history that an output
/// has nevertheless is cut off). See the [module](super) for an example.
#[must_use = "a function is attached to its outputs by `apply`"]
pub struct Function {
    name: String,
    saved: Vec<Tensor>,
}

impl Function {
    /// Starts a function. The name shows in errors, profiles and `grad_fn`.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), saved: Vec::new() }
    }

    /// Saves tensors, inputs, outputs or others, for [`Context::saved`], numbered in the order of saving.
    ///
    /// They are kept as libtorch keeps its own: a later change in place is an error of backward, they are released
    /// after backward unless the graph is retained, and a saved output makes no reference cycle. A tensor that the
    /// closure captures instead has none of this; capture only what takes no part in the graph.
    pub fn save(mut self, tensors: &[&Tensor]) -> Self {
        self.saved.extend(tensors.iter().map(|tensor| tensor.shallow_clone()));
        self
    }

    /// Attaches the function to `outputs` and returns them as part of the graph.
    ///
    /// `backward` gets a gradient for each output, `None` where none arrived (see [`Context::grad_or_zeros`]), and
    /// returns one for each input, `None` where there is none. It may run on another thread (for CUDA tensors, the
    /// engine's), several times (`retain_graph`), and with gradient mode on (`create_graph`): then its own
    /// operations are differentiated, so that gradients of gradients are right if they are differentiable. An error
    /// or panic in it ends the pass and is the error of [`backward`](super::backward) or [`grad`](super::grad).
    ///
    /// The closure is dropped with the graph, whether or not backward ran. Where gradient mode is off, no input
    /// requires a gradient, or no output can have one, it is dropped at once and the outputs are returned plain.
    /// Outputs of integer or bool dtype take no part in the graph. An output that is also an input, a view, or given
    /// twice comes back as an alias of the same memory with its own history.
    ///
    /// # Errors
    ///
    /// If libtorch refuses an input or output.
    pub fn apply<F>(self, inputs: &[&Tensor], outputs: Vec<Tensor>, backward: F) -> Result<Vec<Tensor>>
    where
        F: Fn(&Context<'_>, &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, BoxError> + Send + 'static,
    {
        let name = CString::new(self.name.replace('\0', " ")).unwrap_or_default();
        let closure = Box::new(Closure { name: self.name, backward: Box::new(backward) });
        let mut results = vec![std::ptr::null_mut(); outputs.len()];
        let [inputs, output_handles, saved] =
            [handles(inputs.iter().copied()), handles(&outputs), handles(&self.saved)];
        // SAFETY: the handles are valid during the call, the arrays as long as said, and the shim owns the closure.
        call(|error| unsafe {
            ffi::isobar_function_apply(
                name.as_ptr(),
                inputs.as_ptr(),
                inputs.len(),
                output_handles.as_ptr(),
                output_handles.len(),
                saved.as_ptr(),
                saved.len(),
                Box::into_raw(closure).cast(),
                drop_box::<Closure>,
                run,
                results.as_mut_ptr(),
                error,
            );
        })?;
        // SAFETY: on success each result is a handle that we own.
        Ok(results.into_iter().filter_map(|handle| unsafe { take(handle) }).collect())
    }
}

/// Context of a backward closure, valid during the call.
pub struct Context<'a> {
    node: *const ffi::Node,
    _during_call: PhantomData<&'a ffi::Node>,
}

impl Context<'_> {
    /// The saved tensor of this number, with its place in the graph.
    ///
    /// # Errors
    ///
    /// If it was changed in place since it was saved, if it was released because backward ran before without
    /// `retain_graph`, or if there is none of that number.
    pub fn saved(&self, index: usize) -> Result<Tensor> {
        // SAFETY: the node is alive during the call.
        let count = unsafe { ffi::isobar_node_saved_count(self.node) };
        if index >= count {
            return Err(Error::Argument(format!(
                "saved tensor {index} was asked for, but {count} were saved"
            )));
        }
        // SAFETY: as above.
        let handle = call(|error| unsafe { ffi::isobar_node_saved(self.node, index, error) })?;
        // SAFETY: a fresh handle that we own; never null on success.
        Ok(unsafe { Tensor::from_ptr(handle) })
    }

    /// Returns whether the running pass needs the gradient of this input; `false` if there is no such input.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        // SAFETY: the node is alive during the call.
        unsafe { ffi::isobar_node_needs_input_grad(self.node, index) }
    }

    /// The gradient of output `index`, as zeros of the output's shape where none arrived.
    ///
    /// A collective in a backward needs this: all ranks take part, also those that got no gradient.
    ///
    /// # Errors
    ///
    /// If there is no such output, or it is of a dtype without gradients.
    pub fn grad_or_zeros(&self, grads: &[Option<Tensor>], index: usize) -> Result<Tensor> {
        if let Some(Some(grad)) = grads.get(index) {
            return Ok(grad.shallow_clone());
        }
        // SAFETY: the node is alive during the call.
        let handle = call(|error| unsafe { ffi::isobar_node_output_zeros(self.node, index, error) })?;
        // SAFETY: a fresh handle that we own; never null on success.
        Ok(unsafe { Tensor::from_ptr(handle) })
    }
}

type BackwardFn =
    dyn Fn(&Context<'_>, &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, BoxError> + Send + 'static;

struct Closure {
    name: String,
    backward: Box<BackwardFn>,
}

extern "C" fn run(
    boxed: *mut c_void,
    node: *const ffi::Node,
    grads: *mut *mut ffi::C_tensor,
    grad_count: usize,
    results: *mut *mut ffi::C_tensor,
    result_count: usize,
    failure: *mut RawFailure,
) {
    // SAFETY: the node owns the closure, is alive during the call, and lets one thread in at a time, to which the
    // closure, being `Send`, may have come.
    let closure = unsafe { &*boxed.cast::<Closure>() };
    // SAFETY: the failure is valid and ours during the call.
    let failure = unsafe { &mut *failure };
    // SAFETY: the array is as long as said, and its handles are given to us.
    let grads: Vec<_> = (0..grad_count).map(|i| unsafe { take(*grads.add(i)) }).collect();
    let what = || format!("backward of '{}'", closure.name);
    let computed = catch(what, failure, || {
        let context = Context { node, _during_call: PhantomData };
        let computed = (closure.backward)(&context, &grads)?;
        drop(grads);
        if computed.len() != result_count {
            let got = computed.len();
            return Err(format!("it returned {got} gradients for {result_count} inputs").into());
        }
        if computed.iter().flatten().any(|gradient| !gradient.defined()) {
            return Err("it returned an undefined tensor; no gradient is None".into());
        }
        Ok(computed)
    });
    for (i, gradient) in computed.into_iter().enumerate() {
        if let Some(gradient) = gradient {
            // SAFETY: `computed` is empty or as long as the array (checked above); C++ takes the handle.
            unsafe { *results.add(i) = give(gradient) };
        }
    }
}
