//! Fields: what looks at neighbours, and statistics of channels.

use tch::Tensor;

use super::by_name::{one, two, with};
use super::{Array, argument, named};
use crate::dtypes::{Dtype, check_dtypes};
use crate::error::Result;
use crate::precision::{as_full, full};
use crate::windowed::{
    Conv, ConvParams, Interpolation, PadMode, Pool, Resize, WindowGeometry, interpolated, means,
    spatial_dims, spatial_name,
};

/// The running statistics of a batch norm, `[channel]`, replicated; training updates them in place, which
/// every handle on them sees.
#[derive(Debug)]
pub struct RunningStats<'a, A> {
    /// Running mean.
    pub mean: &'a A,
    /// Running unbiased variance.
    pub var: &'a A,
    /// Weight of the new statistics in the update.
    pub momentum: f64,
}

/// Operators of fields `[batch, channel, extent…]` with one to three spatial dims.
///
/// # Errors
///
/// All methods fail alike: shapes and arguments that do not fit; on sharded arrays also an exchange that fails.
#[expect(clippy::missing_errors_doc, reason = "all fail alike: shapes and arguments that do not fit")]
pub trait Windowed: Sized {
    /// Convolution in as many spatial dims as `weight` `[out, in / groups, kernel…]` has; `bias` is `[out]`.
    /// The batch may be absent.
    ///
    /// ```
    /// use isobar_array::{Conv, PadMode, Padding, Windowed};
    /// use tch::Tensor;
    ///
    /// // Differences of neighbours on a periodic line, [batch, channel, extent].
    /// let x = Tensor::from_slice(&[1.0, 4.0, 9.0]).view([1, 1, 3]);
    /// let weight = Tensor::from_slice(&[0.0, -1.0, 1.0]).view([1, 1, 3]);
    /// let padding = Padding::Each(vec![1]);
    /// let periodic = Conv { padding, padding_mode: PadMode::Circular, ..Conv::default() };
    /// let y = x.conv(&weight, None, &periodic)?;
    /// assert_eq!(y, Tensor::from_slice(&[3.0, 5.0, -8.0]).view([1, 1, 3]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn conv(&self, weight: &Self, bias: Option<&Self>, conv: &Conv) -> Result<Self>;

