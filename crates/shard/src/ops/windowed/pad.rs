//! Padding, rolling, flipping, unfolding.

use isobar_array::PadMode;
use isobar_array::kernel::{Around, WindowGeometry, check_number, number};
use serde_json::Value;

use super::{Windowed, border, part_of, window_on};
use crate::dense::named;
use crate::error::Result;
use crate::layout::Dim;
use crate::ops::{operator, refuse, resolve, torch};
use crate::rules::{Call, Footprint, Side, Traffic};
use crate::tensor::ShardTensor;
use crate::window::{Border, HaloSpec, WindowRun, Windows, fetch};

const OP: &str = "pad";

impl ShardTensor {
    /// Elements before and after, as pairs from the *last* dim backwards (PyTorch's order); negative ones cut off. `value` is
    /// for [`PadMode::Constant`].
    ///
    /// The padding goes to the first and the last rank that has elements; the others stay where they are. All ranks of the
    /// mesh call.
    ///
    /// # Errors
    ///
    /// Pairs that do not fit the tensor; the errors of the exchange.
    pub fn pad_mode(&self, pairs: &[i64], mode: PadMode, value: f64) -> Result<Self> {
        operator(OP, &[self], args!("pad": pairs, "mode": mode.name(), "value": number(value)), || {
            let borders = mode.borders(self.shape(), pairs)?;
            check_number(OP, value, self.kind())?;
            if let Some([cut, add]) = mode.cut_first(pairs) {
                return self.pad_mode(&cut, PadMode::Constant, 0.0)?.pad_mode(&add, mode, value);
            }
            let x = self.resolved()?.consecutive()?;
            let layout = x.layout();
            let mut windows = Windows::own(layout);
            let mut dims = layout.dims().to_vec();
            for Around { dim, before, after } in borders {
                if (before, after) == (0, 0) {
                    continue;
                }
                let extent = x.shape()[dim];
                dims[dim] = padded(&dims[dim], before, extent + before + after);
                let need = HaloSpec::windows(&dims[dim], extent, border(mode), |own| {
                    (own.start - before, own.end() - before)
                });
                windows = windows.with(dim, need);
            }
            let y = fetch(x.local(), layout, &windows, value)?;
            Ok(Self::new(y, layout.with_dims(dims)))
        })
    }

    /// The elements moved by `shifts` along `dims`, round the ends; without dims, of the flattened tensor.
    ///
    /// # Errors
    ///
    /// Dims that do not exist, or not one for each shift; the errors of the exchange.
    pub fn roll(&self, shifts: &[i64], dims: &[i64]) -> Result<Self> {
        const OP: &str = "roll";
        operator(OP, &[self], args!("shifts": shifts, "dims": dims), || {
            if dims.is_empty() && shifts.len() == 1 {
                return self.reshape(&[-1])?.roll(shifts, &[0])?.reshape(self.shape());
            }
            if shifts.len() != dims.len() {
                return refuse(OP, format!("{} shifts for {} dims", shifts.len(), dims.len()));
            }
            let x = self.resolved()?.consecutive()?;
            let mut total = vec![0; x.ndim()];
            for (shift, &dim) in shifts.iter().zip(dims) {
                total[resolve(OP, dim, x.ndim())?] += shift;
            }
            let layout = x.layout();
            let mut windows = Windows::own(layout);
            for (dim, &shift) in total.iter().enumerate() {
                let extent = x.shape()[dim];
                if shift != 0 && extent > 0 && shift % extent != 0 {
                    let shift = shift.rem_euclid(extent);
                    let need = HaloSpec::windows(&layout.dims()[dim], extent, Border::Circular, |own| {
                        (own.start - shift, own.end() - shift)
                    });
                    windows = windows.with(dim, need);
                }
            }
            Ok(Self::new(fetch(x.local(), layout, &windows, 0.0)?, layout.clone()))
        })
    }

