//! Plain tensors beside sharded ones.

use std::fmt::Debug;
use std::ops::Deref;

use tch::Tensor;

use crate::context::{Promotion, promotion};
use crate::error::{Error, Result};
use crate::tensor::ShardTensor;

/// Second operand of a [`ShardTensor`]'s operator: another one, or a plain tensor that is the same on all ranks and counts as
/// replicated, if [`promotion`] allows it.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_mesh::DeviceMesh;
/// use isobar_shard::{Placement, Promotion, PromotionGuard, ShardTensor};
/// use tch::Tensor;
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
/// let x = ShardTensor::distribute(&Tensor::from_slice(&[1.0, 2.0]), &mesh, &[Placement::Shard(0)])?;
/// let scale = Tensor::from_slice(&[3.0, 4.0]);
/// assert_eq!(x.mul(&scale)?.full_tensor(None)?, Tensor::from_slice(&[3.0, 8.0]));
///
/// let _off = PromotionGuard::new(Promotion::Off);
/// assert!(x.mul(&scale).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Operand: Debug + sealed::Sealed {
    /// It as a tensor on the mesh of `x`. Does not communicate.
    ///
    /// # Errors
    ///
    /// A plain tensor with dims where promotion is [off](Promotion::Off).
    fn promote(&self, op: &str, x: &ShardTensor) -> Result<OnMesh<'_>>;
}

/// An [`Operand`] on a mesh.
pub enum OnMesh<'a> {
    /// It was.
    Sharded(&'a ShardTensor),
    /// It was a plain tensor.
    Promoted(ShardTensor),
}

impl Deref for OnMesh<'_> {
    type Target = ShardTensor;

    fn deref(&self) -> &ShardTensor {
        match self {
            Self::Sharded(tensor) => tensor,
            Self::Promoted(tensor) => tensor,
        }
    }
}

impl Operand for ShardTensor {
    fn promote(&self, _op: &str, _x: &ShardTensor) -> Result<OnMesh<'_>> {
        Ok(OnMesh::Sharded(self))
    }
}

impl Operand for Tensor {
    fn promote(&self, op: &str, x: &ShardTensor) -> Result<OnMesh<'_>> {
        let shape = self.size();
        // Those without dims are numbers, and always welcome.
        let mode = if shape.is_empty() { Promotion::Silent } else { promotion() };
        match mode {
            Promotion::Silent => {}
            Promotion::Warn => tracing::warn!(
                operator = op,
                "{op}: a plain tensor of shape {shape:?} meets {}, and is taken for replicated",
                x.layout()
            ),
            Promotion::Off => {
                let met = format!("a plain tensor of shape {shape:?} meets {}", x.layout());
                let reason = format!("{op}: {met}; distribute it, or allow promotion");
                return Err(Error::from(isobar_array::Error::Argument { op: "promotion", reason }));
            }
        }
        let layout = x.layout().replicated_shape(&shape);
        Ok(OnMesh::Promoted(ShardTensor::new(self.shallow_clone(), layout)))
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::ShardTensor {}
    impl Sealed for super::Tensor {}
}

/// An operand that need not be there, on the mesh of `x`.
pub(crate) fn promote_optional<'a>(
    op: &str,
    x: &ShardTensor,
    operand: Option<&'a dyn Operand>,
) -> Result<Option<OnMesh<'a>>> {
    operand.map(|operand| operand.promote(op, x)).transpose()
}

/// The tensor as an operand.
pub(crate) fn operand(tensor: Option<&ShardTensor>) -> Option<&dyn Operand> {
    tensor.map(|tensor| tensor as &dyn Operand)
}

impl ShardTensor {
    /// A plain tensor, the same on all ranks, as a replicated one on this tensor's mesh: what operators do where the two meet,
    /// for those that take lists of sharded tensors, as [`cat`](Self::cat). Does not communicate.
    ///
    /// # Errors
    ///
    /// A tensor with dims where promotion is [off](Promotion::Off).
    pub fn meet(&self, plain: &Tensor) -> Result<Self> {
        Ok(plain.promote("meet", self)?.shallow_clone())
    }
}
