//! Convolution and transposed convolution.

use isobar_collectives::ReduceOp;
use tch::{TchError, Tensor};

use super::{Walk, Windowed, each, spatial_name};
use crate::array::{Attrs, named};
use crate::error::Result;
use crate::layout::{Dim, Interval, Placement};
use crate::ops::align::same_mesh;
use crate::ops::contract::nothing_of;
use crate::ops::{operator, refuse};
use crate::promote::{Operand, beside, operand};
use crate::tensor::ShardTensor;
use crate::window::{Border, Piece, Windows, fetch};

use super::halo::{Halo, Native};
use super::pad::PadMode;

/// What stands around the input of a convolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Padding {
    /// So many elements before and after, for each dim or for all.
    Each(Vec<i64>),
    /// So many that the result has the input's extents, the odd one after; for stride 1.
    Same,
}

/// How a convolution walks. Lists have one value for each spatial dim, or one for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conv {
    /// Step between outputs.
    pub stride: Vec<i64>,
    /// What stands around the input.
    pub padding: Padding,
    /// Step between the kernel's elements.
    pub dilation: Vec<i64>,
    /// Number of independent groups of channels.
    pub groups: i64,
    /// What the padding is of.
    pub padding_mode: PadMode,
}

impl Default for Conv {
    fn default() -> Self {
        Self {
            stride: vec![1],
            padding: Padding::Each(vec![0]),
            dilation: vec![1],
            groups: 1,
            padding_mode: PadMode::Constant,
        }
    }
}

impl Conv {
    /// Its fields by PyTorch's names.
    fn args(&self) -> Attrs {
        let padding = match &self.padding {
            Padding::Each(widths) => serde_json::json!(widths),
            Padding::Same => "same".into(),
        };
        // PyTorch's convolutions call zeros what its padding calls a constant.
        let mode = if self.padding_mode == PadMode::Constant { "zeros" } else { self.padding_mode.name() };
        args!(
            "stride": self.stride,
            "padding": padding,
            "dilation": self.dilation,
            "groups": self.groups,
            "padding_mode": mode,
        )()
    }
}

