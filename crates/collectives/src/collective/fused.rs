//! One reduction for a whole structure of tensors.

use std::collections::BTreeMap;

use isobar_torch::guard::NoGrad;
use tch::{Kind, Tensor};

use crate::collective::all_reduce;
use crate::engine::call::Call;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory;
use crate::local::reduce::ReduceOp;

/// A structure of tensors: a tensor, or a list, map or option of structures. Maps are in the order of their keys.
pub trait Structure: Sized {
    /// Its tensors, in order.
    fn leaves(&self) -> Vec<&Tensor>;

    /// Rebuilds the structure with other tensors, taken from `leaves` in order.
    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Tensor>) -> Option<Self>;
}

impl Structure for Tensor {
    fn leaves(&self) -> Vec<&Tensor> {
        vec![self]
    }

    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Tensor>) -> Option<Self> {
        leaves.next()
    }
}

impl<S: Structure> Structure for Vec<S> {
    fn leaves(&self) -> Vec<&Tensor> {
        self.iter().flat_map(S::leaves).collect()
    }

    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Tensor>) -> Option<Self> {
        self.iter().map(|s| s.rebuild(leaves)).collect()
    }
}

impl<S: Structure> Structure for Option<S> {
    fn leaves(&self) -> Vec<&Tensor> {
        self.iter().flat_map(S::leaves).collect()
    }

    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Tensor>) -> Option<Self> {
        match self {
            Some(s) => s.rebuild(leaves).map(Some),
            None => Some(None),
        }
    }
}

impl<K: Ord + Clone, S: Structure> Structure for BTreeMap<K, S> {
    fn leaves(&self) -> Vec<&Tensor> {
        self.values().flat_map(S::leaves).collect()
    }

    fn rebuild(&self, leaves: &mut dyn Iterator<Item = Tensor>) -> Option<Self> {
        self.iter().map(|(k, s)| Some((k.clone(), s.rebuild(leaves)?))).collect()
    }
}

/// Combines all tensors of a structure over ranks in one collective; gives the same structure of new tensors, each of
/// its own dtype, detached.
///
/// They travel as one buffer of `buffer_kind`; `None` means the dtype to which all promote, at least fp32 for 16-bit
/// floats, and exactly integers where all are integers. Integers among floats need a `buffer_kind`, since they would be
/// rounded.
///
/// Every rank calls, with the same structure and shapes.
///
/// # Errors
///
/// Integers among floats without a `buffer_kind`; a dtype that has no such reduction; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{Group, ReduceOp, fused_all_reduce};
/// use tch::Tensor;
///
/// let metrics = vec![Tensor::from_slice(&[1.0, 2.0]), Tensor::from_slice(&[3.0f32])];
/// let sums = fused_all_reduce(&metrics, ReduceOp::Sum, None, &Group::single())?;
/// assert_eq!(sums[1].kind(), tch::Kind::Float);
/// # Ok::<(), isobar_collectives::Error>(())
/// ```
pub fn fused_all_reduce<S: Structure>(
    tensors: &S,
    op: ReduceOp,
    buffer_kind: Option<Kind>,
    group: &Group,
) -> Result<S> {
    let work = start_in(&tensors.leaves(), op, buffer_kind, true, group)?;
    rebuilt(tensors, work.wait()?.into_iter())
}

/// See [`fused_all_reduce`](crate::fused_all_reduce); asynchronous. The result has the form that the structure has now.
///
/// # Errors
///
/// Those of that function.
pub fn start<S: Structure + Send + 'static>(
    tensors: &S,
    op: ReduceOp,
    buffer_kind: Option<Kind>,
    group: &Group,
) -> Result<Work<S>> {
    let leaves = tensors.leaves();
    let form = rebuilt(tensors, leaves.iter().map(|leaf| leaf.shallow_clone()))?;
    let work = start_in(&leaves, op, buffer_kind, true, group)?;
    Ok(work.map(move |leaves| rebuilt(&form, leaves.into_iter())))
}

fn rebuilt<S: Structure>(structure: &S, mut leaves: impl Iterator<Item = Tensor>) -> Result<S> {
    let lost = || crate::Error::Torch("a structure gave other leaves than it took".into());
    structure.rebuild(&mut leaves).ok_or_else(lost)
}

