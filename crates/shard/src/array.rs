//! Models over sharded tensors: [`Array`] is their operators.

use std::ops::Range;

use isobar_array::kernel::broadcast_to;
use isobar_array::{
    Array, Attention, AttentionOptions, Attrs, Conv, Convert, Factory, FftNorm, Generator, Index,
    Interpolation, Linear, Local, Modes, Neighbours, OnShard, PadMode, Pool, RandomOps, Reduce, Resize,
    RunningStats, Shape, Spectral, Statistic, Window, Windowed, kernel,
};
use tch::{Device, Tensor};

use crate::dense::resolve;
use crate::error::{Error, Result};
use crate::layout::{Dim, Layout, Placement};
use crate::ops::index::own_indices;
use crate::parallel::Parallel;
use crate::promote::operand;
use crate::region::ParallelRegion;
use crate::rules::{self, Outputs, rule};
use crate::tensor::ShardTensor;

/// Methods of a trait that the tensor's own methods of the same name carry out.
macro_rules! forward {
    ($($method:ident($($argument:ident: $type:ty $(=> $value:expr)?),*) -> $output:ty;)*) => {
        $(fn $method(&self, $($argument: $type),*) -> isobar_array::Result<$output> {
            Ok(ShardTensor::$method(self, $(forward!(@ $argument $(, $value)?)),*)?.into())
        })*
    };
    (@ $argument:ident) => { $argument };
    (@ $argument:ident, $value:expr) => { $value };
}

/// Implements functions of a trait by the tensor's own functions of the same names.
macro_rules! associated {
    ($($function:ident($($argument:ident: $type:ty),*);)*) => {
        $(fn $function($($argument: $type),*) -> isobar_array::Result<Self> {
            Ok(ShardTensor::$function($($argument),*)?)
        })*
    };
}

impl Array for ShardTensor {
    fn shape(&self) -> Vec<i64> {
        ShardTensor::shape(self).to_vec()
    }

    fn kind(&self) -> tch::Kind {
        ShardTensor::kind(self)
    }

    fn device(&self) -> Device {
        ShardTensor::device(self)
    }

    fn op(name: &str, inputs: &[&Self], attrs: &Attrs) -> isobar_array::Result<Vec<Self>> {
        Ok(ShardTensor::op(name, inputs, attrs)?)
    }

    fn replaced(
        name: &str,
        inputs: &[&Self],
        attrs: impl FnOnce() -> Attrs,
    ) -> Option<isobar_array::Result<Self>> {
        let outputs = match cfg!(debug_assertions) && rules::is_first_call(name) {
            true => {
                let attrs = attrs();
                rules::assert_arguments(name, &attrs);
                rules::replacement(name, inputs, || attrs)?
            }
            false => rules::replacement(name, inputs, attrs)?,
        };
        Some(outputs.and_then(|outputs| Outputs::from_outputs(name, outputs)).map_err(Into::into))
    }
}

impl Local for ShardTensor {
    type Layout = Layout;

    fn into_local(&self) -> isobar_array::Result<(tch::Tensor, Layout)> {
        let whole = self.resolved()?;
        Ok((whole.local().shallow_clone(), whole.layout().clone()))
    }

    fn from_local(part: tch::Tensor, layout: &Layout) -> Self {
        Self::new(part, layout.clone())
    }

    fn into_local_unreduced(&self) -> (tch::Tensor, Layout) {
        (self.local().shallow_clone(), self.layout().clone())
    }

    fn tiles(&self, dim: i64, count: usize) -> isobar_array::Result<Vec<Self>> {
        Ok(ShardTensor::tiles(self, dim, count)?)
    }

    fn join_tiles(tiles: &[&Self], dim: i64, whole: &Self) -> isobar_array::Result<Self> {
        Ok(ShardTensor::join_tiles(tiles, dim, whole)?)
    }