impl ShardTensor {
    /// Convolution in one to three spatial dims, as many as `weight` `[out, in / groups, kernel…]` has: of
    /// `[batch, in, extent…]`, or without a batch. `bias` is `[out]`.
    ///
    /// Sharded along spatial dims, each rank receives its halo, and nothing else; along the batch, nothing. Along channels
    /// (of one group) the result is a partial sum; split channels of several groups are gathered, with a warning as of an
    /// operator without a rule. The weight's gradient is summed over the ranks. All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Shapes or arguments that do not fit; different meshes; the errors of the exchange.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_manager::DeviceMesh;
    /// use isobar_shard::{Conv, Padding, Placement, ShardTensor};
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
            let spatial = spatial_dims(OP, self, weight)?;
            if self.ndim() == spatial + 1 {
                return self.unsqueeze(0)?.conv(weight, operand(bias), conv)?.select(0, 0);
            }
            let (channels, per_group) = (self.shape()[1], weight.shape()[1]);
            if conv.groups < 1 || per_group * conv.groups != channels || weight.shape()[0] % conv.groups != 0
            {
                let groups = conv.groups;
                return refuse(
                    OP,
                    format!(
                        "weight {:?} in {groups} groups does not fit {channels} channels",
                        weight.shape()
                    ),
                );
            }
            check_bias(OP, bias, weight.shape()[0])?;
            let stride = each(OP, "stride", &conv.stride, spatial)?;
            let dilation = each(OP, "dilation", &conv.dilation, spatial)?;
            if stride.iter().chain(&dilation).any(|&step| step < 1) {
                return refuse(OP, "stride and dilation must be at least 1");
            }
            let padding = paddings(conv, weight, &stride, &dilation, spatial)?;
            let x = self.resolved()?.consecutive()?;
            let mut walks = Vec::with_capacity(spatial);
            for index in 0..spatial {
                let (extent, kernel) = (x.shape()[index + 2], weight.shape()[index + 2]);
                let (before, after) = padding[index];
                let (stride, dilation) = (stride[index], dilation[index]);
                let room = extent + before + after - dilation * (kernel - 1) - 1;
                if room < 0 || kernel < 1 {
                    return refuse(
                        OP,
                        format!("a kernel of {kernel} does not fit {extent} elements with padding"),
                    );
                }
                conv.padding_mode.check(OP, extent, before, after)?;
                let result = room / stride + 1;
                walks.push(Walk { dim: index + 2, extent, result, kernel, stride, dilation, before, after });
            }
            let parts = Channels::new(&x, weight, bias, conv.groups, false)?;
            if conv.padding_mode == PadMode::Constant
                && let Some(halo) = Halo::new(&parts.x, &walks)?
            {
                let padding = walks.iter().map(|walk| walk.before).collect();
                let native = Native { stride, padding, dilation, groups: conv.groups };
                let y = halo.convolve(parts.x.local(), &parts, native)?;
                let result = |walk: &Walk| parts.x.layout().dims()[walk.dim].scaled(walk.result);
                return Ok(parts.result(y, walks.iter().map(result).collect()));
            }
            let windowed = Windowed::new(&parts.x, &walks, conv.padding_mode.border(), 0.0, true)?;
            let left: Vec<i64> = walks
                .iter()
                .zip(&windowed.native)
                .map(|(walk, native)| if *native { walk.before } else { 0 })
                .collect();
            let none = vec![0; spatial];
            let steps = Steps { stride: &stride, padding: &left, dilation: &dilation, extra: &none };
            let y = steps.convolve(&windowed.local, &parts.weight, parts.bias.as_ref(), conv.groups, false);
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
            let spatial = spatial_dims(OP, self, weight)?;
            if self.ndim() == spatial + 1 {
                let batch = self.unsqueeze(0)?;
                return batch.conv_transpose(weight, operand(bias), conv, output_padding)?.select(0, 0);
            }
            let Padding::Each(padding) = &conv.padding else { return refuse(OP, "it has no padding `same`") };
            if conv.padding_mode != PadMode::Constant {
                return refuse(OP, "it pads with zeros only");
            }
            if conv.groups < 1 || weight.shape()[0] != self.shape()[1] || weight.shape()[0] % conv.groups != 0
            {
                return refuse(
                    OP,
                    format!("weight {:?} does not fit {} channels", weight.shape(), self.shape()[1]),
                );
            }
            check_bias(OP, bias, weight.shape()[1] * conv.groups)?;
            let stride = each(OP, "stride", &conv.stride, spatial)?;
            let dilation = each(OP, "dilation", &conv.dilation, spatial)?;
            let padding = each(OP, "padding", padding, spatial)?;
            let extra = each(OP, "output_padding", output_padding, spatial)?;
            if stride.iter().chain(&dilation).any(|&step| step < 1)
                || padding.iter().chain(&extra).any(|&p| p < 0)
            {
                return refuse(OP, "stride and dilation must be at least 1, paddings at least 0");
            }
            let x = self.resolved()?.consecutive()?;
            let parts = Channels::new(&x, weight, bias, conv.groups, true)?;
            let x = &parts.x;
            let layout = x.layout();
            let mut windows = Windows::of(layout);
            let (mut cuts, mut results, mut moved) = (Vec::new(), Vec::new(), false);
            let (mut left, mut left_extra) = (padding.clone(), extra.clone());
            for index in 0..spatial {
                let dim = index + 2;
                let (extent, kernel) = (x.shape()[dim], weight.shape()[dim]);
                if extra[index] >= stride[index].max(dilation[index]) {
                    let (extra, stride) = (extra[index], stride[index]);
                    return refuse(
                        OP,
                        format!("output_padding {extra} must be below stride {stride} or dilation"),
                    );
                }
                let reach = dilation[index] * (kernel - 1);
                let result = (extent - 1) * stride[index] - 2 * padding[index] + reach + extra[index] + 1;
                if result < 1 || extent < 1 {
                    return refuse(OP, format!("{extent} elements give a result of extent {result}"));
                }
                let parts = layout.dims()[dim].scaled(result);
                if layout.is_sharded(dim) {
                    let back = Back { stride: stride[index], padding: padding[index], reach, extent };
                    let pieces = parts.parts.iter().map(|part| back.pieces(part));
                    let need = crate::window::Need { axes: parts.axes.clone(), parts: pieces.collect() };
                    windows = windows.with(dim, need);
                    let own = super::part_of(&parts, layout);
                    let first = back.cover(own).0 * stride[index] - padding[index];
                    cuts.push((dim as i64, if own.len == 0 { 0 } else { own.start - first }, own.len));
                    (left[index], left_extra[index]) = (0, 0);
                    moved = true;
                }
                results.push(parts);
            }
            let local =
                if moved { fetch(x.local(), layout, &windows, 0.0)? } else { x.local().shallow_clone() };
            let steps = Steps { stride: &stride, padding: &left, dilation: &dilation, extra: &left_extra };
            let y = steps.convolve(&local, &parts.weight, parts.bias.as_ref(), conv.groups, true);
            let cut =
                |y: Tensor| cuts.iter().try_fold(y, |y, &(dim, start, len)| y.f_narrow(dim, start, len));
            let y = named(OP, &[&local, &parts.weight], y.and_then(cut))?;
            Ok(parts.result(y, results))
        })
    }
}