/// `use_fp32`: whether a buffer of a 16-bit dtype is summed in fp32.
pub(crate) fn start_in(
    tensors: &[&Tensor],
    op: ReduceOp,
    buffer_kind: Option<Kind>,
    use_fp32: bool,
    group: &Group,
) -> Result<Work<Vec<Tensor>>> {
    let call = group.call("fused_all_reduce");
    let _guard = NoGrad::new();
    let Some(first) = tensors.first() else { return Ok(Work::start(call, async { Ok(Vec::new()) })) };
    tensors.iter().try_for_each(|tensor| call.defined(tensor))?;
    let kind = match buffer_kind {
        Some(kind) => kind,
        None => promoted(&call, tensors)?,
    };
    call.reducible_kind(op, kind)?;
    if let Some(tensor) = tensors.iter().find(|tensor| loses(tensor.kind(), kind)) {
        return Err(
            call.refuse(format!("values of dtype {:?} do not fit a buffer of dtype {kind:?}", tensor.kind()))
        );
    }
    tensors.iter().for_each(|tensor| call.agree_on(tensor.size()));
    let length = tensors.iter().map(|t| t.numel() as i64).sum::<i64>();
    let buffer = memory::empty(&[length], kind, first.device())?;
    let mut at = 0;
    let mut places = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let length = tensor.numel() as i64;
        memory::copy(&buffer.f_narrow(0, at, length)?.f_view(tensor.size().as_slice())?, tensor)?;
        places.push((at, tensor.detach()));
        at += length;
    }
    let reduced = all_reduce::start_as(call, &buffer, op, use_fp32)?;
    Ok(reduced.map(move |buffer| {
        let _guard = NoGrad::new();
        let leaf = |(at, like): (i64, Tensor)| {
            let part = buffer.f_narrow(0, at, like.numel() as i64)?.f_view(like.size().as_slice())?;
            // A copy each, so that one result kept does not keep the buffer of all.
            let leaf = memory::output_like(&like, &like.size())?;
            memory::copy(&leaf, &part)?;
            Ok(leaf)
        };
        places.into_iter().map(leaf).collect()
    }))
}

/// Returns whether a conversion loses a fraction (float to integer) or an imaginary part (complex to real).
fn loses(from: Kind, to: Kind) -> bool {
    let complex = |kind| matches!(kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble);
    let float = |kind| matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double);
    (complex(from) && !complex(to)) || (float(from) && !float(to) && !complex(to))
}

fn promoted(call: &Call, tensors: &[&Tensor]) -> Result<Kind> {
    let rank = |kind: Kind| match kind {
        Kind::Bool => 0,
        Kind::Uint8 | Kind::Int8 => 1,
        Kind::Int16 => 2,
        Kind::Int => 3,
        Kind::Int64 => 4,
        Kind::Half | Kind::BFloat16 => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::ComplexHalf | Kind::ComplexFloat => 8,
        Kind::ComplexDouble => 9,
        _ => 10,
    };
    let kinds: Vec<Kind> = tensors.iter().map(|t| t.kind()).collect();
    if let Some(kind) = kinds.iter().find(|&&k| rank(k) == 10) {
        return Err(call.refuse(format!("tensors of dtype {kind:?} cannot be combined over ranks")));
    }
    let integers = kinds.iter().filter(|&&k| rank(k) < 5).count();
    if integers != 0 && integers != kinds.len() {
        return Err(call.refuse(
            "integer tensors stand among floating ones, which would round them; give a buffer dtype, or reduce them apart"
                .into(),
        ));
    }
    let largest = kinds.iter().copied().max_by_key(|&k| rank(k)).unwrap_or(Kind::Float);
    Ok(match largest {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        // A signed and an unsigned byte fit in two bytes.
        Kind::Int8 | Kind::Uint8 if kinds.contains(&Kind::Int8) && kinds.contains(&Kind::Uint8) => {
            Kind::Int16
        }
        Kind::ComplexHalf | Kind::ComplexFloat if kinds.contains(&Kind::Double) => Kind::ComplexDouble,
        Kind::ComplexHalf => Kind::ComplexFloat,
        kind => kind,
    })
}