    /// Transposed convolution, the adjoint of [`conv`](Self::conv), padding with zeros only; `weight` is
    /// `[in, out / groups, kernel…]`. The result has `output_padding` elements more after the last.
    ///
    /// ```
    /// use isobar_array::{Conv, Windowed};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 10.0]).view([1, 1, 2]);
    /// let weight = Tensor::from_slice(&[1.0, 2.0]).view([1, 1, 2]);
    /// let doubled = Conv { stride: vec![2], ..Conv::default() };
    /// let y = x.conv_transpose(&weight, None, &doubled, &[0])?;
    /// assert_eq!(y, Tensor::from_slice(&[1.0, 2.0, 10.0, 20.0]).view([1, 1, 4]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn conv_transpose(
        &self,
        weight: &Self,
        bias: Option<&Self>,
        conv: &Conv,
        output_padding: &[i64],
    ) -> Result<Self>;

    /// The maxima of windows over the last `spatial` dims, and, of dtype `Int64`, where they are: the index
    /// into the spatial dims, flattened.
    ///
    /// ```
    /// use isobar_array::{Pool, Windowed};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 3.0, 4.0, 2.0]).view([1, 1, 4]);
    /// let (values, places) = x.max_pool(1, &Pool::new(&[2]))?;
    /// assert_eq!(values, Tensor::from_slice(&[3.0, 4.0]).view([1, 1, 2]));
    /// assert_eq!(places, Tensor::from_slice(&[1_i64, 2]).view([1, 1, 2]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn max_pool(&self, spatial: usize, pool: &Pool) -> Result<(Self, Self)>
    where
        Self: Array,
    {
        let name = spatial_name(["max_pool1d", "max_pool2d", "max_pool3d"], spatial);
        two(name, &[self], || pool.args(true))
    }

    /// The means of windows over the last `spatial` dims.
    ///
    /// ```
    /// use isobar_array::{Pool, Windowed};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 3.0, 4.0, 2.0]).view([1, 1, 4]);
    /// let y = x.avg_pool(1, &Pool { stride: vec![1], ..Pool::new(&[2]) })?;
    /// assert_eq!(y, Tensor::from_slice(&[2.0, 3.5, 3.0]).view([1, 1, 3]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn avg_pool(&self, spatial: usize, pool: &Pool) -> Result<Self>
    where
        Self: Array,
    {
        let name = spatial_name(["avg_pool1d", "avg_pool2d", "avg_pool3d"], spatial);
        one(name, &[self], || pool.args(false))
    }

    /// Means over the last `output.len()` (1 to 3) dims such that the result has the extents `output`.
    ///
    /// ```
    /// use isobar_array::Windowed;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).view([1, 1, 4]);
    /// let y = x.adaptive_avg_pool(&[2])?;
    /// assert_eq!(y, Tensor::from_slice(&[1.5, 3.5]).view([1, 1, 2]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn adaptive_avg_pool(&self, output: &[i64]) -> Result<Self>
    where
        Self: Array,
    {
        let names = ["adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"];
        one(spatial_name(names, output.len()), &[self], args!("output_size": output))
    }

    /// Maxima, as [`adaptive_avg_pool`](Self::adaptive_avg_pool).
    ///
    /// ```
    /// use isobar_array::Windowed;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).view([1, 1, 4]);
    /// let y = x.adaptive_max_pool(&[2])?;
    /// assert_eq!(y, Tensor::from_slice(&[2.0, 4.0]).view([1, 1, 2]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn adaptive_max_pool(&self, output: &[i64]) -> Result<Self>
    where
        Self: Array,
    {
        let names = ["adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"];
        one(spatial_name(names, output.len()), &[self], args!("output_size": output))
    }

    /// The field at other extents. With `align_corners`, the first and the last elements of input and result
    /// lie on each other (of [`Interpolation::Linear`] and [`Interpolation::Cubic`]).
    ///
    /// ```
    /// use isobar_array::{Interpolation, Resize, Windowed};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[0.0, 4.0]).view([1, 1, 2]);
    /// let doubled = x.interpolate(&Resize::Scale(vec![2.0]), Interpolation::Nearest, false)?;
    /// assert_eq!(doubled, Tensor::from_slice(&[0.0, 0.0, 4.0, 4.0]).view([1, 1, 4]));
    /// let linear = x.interpolate(&Resize::Size(vec![5]), Interpolation::Linear, true)?;
    /// assert_eq!(linear, Tensor::from_slice(&[0.0, 1.0, 2.0, 3.0, 4.0]).view([1, 1, 5]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn interpolate(&self, resize: &Resize, mode: Interpolation, align_corners: bool) -> Result<Self>
    where
        Self: Array,
    {
        let mode = mode.name(self.shape().len().saturating_sub(2));
        one("interpolate", &[self], || resize.args(mode, align_corners))
    }

    /// Elements before and after, as pairs from the *last* dim backwards (PyTorch's order); negative ones cut
    /// off. `value` is for [`PadMode::Constant`]; the other modes pad spatial dims, all of them.
    ///
    /// ```
    /// use isobar_array::{PadMode, Windowed};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0]).view([1, 1, 3]);
    /// let circular = x.pad_mode(&[1, 1], PadMode::Circular, 0.0)?;
    /// assert_eq!(circular, Tensor::from_slice(&[3.0, 1.0, 2.0, 3.0, 1.0]).view([1, 1, 5]));
    /// let reflected = x.pad_mode(&[2, 0], PadMode::Reflect, 0.0)?;
    /// assert_eq!(reflected, Tensor::from_slice(&[3.0, 2.0, 1.0, 2.0, 3.0]).view([1, 1, 5]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn pad_mode(&self, pairs: &[i64], mode: PadMode, value: f64) -> Result<Self>;

    /// (x − mean) / √(variance + `eps`) over each of `groups` groups of channels of each sample, times
    /// `weight` plus `bias`, `[channel]` (Wu and He, *Group Normalization*, arXiv:1803.08494).
    ///
    /// ```
    /// use isobar_array::Windowed;
    /// use tch::Tensor;
    ///
    /// // Two groups of one channel each.
    /// let x = Tensor::from_slice(&[0.0, 2.0, 10.0, 30.0]).view([1, 2, 2]);
    /// let y = Windowed::group_norm(&x, 2, None, None, 0.0)?;
    /// let want = Tensor::from_slice(&[-1.0, 1.0, -1.0, 1.0]).view([1, 2, 2]);
    /// assert!(y.allclose(&want, 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn group_norm(&self, groups: i64, weight: Option<&Self>, bias: Option<&Self>, eps: f64) -> Result<Self>
    where
        Self: Array,
    {
        let given = (weight.is_some(), bias.is_some());
        let attrs = args!("has_weight": given.0, "has_bias": given.1, "num_groups": groups, "eps": eps);
        one("group_norm", &with(&[self], &[weight, bias]), attrs)
    }

    /// Normalises each channel of each sample (Ulyanov et al., arXiv:1607.08022).
    ///
    /// ```
    /// use isobar_array::Windowed;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[0.0, 2.0, 10.0, 30.0]).view([1, 2, 2]);
    /// let scale = Tensor::from_slice(&[1.0, 5.0]);
    /// let y = Windowed::instance_norm(&x, Some(&scale), None, 0.0)?;
    /// let want = Tensor::from_slice(&[-1.0, 1.0, -5.0, 5.0]).view([1, 2, 2]);
    /// assert!(y.allclose(&want, 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn instance_norm(&self, weight: Option<&Self>, bias: Option<&Self>, eps: f64) -> Result<Self>
    where
        Self: Array,
    {
        let given = (weight.is_some(), bias.is_some());
        let attrs = args!("has_weight": given.0, "has_bias": given.1, "eps": eps);
        one("instance_norm", &with(&[self], &[weight, bias]), attrs)
    }

    /// Normalises each channel over the full batch in training, which updates the `running` statistics;
    /// otherwise with these statistics (Ioffe and Szegedy, *Batch Normalization*, arXiv:1502.03167).
    ///
    /// ```
    /// use isobar_array::{RunningStats, Windowed};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[0.0, 2.0, 4.0, 6.0]).view([2, 1, 2]);
    /// let (mean, var) = (Tensor::from_slice(&[0.0]), Tensor::from_slice(&[1.0]));
    /// let running = RunningStats { mean: &mean, var: &var, momentum: 0.1 };
    /// let y = Windowed::batch_norm(&x, None, None, Some(running), true, 1e-5)?;
    /// assert_eq!(y.size(), [2, 1, 2]);
    /// // A tenth of the way from 0 to the mean of the batch, 3.
    /// assert!((mean.double_value(&[0]) - 0.3).abs() < 1e-6);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn batch_norm(
        &self,
        weight: Option<&Self>,
        bias: Option<&Self>,
        running: Option<RunningStats<'_, Self>>,
        training: bool,
        eps: f64,
    ) -> Result<Self>
    where
        Self: Array,
    {
        let given = (weight.is_some(), bias.is_some());
        let momentum = running.as_ref().map(|running| running.momentum);
        let attrs = args!(
            "has_weight": given.0,
            "has_bias": given.1,
            "training": training,
            "momentum": momentum,
            "eps": eps,
        );
        let running = running.map_or([None, None], |running| [Some(running.mean), Some(running.var)]);
        one("batch_norm", &with(&[self], &[weight, bias, running[0], running[1]]), attrs)
    }
}

