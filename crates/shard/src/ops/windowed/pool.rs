//! Pooling.

use isobar_array::Pool;
use isobar_array::kernel::{
    WindowGeometry, along, average, cut_like, least, maxima, nonempty, spatial_name, values,
};
use tch::{Device, Kind, TchError, Tensor};

use super::{Windowed, window, window_on};
use crate::dense::named;
use crate::error::Result;
use crate::layout::{Dim, Interval};
use crate::ops::{operator, wide};
use crate::rules::{Call, Footprint, Side};
use crate::tensor::ShardTensor;
use crate::window::Border;

impl ShardTensor {
    /// The maxima of windows over the last `spatial` (1 to 3) dims of `[batch, channel, extent…]`, and, of dtype `Int64`, where
    /// they are: the index into the global spatial dims, flattened.
    ///
    /// All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Windows that do not fit; the errors of the exchange.
    pub fn max_pool(&self, spatial: usize, pool: &Pool) -> Result<(Self, Self)> {
        const OP: &str = "max_pool";
        let name = spatial_name(["max_pool1d", "max_pool2d", "max_pool3d"], spatial);
        let args = || pool.args(true);
        operator(name, &[self], args, || {
            let geometries = pool.geometry(OP, self.shape(), spatial, true)?;
            let x = self.resolved()?.consecutive_along(|dim| dim > 0)?;
            let windowed = Windowed::new(&x, &geometries, Border::Fill, least(x.kind()), true)?;
            let padding: Vec<i64> = geometries
                .iter()
                .zip(&windowed.native)
                .map(|(w, native)| if *native { w.before } else { 0 })
                .collect();
            let (y, indices) = maxima(&windowed.local, &geometries, padding, pool.ceil_mode)?;
            let global = match windowed.native.iter().all(|native| *native) {
                true => Ok(indices.shallow_clone()),
                false => global_indices(&indices, &windowed, &geometries),
            };
            let y = named(OP, &[&y], windowed.trim(y.shallow_clone(), &geometries))?;
            let global = named(OP, &[&indices], global.and_then(|g| windowed.trim(g, &geometries)))?;
            let layout = result_layout(&x, &geometries, &windowed.results);
            Ok((Self::new(y, layout.clone()), Self::new(global, layout)))
        })
    }

    /// The means of windows over the last `spatial` (1 to 3) dims.
    ///
    /// All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Windows that do not fit; the errors of the exchange.
    pub fn avg_pool(&self, spatial: usize, pool: &Pool) -> Result<Self> {
        const OP: &str = "avg_pool";
        let name = spatial_name(["avg_pool1d", "avg_pool2d", "avg_pool3d"], spatial);
        let args = || pool.args(false);
        operator(name, &[self], args, || {
            let geometries = pool.geometry(OP, self.shape(), spatial, false)?;
            let x = self.resolved()?.consecutive_along(|dim| dim > 0)?;
            let split = geometries.iter().any(|geometry| x.layout().is_sharded(geometry.dim));
            let windowed = match split {
                true => Windowed::new(&x, &geometries, Border::Fill, 0.0, false)?,
                false => Windowed {
                    local: x.local().shallow_clone(),
                    results: geometries.iter().map(|geometry| Dim::whole(geometry.result)).collect(),
                    own: geometries.iter().map(|geometry| Interval::new(0, geometry.result)).collect(),
                    native: vec![true; spatial],
                },
            };
            let local = nonempty(&windowed.local)?;
            let y = if split { sums(&local, &geometries) } else { average(&local, &geometries, pool) };
            let y = cut_like(&named(OP, &[&windowed.local], y)?, &windowed.local, spatial)?;
            let y = match split {
                true => windowed
                    .trim(y, &geometries)
                    .and_then(|y| y.f_div(&divisors(&y, &geometries, &windowed.own, pool)?))
                    .and_then(|y| y.f_to_kind(x.kind())),
                false => Ok(y),
            };
            Ok(Self::new(
                named(OP, &[&windowed.local], y)?,
                result_layout(&x, &geometries, &windowed.results),
            ))
        })
    }
}

/// The layout of a result whose walked dims are these.
pub(super) fn result_layout(
    x: &ShardTensor,
    geometries: &[WindowGeometry],
    results: &[Dim],
) -> crate::layout::Layout {
    let mut dims = x.layout().dims().to_vec();
    for (geometry, result) in geometries.iter().zip(results) {
        dims[geometry.dim] = result.clone();
    }
    x.layout().with_dims(dims)
}

/// From indices into the flattened window to those into the flattened whole.
fn global_indices(
    indices: &Tensor,
    windowed: &Windowed,
    geometries: &[WindowGeometry],
) -> Result<Tensor, TchError> {
    let mut rest = indices.shallow_clone();
    let mut global = indices.f_zeros_like()?;
    let mut scale = 1;
    for ((geometry, own), native) in geometries.iter().zip(&windowed.own).zip(&windowed.native).rev() {
        let extent = windowed.local.size()[geometry.dim].max(1);
        let coordinate = rest.f_remainder(extent)?;
        rest = rest.f_floor_divide_scalar(extent)?;
        let first = if *native { 0 } else { window(geometry, *own).0 };
        // A maximum of −∞ may seem to be in the border.
        let place = coordinate.f_add_scalar(first)?.f_clamp(0, geometry.extent - 1)?;
        global = global.f_add(&place.f_mul_scalar(scale)?)?;
        scale *= geometry.extent;
    }
    Ok(global)
}

