//! Gradients of sharded tensors.

use isobar_array::kernel::{Dtype, check_dtypes};
use isobar_torch::BoxError;
use isobar_torch::autograd::{self, BackwardOptions, HookHandle};
use tch::Tensor;

use super::ShardTensor;
use crate::error::{Error, Result};

impl ShardTensor {
    /// Returns whether its gradient is computed.
    pub fn requires_grad(&self) -> bool {
        self.local.requires_grad()
    }

    /// Sets whether the gradient of this leaf is computed. All ranks of the mesh must pass the same value.
    ///
    /// # Errors
    ///
    /// A dtype that has no gradients; a tensor that was computed from others, of which only a
    /// [`detach`](Self::detach)ed one can be a leaf.
    pub fn set_requires_grad(self, requires_grad: bool) -> Result<Self> {
        if requires_grad {
            let tensor = ("the tensor", self.kind(), Dtype::FloatingOrComplex);
            check_dtypes("requires_grad", [tensor], self.device())?;
        }
        let local = self.local.f_set_requires_grad(requires_grad).map_err(|e| failed("requires_grad", e))?;
        Ok(Self::new(local, self.layout))
    }

    /// Returns whether the tensor is a leaf: created, not computed from tensors that require gradients.
    pub fn is_leaf(&self) -> bool {
        self.source().is_leaf()
    }

    /// Detaches the tensor from the autograd graph.
    #[must_use]
    pub fn detach(&self) -> Self {
        Self { watched: self.watched.clone(), ..Self::new(self.local.detach(), self.layout.clone()) }
    }

    /// The gradient that backward passes have added up in this leaf: laid out as the tensor, replicated where it is partial.
    /// One that is left [pending](crate::MeshParams::pending) is `Partial(Sum)` along the axes where it is.
    pub fn grad(&self) -> Option<Self> {
        let grad = self.source().grad();
        grad.defined().then(|| Self::new(grad, self.source_layout()))
    }

    /// Forgets the gradient.
    pub fn zero_grad(&mut self) {
        match &mut self.pending {
            Some(pending) => pending.zero_grad(),
            None => self.local.zero_grad(),
        }
    }

    /// Computes the gradients of the leaves that this tensor, of one element, was computed from. A partial tensor is reduced
    /// first.
    ///
    /// All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// A tensor of more elements than one; one without history; the errors of the adjoints' exchanges.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Placement, ShardTensor};
    /// use tch::Tensor;
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let x = ShardTensor::distribute(&Tensor::from_slice(&[1.0, 2.0, 3.0]), &mesh, &[Placement::Shard(0)]);
    ///     let x = x.unwrap().set_requires_grad(true).unwrap();
    ///     x.mul(&x).unwrap().sum().unwrap().backward().unwrap();
    ///     // 2x, laid out as x.
    ///     let grad = x.grad().unwrap();
    ///     assert_eq!(grad.placements(), [Placement::Shard(0)]);
    ///     assert_eq!(grad.full_tensor(None).unwrap(), Tensor::from_slice(&[2.0, 4.0, 6.0]));
    /// });
    /// ```
    pub fn backward(&self) -> Result<()> {
        if self.layout.numel() != 1 {
            return Err(Error::from(isobar_array::Error::Argument {
                op: "backward",
                reason: format!(
                    "{} has {} elements; give backward_from its gradient",
                    self.layout,
                    self.layout.numel()
                ),
            }));
        }
        self.backward_from(None, BackwardOptions::default())
    }

    /// Runs backward from a gradient of this tensor, in any layout; ones by default.
    ///
    /// # Errors
    ///
    /// A gradient of another shape; one without history; the errors of the adjoints' exchanges.
    pub fn backward_from(&self, gradient: Option<&Self>, options: BackwardOptions) -> Result<()> {
        let whole = self.resolved()?;
        let gradient = cotangent(&whole, gradient)?;
        Ok(autograd::backward(&[&whole.local], &[Some(gradient)], options)?)
    }

    /// Calls `hook` with the gradient of this tensor in each backward pass that computes it; what it returns replaces the
    /// gradient. All ranks register the same hooks in the same order, and the hook may communicate.
    ///
    /// # Errors
    ///
    /// A tensor that requires no gradient.
    pub fn register_hook<F>(&self, hook: F) -> Result<HookHandle>
    where
        F: Fn(&Self) -> Result<Option<Self>> + Send + 'static,
    {
        let layout = self.source_layout();
        let run = move |grad: &Tensor| -> Result<Option<Tensor>, BoxError> {
            let grad = Self::new(grad.shallow_clone(), layout.clone());
            match hook(&grad)? {
                Some(other) => Ok(Some(other.to_layout(&layout)?.local)),
                None => Ok(None),
            }
        };
        Ok(autograd::register_hook(self.source(), run)?)
    }
}

/// The gradients of `outputs` with respect to `inputs`, in their order, each laid out as its input. `grad_outputs` are the
/// gradients that the outputs start with, in any layout; `None`, or nothing, stands for ones. No `grad` changes.
///
/// All ranks of the mesh call. With [`BackwardOptions::create_graph`], the gradients have gradients.
///
/// # Errors
///
/// Gradients of other shapes than the outputs'; inputs that the outputs do not depend on, unless these are allowed; the errors
/// of the adjoints' exchanges.
pub fn grad(
    outputs: &[&ShardTensor],
    inputs: &[&ShardTensor],
    grad_outputs: &[Option<&ShardTensor>],
    options: BackwardOptions,
) -> Result<Vec<Option<ShardTensor>>> {
    let wholes: Vec<ShardTensor> = outputs.iter().map(|output| output.resolved()).collect::<Result<_>>()?;
    let given = |index: usize| grad_outputs.get(index).copied().flatten();
    let cotangents: Vec<Option<Tensor>> = wholes
        .iter()
        .enumerate()
        .map(|(index, whole)| cotangent(whole, given(index)).map(Some))
        .collect::<Result<_>>()?;
    let roots: Vec<&Tensor> = wholes.iter().map(|whole| &whole.local).collect();
    let leaves: Vec<&Tensor> = inputs.iter().map(|input| input.source()).collect();
    let grads = autograd::grad(&roots, &leaves, &cotangents, options)?;
    let lay_out = |(grad, input): (Option<Tensor>, &&ShardTensor)| {
        grad.map(|local| ShardTensor::new(local, input.source_layout()))
    };
    Ok(grads.into_iter().zip(inputs).map(lay_out).collect())
}

/// The gradient with which an output starts, as its parts are.
fn cotangent(whole: &ShardTensor, gradient: Option<&ShardTensor>) -> Result<Tensor> {
    match gradient {
        Some(gradient) => Ok(gradient.to_layout(&whole.layout)?.local),
        None => whole.local.f_ones_like().map_err(|e| failed("backward", e)),
    }
}

fn failed(op: &'static str, source: tch::TchError) -> Error {
    Error::from(isobar_array::Error::Operator { op, shapes: "a part".into(), source })
}