impl Windowed for Tensor {
    fn conv(&self, weight: &Self, bias: Option<&Self>, conv: &Conv) -> Result<Self> {
        const OP: &str = "conv";
        let spatial = spatial_dims(OP, &self.size(), &weight.size())?;
        let name = spatial_name(["conv1d", "conv2d", "conv3d"], spatial);
        check_operands(name, (self, Dtype::Real), weight, bias)?;
        if self.dim() == spatial + 1 {
            let batch = named(OP, &[self], self.f_unsqueeze(0))?;
            let y = Windowed::conv(&batch, weight, bias, conv)?;
            return named(OP, &[&y], y.f_select(0, 0));
        }
        let geometries = conv.geometry(&self.size(), &weight.size(), bias.map(Tensor::size).as_deref())?;
        let native = conv.padding_mode == PadMode::Constant
            && geometries.iter().all(|geometry| geometry.before == geometry.after);
        let params = ConvParams::within(&geometries, &vec![native; spatial]);
        let x = match native {
            true => self.shallow_clone(),
            false => {
                let pair = |geometry: &WindowGeometry| [geometry.before, geometry.after];
                let pairs: Vec<i64> = geometries.iter().rev().flat_map(pair).collect();
                conv.padding_mode.pad(self, &pairs, 0.0)?
            }
        };
        named(OP, &[self, weight], params.convolve(&x, weight, bias, conv.groups, false))
    }

