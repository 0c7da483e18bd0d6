//! Activation checkpointing of sharded and dense arrays: recomputation in the forward pass's mesh, promotion mode and module.

use isobar_array::{Array, Generator, Surroundings, recompute};
use isobar_collectives::trace::{Label, LabelGuard};
use isobar_mesh::DeviceMesh;

use crate::context::{
    CurrentMesh, ForbidHiddenCommunication, Promotion, PromotionGuard, forbid_hidden_communication,
    is_hidden_communication_forbidden, promotion,
};

/// Runs `f` on `inputs` and keeps none of its activations: backward runs `f` again and differentiates it (Chen et al., *Training
/// Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174; PyTorch's `torch.utils.checkpoint`).
///
/// Parameters that `f` captures get their gradients as usual, and their hooks run. With a `generator`, `f` receives it, and in
/// backward one that repeats the same draws. Other side effects of `f` happen twice: [`isobar_array::is_recomputing`] tells when.
///
/// With sharded arrays all ranks call, and `f` communicates again in backward, in the same order on all of them. Without
/// gradients this is a call of `f`.
///
/// # Errors
///
/// Those of `f`; an error in backward is the error of the pass. Gradients of gradients are not computed through it, nor a pass
/// that asks for the gradients of some inputs only ([`grad`](crate::grad)).
///
/// ```
/// use isobar_array::Elementwise;
/// use isobar_shard::{Error, checkpoint};
/// use tch::Tensor;
///
/// let x = Tensor::from_slice(&[2.0]).set_requires_grad(true);
/// let y = checkpoint(&[&x], None, |inputs, _| Ok::<_, Error>(inputs[0].mul(&inputs[0])?))?;
/// y.sum(tch::Kind::Double).backward();
/// assert_eq!(x.grad(), Tensor::from_slice(&[4.0]));
/// # Ok::<(), Error>(())
/// ```
pub fn checkpoint<A, E, F>(inputs: &[&A], generator: Option<&Generator>, f: F) -> Result<A, E>
where
    A: Array,
    E: From<isobar_array::Error> + std::error::Error + Send + Sync + 'static,
    F: Fn(&[A], Option<&Generator>) -> Result<A, E> + Send + 'static,
{
    recompute(inputs, generator, Context::current(), f)
}

/// State of the thread of the forward pass; backward may run on another one.
struct Context {
    mesh: Option<DeviceMesh>,
    promotion: Promotion,
    forbidden: bool,
    label: Label,
}

impl Context {
    fn current() -> Self {
        Self {
            mesh: CurrentMesh::get(),
            promotion: promotion(),
            forbidden: is_hidden_communication_forbidden(),
            label: Label::current(),
        }
    }
}

/// Guards in the order in which they are dropped: the reverse of that in which they were made.
struct Entered {
    _label: LabelGuard,
    _forbidden: Option<ForbidHiddenCommunication>,
    _promotion: PromotionGuard,
    _mesh: Option<CurrentMesh>,
}

impl Surroundings for Context {
    type Guard = Entered;

    fn enter(&self) -> Entered {
        let mesh = self.mesh.as_ref().map(CurrentMesh::enter);
        let promotion = PromotionGuard::new(self.promotion);
        let forbidden = self.forbidden.then(forbid_hidden_communication);
        Entered { _label: self.label.backward(), _forbidden: forbidden, _promotion: promotion, _mesh: mesh }
    }
}
