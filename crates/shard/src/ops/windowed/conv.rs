//! Convolution and transposed convolution.

use isobar_array::kernel::{Steps, Walk, spatial_dims, spatial_name};
use isobar_array::{Conv, PadMode};
use isobar_collectives::ReduceOp;
use tch::Tensor;

use super::halo::{Halo, Native};
use super::{Windowed, border};
use crate::dense::named;
use crate::error::Result;
use crate::layout::{Dim, Interval, Placement};
use crate::ops::align::same_mesh;
use crate::ops::contract::nothing_of;
use crate::ops::operator;
use crate::promote::{Operand, beside, operand};
use crate::tensor::ShardTensor;
use crate::window::{Piece, Windows, fetch};

impl ShardTensor {
    /// Convolution in one to three spatial dims, as many as `weight` `[out, in / groups, kernel…]` has: of
    /// `[batch, in, extent…]`, or without a batch. `bias` is `[out]`.
    ///
    /// Sharded along spatial dims, each rank receives its halo and nothing else; sharded along the batch, nothing.
    /// Sharded channels give a partial sum. In a grouped convolution, each rank instead convolves complete groups and
    /// receives the channels up to the next group boundary; if a rank would be left without a group, another dim is
    /// sharded. The weight's gradient is summed over the ranks. All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Shapes or arguments that do not fit; different meshes; the errors of the exchange.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_array::{Conv, Padding};
    /// use isobar_shard::{Placement, ShardTensor};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let image = Tensor::ones([1, 3, 9, 8], (Kind::Float, Device::Cpu));
    ///     let weight = Tensor::ones([4, 3, 3, 3], (Kind::Float, Device::Cpu));
    ///     let x = ShardTensor::distribute(&image, &mesh, &[Placement::Shard(2)]).unwrap();
    ///     let w = ShardTensor::distribute(&weight, &mesh, &[Placement::Replicate]).unwrap();
    ///     let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
    ///     let y = x.conv(&w, None, &conv).unwrap();
    ///     assert_eq!(y.shape(), [1, 4, 9, 8]);
    ///     assert_eq!(y.local_shape()[2], [5, 4][group.rank()]);
    /// });
    /// ```
    pub fn conv(&self, weight: &dyn Operand, bias: Option<&dyn Operand>, conv: &Conv) -> Result<Self> {
        const OP: &str = "conv";
        let (weight, bias) = (&*weight.beside(OP, self)?, beside(OP, self, bias)?);
        let bias = bias.as_deref();
        let inputs: Vec<&Self> = [self, weight].into_iter().chain(bias).collect();
        let name = spatial_name(["conv1d", "conv2d", "conv3d"], weight.ndim().saturating_sub(2));
        let args = || conv.args();
        operator(name, &inputs, args, || {
            let spatial = spatial_dims(OP, self.shape(), weight.shape())?;
            if self.ndim() == spatial + 1 {
                return self.unsqueeze(0)?.conv(weight, operand(bias), conv)?.select(0, 0);
            }
            let walks = conv.walks(self.shape(), weight.shape(), bias.map(Self::shape))?;
            let x = self.resolved()?.consecutive_along(|dim| dim > 0)?;
            let parts = Channels::new(&x, weight, bias, conv.groups, false)?;
            if conv.padding_mode == PadMode::Constant
                && let Some(halo) = Halo::new(&parts.x, &walks)?
            {
                let Steps { stride, padding, dilation, .. } = Steps::of(&walks);
                let native = Native { stride, padding, dilation, groups: parts.groups, bias: bias.is_some() };
                let y = halo.convolve(parts.x.local(), &parts, native)?;
                let result = |walk: &Walk| parts.x.layout().dims()[walk.dim].scaled(walk.result);
                return Ok(parts.result(y, walks.iter().map(result).collect()));
            }
            let windowed = Windowed::new(&parts.x, &walks, border(conv.padding_mode), 0.0, true)?;
            let mut steps = Steps::of(&walks);
            for (padding, native) in steps.padding.iter_mut().zip(&windowed.native) {
                *padding = if *native { *padding } else { 0 };
            }
            let y = steps.convolve(&windowed.local, &parts.weight, parts.bias.as_ref(), parts.groups, false);
            let y = named(OP, &[&windowed.local, &parts.weight], y.and_then(|y| windowed.trim(y, &walks)))?;
            Ok(parts.result(y, windowed.results))
        })
    }