/// How the dense operator walks a window.
pub(super) struct Steps<'a> {
    pub(super) stride: &'a [i64],
    pub(super) padding: &'a [i64],
    pub(super) dilation: &'a [i64],
    pub(super) extra: &'a [i64],
}

impl Steps<'_> {
    /// The dense operator. It knows no tensors without channels: of those that go in one of zeros is made, and of those that
    /// come out one that is cut off again.
    pub(super) fn convolve(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        groups: i64,
        transposed: bool,
    ) -> Result<Tensor, TchError> {
        let (input, output) = if transposed { (0, 1) } else { (1, 0) };
        let (mut x, mut weight) = (x.shallow_clone(), weight.shallow_clone());
        let mut bias = bias.map(Tensor::shallow_clone);
        let none = weight.size()[output] == 0;
        if x.size()[1] == 0 {
            x = with_one(&x, 1)?;
            weight = with_one(&weight, input)?;
        }
        if none {
            weight = with_one(&weight, output)?;
            bias = bias.map(|bias| with_one(&bias, 0)).transpose()?;
        }
        let Self { stride, padding, dilation, extra } = *self;
        let y =
            x.f_convolution(&weight, bias.as_ref(), stride, padding, dilation, transposed, extra, groups)?;
        if none { y.f_narrow(1, 0, 0) } else { Ok(y) }
    }
}

/// One element of zeros along a dim that has none.
fn with_one(x: &Tensor, dim: usize) -> Result<Tensor, TchError> {
    let pairs: Vec<i64> = (0..x.dim()).rev().flat_map(|d| [0, i64::from(d == dim)]).collect();
    x.f_constant_pad_nd(pairs)
}

/// Which inputs of a transposed convolution a result needs.
struct Back {
    stride: i64,
    padding: i64,
    reach: i64,
    extent: i64,
}

impl Back {
    /// Inputs whose outputs cover the interval; they may lie beyond the ends.
    fn cover(&self, own: Interval) -> (i64, i64) {
        let first = (own.start + self.padding - self.reach).div_euclid(self.stride);
        let last = -(-(own.end() - 1 + self.padding)).div_euclid(self.stride);
        (first, last + 1)
    }

    fn pieces(&self, part: &[Interval]) -> Vec<Piece> {
        let own = part.first().copied().unwrap_or(Interval::new(0, 0));
        if own.len == 0 {
            return vec![Piece::Fill(1)];
        }
        let (first, end) = self.cover(own);
        // Those that reach into it; the others of the cover are zeros.
        let needed = -(-(own.start + self.padding - self.reach)).div_euclid(self.stride);
        let needed = needed.clamp(first, end).max(0);
        let needed_end = ((own.end() - 1 + self.padding).div_euclid(self.stride) + 1).min(self.extent);
        let needed_end = needed_end.max(needed);
        let pieces = [
            Piece::Fill(needed.min(end) - first),
            Piece::Take { start: needed, len: needed_end - needed, step: 1 },
            Piece::Fill(end - needed_end),
        ];
        let any = |piece: &Piece| !matches!(piece, Piece::Fill(0) | Piece::Take { len: 0, .. });
        pieces.into_iter().filter(any).collect()
    }
}

