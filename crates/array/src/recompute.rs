//! Activation checkpointing: activations are recomputed in backward.

use std::cell::Cell;
use std::marker::PhantomData;

use isobar_torch::BoxError;
use isobar_torch::autograd::{Function, backward_within};
use isobar_torch::guard::{Autocast, EnableGrad, NoGrad, autocast_kind, is_grad_enabled};
use tch::{Device, Kind, Tensor};

use crate::array::Array;
use crate::error::{Error, argument, named};
use crate::random::Generator;

const OP: &str = "checkpoint";

/// State of the thread of the forward pass that a recomputation needs too, which may run on another thread.
pub trait Surroundings: Send + 'static {
    /// Keeps the state while it lives.
    type Guard;

    /// Restores the state on the calling thread.
    fn enter(&self) -> Self::Guard;
}

impl Surroundings for () {
    type Guard = ();

    fn enter(&self) {}
}

/// Runs `f` on `inputs` and keeps none of its activations: backward runs `f` again and differentiates it (Chen et al., *Training
/// Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174; PyTorch's `torch.utils.checkpoint`).
///
/// Parameters that `f` captures get their gradients as usual, and their hooks run. With a `generator`, `f` receives it, and in
/// backward one that repeats the same draws. Other side effects of `f` happen twice: [`is_recomputing`] tells when.
/// `surroundings` is state of the thread that `f` needs; autocast is restored without it.
///
/// # Errors
///
/// Those of `f`; an error in backward is the error of the pass. Gradients of gradients are not computed through it, nor a pass
/// that asks for the gradients of some inputs only.
///
/// ```
/// use isobar_array::{Elementwise, Error, recompute};
/// use tch::Tensor;
///
/// let x = Tensor::from_slice(&[2.0]).set_requires_grad(true);
/// let y = recompute(&[&x], None, (), |inputs, _| inputs[0].mul(&inputs[0]))?;
/// y.sum(tch::Kind::Double).backward();
/// assert_eq!(x.grad(), Tensor::from_slice(&[4.0]));
/// # Ok::<(), Error>(())
/// ```
pub fn recompute<A, E, S, F>(
    inputs: &[&A],
    generator: Option<&Generator>,
    surroundings: S,
    f: F,
) -> Result<A, E>
where
    A: Array,
    E: From<Error> + std::error::Error + Send + Sync + 'static,
    S: Surroundings,
    F: Fn(&[A], Option<&Generator>) -> Result<A, E> + Send + 'static,
{
    if !is_grad_enabled() {
        let inputs: Vec<A> = inputs.iter().map(|input| input.shallow_clone()).collect();
        return f(&inputs, generator);
    }
    RECORDED.set(RECORDED.get() + 1);
    let before = generator.cloned();
    let (mut parts, mut layouts) = (Vec::new(), Vec::new());
    for input in inputs {
        let (part, layout) = input.into_local()?;
        parts.push(part);
        layouts.push(layout);
    }
    let (value, layout) = {
        let _no_grad = NoGrad::new();
        let inputs: Vec<A> = parts
            .iter()
            .zip(&layouts)
            .map(|(part, layout)| A::from_local(part.shallow_clone(), layout))
            .collect();
        // A partial sum stays one: its reduction is left to whoever uses it.
        f(&inputs, generator)?.into_local_unreduced()
    };

    // Tensors that require a gradient may only be captured; this input then attaches the result to the graph.
    let anchor = Tensor::f_zeros([0], (Kind::Float, value.device()))
        .and_then(|anchor| anchor.f_set_requires_grad(true));
    let anchor = named(OP, &[&value], anchor)?;
    let wanted: Vec<bool> = parts.iter().map(Tensor::requires_grad).collect();
    let saved: Vec<&Tensor> = parts.iter().collect();
    let attached: Vec<&Tensor> = saved.iter().copied().chain([&anchor]).collect();
    let pass = Pass::current(value.device(), surroundings);
    let outputs = Function::new(OP).save(&saved).apply(&attached, vec![value], move |ctx, grads| {
        if is_grad_enabled() {
            return Err(argument(
                OP,
                "gradients of gradients are not computed through what is computed again",
            )
            .into());
        }
        let grad = ctx.grad_or_zeros(grads, 0)?;
        let leaf = |(index, &wanted): (usize, &bool)| -> Result<Tensor, BoxError> {
            Ok(ctx.saved(index)?.f_detach()?.f_set_requires_grad(wanted)?)
        };
        let leaves = wanted.iter().enumerate().map(leaf).collect::<Result<Vec<Tensor>, BoxError>>()?;
        let value = pass.within(|| {
            let inputs: Vec<A> = leaves
                .iter()
                .zip(&layouts)
                .map(|(leaf, layout)| A::from_local(leaf.shallow_clone(), layout))
                .collect();
            // The pass may come again, over a graph that was kept.
            let (value, _) = f(&inputs, before.clone().as_ref())?.into_local_unreduced();
            Ok::<_, E>(value)
        })??;
        if value.requires_grad() {
            backward_within(&[&value], &[Some(grad)])?;
        }
        let gradient = |leaf: &Tensor| -> Result<Option<Tensor>, BoxError> {
            let gradient = leaf.f_grad()?;
            Ok(gradient.defined().then_some(gradient))
        };
        leaves.iter().map(gradient).chain([Ok(None)]).collect()
    });
    let value = outputs.map_err(Error::from)?.into_iter().next();
    let value = value.ok_or_else(|| argument(OP, "libtorch gave no result"))?;
    Ok(A::from_local(value, &layout))
}