    /// The order of the elements along `dims` turned round.
    ///
    /// # Errors
    ///
    /// Dims that do not exist, or come twice; the errors of the exchange.
    pub fn flip(&self, dims: &[i64]) -> Result<Self> {
        const OP: &str = "flip";
        operator(OP, &[self], args!("dims": dims), || {
            let mut seen = Vec::new();
            for &dim in dims {
                let dim = resolve(OP, dim, self.ndim())?;
                if seen.contains(&dim) {
                    return refuse(OP, format!("dim {dim} is named twice in {dims:?}"));
                }
                seen.push(dim);
            }
            let x = self.resolved()?;
            if !seen.iter().any(|&dim| x.layout().is_sharded(dim)) {
                return x.viewed(OP, x.layout().clone(), |x| x.f_flip(dims));
            }
            let x = x.consecutive()?;
            let layout = x.layout();
            let mut windows = Windows::own(layout);
            for dim in seen {
                let split = &layout.dims()[dim];
                let reversed = |part: &Vec<crate::layout::Interval>| {
                    let pieces = part.iter().filter(|own| own.len > 0);
                    let turn = |own: &crate::layout::Interval| WindowRun::Take {
                        start: x.shape()[dim] - 1 - own.start,
                        len: own.len,
                        step: -1,
                    };
                    pieces.map(turn).collect()
                };
                let parts = split.parts.iter().map(reversed).collect();
                windows = windows.with(dim, HaloSpec { axes: split.axes.clone(), parts });
            }
            Ok(Self::new(fetch(x.local(), layout, &windows, 0.0)?, layout.clone()))
        })
    }

    /// All windows of `size` elements along `dim`, `step` apart, as a new last dim.
    ///
    /// # Errors
    ///
    /// A dim that does not exist, a window that does not fit; the errors of the exchange.
    pub fn unfold(&self, dim: i64, size: i64, step: i64) -> Result<Self> {
        const OP: &str = "unfold";
        operator(OP, &[self], args!("dimension": dim, "size": size, "step": step), || {
            let x = self.resolved()?.consecutive()?;
            let dim = resolve(OP, dim, x.ndim())?;
            let extent = x.shape()[dim];
            if size < 0 || step < 1 || size > extent {
                return refuse(OP, format!("windows of {size}, {step} apart, of {extent} elements"));
            }
            let layout = x.layout();
            if !layout.is_sharded(dim) || size == 0 {
                let x = x.replicate_where(|d| d == dim && size == 0)?;
                let mut dims = x.layout().dims().to_vec();
                dims[dim] = Dim::whole((extent - size) / step + 1);
                dims.push(Dim::whole(size));
                let y = named(OP, &[x.local()], x.local().f_unfold(dim as i64, size, step))?;
                return Ok(Self::new(y, x.layout().with_dims(dims)));
            }
            let result = (extent - size) / step + 1;
            let geometry = WindowGeometry {
                dim,
                extent,
                result,
                kernel: size,
                stride: step,
                dilation: 1,
                before: 0,
                after: 0,
            };
            let windowed = Windowed::new(&x, &[geometry], Border::Fill, 0.0, false)?;
            let y =
                windowed.local.f_unfold(dim as i64, size, step).and_then(|y| windowed.trim(y, &[geometry]));
            let mut dims = layout.dims().to_vec();
            dims[dim] = windowed.results[0].clone();
            debug_assert_eq!(part_of(&dims[dim], layout).len, windowed.own[0].len);
            dims.push(Dim::whole(size));
            Ok(Self::new(torch(OP, y)?, layout.with_dims(dims)))
        })
    }
}

/// Returns the split of a padded dim: elements stay on their ranks; padding before goes to the first non-empty shard,
/// padding after to the last.
fn padded(dim: &Dim, before: i64, result: i64) -> Dim {
    let mut boundaries = dim.boundaries();
    let sizes = dim.sizes();
    let first = sizes.iter().position(|&size| size > 0).unwrap_or(0);
    let last = sizes.iter().rposition(|&size| size > 0).unwrap_or(0);
    for (index, boundary) in boundaries.iter_mut().enumerate() {
        *boundary = match index {
            index if index <= first => 0,
            index if index > last => result,
            _ => (*boundary + before).clamp(0, result),
        };
    }
    Dim::between(dim.axes.clone(), &boundaries)
}