    fn conv_transpose(
        &self,
        weight: &Self,
        bias: Option<&Self>,
        conv: &Conv,
        output_padding: &[i64],
    ) -> Result<Self> {
        const OP: &str = "conv_transpose";
        let spatial = spatial_dims(OP, &self.size(), &weight.size())?;
        let names = ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"];
        check_operands(spatial_name(names, spatial), (self, Dtype::FloatingOrInt64), weight, bias)?;
        if self.dim() == spatial + 1 {
            let batch = named(OP, &[self], self.f_unsqueeze(0))?;
            let y = Windowed::conv_transpose(&batch, weight, bias, conv, output_padding)?;
            return named(OP, &[&y], y.f_select(0, 0));
        }
        let of_bias = bias.map(Tensor::size);
        let shapes = (&self.size()[..], &weight.size()[..], of_bias.as_deref());
        let (steps, _) = conv.transposed(shapes, output_padding)?;
        named(OP, &[self, weight], steps.convolve(self, weight, bias, conv.groups, true))
    }

    fn max_pool(&self, spatial: usize, pool: &Pool) -> Result<(Self, Self)> {
        pool.maxima(self, spatial)
    }

    fn avg_pool(&self, spatial: usize, pool: &Pool) -> Result<Self> {
        pool.means(self, spatial)
    }

    fn adaptive_avg_pool(&self, output: &[i64]) -> Result<Self> {
        named("adaptive_avg_pool", &[self], means(self, output))
    }

    fn adaptive_max_pool(&self, output: &[i64]) -> Result<Self> {
        let result = match output.len() {
            1 => self.f_adaptive_max_pool1d(output),
            2 => self.f_adaptive_max_pool2d(output),
            _ => self.f_adaptive_max_pool3d(output),
        };
        Ok(named("adaptive_max_pool", &[self], result)?.0)
    }

    fn interpolate(&self, resize: &Resize, mode: Interpolation, align_corners: bool) -> Result<Self> {
        interpolated(self, resize, mode, align_corners)
    }

    fn pad_mode(&self, pairs: &[i64], mode: PadMode, value: f64) -> Result<Self> {
        mode.pad(self, pairs, value)
    }

    fn group_norm(&self, groups: i64, weight: Option<&Self>, bias: Option<&Self>, eps: f64) -> Result<Self> {
        let y = full(self).and_then(|x| x.f_group_norm(groups, as_full(weight)?, as_full(bias)?, eps, true));
        named("group_norm", &[self], y)
    }

    fn instance_norm(&self, weight: Option<&Self>, bias: Option<&Self>, eps: f64) -> Result<Self> {
        let none = || None::<Tensor>;
        // Without running statistics the momentum says nothing.
        let y = full(self).and_then(|x| {
            x.f_instance_norm(as_full(weight)?, as_full(bias)?, none(), none(), true, 0.0, eps, true)
        });
        named("instance_norm", &[self], y)
    }

    fn batch_norm(
        &self,
        weight: Option<&Self>,
        bias: Option<&Self>,
        running: Option<RunningStats<'_, Self>>,
        training: bool,
        eps: f64,
    ) -> Result<Self> {
        const OP: &str = "batch_norm";
        if !training && running.is_none() {
            return Err(argument(OP, "running statistics are needed outside of training"));
        }
        let momentum = running.as_ref().map_or(0.0, |running| running.momentum);
        let (mean, var) = running.map(|running| (running.mean, running.var)).unzip();
        let y = full(self).and_then(|x| {
            let (weight, bias) = (as_full(weight)?, as_full(bias)?);
            x.f_batch_norm(weight.as_ref(), bias.as_ref(), mean, var, training, momentum, eps, true)
        });
        named(OP, &[self], y)
    }
}

/// Refuses operands of a convolution whose dtypes differ: libtorch lets some biases pass, but not with every algorithm.
fn check_operands(
    op: &'static str,
    (x, first): (&Tensor, Dtype),
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<()> {
    let operand = |(name, x): (&'static str, &Tensor)| (name, x.kind(), Dtype::Operand);
    let others = [("weight", weight)].into_iter().chain(bias.map(|bias| ("bias", bias))).map(operand);
    check_dtypes(op, [("input", x.kind(), first)].into_iter().chain(others), Tensor::device(x))
}
