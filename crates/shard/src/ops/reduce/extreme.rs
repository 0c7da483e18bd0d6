//! Extrema and where they are.

use isobar_collectives::trace::Label;
use isobar_collectives::{ReduceOp, copy_to_parallel_region, reduce_from_parallel_region, start};
use isobar_torch::autograd::Function;
use isobar_torch::guard::NoGrad;
use tch::{Kind, TchError, Tensor};

use super::Over;
use crate::dense::named;
use crate::error::Result;
use crate::layout::Layout;
use crate::ops::{operator, refuse, torch};
use crate::tensor::ShardTensor;

/// The greatest or the least elements over the dims, which stay. Its gradient is split evenly among all that are as great, on
/// whatever rank.
pub(super) fn extreme(op: &'static str, x: &ShardTensor, over: &Over, greatest: bool) -> Result<Tensor> {
    let local = x.local();
    if over.axes.is_empty() {
        let dims = over.dims.as_slice();
        return named(
            op,
            &[local],
            if greatest { local.f_amax(dims, true) } else { local.f_amin(dims, true) },
        );
    }
    let group = x.layout().group_along(&over.axes)?;
    let best = {
        let _guard = NoGrad::new();
        let own = named(op, &[local], part_extreme(&local.detach(), over, x, greatest))?;
        start::all_reduce(&own, if greatest { ReduceOp::Max } else { ReduceOp::Min }, &group)?.wait()?
    };
    let dims = over.dims.clone();
    let label = Label::current();
    let mut outputs =
        Function::new(op).save(&[local, &best]).apply(&[local], vec![best], move |context, grads| {
            let _label = label.backward();
            let grad = context.grad_or_zeros(grads, 0)?;
            let (x, best) = (context.saved(0)?.detach(), context.saved(1)?.detach());
            let hit = x.f_eq_tensor(&best)?.f_to_kind(grad.kind())?;
            let own = hit.f_sum_dim_intlist(dims.as_slice(), true, None)?;
            let count = reduce_from_parallel_region(&own, &group)?;
            let share = copy_to_parallel_region(&grad.f_div(&count)?, &group)?;
            Ok(vec![Some(hit.f_mul(&share)?)])
        })?;
    outputs.pop().map_or_else(|| refuse(op, "a function lost its output"), Ok)
}

/// The extreme of a part; of no elements, what is never one.
fn part_extreme(x: &Tensor, over: &Over, whole: &ShardTensor, greatest: bool) -> Result<Tensor, TchError> {
    let dims = over.dims.as_slice();
    if over.local_count(whole) > 0 {
        return if greatest { x.f_amax(dims, true) } else { x.f_amin(dims, true) };
    }
    never(over.kept.local_shape(), x, greatest)
}

/// Values that no maximum, or no minimum, is.
pub(super) fn never(shape: &[i64], like: &Tensor, greatest: bool) -> Result<Tensor, TchError> {
    let options = (like.kind(), like.device());
    let (low, high) = match like.kind() {
        Kind::Bool => (0, 1),
        Kind::Uint8 => (0, 255),
        Kind::Int8 => (i64::from(i8::MIN), i64::from(i8::MAX)),
        Kind::Int16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
        Kind::Int => (i64::from(i32::MIN), i64::from(i32::MAX)),
        Kind::Int64 => (i64::MIN, i64::MAX),
        _ => {
            let value = if greatest { f64::NEG_INFINITY } else { f64::INFINITY };
            return Tensor::f_full(shape, value, options);
        }
    };
    Tensor::f_full(shape, if greatest { low } else { high }, options)
}

impl ShardTensor {
    /// Returns the index of the greatest element along `dim`, or in the flattened tensor without a dim; dtype `Int64`. Of equal
    /// elements the first; NaN counts as the greatest.
    ///
    /// # Errors
    ///
    /// A dim that does not exist, or has no elements; the errors of the exchange.
    pub fn argmax(&self, dim: Option<i64>, keepdim: bool) -> Result<Self> {
        self.arg("argmax", dim, keepdim, true)
    }

