//! Pooling.

use tch::{Device, Kind, TchError, Tensor};

use super::{Walk, Windowed, along, each, spatial_name};
use crate::array::{Attrs, named};
use crate::error::Result;
use crate::layout::{Dim, Interval};
use crate::ops::{operator, refuse};
use crate::tensor::ShardTensor;
use crate::window::Border;

/// How a pooling walks. Lists have one value for each spatial dim, or one for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Extents of the window.
    pub kernel: Vec<i64>,
    /// Step between windows; the kernel where empty.
    pub stride: Vec<i64>,
    /// Elements before and after.
    pub padding: Vec<i64>,
    /// Step between a window's elements; of maxima.
    pub dilation: Vec<i64>,
    /// Whether a last window that is not full counts.
    pub ceil_mode: bool,
    /// Whether padding counts as elements; of averages.
    pub count_include_pad: bool,
    /// What sums are divided by in place of the number of elements; of averages.
    pub divisor_override: Option<i64>,
}

impl Pool {
    /// Windows of these extents side by side.
    pub fn new(kernel: &[i64]) -> Self {
        Self {
            kernel: kernel.to_vec(),
            stride: Vec::new(),
            padding: vec![0],
            dilation: vec![1],
            ceil_mode: false,
            count_include_pad: true,
            divisor_override: None,
        }
    }

    /// The fields that count, by PyTorch's names.
    fn args(&self, maxima: bool) -> Attrs {
        let stride = if self.stride.is_empty() { &self.kernel } else { &self.stride };
        let mut args = args!(
            "kernel_size": self.kernel,
            "stride": stride,
            "padding": self.padding,
            "ceil_mode": self.ceil_mode,
        )();
        args.extend(match maxima {
            true => args!("dilation": self.dilation, "return_indices": true)(),
            false => args!(
                "count_include_pad": self.count_include_pad,
                "divisor_override": self.divisor_override,
            )(),
        });
        args
    }

    /// How maxima or means of windows go over an input of the shape.
    fn walks(&self, op: &'static str, shape: &[i64], spatial: usize, maxima: bool) -> Result<Vec<Walk>> {
        check_dims(op, shape, spatial)?;
        let kernel = each(op, "kernel", &self.kernel, spatial)?;
        let stride =
            if self.stride.is_empty() { kernel.clone() } else { each(op, "stride", &self.stride, spatial)? };
        let padding = each(op, "padding", &self.padding, spatial)?;
        let dilation = if maxima { each(op, "dilation", &self.dilation, spatial)? } else { vec![1; spatial] };
        let first = shape.len() - spatial;
        let mut walks = Vec::with_capacity(spatial);
        for index in 0..spatial {
            let (dim, extent) = (first + index, shape[first + index]);
            let (kernel, stride) = (kernel[index], stride[index]);
            let (before, dilation) = (padding[index], dilation[index]);
            if kernel < 1 || stride < 1 || dilation < 1 || before < 0 || before * 2 > kernel {
                return refuse(
                    op,
                    format!(
                        "kernel {kernel}, stride {stride}, dilation {dilation}, padding {before}: expected at least 1, \
                             and a padding of at most half the kernel"
                    ),
                );
            }
            let room = extent + 2 * before - dilation * (kernel - 1) - 1;
            let mut result = match self.ceil_mode {
                true => -(-room).div_euclid(stride) + 1,
                false => room.div_euclid(stride) + 1,
            };
            // A window must not begin in the padding after the last.
            if self.ceil_mode && (result - 1) * stride >= extent + before {
                result -= 1;
            }
            if result < 1 {
                return refuse(op, format!("a window of {kernel} does not fit {extent} elements"));
            }
            walks.push(Walk { dim, extent, result, kernel, stride, dilation, before, after: before });
        }
        if maxima {
            return Ok(walks);
        }
        if self.divisor_override == Some(0) {
            return refuse(op, "a divisor of 0");
        }
        // As libtorch has it, whatever the padding.
        if spatial == 3 && walks.iter().any(|walk| walk.kernel > walk.extent) {
            return refuse(op, format!("{shape:?} is smaller than the window {:?}", self.kernel));
        }
        Ok(walks)
    }

    /// The maxima of a tensor's windows, and where they are in the flattened spatial dims.
    pub(crate) fn maxima(&self, x: &Tensor, spatial: usize) -> Result<(Tensor, Tensor)> {
        let walks = self.walks("max_pool", &x.size(), spatial, true)?;
        let padding = values(&walks, |walk| walk.before);
        maxima(x, &walks, padding, self.ceil_mode)
    }

    /// The means of a tensor's windows.
    pub(crate) fn means(&self, x: &Tensor, spatial: usize) -> Result<Tensor> {
        const OP: &str = "avg_pool";
        let walks = self.walks(OP, &x.size(), spatial, false)?;
        cut_like(&named(OP, &[x], dense(&nonempty(x)?, &walks, self))?, x, spatial)
    }
}

