//! Concatenation of tensors.

use tch::Tensor;

use crate::error::Result;
use crate::layout::{Dim, Interval, Layout, Sizes, join};
use crate::ops::{operator, refuse, resolve};
use crate::tensor::{ShardTensor, same_mesh};

impl ShardTensor {
    /// Concatenates tensors along `dim`. Elements stay on their ranks: along a split dim, a rank's part of the result
    /// is its parts of all tensors. The other dims follow the largest tensor, or one that splits these further: cutting costs nothing.
    ///
    /// # Errors
    ///
    /// No tensors, extents that differ along other dims, different meshes; the errors of the exchange.
    pub fn cat(tensors: &[&Self], dim: i64) -> Result<Self> {
        const OP: &str = "cat";
        operator(OP, tensors, args!("dim": dim), || {
            let [first, ..] = tensors else { return refuse(OP, "no tensors were given") };
            same_mesh(OP, tensors)?;
            let dim = resolve(OP, dim, first.ndim())?;
            let fits = |other: &&Self| {
                other.ndim() == first.ndim()
                    && (0..first.ndim()).all(|d| d == dim || other.shape()[d] == first.shape()[d])
            };
            if let Some(other) = tensors.iter().find(|other| !fits(other)) {
                let reason = format!("{:?} does not fit {:?} along dim {dim}", other.shape(), first.shape());
                return refuse(OP, reason);
            }
            let resolved: Vec<Self> =
                tensors.iter().map(|tensor| tensor.resolved()).collect::<Result<_>>()?;
            let largest = target(&resolved, Some(dim));
            let split = &largest.dims()[dim];
            let mut aligned = Vec::with_capacity(tensors.len());
            let mut parts: Vec<Vec<Interval>> = vec![Vec::new(); split.parts.len()];
            let mut at = 0;
            for tensor in &resolved {
                let own = &tensor.layout().dims()[dim];
                let along = if own.axes == split.axes {
                    own.clone()
                } else {
                    let mesh = largest.mesh_shape();
                    let whole = Dim::whole(own.extent());
                    split.axes.iter().fold(whole, |dim, &axis| dim.split(axis, mesh[axis], &Sizes::Chunk, 1))
                };
                for (part, more) in parts.iter_mut().zip(&along.parts) {
                    part.extend(more.iter().map(|i| Interval::new(i.start + at, i.len)));
                }
                at += own.extent();
                aligned.push(tensor.to_layout(&largest.with_dim(dim, along))?);
            }
            let parts = parts.into_iter().map(|part| join(part.into_iter())).collect();
            let layout = largest.with_dim(dim, Dim { axes: split.axes.clone(), parts });
            let pieces = layout.dims()[dim].parts.iter().map(Vec::len).max().unwrap_or(0);
            let joined = Self::joined(OP, &aligned, layout, |parts| Tensor::f_cat(parts, dim as i64))?;
            // Parts of very many pieces cost more than one exchange.
            if pieces > MAX_PIECES { joined.consecutive() } else { Ok(joined) }
        })
    }

    /// Stacks tensors of one shape along a new `dim`, laid out as [`cat`](Self::cat) does.
    ///
    /// # Errors
    ///
    /// No tensors, shapes that differ, different meshes; the errors of the exchange.
    pub fn stack(tensors: &[&Self], dim: i64) -> Result<Self> {
        const OP: &str = "stack";
        operator(OP, tensors, args!("dim": dim), || {
            let [first, ..] = tensors else { return refuse(OP, "no tensors were given") };
            same_mesh(OP, tensors)?;
            let at = resolve(OP, dim, first.ndim() + 1)?;
            if let Some(other) = tensors.iter().find(|other| other.shape() != first.shape()) {
                return refuse(OP, format!("shapes {:?} and {:?} differ", first.shape(), other.shape()));
            }
            let resolved: Vec<Self> =
                tensors.iter().map(|tensor| tensor.resolved()).collect::<Result<_>>()?;
            let target = target(&resolved, None);
            let aligned: Vec<Self> =
                resolved.iter().map(|tensor| tensor.to_layout(&target)).collect::<Result<_>>()?;
            let mut dims = target.dims().to_vec();
            dims.insert(at, Dim::whole(tensors.len() as i64));
            Self::joined(OP, &aligned, target.with_dims(dims), |parts| Tensor::f_stack(parts, at as i64))
        })
    }
}

/// More pieces than this a part shall not be in.
const MAX_PIECES: usize = 256;

/// The layout of the largest tensor, or of one that is split as that is and along more axes, such as a field beside replicated
/// positions: the largest is then cut, which sends nothing. Along the dim `joined`, the split is that of the largest.
fn target(tensors: &[ShardTensor], joined: Option<usize>) -> Layout {
    let axes = |tensor: &ShardTensor| tensor.layout().sharding_axes().len();
    let largest = tensors.iter().rev().max_by_key(|tensor| (tensor.layout().numel(), axes(tensor)));
    let largest = largest.unwrap_or(&tensors[0]);
    let refines = |tensor: &&ShardTensor| {
        let dims = largest.layout().dims().iter().zip(tensor.layout().dims()).enumerate();
        dims.into_iter().all(|(dim, (of_largest, own))| match Some(dim) == joined {
            true => of_largest.axes == own.axes,
            false => !of_largest.is_split() || of_largest == own,
        })
    };
    let finest =
        tensors.iter().rev().filter(refines).max_by_key(|tensor| (axes(tensor), tensor.layout().numel()));
    finest.unwrap_or(largest).layout().clone()
}

crate::register! {
    /// The tensors one after the other along `dim` (0 if not given).
    "cat"(; dim) Followed: |call| ShardTensor::cat(call.tensors(), call.or("dim", 0)?);
    /// The tensors as slices of a new dim `dim` (0 if not given).
    "stack"(; dim) Followed: |call| ShardTensor::stack(call.tensors(), call.or("dim", 0)?);
}
