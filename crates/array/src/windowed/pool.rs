//! Pooling of dense tensors.

use tch::{TchError, Tensor};

use super::{WindowGeometry, each};
use crate::error::{Result, named, refuse};
use crate::registry::Attrs;

/// Options of a pooling. Lists have one value for each spatial dim, or one for all.
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
    /// True if a last, incomplete window counts.
    pub ceil_mode: bool,
    /// True if padding counts as elements, for averages.
    pub count_include_pad: bool,
    /// Divisor in place of the number of elements, for averages.
    pub divisor_override: Option<i64>,
}

impl Pool {
    /// Windows of these extents side by side.
    ///
    /// ```
    /// use isobar_array::Pool;
    ///
    /// // 3 × 3 windows that overlap, as after the first convolution of a ResNet.
    /// let pool = Pool { stride: vec![2], padding: vec![1], ..Pool::new(&[3]) };
    /// let geometry = pool.geometry("max_pool2d", &[1, 64, 112, 112], 2, true)?;
    /// assert_eq!((geometry[0].result, geometry[1].result), (56, 56));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
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

    /// Returns the fields by PyTorch's names; `maxima` chooses those of max pooling.
    pub fn args(&self, maxima: bool) -> Attrs {
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

    /// Returns the geometry along each of the last `spatial` dims, for max or average pooling of an input of the shape.
    ///
    /// # Errors
    ///
    /// Windows that do not fit.
    pub fn geometry(
        &self,
        op: &'static str,
        shape: &[i64],
        spatial: usize,
        maxima: bool,
    ) -> Result<Vec<WindowGeometry>> {
        check_dims(op, shape, spatial)?;
        let kernel = each(op, "kernel", &self.kernel, spatial)?;
        let stride =
            if self.stride.is_empty() { kernel.clone() } else { each(op, "stride", &self.stride, spatial)? };
        let padding = each(op, "padding", &self.padding, spatial)?;
        let dilation = if maxima { each(op, "dilation", &self.dilation, spatial)? } else { vec![1; spatial] };
        let first = shape.len() - spatial;
        let mut geometries = Vec::with_capacity(spatial);
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
            geometries.push(WindowGeometry {
                dim,
                extent,
                result,
                kernel,
                stride,
                dilation,
                before,
                after: before,
            });
        }
        if maxima {
            return Ok(geometries);
        }
        if self.divisor_override == Some(0) {
            return refuse(op, "a divisor of 0");
        }
        // As libtorch has it, whatever the padding.
        if spatial == 3 && geometries.iter().any(|geometry| geometry.kernel > geometry.extent) {
            return refuse(op, format!("{shape:?} is smaller than the window {:?}", self.kernel));
        }
        Ok(geometries)
    }

    /// Returns the maxima of a tensor's windows, and their indices in the flattened spatial dims.
    ///
    /// # Errors
    ///
    /// Windows that do not fit.
    pub fn maxima(&self, x: &Tensor, spatial: usize) -> Result<(Tensor, Tensor)> {
        let geometries = self.geometry("max_pool", &x.size(), spatial, true)?;
        let padding = values(&geometries, |geometry| geometry.before);
        maxima(x, &geometries, padding, self.ceil_mode)
    }

    /// Returns the means of a tensor's windows.
    ///
    /// # Errors
    ///
    /// Windows that do not fit.
    pub fn means(&self, x: &Tensor, spatial: usize) -> Result<Tensor> {
        const OP: &str = "avg_pool";
        let geometries = self.geometry(OP, &x.size(), spatial, false)?;
        cut_like(&named(OP, &[x], average(&nonempty(x)?, &geometries, self))?, x, spatial)
    }
}

/// Checks that a shape has a channel dim, a batch dim or none, and `spatial` dims.
///
/// # Errors
///
/// It has not.
pub fn check_dims(op: &'static str, shape: &[i64], spatial: usize) -> Result<()> {
    if !(1..=3).contains(&spatial) || !(spatial + 1..=spatial + 2).contains(&shape.len()) {
        return refuse(op, format!("{shape:?} is not [batch, channel, extent…] of {spatial} spatial dims"));
    }
    Ok(())
}

/// Returns the maxima of windows and their indices with libtorch.
///
/// # Errors
///
/// libtorch refuses the shapes or the dtype.
pub fn maxima(
    x: &Tensor,
    geometries: &[WindowGeometry],
    padding: Vec<i64>,
    ceil_mode: bool,
) -> Result<(Tensor, Tensor)> {
    let (kernel, stride) = (values(geometries, |w| w.kernel), values(geometries, |w| w.stride));
    let dilation = values(geometries, |w| w.dilation);
    let full = nonempty(x)?;
    let pooled = match geometries.len() {
        1 => full.f_max_pool1d_with_indices(kernel, stride, padding, dilation, ceil_mode),
        2 => full.f_max_pool2d_with_indices(kernel, stride, padding, dilation, ceil_mode),
        _ => full.f_max_pool3d_with_indices(kernel, stride, padding, dilation, ceil_mode),
    };
    let (y, indices) = named("max_pool", &[x], pooled)?;
    Ok((cut_like(&y, x, geometries.len())?, cut_like(&indices, x, geometries.len())?))
}

/// Pads a tensor without samples or channels, which libtorch refuses, with one; [`cut_like`] removes it again.
///
/// # Errors
///
/// libtorch refuses the padding.
pub fn nonempty(x: &Tensor) -> Result<Tensor> {
    let shape = x.size();
    let wanted: Vec<i64> = shape.iter().map(|&extent| extent.max(1)).collect();
    if shape == wanted {
        return Ok(x.shallow_clone());
    }
    let pairs: Vec<i64> = shape.iter().zip(&wanted).rev().flat_map(|(from, to)| [0, to - from]).collect();
    named("pool", &[x], x.f_constant_pad_nd(pairs))
}

/// Cuts the result to the number of samples and channels of the input.
///
/// # Errors
///
/// libtorch refuses the cut.
pub fn cut_like(y: &Tensor, x: &Tensor, spatial: usize) -> Result<Tensor> {
    let mut cut = y.shallow_clone();
    for dim in 0..x.dim() - spatial {
        if x.size()[dim] == 0 {
            cut = named("pool", &[y], cut.f_narrow(dim as i64, 0, 0))?;
        }
    }
    Ok(cut)
}

/// Collects one value of each geometry.
pub fn values(geometries: &[WindowGeometry], f: fn(&WindowGeometry) -> i64) -> Vec<i64> {
    geometries.iter().map(f).collect()
}

/// Averages over windows with libtorch.
///
/// # Errors
///
/// libtorch refuses the shapes or the dtype.
pub fn average(x: &Tensor, geometries: &[WindowGeometry], pool: &Pool) -> Result<Tensor, TchError> {
    let (kernel, stride) = (values(geometries, |w| w.kernel), values(geometries, |w| w.stride));
    let padding = values(geometries, |w| w.before);
    let (ceil, include) = (pool.ceil_mode, pool.count_include_pad);
    match geometries.len() {
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