thread_local! {
    static RECOMPUTING: Cell<bool> = const { Cell::new(false) };
    static RECORDED: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of [`recompute`] calls that this thread has recorded for backward. Backward accumulates a separate gradient of
/// the captured parameters for each call.
///
/// ```
/// use isobar_array::{Elementwise, Error, recompute, recomputed_calls};
/// use tch::Tensor;
///
/// let before = recomputed_calls();
/// let x = Tensor::from_slice(&[2.0]).set_requires_grad(true);
/// recompute(&[&x], None, (), |inputs, _| inputs[0].mul(&inputs[0]))?;
/// assert_eq!(recomputed_calls() - before, 1);
/// # Ok::<(), Error>(())
/// ```
pub fn recomputed_calls() -> u64 {
    RECORDED.get()
}

/// Returns true while the calling thread recomputes activations: code with side effects, such as running statistics, skips them
/// then.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use isobar_array::{Elementwise, Error, is_recomputing, recompute};
/// use tch::Tensor;
///
/// static FORWARD: AtomicUsize = AtomicUsize::new(0);
/// let x = Tensor::from_slice(&[2.0]).set_requires_grad(true);
/// let y = recompute(&[&x], None, (), |inputs, _| {
///     if !is_recomputing() {
///         FORWARD.fetch_add(1, Ordering::Relaxed);
///     }
///     inputs[0].mul(&inputs[0])
/// })?;
/// y.sum(tch::Kind::Double).backward();
/// assert_eq!(FORWARD.load(Ordering::Relaxed), 1);
/// # Ok::<(), Error>(())
/// ```
pub fn is_recomputing() -> bool {
    RECOMPUTING.get()
}

struct Recomputing {
    before: bool,
    _not_send: PhantomData<*const ()>,
}

impl Recomputing {
    fn new() -> Self {
        Self { before: RECOMPUTING.replace(true), _not_send: PhantomData }
    }
}

impl Drop for Recomputing {
    fn drop(&mut self) {
        RECOMPUTING.set(self.before);
    }
}

/// State of the thread of the forward pass.
struct Pass<S> {
    surroundings: S,
    /// The dtype of autocast, where it is on.
    precision: Option<(Device, Kind)>,
}

impl<S: Surroundings> Pass<S> {
    fn current(device: Device, surroundings: S) -> Self {
        Self { surroundings, precision: autocast_kind(device).map(|kind| (device, kind)) }
    }

    /// Runs `f`, with a graph, in the state of the forward pass.
    fn within<T>(&self, f: impl FnOnce() -> T) -> isobar_torch::Result<T> {
        let _surroundings = self.surroundings.enter();
        let _recomputing = Recomputing::new();
        let _grad = EnableGrad::new();
        let _precision = self.precision.map(|(device, kind)| Autocast::new(device, kind)).transpose()?;
        Ok(f())
    }
}