    fn redistribute_like(&self, other: &Self) -> isobar_array::Result<Self> {
        let to = other.layout().without_partial();
        if ShardTensor::shape(self) != to.shape() {
            let reason = format!("{self} and {other} differ in shape");
            return kernel::refuse("redistribute_like", reason);
        }
        Ok(self.to_layout(&to)?)
    }

    fn replicate_dims(&self, dims: &[usize]) -> isobar_array::Result<Self> {
        Ok(rule("replicate_dims", &[self], || self.resolved()?.replicate_where(|dim| dims.contains(&dim)))?)
    }

    fn on_shards_of(&self, like: &Self, dims: usize, f: OnShard<'_>) -> isobar_array::Result<Self> {
        const OP: &str = "on_shards_of";
        let Some(lead) = like.layout().dims().get(..dims) else {
            return kernel::refuse(OP, format!("{dims} dims of {like}"));
        };
        Ok(rule(OP, &[self, like], || {
            let table = self.resolved()?.replicate_where(|_| true)?;
            let mut axes: Vec<usize> = lead.iter().flat_map(|dim| dim.axes.iter().copied()).collect();
            axes.sort_unstable();
            let local = table.mark_varying(&axes)?;
            let indices = (0..dims).map(|dim| own_indices(like.layout(), dim, self.device()));
            let indices = indices.collect::<Result<Vec<_>, _>>();
            let made = f(&local, &crate::dense::named(OP, &[], indices)?)?;
            let extents = &like.layout().local_shape()[..dims];
            let made = crate::dense::named(OP, &[&made], broadcast_to(&made, extents))?;
            let rest = made.size()[dims..].iter().map(|&extent| Dim::whole(extent)).collect::<Vec<_>>();
            Ok(Self::new(made, like.layout().without_partial().with_dims([lead, &rest[..]].concat())))
        })?)
    }

    fn pick(&self, dims: &[usize], wanted: &[(&Tensor, &Self)]) -> isobar_array::Result<Vec<Self>> {
        Ok(ShardTensor::pick(self, dims, wanted)?)
    }

    fn num_shards(&self, dims: &[usize]) -> usize {
        let split = |placement: &Placement| placement.dim().is_some_and(|dim| dims.contains(&dim));
        let axes = self.layout().placements().iter().zip(self.layout().mesh().shape());
        axes.filter_map(|(placement, ranks)| split(placement).then_some(ranks)).product()
    }

    fn full_tensor(&self) -> isobar_array::Result<Tensor> {
        Ok(ShardTensor::full_tensor(self, None)?)
    }
}

impl Convert for ShardTensor {
    fn shallow_clone(&self) -> Self {
        ShardTensor::shallow_clone(self)
    }

    forward! { to_kind(kind: tch::Kind) -> Self; }

    fn to_device(&self, device: Device) -> isobar_array::Result<Self> {
        Ok(self.map("to_device", args!("device": format!("{device:?}")), |x| kernel::on_device(x, device))?)
    }

    fn detach(&self) -> isobar_array::Result<Self> {
        Ok(ShardTensor::detach(self))
    }

    fn constant(&self, plain: &tch::Tensor) -> isobar_array::Result<Self> {
        let here = crate::dense::named("constant", &[plain], kernel::on_device(plain, self.device()))?;
        Ok(Self::new(here, self.layout().replicated_shape(&plain.size())))
    }

    fn contiguous(&self) -> isobar_array::Result<Self> {
        Ok(self.map("contiguous", args!(), tch::Tensor::f_contiguous)?)
    }

    fn view_as_real(&self) -> isobar_array::Result<Self> {
        Ok(rule("view_as_real", &[self], || {
            let x = self.resolved()?;
            let dims = [x.layout().dims(), &[Dim::whole(2)]].concat();
            Ok(Self::new(Convert::view_as_real(x.local())?, x.layout().with_dims(dims)))
        })?)
    }