    /// Transposed convolution, the adjoint of [`conv`](Self::conv): of `[batch, in, extent…]` with `weight`
    /// `[in, out / groups, kernel…]`; `output_padding` elements more after the last.
    ///
    /// # Errors
    ///
    /// As [`conv`](Self::conv); a padding mode or `Same`, which there are not here.
    pub fn conv_transpose(
        &self,
        weight: &dyn Operand,
        bias: Option<&dyn Operand>,
        conv: &Conv,
        output_padding: &[i64],
    ) -> Result<Self> {
        const OP: &str = "conv_transpose";
        const NAMES: [&str; 3] = ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"];
        let (weight, bias) = (&*weight.beside(OP, self)?, beside(OP, self, bias)?);
        let bias = bias.as_deref();
        let inputs: Vec<&Self> = [self, weight].into_iter().chain(bias).collect();
        let args = || {
            let mut args = conv.args();
            args.extend(args!("output_padding": output_padding)());
            args
        };
        operator(spatial_name(NAMES, weight.ndim().saturating_sub(2)), &inputs, args, || {
            let spatial = spatial_dims(OP, self.shape(), weight.shape())?;
            if self.ndim() == spatial + 1 {
                let batch = self.unsqueeze(0)?;
                return batch.conv_transpose(weight, operand(bias), conv, output_padding)?.select(0, 0);
            }
            let shapes = (self.shape(), weight.shape(), bias.map(Self::shape));
            let (mut steps, extents) = conv.transposed(shapes, output_padding)?;
            let x = self.resolved()?.consecutive_along(|dim| dim > 0)?;
            let parts = Channels::new(&x, weight, bias, conv.groups, true)?;
            let x = &parts.x;
            let layout = x.layout();
            let mut windows = Windows::of(layout);
            let (mut cuts, mut results, mut moved) = (Vec::new(), Vec::new(), false);
            for (index, &result) in extents.iter().enumerate() {
                let dim = index + 2;
                let parts = layout.dims()[dim].scaled(result);
                if layout.is_sharded(dim) {
                    let (stride, padding) = (steps.stride[index], steps.padding[index]);
                    let reach = steps.dilation[index] * (weight.shape()[dim] - 1);
                    let back = Back { stride, padding, reach, extent: x.shape()[dim] };
                    let pieces = parts.parts.iter().map(|part| back.pieces(part));
                    let need = crate::window::Need { axes: parts.axes.clone(), parts: pieces.collect() };
                    windows = windows.with(dim, need);
                    let own = super::part_of(&parts, layout);
                    let cut = back.cut(own, steps.dilation[index]);
                    (steps.padding[index], steps.extra[index]) = (cut.padding, cut.extra);
                    cuts.push((dim as i64, cut.start, own.len));
                    moved = true;
                }
                results.push(parts);
            }
            let local =
                if moved { fetch(x.local(), layout, &windows, 0.0)? } else { x.local().shallow_clone() };
            let y = steps.convolve(&local, &parts.weight, parts.bias.as_ref(), parts.groups, true);
            let cut =
                |y: Tensor| cuts.iter().try_fold(y, |y, &(dim, start, len)| y.f_narrow(dim, start, len));
            let y = named(OP, &[&local, &parts.weight], y.and_then(cut))?;
            Ok(parts.result(y, results))
        })
    }
}

/// Which inputs of a transposed convolution a result needs.
struct Back {
    stride: i64,
    padding: i64,
    reach: i64,
    extent: i64,
}