impl ShardTensor {
    /// The maxima of windows over the last `spatial` (1 to 3) dims of `[batch, channel, extent…]`, and, of kind `Int64`, where
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
            let walks = pool.walks(OP, self.shape(), spatial, true)?;
            let x = self.resolved()?.consecutive()?;
            let windowed = Windowed::new(&x, &walks, Border::Fill, f64::NEG_INFINITY, true)?;
            let padding: Vec<i64> = walks
                .iter()
                .zip(&windowed.native)
                .map(|(w, native)| if *native { w.before } else { 0 })
                .collect();
            let (y, indices) = maxima(&windowed.local, &walks, padding, pool.ceil_mode)?;
            let global = global_indices(&indices, &windowed, &walks);
            let y = named(OP, &[&y], windowed.trim(y.shallow_clone(), &walks))?;
            let global = named(OP, &[&indices], global.and_then(|g| windowed.trim(g, &walks)))?;
            let layout = result_layout(&x, &walks, &windowed.results);
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
            let walks = pool.walks(OP, self.shape(), spatial, false)?;
            let x = self.resolved()?.consecutive()?;
            let split = walks.iter().any(|walk| x.layout().is_sharded(walk.dim));
            let windowed = match split {
                true => Windowed::new(&x, &walks, Border::Fill, 0.0, false)?,
                false => Windowed {
                    local: x.local().shallow_clone(),
                    results: walks.iter().map(|walk| Dim::whole(walk.result)).collect(),
                    own: walks.iter().map(|walk| Interval::new(0, walk.result)).collect(),
                    native: vec![true; spatial],
                },
            };
            let local = nonempty(&windowed.local)?;
            let y = if split { sums(&local, &walks) } else { dense(&local, &walks, pool) };
            let y = cut_like(&named(OP, &[&windowed.local], y)?, &windowed.local, spatial)?;
            let y = match split {
                true => windowed
                    .trim(y, &walks)
                    .and_then(|y| y.f_div(&divisors(&y, &walks, &windowed.own, pool)?))
                    .and_then(|y| y.f_to_kind(x.kind())),
                false => Ok(y),
            };
            Ok(Self::new(named(OP, &[&windowed.local], y)?, result_layout(&x, &walks, &windowed.results)))
        })
    }
}

/// The layout of a result whose walked dims are these.
pub(super) fn result_layout(x: &ShardTensor, walks: &[Walk], results: &[Dim]) -> crate::layout::Layout {
    let mut dims = x.layout().dims().to_vec();
    for (walk, result) in walks.iter().zip(results) {
        dims[walk.dim] = result.clone();
    }
    x.layout().with_dims(dims)
}

pub(super) fn check_dims(op: &'static str, shape: &[i64], spatial: usize) -> Result<()> {
    if !(1..=3).contains(&spatial) || !(spatial + 1..=spatial + 2).contains(&shape.len()) {
        return refuse(op, format!("{shape:?} is not [batch, channel, extent…] of {spatial} spatial dims"));
    }
    Ok(())
}

/// The maxima of windows, and where they are, as libtorch has them.
fn maxima(x: &Tensor, walks: &[Walk], padding: Vec<i64>, ceil_mode: bool) -> Result<(Tensor, Tensor)> {
    let (kernel, stride) = (values(walks, |w| w.kernel), values(walks, |w| w.stride));
    let dilation = values(walks, |w| w.dilation);
    let full = nonempty(x)?;
    let pooled = match walks.len() {
        1 => full.f_max_pool1d_with_indices(kernel, stride, padding, dilation, ceil_mode),
        2 => full.f_max_pool2d_with_indices(kernel, stride, padding, dilation, ceil_mode),
        _ => full.f_max_pool3d_with_indices(kernel, stride, padding, dilation, ceil_mode),
    };
    let (y, indices) = named("max_pool", &[x], pooled)?;
    Ok((cut_like(&y, x, walks.len())?, cut_like(&indices, x, walks.len())?))
}

/// libtorch refuses tensors without samples or channels: those get one, which [`cut_like`] takes away again.
fn nonempty(x: &Tensor) -> Result<Tensor> {
    let shape = x.size();
    let wanted: Vec<i64> = shape.iter().map(|&extent| extent.max(1)).collect();
    if shape == wanted {
        return Ok(x.shallow_clone());
    }
    let pairs: Vec<i64> = shape.iter().zip(&wanted).rev().flat_map(|(from, to)| [0, to - from]).collect();
    named("pool", &[x], x.f_constant_pad_nd(pairs))
}