crate::register! {
    /// The field with `pad` more elements at the ends of its last dims, by `mode`.
    "pad"(input; pad, mode, value) Halo(padded_window): |call| {
        let (pairs, value) = (call.get::<Vec<i64>>("pad")?, call.optional_number("value")?.unwrap_or(0.0));
        call.tensor(0)?.pad_mode(&pairs, pad_mode(call, "mode", "constant")?, value)
    };
    /// The field shifted along `dims` by `shifts`, periodically.
    "roll"(input; shifts, dims) Bytes("the elements that change their rank", rolled): |call| {
        let (shifts, dims) = (call.list("shifts", Vec::new())?, call.list("dims", Vec::new())?);
        call.tensor(0)?.roll(&shifts, &dims)
    };
    /// The field with `dims` in reverse order.
    "flip"(input; dims) Moved: |call| call.tensor(0)?.flip(&call.list::<i64>("dims", Vec::new())?);
    /// Windows of `size` along `dimension`, one each `step`.
    "unfold"(input; dimension, size, step) Halo(unfolded_window):
        |call| call.tensor(0)?.unfold(call.get("dimension")?, call.get("size")?, call.get("step")?);
}

/// Bounds a roll: elements move to another rank, and their gradients back; without dims also those that a reshape tears from their
/// box, there and back.
fn rolled(call: &Footprint<'_>) -> Result<u64> {
    let is_flat = match call.attrs.get("dims") {
        None | Some(Value::Null) => true,
        Some(dims) => dims.as_array().is_some_and(Vec::is_empty),
    };
    let exchanges = if is_flat { 3 } else { 1 };
    Ok(exchanges * Traffic::Moved.bytes(call)?)
}

/// Returns the window along a dim, to bound the bytes.
fn unfolded_window(call: &Footprint<'_>, side: &Side) -> Result<(i64, i64)> {
    let [dim, kernel, stride] = ["dimension", "size", "step"].map(|name| call.attr::<i64>(name));
    let (dim, kernel, stride) = (dim?.unwrap_or(0), kernel?.unwrap_or(1), stride?.unwrap_or(1));
    if dim.rem_euclid(call.ndim().max(1) as i64) != side.dim as i64 {
        return Ok(side.shard);
    }
    let (extent, result) = (side.extent, side.result);
    let geometry =
        WindowGeometry { dim: side.dim, extent, result, kernel, stride, dilation: 1, before: 0, after: 0 };
    window_on(call, side, &geometry)
}

/// Returns the window along a dim, to bound the bytes: padding goes to the first and the last owner.
fn padded_window(call: &Footprint<'_>, side: &Side) -> Result<(i64, i64)> {
    let pairs: Vec<i64> = call.attr("pad")?.unwrap_or_default();
    let before = pairs.get(2 * (call.ndim() - 1 - side.dim)).copied().unwrap_or(0);
    let first = if side.shard.0 == 0 { -before } else { side.shard.0 };
    let end = if side.shard.1 == side.extent { side.result - before } else { side.shard.1 };
    Ok((first, end))
}

/// The padding mode that the argument `name` gives.
pub(super) fn pad_mode(call: &Call<'_>, name: &str, default: &str) -> Result<PadMode> {
    Ok(match &call.word(name, default)?[..] {
        "zeros" | "constant" => PadMode::Constant,
        "circular" => PadMode::Circular,
        "reflect" => PadMode::Reflect,
        "replicate" => PadMode::Replicate,
        other => {
            let known = "zeros, constant, circular, reflect or replicate";
            return call.refuse(format!("{name} = \"{other}\"; expected {known}"));
        }
    })
}