/// Crop of a cover's result.
struct Cut {
    /// Cut off at both ends by the dense operator.
    padding: i64,
    /// Not cut off at the end by it.
    extra: i64,
    /// Cut off at the start after it.
    start: i64,
}

impl Back {
    /// Inputs whose results cover the interval, as first and behind the last; then those of them that exist and reach into
    /// it. In the place of the others stand zeros.
    fn cover(&self, own: Interval) -> [(i64, i64); 2] {
        let Self { stride, padding, reach, extent } = *self;
        let (start, last) = (own.start + padding, own.end() - 1 + padding);
        let needed = (-(reach - start).div_euclid(stride)).clamp(0, extent);
        let needed_end = (last.div_euclid(stride) + 1).clamp(needed, extent);
        let first = needed.min(start.div_euclid(stride));
        let end = needed_end.max(1 - (reach - last).div_euclid(stride));
        [(first, end), (needed, needed_end)]
    }

    fn pieces(&self, part: &[Interval]) -> Vec<Piece> {
        let own = part.first().copied().unwrap_or(Interval::new(0, 0));
        if own.len == 0 {
            return vec![Piece::Fill(1)];
        }
        let [(first, end), (needed, needed_end)] = self.cover(own);
        let pieces = [
            Piece::Fill(needed - first),
            Piece::Take { start: needed, len: needed_end - needed, step: 1 },
            Piece::Fill(end - needed_end),
        ];
        let any = |piece: &Piece| !matches!(piece, Piece::Fill(0) | Piece::Take { len: 0, .. });
        pieces.into_iter().filter(any).collect()
    }

    fn cut(&self, own: Interval, dilation: i64) -> Cut {
        if own.len == 0 {
            return Cut { padding: 0, extra: 0, start: 0 };
        }
        let [(first, end), _] = self.cover(own);
        let before = own.start + self.padding - first * self.stride;
        let after = (end - 1) * self.stride + self.reach + 1 - (own.end() + self.padding);
        // libtorch takes an output padding below the stride or the dilation.
        let padding = before.min(after + self.stride.max(dilation) - 1);
        Cut { padding, extra: (padding - after).max(0), start: before - padding }
    }
}

/// Input, weight and bias as their channels go together.
pub(super) struct Channels {
    x: ShardTensor,
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
    /// Groups of this rank.
    groups: i64,
    out: Dim,
    /// Axes along which the result is a partial sum.
    summed: Vec<usize>,
}

impl Channels {
    fn new(
        x: &ShardTensor,
        weight: &ShardTensor,
        bias: Option<&ShardTensor>,
        groups: i64,
        transposed: bool,
    ) -> Result<Self> {
        let tensors: Vec<&ShardTensor> = [x, weight].into_iter().chain(bias).collect();
        same_mesh("conv", &tensors)?;
        let (input, output) = if transposed { (0, 1) } else { (1, 0) };
        if groups > 1 {
            return Self::in_groups(x, weight, bias, groups, transposed);
        }
        // Kernels are small: they are whole on every rank.
        let weight = weight.resolved()?.gathered(|dim| dim > 1)?;
        let busy: Vec<usize> = x.layout().sharding_axes();
        let free = |dim: &Dim| !dim.axes.iter().any(|axis| busy.contains(axis));
        let of_weight = weight.layout().dims();
        let mut inner = x.layout().dims()[1].clone();
        if !inner.is_split() && of_weight[input].is_split() && free(&of_weight[input]) {
            inner = of_weight[input].clone();
        }
        let mut out = Dim::whole(of_weight[output].extent());
        let taken = |dim: &Dim| dim.axes.iter().any(|axis| inner.axes.contains(axis));
        if of_weight[output].is_split() && free(&of_weight[output]) && !taken(&of_weight[output]) {
            out = of_weight[output].clone();
        }
        let x = x.to_layout(&x.layout().with_dim(1, inner.clone()))?;
        let mut used = x.layout().sharding_axes();
        used.extend(&out.axes);
        // Ranks with other channels of the result use the whole input each for itself.
        let x = ShardTensor::new(x.per_rank(&out.axes)?, x.layout().clone());
        let mut dims = of_weight.to_vec();
        dims[input] = inner.clone();
        dims[output] = out.clone();
        let weight = used_along(&used, &weight.to_layout(&weight.layout().with_dims(dims))?)?;
        let summed = inner.axes.clone();
        let bias = match bias {
            None => None,
            Some(bias) => {
                let local = bias_of(bias, &out, &used)?;
                let at = x.layout().coordinates().unwrap_or_default();
                // Of a partial sum, the first rank adds it.
                let first = summed.iter().all(|&axis| at[axis] == 0);
                Some(if first { local } else { named("conv", &[&local], nothing_of(&local))? })
            }
        };
        Ok(Self { x, weight, bias, groups, out, summed })
    }

