//! Provided methods of `Array`: of an implementation that has the required ones only, they give what dense tensors give.

use isobar_array::{
    Array, Attention, AttentionOptions, Attrs, Binary, Comparison, Conv, Conv2d, Convert, Elementwise,
    Factory, FftNorm, Generator, Index, Interpolation, Linear, Local, Modes, Neighbours, OnShard, PadMode,
    Pool, RandomOps, Reduce, Resize, Result, RunningStats, Shape, Spectral, Statistic, Unary, Window,
    Windowed,
};
use tch::{Device, Kind, Tensor};

use crate::common::{difference, numbers};

/// A dense tensor with the required methods only.
#[derive(Debug)]
struct Plain(Tensor);

/// Methods that the dense tensor carries out.
macro_rules! dense {
    ($trait:ident: $($method:ident($($argument:ident: $type:ty $(=> $value:expr)?),*);)*) => {
        $(fn $method(&self, $($argument: $type),*) -> Result<Self> {
            <Tensor as $trait>::$method(&self.0, $(dense!(@ $argument $(, $value)?)),*).map(Plain)
        })*
    };
    (@ $argument:ident) => { $argument };
    (@ $argument:ident, $value:expr) => { $value };
}

fn inner(x: Option<&Plain>) -> Option<&Tensor> {
    x.map(|x| &x.0)
}

impl Array for Plain {
    fn shape(&self) -> Vec<i64> {
        self.0.size()
    }

    fn kind(&self) -> Kind {
        self.0.kind()
    }

    fn device(&self) -> Device {
        self.0.device()
    }

    fn op(name: &str, inputs: &[&Self], attrs: &Attrs) -> Result<Vec<Self>> {
        let inputs: Vec<&Tensor> = inputs.iter().map(|input| &input.0).collect();
        Ok(Tensor::op(name, &inputs, attrs)?.into_iter().map(Plain).collect())
    }
}

impl Elementwise for Plain {
    dense! { Elementwise:
        unary(function: Unary);
        binary(function: Binary, other: &Self => &other.0);
        select_where(on_true: &Self => &on_true.0, on_false: &Self => &on_false.0);
    }
}

impl Linear for Plain {
    dense! { Linear: matmul(other: &Self => &other.0); }
}

impl Windowed for Plain {
    dense! { Windowed:
        conv(weight: &Self => &weight.0, bias: Option<&Self> => inner(bias), conv: &Conv);
        conv_transpose(
            weight: &Self => &weight.0, bias: Option<&Self> => inner(bias), conv: &Conv, output_padding: &[i64]
        );
        pad_mode(pairs: &[i64], mode: PadMode, value: f64);
    }
}

impl Shape for Plain {
    dense! { Shape:
        reshape(shape: &[i64]);
        permute(order: &[i64]);
        slice(dim: i64, start: Option<i64>, end: Option<i64>, step: i64);
        index_select(dim: i64, index: &Self => &index.0);
        expand(shape: &[i64]);
    }

    fn cat(arrays: &[&Self], dim: i64) -> Result<Self> {
        let arrays: Vec<&Tensor> = arrays.iter().map(|array| &array.0).collect();
        <Tensor as Shape>::cat(&arrays, dim).map(Plain)
    }
}

impl Reduce for Plain {
    dense! { Reduce: statistic(statistic: Statistic, dims: &[i64], keepdim: bool); }
}

impl Index for Plain {}

impl Neighbours for Plain {}

impl Spectral for Plain {
    dense! { Spectral:
        fftn(s: &[i64], dims: &[i64], norm: FftNorm);
        ifftn(s: &[i64], dims: &[i64], norm: FftNorm);
        rfftn(s: &[i64], dims: &[i64], norm: FftNorm);
        irfftn(s: &[i64], dims: &[i64], norm: FftNorm);
    }
}

impl Convert for Plain {
    dense! { Convert:
        detach();
        constant(plain: &Tensor);
        view_as_real();
        view_as_complex();
    }

    fn shallow_clone(&self) -> Self {
        Plain(self.0.shallow_clone())
    }
}

impl Factory for Plain {
    dense! { Factory: linspace_along(dim: i64, start: f64, end: f64); }
}