/// Input, weight and bias as their channels go together.
pub(super) struct Channels {
    x: ShardTensor,
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
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
        // Kernels are small: they are whole on every rank, and so are the channels of several groups.
        let weight = weight.resolved()?.gathered(|dim| dim > 1 || groups > 1)?;
        let x = if groups > 1 { x.whole_along("conv in groups", &[1])? } else { x.shallow_clone() };
        let busy: Vec<usize> = x.layout().sharding_axes();
        let free = |dim: &Dim| !dim.axes.iter().any(|axis| busy.contains(axis));
        let of_weight = weight.layout().dims();
        let mut inner = x.layout().dims()[1].clone();
        if !inner.is_split() && of_weight[input].is_split() && free(&of_weight[input]) {
            inner = of_weight[input].clone();
        }
        if groups > 1 {
            inner = Dim::whole(inner.extent());
        }
        let mut out = Dim::whole(of_weight[output].extent() * if transposed { groups } else { 1 });
        let taken = |dim: &Dim| dim.axes.iter().any(|axis| inner.axes.contains(axis));
        if groups == 1
            && of_weight[output].is_split()
            && free(&of_weight[output])
            && !taken(&of_weight[output])
        {
            out = of_weight[output].clone();
        }
        let x = match groups {
            1 => x.to_layout(&x.layout().with_dim(1, inner.clone()))?,
            _ => x,
        };
        let mut used = x.layout().sharding_axes();
        used.extend(&out.axes);
        // Ranks with other channels of the result use the whole input each for itself.
        let x = ShardTensor::new(x.per_rank(&out.axes)?, x.layout().clone());
        let mut dims = of_weight.to_vec();
        if groups == 1 {
            dims[input] = inner.clone();
            dims[output] = out.clone();
        }
        let differing = |tensor: &ShardTensor| -> Vec<usize> {
            let own = tensor.layout().sharding_axes();
            used.iter().copied().filter(|axis| !own.contains(axis)).collect()
        };
        let weight = weight.to_layout(&weight.layout().with_dims(dims))?;
        let local_weight = weight.per_rank(&differing(&weight))?;
        let summed = inner.axes.clone();
        let local_bias = match bias {
            None => None,
            Some(bias) => {
                let bias = bias.resolved()?;
                let bias = bias.to_layout(&bias.layout().with_dims(vec![out.clone()]))?;
                let local = bias.per_rank(&differing(&bias))?;
                let at = x.layout().coordinates().unwrap_or_default();
                // Of a partial sum, the first rank adds it.
                let first = summed.iter().all(|&axis| at[axis] == 0);
                Some(if first { local } else { named("conv", &[&local], nothing_of(&local))? })
            }
        };
        Ok(Self { x, weight: local_weight, bias: local_bias, out, summed })
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

fn spatial_dims(op: &'static str, x: &ShardTensor, weight: &ShardTensor) -> Result<usize> {
    match weight.ndim().checked_sub(2) {
        Some(spatial @ 1..=3) if x.ndim() == spatial + 2 || x.ndim() == spatial + 1 => Ok(spatial),
        _ => refuse(
            op,
            format!(
                "input {:?} and weight {:?}; expected [batch, channel, extent…] and [_, _, kernel…] of 1 to 3 dims",
                x.shape(),
                weight.shape()
            ),
        ),
    }
}

fn check_bias(op: &'static str, bias: Option<&ShardTensor>, channels: i64) -> Result<()> {
    match bias {
        Some(bias) if bias.shape() != [channels] => {
            refuse(op, format!("bias {:?} is not one number for each of {channels} channels", bias.shape()))
        }
        _ => Ok(()),
    }
}

/// Elements before and after along each dim.
fn paddings(
    conv: &Conv,
    weight: &ShardTensor,
    stride: &[i64],
    dilation: &[i64],
    spatial: usize,
) -> Result<Vec<(i64, i64)>> {
    match &conv.padding {
        Padding::Each(padding) => {
            let padding = each("conv", "padding", padding, spatial)?;
            if padding.iter().any(|&p| p < 0) {
                return refuse("conv", format!("padding {padding:?} is negative"));
            }
            Ok(padding.into_iter().map(|p| (p, p)).collect())
        }
        Padding::Same if stride.iter().any(|&s| s != 1) => refuse("conv", "padding `same` is for stride 1"),
        Padding::Same => {
            let of = |index: usize| {
                let total = dilation[index] * (weight.shape()[index + 2] - 1);
                (total / 2, total - total / 2)
            };
            Ok((0..spatial).map(of).collect())
        }
    }
}

impl PadMode {
    /// What the window's border is.
    pub(super) fn border(self) -> Border {
        match self {
            Self::Constant => Border::Fill,
            Self::Circular => Border::Circular,
            Self::Reflect => Border::Reflect,
            Self::Replicate => Border::Replicate,
        }
    }
}
