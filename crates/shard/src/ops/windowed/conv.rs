//! Convolution and transposed convolution.

use isobar_array::kernel::{ConvParams, WindowGeometry, spatial_dims, spatial_name};
use isobar_array::{Conv, Padding};
use tch::Tensor;

use super::channels::ConvOperands;
use super::halo::Overlap;
use super::pad::pad_mode;
use super::{WindowPlan, border, window_on};
use crate::dense::named;
use crate::error::Result;
use crate::layout::Interval;
use crate::ops::operator;
use crate::promote::{Operand, operand, promote_optional};
use crate::rules::{Call, Footprint, Side};
use crate::tensor::ShardTensor;
use crate::window::{WindowRun, Windows, fetch};

impl ShardTensor {
    /// Convolution in one to three spatial dims, as many as `weight` `[out, in / groups, kernel…]` has: of
    /// `[batch, in, extent…]`, or without a batch. `bias` is `[out]`.
    ///
    /// Along sharded spatial dims, each rank receives only its halo, and computes its interior while the halo is in flight.
    /// A sharded batch needs no communication. Sharded channels give a partial sum. In a grouped convolution, each rank
    /// instead convolves complete groups and receives the channels up to the next group boundary; if a rank would be left
    /// without a group, another dim is sharded. The weight's gradient is summed over the ranks. All ranks of the mesh call.
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
        let (weight, bias) = (&*weight.promote(OP, self)?, promote_optional(OP, self, bias)?);
        let bias = bias.as_deref();
        let inputs: Vec<&Self> = [self, weight].into_iter().chain(bias).collect();
        let name = spatial_name(["conv1d", "conv2d", "conv3d"], weight.ndim().saturating_sub(2));
        let args = || conv.args();
        operator(name, &inputs, args, || {
            let spatial = spatial_dims(OP, self.shape(), weight.shape())?;
            if self.ndim() == spatial + 1 {
                return self.unsqueeze(0)?.conv(weight, operand(bias), conv)?.select(0, 0);
            }
            let geometries = conv.geometry(self.shape(), weight.shape(), bias.map(Self::shape))?;
            let x = self.resolved()?.consecutive_along(|dim| dim > 0)?;
            let parts = ConvOperands::new(&x, weight, bias, conv.groups, false)?;
            let (layout, border) = (parts.x.layout(), border(conv.padding_mode));
            let plan = WindowPlan::new(layout, &geometries, border, true);
            if let Some(overlap) = Overlap::new(layout, &geometries, &plan, border, parts.groups)? {
                let y = overlap.convolve(&parts)?;
                return Ok(parts.result(y, plan.results));
            }
            let windowed = plan.fetch(&parts.x, 0.0)?;
            let params = ConvParams::within(&geometries, &windowed.native);
            let y = params.convolve(&windowed.local, &parts.weight, parts.bias.as_ref(), parts.groups, false);
            let y =
                named(OP, &[&windowed.local, &parts.weight], y.and_then(|y| windowed.trim(y, &geometries)))?;
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
        let (weight, bias) = (&*weight.promote(OP, self)?, promote_optional(OP, self, bias)?);
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
            let parts = ConvOperands::new(&x, weight, bias, conv.groups, true)?;
            let x = &parts.x;
            let layout = x.layout();
            let mut windows = Windows::own(layout);
            let (mut cuts, mut results, mut moved) = (Vec::new(), Vec::new(), false);
            for (index, &result) in extents.iter().enumerate() {
                let dim = index + 2;
                let parts = layout.dims()[dim].scaled(result);
                if layout.is_sharded(dim) {
                    let (stride, padding) = (steps.stride[index], steps.padding[index]);
                    let reach = steps.dilation[index] * (weight.shape()[dim] - 1);
                    let back = TransposedWindow { stride, padding, reach, extent: x.shape()[dim] };
                    let pieces = parts.parts.iter().map(|part| back.pieces(part));
                    let need = crate::window::HaloSpec { axes: parts.axes.clone(), parts: pieces.collect() };
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

/// Inputs of a transposed convolution that a result needs.
struct TransposedWindow {
    stride: i64,
    padding: i64,
    reach: i64,
    extent: i64,
}

/// Crop of a cover's result.
struct Crop {
    /// Cut off at both ends by the dense operator.
    padding: i64,
    /// Not cut off at the end by it.
    extra: i64,
    /// Cut off at the start after it.
    start: i64,
}

impl TransposedWindow {
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

    fn pieces(&self, part: &[Interval]) -> Vec<WindowRun> {
        let own = part.first().copied().unwrap_or(Interval::new(0, 0));
        if own.len == 0 {
            return vec![WindowRun::Fill(1)];
        }
        let [(first, end), (needed, needed_end)] = self.cover(own);
        let pieces = [
            WindowRun::Fill(needed - first),
            WindowRun::Take { start: needed, len: needed_end - needed, step: 1 },
            WindowRun::Fill(end - needed_end),
        ];
        let any = |piece: &WindowRun| !matches!(piece, WindowRun::Fill(0) | WindowRun::Take { len: 0, .. });
        pieces.into_iter().filter(any).collect()
    }

    fn cut(&self, own: Interval, dilation: i64) -> Crop {
        if own.len == 0 {
            return Crop { padding: 0, extra: 0, start: 0 };
        }
        let [(first, end), _] = self.cover(own);
        let before = own.start + self.padding - first * self.stride;
        let after = (end - 1) * self.stride + self.reach + 1 - (own.end() + self.padding);
        // libtorch takes an output padding below the stride or the dilation.
        let padding = before.min(after + self.stride.max(dilation) - 1);
        Crop { padding, extra: (padding - after).max(0), start: before - padding }
    }
}

crate::register! {
    /// The convolution over 1 dim.
    "conv1d"(input: Real, weight: Operand, bias: Operand; stride, padding, dilation, groups, padding_mode) Halo(conv_window): |call| conv(call);
    /// The convolution over 2 dims.
    "conv2d"(input: Real, weight: Operand, bias: Operand; stride, padding, dilation, groups, padding_mode) Halo(conv_window): |call| conv(call);
    /// The convolution over 3 dims.
    "conv3d"(input: Real, weight: Operand, bias: Operand; stride, padding, dilation, groups, padding_mode) Halo(conv_window): |call| conv(call);
    /// The transposed convolution over 1 dim.
    "conv_transpose1d"(input: FloatingOrInt64, weight: Operand, bias: Operand; stride, padding, output_padding, groups, dilation, padding_mode) Halo(transposed_window):
        |call| conv_transpose(call);
    /// The transposed convolution over 2 dims.
    "conv_transpose2d"(input: FloatingOrInt64, weight: Operand, bias: Operand; stride, padding, output_padding, groups, dilation, padding_mode) Halo(transposed_window):
        |call| conv_transpose(call);
    /// The transposed convolution over 3 dims.
    "conv_transpose3d"(input: FloatingOrInt64, weight: Operand, bias: Operand; stride, padding, output_padding, groups, dilation, padding_mode) Halo(transposed_window):
        |call| conv_transpose(call);
}

/// Returns the window of a convolution along a dim, to bound its bytes.
fn conv_window(call: &Footprint<'_>, side: &Side) -> Result<(i64, i64)> {
    match geometry_along(call, side)? {
        Some(geometry) => window_on(call, side, &geometry),
        None => Ok(side.shard),
    }
}

/// Returns the window of a transposed convolution along a dim, to bound its bytes.
fn transposed_window(call: &Footprint<'_>, side: &Side) -> Result<(i64, i64)> {
    let Some(geometry) = geometry_along(call, side)? else { return Ok(side.shard) };
    let Some((start, end)) = side.own else { return Ok((0, 0)) };
    let WindowGeometry { before, stride, .. } = geometry;
    let first = (start + before - geometry.reach() + stride).div_euclid(stride);
    Ok((first, (end - 1 + before).div_euclid(stride) + 1))
}

/// Returns the geometry along a dim; `None` along batch and channels.
fn geometry_along(call: &Footprint<'_>, side: &Side) -> Result<Option<WindowGeometry>> {
    let kernel = &call.tensor(1)?.layout.shape()[2..];
    let Some(index) = (side.dim + kernel.len()).checked_sub(call.ndim()) else { return Ok(None) };
    let (kernel, dilation) = (kernel[index], call.number("dilation", index, 1));
    let padding = match call.attrs.get("padding").and_then(serde_json::Value::as_str) {
        Some("same") => dilation * (kernel - 1) / 2,
        Some(_) => 0,
        None => call.number("padding", index, 0),
    };
    Ok(Some(WindowGeometry {
        dim: side.dim,
        extent: side.extent,
        result: side.result,
        kernel,
        stride: call.number("stride", index, 1),
        dilation,
        before: padding,
        after: padding,
    }))
}

fn conv(call: &Call<'_>) -> Result<ShardTensor> {
    let bias = operand(call.optional_tensor(2));
    call.tensor(0)?.conv(call.tensor(1)?, bias, &options(call)?)
}

fn conv_transpose(call: &Call<'_>) -> Result<ShardTensor> {
    let bias = operand(call.optional_tensor(2));
    let output_padding = call.list("output_padding", vec![0])?;
    call.tensor(0)?.conv_transpose(call.tensor(1)?, bias, &options(call)?, &output_padding)
}

fn options(call: &Call<'_>) -> Result<Conv> {
    // Either a word, or numbers.
    let padding = match call.optional::<String>("padding") {
        Ok(Some(word)) => match &word[..] {
            "same" => Padding::Same,
            "valid" => Padding::Each(vec![0]),
            other => return call.refuse(format!("padding = \"{other}\"; expected numbers, same or valid")),
        },
        _ => Padding::Each(call.list("padding", vec![0])?),
    };
    Ok(Conv {
        stride: call.list("stride", vec![1])?,
        padding,
        dilation: call.list("dilation", vec![1])?,
        groups: call.or("groups", 1)?,
        padding_mode: pad_mode(call, "padding_mode", "zeros")?,
    })
}