/// The sums of windows that lie whole in the tensor; in fp32 where 16 bits would overflow.
fn sums(x: &Tensor, geometries: &[WindowGeometry]) -> Result<Tensor, TchError> {
    let x = &wide(x)?;
    let (kernel, stride) = (values(geometries, |w| w.kernel), values(geometries, |w| w.stride));
    let zeros = vec![0; geometries.len()];
    match geometries.len() {
        1 => {
            let (kernel, stride) = ([1, kernel[0]], [1, stride[0]]);
            x.f_unsqueeze(-2)?.f_avg_pool2d(kernel, stride, [0, 0], false, true, Some(1))?.f_squeeze_dim(-2)
        }
        2 => x.f_avg_pool2d(kernel, stride, zeros, false, true, Some(1)),
        _ => x.f_avg_pool3d(kernel, stride, zeros, false, true, Some(1)),
    }
}

/// Returns the number of elements of each window on this rank: a product of one number along each dim.
fn divisors(
    y: &Tensor,
    geometries: &[WindowGeometry],
    own: &[Interval],
    pool: &Pool,
) -> Result<Tensor, TchError> {
    let options = (y.kind(), y.device());
    if let Some(divisor) = pool.divisor_override {
        return Tensor::f_full([1; 0], divisor, options);
    }
    let mut product = Tensor::f_ones([1; 0], options)?;
    for (geometry, own) in geometries.iter().zip(own) {
        let count = |index: i64| {
            let start = index * geometry.stride - geometry.before;
            let end = (start + geometry.kernel).min(geometry.extent + geometry.before);
            match pool.count_include_pad {
                true => end - start,
                false => end.min(geometry.extent) - start.max(0),
            }
        };
        let counts: Vec<i64> = (own.start..own.end()).map(count).collect();
        let counts = Tensor::f_from_slice(&counts)?.f_to_device(y.device())?.f_to_kind(y.kind())?;
        product = product.f_mul(&along(&counts, geometry.dim, y.dim())?)?;
    }
    debug_assert_eq!(y.device() == Device::Cpu, product.device() == Device::Cpu);
    debug_assert!(y.kind() != Kind::Bool);
    Ok(product)
}

crate::register! {
    /// The maximum of each window of 1 dim, and its index if `return_indices`.
    "max_pool1d"(input: Real; kernel_size, stride, padding, dilation, ceil_mode, return_indices) Halo(|call, side| window_of(call, side, 1)):
        |call| max_pool(call, 1);
    /// The maximum of each window of 2 dims, and its index if `return_indices`.
    "max_pool2d"(input: Real; kernel_size, stride, padding, dilation, ceil_mode, return_indices) Halo(|call, side| window_of(call, side, 2)):
        |call| max_pool(call, 2);
    /// The maximum of each window of 3 dims, and its index if `return_indices`.
    "max_pool3d"(input: Real; kernel_size, stride, padding, dilation, ceil_mode, return_indices) Halo(|call, side| window_of(call, side, 3)):
        |call| max_pool(call, 3);
    /// The mean of each window of 1 dim.
    "avg_pool1d"(input: FloatingOrInt64; kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override) Halo(|call, side| window_of(call, side, 1)):
        |call| avg_pool(call, 1);
    /// The mean of each window of 2 dims.
    "avg_pool2d"(input: FloatingOrInt64; kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override) Halo(|call, side| window_of(call, side, 2)):
        |call| avg_pool(call, 2);
    /// The mean of each window of 3 dims.
    "avg_pool3d"(input: FloatingOrInt64; kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override) Halo(|call, side| window_of(call, side, 3)):
        |call| avg_pool(call, 3);
}

/// Returns the window along a dim of a pooling over the last `spatial` dims, to bound its bytes.
fn window_of(call: &Footprint<'_>, side: &Side, spatial: usize) -> Result<(i64, i64)> {
    let Some(index) = (side.dim + spatial).checked_sub(call.ndim()) else { return Ok(side.shard) };
    let (kernel, padding) = (call.number("kernel_size", index, 1), call.number("padding", index, 0));
    let geometry = WindowGeometry {
        dim: side.dim,
        extent: side.extent,
        result: side.result,
        kernel,
        stride: call.number("stride", index, kernel),
        dilation: call.number("dilation", index, 1),
        before: padding,
        after: padding,
    };
    window_on(call, side, &geometry)
}

fn options(call: &Call<'_>) -> Result<Pool> {
    Ok(Pool {
        stride: call.list("stride", Vec::new())?,
        padding: call.list("padding", vec![0])?,
        ceil_mode: call.or("ceil_mode", false)?,
        ..Pool::new(&call.list::<i64>("kernel_size", Vec::new())?)
    })
}

fn avg_pool(call: &Call<'_>, spatial: usize) -> Result<ShardTensor> {
    let pool = Pool {
        count_include_pad: call.or("count_include_pad", true)?,
        divisor_override: call.optional("divisor_override")?,
        ..options(call)?
    };
    call.tensor(0)?.avg_pool(spatial, &pool)
}

fn max_pool(call: &Call<'_>, spatial: usize) -> Result<Vec<ShardTensor>> {
    let pool = Pool { dilation: call.list("dilation", vec![1])?, ..options(call)? };
    let (values, indices) = call.tensor(0)?.max_pool(spatial, &pool)?;
    Ok(if call.or("return_indices", false)? { vec![values, indices] } else { vec![values] })
}