/// The result with as many samples and channels as the input has.
fn cut_like(y: &Tensor, x: &Tensor, spatial: usize) -> Result<Tensor> {
    let mut cut = y.shallow_clone();
    for dim in 0..x.dim() - spatial {
        if x.size()[dim] == 0 {
            cut = named("pool", &[y], cut.f_narrow(dim as i64, 0, 0))?;
        }
    }
    Ok(cut)
}

/// From indices into the flattened window to those into the flattened whole.
fn global_indices(indices: &Tensor, windowed: &Windowed, walks: &[Walk]) -> Result<Tensor, TchError> {
    let mut rest = indices.shallow_clone();
    let mut global = indices.f_zeros_like()?;
    let mut scale = 1;
    for ((walk, own), native) in walks.iter().zip(&windowed.own).zip(&windowed.native).rev() {
        let extent = windowed.local.size()[walk.dim].max(1);
        let coordinate = rest.f_remainder(extent)?;
        rest = rest.f_floor_divide_scalar(extent)?;
        let first = if *native { 0 } else { walk.window(*own).0 };
        // A maximum of −∞ may seem to be in the border.
        let place = coordinate.f_add_scalar(first)?.f_clamp(0, walk.extent - 1)?;
        global = global.f_add(&place.f_mul_scalar(scale)?)?;
        scale *= walk.extent;
    }
    Ok(global)
}

fn values(walks: &[Walk], f: fn(&Walk) -> i64) -> Vec<i64> {
    walks.iter().map(f).collect()
}

/// The sums of windows that lie whole in the tensor; in fp32 where 16 bits would overflow.
fn sums(x: &Tensor, walks: &[Walk]) -> Result<Tensor, TchError> {
    let x = &match x.kind() {
        Kind::Half | Kind::BFloat16 => x.f_to_kind(Kind::Float)?,
        _ => x.shallow_clone(),
    };
    let (kernel, stride) = (values(walks, |w| w.kernel), values(walks, |w| w.stride));
    let zeros = vec![0; walks.len()];
    match walks.len() {
        1 => {
            let (kernel, stride) = ([1, kernel[0]], [1, stride[0]]);
            x.f_unsqueeze(-2)?.f_avg_pool2d(kernel, stride, [0, 0], false, true, Some(1))?.f_squeeze_dim(-2)
        }
        2 => x.f_avg_pool2d(kernel, stride, zeros, false, true, Some(1)),
        _ => x.f_avg_pool3d(kernel, stride, zeros, false, true, Some(1)),
    }
}

fn dense(x: &Tensor, walks: &[Walk], pool: &Pool) -> Result<Tensor, TchError> {
    let (kernel, stride) = (values(walks, |w| w.kernel), values(walks, |w| w.stride));
    let padding = values(walks, |w| w.before);
    let (ceil, include) = (pool.ceil_mode, pool.count_include_pad);
    match walks.len() {
        1 if pool.divisor_override.is_none() => x.f_avg_pool1d(kernel, stride, padding, ceil, include),
        1 => {
            let (kernel, stride, padding) = ([1, kernel[0]], [1, stride[0]], [0, padding[0]]);
            let y = x.f_unsqueeze(-2)?.f_avg_pool2d(
                kernel,
                stride,
                padding,
                ceil,
                include,
                pool.divisor_override,
            )?;
            y.f_squeeze_dim(-2)
        }
        2 => x.f_avg_pool2d(kernel, stride, padding, ceil, include, pool.divisor_override),
        _ => x.f_avg_pool3d(kernel, stride, padding, ceil, include, pool.divisor_override),
    }
}

/// How many elements each window of this rank has: a product of one number along each dim.
fn divisors(y: &Tensor, walks: &[Walk], own: &[Interval], pool: &Pool) -> Result<Tensor, TchError> {
    let options = (y.kind(), y.device());
    if let Some(divisor) = pool.divisor_override {
        return Tensor::f_full([1; 0], divisor, options);
    }
    let mut product = Tensor::f_ones([1; 0], options)?;
    for (walk, own) in walks.iter().zip(own) {
        let count = |index: i64| {
            let start = index * walk.stride - walk.before;
            let end = (start + walk.kernel).min(walk.extent + walk.before);
            match pool.count_include_pad {
                true => end - start,
                false => end.min(walk.extent) - start.max(0),
            }
        };
        let counts: Vec<i64> = (own.start..own.end()).map(count).collect();
        let counts = Tensor::f_from_slice(&counts)?.f_to_device(y.device())?.f_to_kind(y.kind())?;
        product = product.f_mul(&along(&counts, walk.dim, y.dim())?)?;
    }
    debug_assert_eq!(y.device() == Device::Cpu, product.device() == Device::Cpu);
    debug_assert!(y.kind() != Kind::Bool);
    Ok(product)
}
