//! Activation checkpointing: what lies between is computed again in backward.

use std::cell::Cell;
use std::marker::PhantomData;

use isobar_torch::BoxError;
use isobar_torch::autograd::{Function, backward_within};
use isobar_torch::guard::{Autocast, EnableGrad, NoGrad, autocast_kind, is_grad_enabled};
use tch::{Device, Kind, Tensor};

use crate::array::{Array, argument, named};
use crate::context::{
    CurrentMesh, PromotionGuard, forbid_hidden_communication, is_hidden_communication_forbidden, promotion,
};
use crate::error::Error;
use crate::random::Generator;
use crate::trace::Label;

const OP: &str = "checkpoint";

/// What `f` makes of `inputs`, keeping none of what it computes on the way: backward runs `f` again, and goes on through it
/// (Chen et al., *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174; PyTorch's `torch.utils.checkpoint`).
///
/// Parameters that `f` captures get their gradients as ever, and their hooks run. With a `generator`, `f` is given it, and
/// in backward one that makes the same draws again, whatever was drawn since. What `f` changes besides, it changes twice:
/// [`is_recomputing`] tells when.
///
/// Where arrays are sharded all ranks call, and `f` communicates again in backward, in the same order on all of them. Without
/// gradients this is a call of `f`.
///
/// # Errors
///
/// Those of `f`; what it reports in backward is the error of the pass. So are gradients of gradients, and a pass that wants the
/// gradients of some inputs only ([`grad`](crate::grad)), which are not computed through it.
///
/// ```
/// use isobar_shard::{Elementwise, Error, checkpoint};
/// use tch::Tensor;
///
/// let x = Tensor::from_slice(&[2.0]).set_requires_grad(true);
/// let y = checkpoint(&[&x], None, |inputs, _| inputs[0].mul(&inputs[0]))?;
/// y.sum(tch::Kind::Double).backward();
/// assert_eq!(x.grad(), Tensor::from_slice(&[4.0]));
/// # Ok::<(), Error>(())
/// ```
pub fn checkpoint<A, E, F>(inputs: &[&A], generator: Option<&Generator>, f: F) -> Result<A, E>
where
    A: Array,
    E: From<Error> + std::error::Error + Send + Sync + 'static,
    F: Fn(&[A], Option<&Generator>) -> Result<A, E> + Send + 'static,
{
    if !is_grad_enabled() {
        let inputs: Vec<A> = inputs.iter().map(|input| input.shallow_clone()).collect();
        return f(&inputs, generator);
    }
    let before = generator.cloned();
    let (mut parts, mut layouts) = (Vec::new(), Vec::new());
    for input in inputs {
        let (part, layout) = input.take_apart()?;
        parts.push(part);
        layouts.push(layout);
    }
    let (value, layout) = {
        let _no_grad = NoGrad::new();
        let inputs: Vec<A> = parts
            .iter()
            .zip(&layouts)
            .map(|(part, layout)| A::put_together(part.shallow_clone(), layout))
            .collect();
        f(&inputs, generator)?.take_apart()?
    };

    // What requires a gradient may be captured only: then this input makes the result one of the graph.
    let anchor = Tensor::f_zeros([0], (Kind::Float, value.device()))
        .and_then(|anchor| anchor.f_set_requires_grad(true));
    let anchor = named(OP, &[&value], anchor)?;
    let wanted: Vec<bool> = parts.iter().map(Tensor::requires_grad).collect();
    let saved: Vec<&Tensor> = parts.iter().collect();
    let attached: Vec<&Tensor> = saved.iter().copied().chain([&anchor]).collect();
    let surroundings = Surroundings::current(value.device());
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
        let value = surroundings.within(|| {
            let inputs: Vec<A> = leaves
                .iter()
                .zip(&layouts)
                .map(|(leaf, layout)| A::put_together(leaf.shallow_clone(), layout))
                .collect();
            // The pass may come again, over a graph that was kept.
            let (value, _) = f(&inputs, before.clone().as_ref())?.take_apart()?;
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
    Ok(A::put_together(value, &layout))
}

thread_local! {
    static RECOMPUTING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread computes something again for [`checkpoint`]: what has changed something the first time, as
/// running statistics, leaves it then.
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

/// What held for the thread of the forward pass; backward may run on another one.
struct Surroundings {
    mesh: Option<isobar_mesh::DeviceMesh>,
    promotion: crate::context::Promotion,
    forbidden: bool,
    label: Label,
    /// The kind of mixed precision, where it is on.
    precision: Option<(Device, Kind)>,
}

impl Surroundings {
    fn current(device: Device) -> Self {
        let precision = autocast_kind(device).map(|kind| (device, kind));
        let forbidden = is_hidden_communication_forbidden();
        Self {
            mesh: CurrentMesh::get(),
            promotion: promotion(),
            forbidden,
            label: Label::current(),
            precision,
        }
    }

    /// Runs `f`, with a graph, as it was run at first.
    fn within<T>(&self, f: impl FnOnce() -> T) -> isobar_torch::Result<T> {
        let _mesh = self.mesh.as_ref().map(CurrentMesh::enter);
        let _promotion = PromotionGuard::new(self.promotion);
        let _forbidden = self.forbidden.then(forbid_hidden_communication);
        let _label = self.label.backward();
        let _recomputing = Recomputing::new();
        let _grad = EnableGrad::new();
        let _precision = self.precision.map(|(device, kind)| Autocast::new(device, kind)).transpose()?;
        Ok(f())
    }
}