    fn view_as_complex(&self) -> isobar_array::Result<Self> {
        Ok(rule("view_as_complex", &[self], || {
            let last = self.ndim().saturating_sub(1);
            let x = self.resolved()?.replicate_where(|dim| dim == last)?;
            let mut dims = x.layout().dims().to_vec();
            dims.pop();
            x.viewed("view_as_complex", x.layout().with_dims(dims), isobar_array::kernel::as_complex)
        })?)
    }
}

impl Linear for ShardTensor {
    forward! {
        linear(weight: &Self, bias: Option<&Self> => operand(bias)) -> Self;
        matmul(other: &Self) -> Self;
        bmm(other: &Self, bias: Option<&Self> => operand(bias)) -> Self;
        layer_norm(
            normalized: &[i64], weight: Option<&Self> => operand(weight), bias: Option<&Self> => operand(bias), eps: f64
        ) -> Self;
        softmax(dim: i64) -> Self;
        log_softmax(dim: i64) -> Self;
    }

    associated! { einsum(equation: &str, arrays: &[&Self]); }
}

impl Factory for ShardTensor {
    fn linspace_along(&self, dim: i64, start: f64, end: f64) -> isobar_array::Result<Self> {
        let dim = self.layout().dims()[resolve("linspace", dim, self.ndim())?].clone();
        let step = (end - start) / (dim.extent() - 1).max(1) as f64;
        let layout = self.layout().without_partial().with_dims(vec![dim]);
        Ok(Self::arange(&layout, start, step, self.kind(), self.device())?)
    }
}

impl Reduce for ShardTensor {
    forward! {
        statistic(statistic: Statistic, dims: &[i64], keepdim: bool) -> Self;
        argmax(dim: Option<i64>, keepdim: bool) -> Self;
        argmin(dim: Option<i64>, keepdim: bool) -> Self;
        cumsum(dim: i64) -> Self;
        index_add(dim: i64, index: &Self, source: &Self) -> Self;
    }
}

impl Shape for ShardTensor {
    forward! {
        reshape(shape: &[i64]) -> Self;
        permute(order: &[i64]) -> Self;
        transpose(dim0: i64, dim1: i64) -> Self;
        slice(dim: i64, start: Option<i64>, end: Option<i64>, step: i64) -> Self;
        unbind(dim: i64) -> Vec<Self>;
        chunk(chunks: usize, dim: i64) -> Vec<Self>;
        flatten(start: i64, end: i64) -> Self;
        squeeze(dims: &[i64]) -> Self;
        repeat(repeats: &[i64]) -> Self;
        unfold(dim: i64, size: i64, step: i64) -> Self;
        narrow(dim: i64, start: i64, length: i64) -> Self;
        split(sizes: &[i64], dim: i64) -> Vec<Self>;
        select(dim: i64, index: i64) -> Self;
        index_select(dim: i64, index: &Self) -> Self;
        embedding(indices: &Self) -> Self;
        expand(shape: &[i64]) -> Self;
        unsqueeze(dim: i64) -> Self;
        flip(dims: &[i64]) -> Self;
        roll(shifts: &[i64], dims: &[i64]) -> Self;
    }

    associated! {
        cat(arrays: &[&Self], dim: i64);
        stack(arrays: &[&Self], dim: i64);
    }
}

impl Index for ShardTensor {
    forward! {
        gather(dim: i64, index: &Self) -> Self;
        scatter_add(dim: i64, index: &Self, source: &Self) -> Self;
        sort(dim: i64, descending: bool) -> (Self, Self);
        topk(k: i64, dim: i64, largest: bool) -> (Self, Self);
    }
}

impl Neighbours for ShardTensor {
    forward! {
        knn(queries: &Self, k: i64) -> (Self, Self);
        ball_query(queries: &Self, radius: f64) -> [Self; 3];
        ball_query_limited(queries: &Self, radius: f64, max_points: i64) -> [Self; 3];
    }

    associated! { cdist(a: &Self, b: &Self, p: f64); }
}