    /// Of several groups, each rank convolves whole ones. Split channels move to the next boundary between groups; where that
    /// leaves a rank without a group, another dim is split in their place.
    fn in_groups(
        x: &ShardTensor,
        weight: &ShardTensor,
        bias: Option<&ShardTensor>,
        groups: i64,
        transposed: bool,
    ) -> Result<Self> {
        let channels = x.shape()[1];
        let mut counts = x.layout().dims()[1].scaled(groups);
        let mut layout = x.layout().clone();
        if counts.sizes().contains(&0) {
            let others = (0..x.ndim()).filter(|&dim| dim != 1);
            let widest = others.max_by_key(|&dim| (x.shape()[dim], !layout.is_sharded(dim))).unwrap_or(0);
            (counts, layout) = (Dim::whole(groups), layout.turned(1, widest));
        }
        let split = |extent: i64| {
            let sizes: Vec<i64> = counts.sizes().iter().map(|count| count * (extent / groups)).collect();
            Dim::consecutive(counts.axes.clone(), &sizes)
        };
        let x = x.to_layout(&layout.with_dim(1, split(channels)))?;
        let (rows, of_group) = (weight.shape()[0], weight.shape()[1]);
        let out = split(if transposed { of_group * groups } else { rows });
        let used = x.layout().sharding_axes();
        let weight = weight.resolved()?.gathered(|_| true)?;
        let weight = used_along(&used, &weight.to_layout(&weight.layout().with_dim(0, split(rows)))?)?;
        let bias = bias.map(|bias| bias_of(bias, &out, &used)).transpose()?;
        let groups = super::part_of(&counts, x.layout()).len.max(1);
        Ok(Self { x, weight, bias, groups, out, summed: Vec::new() })
    }

    /// The result with these spatial dims.
    fn result(&self, local: Tensor, spatial: Vec<Dim>) -> ShardTensor {
        let layout = self.x.layout();
        let mut dims = vec![layout.dims()[0].clone(), self.out.clone()];
        dims.extend(spatial);
        let split = layout.with_dims(dims);
        let mut placements = split.placements().to_vec();
        for &axis in &self.summed {
            placements[axis] = Placement::Partial(ReduceOp::Sum);
        }
        let dims = split.dims().to_vec();
        ShardTensor::new(local, split.beside(placements, dims))
    }
}

/// The rank's part of a parameter, which ranks along these axes use each for itself.
fn used_along(used: &[usize], parameter: &ShardTensor) -> Result<Tensor> {
    let own = parameter.layout().sharding_axes();
    let others: Vec<usize> = used.iter().copied().filter(|axis| !own.contains(axis)).collect();
    parameter.per_rank(&others)
}

/// The rank's part of a bias, split as the channels of the result.
fn bias_of(bias: &ShardTensor, out: &Dim, used: &[usize]) -> Result<Tensor> {
    let bias = bias.resolved()?;
    used_along(used, &bias.to_layout(&bias.layout().with_dims(vec![out.clone()]))?)
}