    /// Returns the index of the least element along `dim`; see [`argmax`](Self::argmax).
    ///
    /// # Errors
    ///
    /// See [`argmax`](Self::argmax).
    pub fn argmin(&self, dim: Option<i64>, keepdim: bool) -> Result<Self> {
        self.arg("argmin", dim, keepdim, false)
    }

    fn arg(&self, op: &'static str, dim: Option<i64>, keepdim: bool, greatest: bool) -> Result<Self> {
        operator(op, &[self], args!("dim": dim, "keepdim": keepdim), || {
            let x = self.resolved()?.detach();
            if matches!(x.kind(), Kind::Bool | Kind::ComplexFloat | Kind::ComplexDouble) {
                return refuse(op, format!("{:?} has no order; convert it", x.kind()));
            }
            let over = Over::new(op, &x, &dim.map_or_else(Vec::new, |dim| vec![dim]), keepdim)?;
            if over.count(&x) == 0 {
                return refuse(op, format!("{:?} has no elements to choose from", x.shape()));
            }
            let (values, places) = torch(op, own_best(&x, &over, dim.is_some(), greatest))?;
            if over.axes.is_empty() {
                return over.done(places);
            }
            let (values, places) =
                (over.everyones(x.layout(), &values)?, over.everyones(x.layout(), &places)?);
            let first = || -> Result<Tensor, TchError> {
                let best = if greatest { values.f_amax([0], true)? } else { values.f_amin([0], true)? };
                let same = values.f_eq_tensor(&best)?.f_logical_or(&values.f_ne_tensor(&values)?)?;
                places.f_masked_fill(&same.f_logical_not()?, i64::MAX)?.f_amin([0], false)
            };
            over.done(torch(op, first())?)
        })
    }
}

/// The extreme of this rank's part, and its global index along the dim or in the flattened whole; dims stay.
fn own_best(
    x: &ShardTensor,
    over: &Over,
    one_dim: bool,
    greatest: bool,
) -> Result<(Tensor, Tensor), TchError> {
    let local = x.local();
    let shape = over.kept.local_shape();
    if over.local_count(x) == 0 {
        let places = Tensor::f_full(shape, i64::MAX, (Kind::Int64, local.device()))?;
        return Ok((never(shape, local, greatest)?, places));
    }
    // The dims that are searched, last and as one.
    let stays: Vec<i64> = (0..x.ndim() as i64).filter(|dim| !over.dims.contains(dim)).collect();
    let order = [&stays[..], &over.dims[..]].concat();
    let searched = match one_dim {
        true => local.f_permute(order)?,
        false => local.f_reshape([-1])?,
    };
    let place = if greatest { searched.f_argmax(-1, true)? } else { searched.f_argmin(-1, true)? };
    let value = searched.f_gather(-1, &place, false)?;
    let global = global_places(&place, x.layout(), &over.dims)?;
    Ok((value.f_reshape(shape)?, global.f_reshape(shape)?))
}

/// From indices into the flattened dims of a part to those of the whole.
fn global_places(place: &Tensor, layout: &Layout, dims: &[i64]) -> Result<Tensor, TchError> {
    let mut rest = place.shallow_clone();
    let mut global = place.f_zeros_like()?;
    let mut scale = 1;
    for &dim in dims.iter().rev() {
        let dim = dim as usize;
        let extent = layout.local_shape()[dim].max(1);
        let at = rest.f_remainder(extent)?;
        rest = rest.f_floor_divide_scalar(extent)?;
        let table = crate::ops::index::own_indices(layout, dim, place.device())?;
        let index = table.f_index_select(0, &at.f_reshape([-1])?)?.f_reshape(at.size())?;
        global = global.f_add(&index.f_mul_scalar(scale)?)?;
        scale *= layout.shape()[dim];
    }
    Ok(global)
}

crate::register! {
    /// The index of the greatest element along `dim`, or of all.
    "argmax"(input; dim, keepdim) Terms:
        |call| call.tensor(0)?.argmax(call.optional("dim")?, call.or("keepdim", false)?);
    /// The index of the least element along `dim`, or of all.
    "argmin"(input; dim, keepdim) Terms:
        |call| call.tensor(0)?.argmin(call.optional("dim")?, call.or("keepdim", false)?);
}