impl ShardTensor {
    /// The tensor with these dims whole, for an operator that has no rule for them split.
    pub(crate) fn replicate_dims(&self, op: &'static str, dims: &[usize]) -> Result<Self> {
        let x = self.resolved()?;
        let whole = |(index, dim): (usize, &Dim)| match dims.contains(&index) {
            true => Dim::whole(dim.extent()),
            false => dim.clone(),
        };
        let to = x.layout().with_dims(x.layout().dims().iter().enumerate().map(whole).collect());
        rules::announce(op, &x, &to)?;
        x.to_layout(&to)
    }
}

/// Transforms, each with its kernel, the numbers of points and the dims.
macro_rules! transforms {
    ($($method:ident($($argument:ident: $type:ty),*) => $kind:ident($points:expr, $dims:expr);)*) => {
        $(fn $method(&self, $($argument: $type,)* norm: FftNorm) -> isobar_array::Result<Self> {
            Ok(self.fourier(stringify!($method), kernel::Kind::$kind, $points, $dims, norm)?)
        })*
    };
}

/// Dims that are split are made whole by exchanges for others.
impl Spectral for ShardTensor {
    transforms! {
        fftn(s: &[i64], dims: &[i64]) => Forward(s, dims);
        ifftn(s: &[i64], dims: &[i64]) => Inverse(s, dims);
        rfftn(s: &[i64], dims: &[i64]) => Real(s, dims);
        irfftn(s: &[i64], dims: &[i64]) => InverseReal(s, dims);
        fft(n: Option<i64>, dim: i64) => Forward(n.as_slice(), &[dim]);
        ifft(n: Option<i64>, dim: i64) => Inverse(n.as_slice(), &[dim]);
        rfft(n: Option<i64>, dim: i64) => Real(n.as_slice(), &[dim]);
        irfft(n: Option<i64>, dim: i64) => InverseReal(n.as_slice(), &[dim]);
        fft2(dims: [i64; 2]) => Forward(&[], &dims);
        ifft2(dims: [i64; 2]) => Inverse(&[], &dims);
        rfft2(dims: [i64; 2]) => Real(&[], &dims);
        irfft2(size: [i64; 2], dims: [i64; 2]) => InverseReal(&size, &dims);
    }

    forward! {
        rfft2_modes(dim: i64, modes: &Modes, norm: FftNorm) -> Self;
        irfft2_modes(dim: i64, size: [i64; 2], modes: &Modes, norm: FftNorm) -> Self;
        rfftn_modes(dims: &[i64], kept: &[Vec<Range<i64>>], norm: FftNorm) -> Self;
        irfftn_modes(s: &[i64], dims: &[i64], kept: &[Vec<Range<i64>>], norm: FftNorm) -> Self;
        irfftn_modes_as(field: &Self, dims: &[i64], kept: &[Vec<Range<i64>>], norm: FftNorm) -> Self;
    }
}

impl Windowed for ShardTensor {
    forward! {
        conv(weight: &Self, bias: Option<&Self> => operand(bias), conv: &Conv) -> Self;
        conv_transpose(
            weight: &Self, bias: Option<&Self> => operand(bias), conv: &Conv, output_padding: &[i64]
        ) -> Self;
        max_pool(spatial: usize, pool: &Pool) -> (Self, Self);
        avg_pool(spatial: usize, pool: &Pool) -> Self;
        adaptive_avg_pool(output: &[i64]) -> Self;
        adaptive_max_pool(output: &[i64]) -> Self;
        interpolate(resize: &Resize, mode: Interpolation, align_corners: bool) -> Self;
        pad_mode(pairs: &[i64], mode: PadMode, value: f64) -> Self;
        group_norm(
            groups: i64, weight: Option<&Self> => operand(weight), bias: Option<&Self> => operand(bias), eps: f64
        ) -> Self;
        instance_norm(weight: Option<&Self> => operand(weight), bias: Option<&Self> => operand(bias), eps: f64) -> Self;
        batch_norm(
            weight: Option<&Self> => operand(weight),
            bias: Option<&Self> => operand(bias),
            running: Option<RunningStats<'_, Self>>,
            training: bool,
            eps: f64
        ) -> Self;
    }
}