impl Attention for Plain {
    fn scaled_dot_product_attention(
        query: &Self,
        key: &Self,
        value: &Self,
        options: &AttentionOptions<'_, Self>,
    ) -> Result<Self> {
        let options = options.with_mask(inner(options.attn_mask));
        <Tensor as Attention>::scaled_dot_product_attention(&query.0, &key.0, &value.0, &options).map(Plain)
    }
}

impl RandomOps for Plain {
    dense! { RandomOps:
        dropout(p: f64, generator: &Generator, window: &Window);
        normal_like(generator: &Generator, window: &Window);
        uniform_like(generator: &Generator, window: &Window);
    }
}

impl Local for Plain {
    type Layout = ();

    dense! { Local:
        redistribute_like(other: &Self => &other.0);
        replicate_dims(dims: &[usize]);
        on_shards_of(like: &Self => &like.0, dims: usize, f: OnShard<'_>);
    }

    fn pick(&self, dims: &[usize], wanted: &[(&Tensor, &Self)]) -> Result<Vec<Self>> {
        let wanted: Vec<_> = wanted.iter().map(|&(index, like)| (index, &like.0)).collect();
        Ok(self.0.pick(dims, &wanted)?.into_iter().map(Plain).collect())
    }

    fn into_local(&self) -> Result<(Tensor, ())> {
        self.0.into_local()
    }

    fn into_local_unreduced(&self) -> (Tensor, ()) {
        self.0.into_local_unreduced()
    }

    fn from_local(part: Tensor, (): &()) -> Self {
        Plain(part)
    }

    fn tiles(&self, dim: i64, count: usize) -> Result<Vec<Self>> {
        Ok(Local::tiles(&self.0, dim, count)?.into_iter().map(Plain).collect())
    }

    fn join_tiles(tiles: &[&Self], dim: i64, whole: &Self) -> Result<Self> {
        let tiles: Vec<&Tensor> = tiles.iter().map(|tile| &tile.0).collect();
        <Tensor as Local>::join_tiles(&tiles, dim, &whole.0).map(Plain)
    }

    fn num_shards(&self, dims: &[usize]) -> usize {
        Local::num_shards(&self.0, dims)
    }

    fn full_tensor(&self) -> Result<Tensor> {
        self.0.full_tensor()
    }
}

/// Tensors that the methods are called with.
struct Inputs<A> {
    /// `[2, 4, 6, 8]`
    image: A,
    /// `[5, 4, 3, 3]`
    kernel: A,
    /// `[5]`
    bias: A,
    /// `[4, 8]`
    matrix: A,
    /// `[4]`
    channels: A,
    /// Whole numbers below 4, `[4, 8]`
    index: A,
    /// Whole numbers below 4, `[3]`
    rows: A,
    /// `[9, 3]`
    points: A,
}

/// The results of all provided methods.
fn results<A: Array>(i: &Inputs<A>) -> Result<Vec<A>> {
    let Inputs { image, kernel, bias, matrix, channels, index, rows, points } = i;
    let pair = |(a, b): (A, A)| vec![a, b];
    let modes = Modes { rows: 1..4, columns: 0..3 };
    let spectrum = image.rfft2_modes(2, &modes, FftNorm::Ortho)?;
    let kept = [vec![0..2, 4..6], vec![1..2, 2..4]];
    let halves = image.rfftn_modes(&[2, 3], &kept, FftNorm::Forward)?;
    let square = matrix.matmul(&matrix.transpose(0, 1)?)?;
    let batch = square.unsqueeze(0)?;
    let (mean, var) = (channels.shallow_clone(), channels.unary(Unary::Square)?);
    let running = || Some(RunningStats { mean: &mean, var: &var, momentum: 0.2 });
    let conv = Conv2d { stride: [2, 1], padding: [1, 0], ..Conv2d::default() };
    let pool = Pool { padding: vec![1], ..Pool::new(&[2, 3]) };
    let scale = Resize::Scale(vec![2.0, 1.5]);
    let mut all = vec![
        image.prelu(channels)?,
        matrix.compare(Comparison::Gt, &matrix.mul_scalar(0.5)?)?.to_kind(Kind::Double)?,
        matrix.masked_fill(&matrix.compare(Comparison::Lt, &matrix.mul_scalar(0.5)?)?, 3.0)?,
        matrix.linear(&matrix.slice(0, Some(1), None, 1)?, None)?,
        matrix.linear(matrix, Some(channels))?,
        batch.bmm(&batch, None)?,
        batch.bmm(&batch, Some(&batch))?,
        image.conv2d(kernel, Some(bias), &conv)?,
        image.layer_norm(&[8], None, Some(&matrix.select(0, 1)?), 1e-4)?,
        matrix.softmax(0)?,
        matrix.log_softmax(-1)?,
        A::einsum("ij,kj->ik", &[matrix, matrix])?,
        image.avg_pool(2, &pool)?,
        image.adaptive_avg_pool(&[3, 5])?,
        image.adaptive_max_pool(&[3, 5])?,
        image.interpolate(&scale, Interpolation::Linear, true)?,
        image.interpolate(&Resize::Size(vec![4, 9]), Interpolation::Nearest, false)?,
        image.group_norm(2, Some(channels), None, 1e-4)?,
        image.instance_norm(None, Some(channels), 1e-4)?,
        image.batch_norm(Some(channels), None, None, true, 1e-4)?,
        image.batch_norm(None, Some(channels), running(), false, 1e-4)?,
        image.transpose(1, -1)?,
        image.flatten(1, 2)?,
        batch.squeeze(&[0])?,
        matrix.repeat(&[2, 1, 2])?,
        matrix.unfold(1, 3, 2)?,
        matrix.narrow(1, 2, 5)?,
        matrix.select(1, -1)?,
        matrix.embedding(rows)?,
        A::stack(&[matrix, matrix], 1)?,
        matrix.unsqueeze(1)?,
        matrix.pad(&[1, 2], 0.5)?,
        image.flip(&[2, 3])?,
        image.roll(&[2, -1], &[2, 3])?,
        matrix.argmax(Some(1), true)?,
        matrix.argmin(None, false)?,
        matrix.cumsum(1)?,
        matrix.index_add(0, rows, &matrix.narrow(0, 0, 3)?)?,
        matrix.mse_loss(&matrix.mul_scalar(0.3)?)?,
        matrix.gather(0, index)?,
        matrix.scatter_add(0, index, matrix)?,
        A::cdist(points, points, 1.0)?,
        spectrum.irfft2_modes(2, [6, 8], &modes, FftNorm::Ortho)?,
        halves.irfftn_modes(&[6, 8], &[2, 3], &kept, FftNorm::Forward)?,
        halves.irfftn_modes_as(image, &[2, 3], &kept, FftNorm::Forward)?,
        halves.view_as_real()?,
        matrix.to_device(Device::Cpu)?,
        image.transpose(1, 2)?.contiguous()?,
        spectrum,
    ];
    all.extend(pair(image.max_pool(2, &pool)?));
    all.extend(pair(matrix.sort(1, true)?));
    all.extend(pair(matrix.topk(3, 1, false)?));
    all.extend(pair(points.knn(points, 3)?));
    all.extend(points.ball_query(points, 1.5)?);
    all.extend(points.ball_query_limited(points, 1.5, 2)?);
    all.extend(matrix.unbind(1)?);
    all.extend(matrix.chunk(3, 1)?);
    all.extend(matrix.split(&[1, 3], 0)?);
    Ok(all)
}

#[test]
fn provided_methods_are_those_of_dense_tensors() {
    let whole = |shape: &[i64], seed| (numbers(shape, seed).abs() * 2.0).clamp_max(3.0).to_kind(Kind::Int64);
    let inputs = || Inputs {
        image: numbers(&[2, 4, 6, 8], 1),
        kernel: numbers(&[5, 4, 3, 3], 2),
        bias: numbers(&[5], 3),
        matrix: numbers(&[4, 8], 4),
        channels: numbers(&[4], 5).abs() + 0.1,
        index: whole(&[4, 8], 6),
        rows: whole(&[3], 7),
        points: numbers(&[9, 3], 8),
    };
    let Inputs { image, kernel, bias, matrix, channels, index, rows, points } = inputs();
    let plain = Inputs {
        image: Plain(image),
        kernel: Plain(kernel),
        bias: Plain(bias),
        matrix: Plain(matrix),
        channels: Plain(channels),
        index: Plain(index),
        rows: Plain(rows),
        points: Plain(points),
    };
    let (got, want) = (results(&plain).unwrap(), results(&inputs()).unwrap());
    assert_eq!(got.len(), want.len());
    for (number, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_eq!(got.0.kind(), want.kind(), "result {number}");
        assert!(difference(&got.0, want) < 1e-12, "result {number}");
    }
}