impl Attention for ShardTensor {
    fn scaled_dot_product_attention(
        query: &Self,
        key: &Self,
        value: &Self,
        options: &AttentionOptions<'_, Self>,
    ) -> isobar_array::Result<Self> {
        let options = options.with_mask(operand(options.attn_mask));
        Ok(ShardTensor::scaled_dot_product_attention(query, key, value, &options)?)
    }
}

impl RandomOps for ShardTensor {
    /// `window` is that of all ranks' parts together; it has an extent of 1 along dims that are dropped together.
    fn dropout(&self, p: f64, generator: &Generator, window: &Window) -> isobar_array::Result<Self> {
        let shape = ShardTensor::shape(self);
        let fits = window.shape().len() == shape.len()
            && shape.iter().zip(window.shape()).all(|(&extent, &mask)| extent == mask || mask == 1);
        if !fits {
            let reason =
                format!("window {window:?} is not of the shape {shape:?}, or of extent 1 along a dim");
            return kernel::refuse("dropout", reason);
        }
        if window.shape() == shape || p == 0.0 {
            return Ok(self.dropout_of(p, generator, window)?);
        }
        let mask_dim =
            |(dim, &mask): (&Dim, &i64)| if dim.extent() == mask { dim.clone() } else { Dim::whole(mask) };
        let dims = self.layout().dims().iter().zip(window.shape()).map(mask_dim).collect();
        let layout: Layout = self.layout().without_partial().with_dims(dims);
        let ones = Self::ones(&layout, self.kind(), self.device())?;
        Ok(self.mul(&ones.dropout_of(p, generator, window)?)?)
    }

    fn normal_like(&self, generator: &Generator, window: &Window) -> isobar_array::Result<Self> {
        check_window("normal_like", self, window)?;
        Ok(self.normal_like_of(generator, window)?)
    }

    fn uniform_like(&self, generator: &Generator, window: &Window) -> isobar_array::Result<Self> {
        check_window("uniform_like", self, window)?;
        Ok(self.uniform_like_of(generator, window)?)
    }
}

/// Checks that the tensor has the shape of the window.
fn check_window(op: &'static str, like: &ShardTensor, window: &Window) -> isobar_array::Result<()> {
    let shape = ShardTensor::shape(like);
    if window.shape() == shape {
        return Ok(());
    }
    kernel::refuse(op, format!("window of shape {:?}; expected the array's {shape:?}", window.shape()))
}

/// A sharded tensor is split over a region's ranks by its layout: regions of one rank are the identity, and others refuse.
impl Parallel for ShardTensor {
    fn copy_to_region(&self, region: &ParallelRegion) -> Result<Self> {
        self.alone("copy_to_region", region)
    }

    fn reduce_from_region(&self, region: &ParallelRegion) -> Result<Self> {
        self.alone("reduce_from_region", region)
    }

    fn scatter_to_region(&self, _dim: i64, _sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self> {
        self.alone("scatter_to_region", region)
    }

    fn gather_from_region(&self, _dim: i64, _sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self> {
        self.alone("gather_from_region", region)
    }

    fn all_gather(&self, _dim: i64, _sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self> {
        self.alone("all_gather", region)
    }

    fn reduce_scatter(&self, _dim: i64, _sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self> {
        self.alone("reduce_scatter", region)
    }
}

impl ShardTensor {
    fn alone(&self, op: &'static str, region: &ParallelRegion) -> Result<Self> {
        if region.size() == 1 {
            return Ok(ShardTensor::shallow_clone(self));
        }
        let reason = format!(
            "a region of {} ranks, of {self}; a sharded tensor is split by its layout: shard it along an axis of its mesh",
            region.size()
        );
        Err(Error::from(isobar_array::Error::Argument { op, reason }))
    }
}
