//! A function registered under an operator's name is also called by its method, with all arguments.

mod common;

use std::collections::BTreeMap;
use std::sync::Mutex;

use common::{difference, numbers, on_mesh};
use isobar_array::{
    Array, Attrs, Comparison, Conv, Convert, Elementwise, FftNorm, Generator, GridSample, Interpolation,
    PadMode, Padding, Pool, Resample, Resize, RunningStats, SamplePadding, Spectral, Statistic, Unary,
};
use isobar_shard::rules::{Sharding, Shardings, register_sharded_op, register_sharding};
use isobar_shard::{AttentionOptions, Placement, Result, ShardTensor};
use tch::{Device, Kind, Tensor};

/// Number of calls of each handler on rank 0.
static CALLS: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

/// The tensors that the calls are of.
struct Inputs {
    /// `[2, 4, 6]`
    x: ShardTensor,
    /// `[1, 4, 6, 6]`
    image: ShardTensor,
    /// `[1, 4, 6]`, small positive
    positive: ShardTensor,
    /// Whole numbers below 4, `[2, 4, 6]`
    index: ShardTensor,
    /// `[9, 3]`
    points: ShardTensor,
}

type Call = (&'static str, fn(&Inputs) -> Result<Vec<ShardTensor>>);

fn one(result: Result<ShardTensor>) -> Result<Vec<ShardTensor>> {
    Ok(vec![result?])
}

fn two(result: Result<(ShardTensor, ShardTensor)>) -> Result<Vec<ShardTensor>> {
    result.map(|(first, second)| vec![first, second])
}

fn pool() -> Pool {
    Pool { stride: vec![2], padding: vec![1], count_include_pad: false, ..Pool::new(&[3]) }
}

/// A call of every method, with arguments that are no defaults.
fn calls() -> Vec<Call> {
    vec![
        ("neg", |i| one(Ok(i.x.unary(Unary::Neg)?))),
        ("leaky_relu", |i| one(Ok(i.x.unary(Unary::LeakyRelu(0.3))?))),
        ("gelu", |i| one(Ok(i.x.unary(Unary::GeluTanh)?))),
        ("softshrink", |i| one(Ok(i.x.softshrink(0.2)?))),
        ("threshold", |i| one(Ok(i.x.unary(Unary::Threshold { threshold: 0.1, value: 7.0 })?))),
        ("clamp", |i| one(Ok(i.x.unary(Unary::Clamp { min: -0.2, max: 0.3 })?))),
        ("add", |i| one(Ok(i.x.add_scalar(0.7)?))),
        ("mul", |i| one(Ok(i.x.mul_scalar(1.7)?))),
        ("pow", |i| one(Ok(i.positive.unary(Unary::PowScalar(1.5))?))),
        ("add", |i| one(i.x.add(&i.positive))),
        ("sub", |i| one(i.x.sub(&i.positive))),
        ("div", |i| one(i.x.div(&i.positive))),
        ("where", |i| one(i.x.compare(Comparison::Gt, &i.positive)?.select_where(&i.x, &i.positive))),
        ("le", |i| one(i.x.compare(Comparison::Le, &i.positive))),
        ("masked_fill", |i| one(i.x.masked_fill(&i.x.compare(Comparison::Gt, &i.positive)?, 5.0))),
        ("prelu", |i| one(Ok(Elementwise::prelu(&i.x, &i.positive.select(2, 0)?.reshape(&[4])?)?))),
        ("to_kind", |i| one(i.x.to_kind(Kind::Float))),
        ("linear", |i| one(i.x.linear(&i.x.select(0, 0)?, Some(&i.positive.select(2, 0)?.reshape(&[4])?)))),
        ("matmul", |i| one(i.x.matmul(&i.x.transpose(1, 2)?))),
        ("bmm", |i| one(i.x.bmm(&i.x.transpose(1, 2)?, Some(&i.x.narrow(2, 0, 4)?)))),
        ("einsum", |i| one(ShardTensor::einsum("bij,bkj->bik", &[&i.x, &i.x]))),
        ("conv2d", |i| {
            let conv = Conv {
                stride: vec![2, 1],
                padding: Padding::Each(vec![1]),
                groups: 2,
                padding_mode: PadMode::Circular,
                ..Conv::default()
            };
            one(i.image.conv(&i.image.reshape(&[4, 2, 3, 6])?.narrow(3, 0, 3)?, None, &conv))
        }),
        ("conv_transpose2d", |i| {
            let conv = Conv { stride: vec![2], ..Conv::default() };
            one(i.image.conv_transpose(&i.image.reshape(&[4, 2, 3, 6])?, None, &conv, &[1]))
        }),
        ("max_pool2d", |i| two(i.image.max_pool(2, &pool()))),
        ("avg_pool2d", |i| one(i.image.avg_pool(2, &pool()))),
        ("adaptive_avg_pool2d", |i| one(i.image.adaptive_avg_pool(&[4, 5]))),
        ("adaptive_max_pool2d", |i| one(i.image.adaptive_max_pool(&[4, 5]))),
        ("interpolate", |i| one(i.image.interpolate(&Resize::Scale(vec![1.4]), Interpolation::Linear, true))),
        ("interpolate", |i| {
            one(i.image.interpolate(&Resize::Size(vec![4, 9]), Interpolation::Nearest, false))
        }),
        ("pad", |i| one(i.image.pad_mode(&[1, 2, -1, 3], PadMode::Constant, 0.5))),
        ("pad", |i| one(i.image.pad_mode(&[1, 0], PadMode::Constant, f64::NEG_INFINITY)?.softmax(3))),
        ("masked_fill", |i| {
            let hidden = i.x.compare(Comparison::Gt, &i.positive)?;
            one(i.x.masked_fill(&hidden, f64::NEG_INFINITY)?.softmax(2))
        }),
        ("layer_norm", |i| one(i.x.layer_norm(&[4, 6], None, Some(&i.x.select(0, 1)?), 1e-2))),
        ("batch_norm", |i| {
            let channels = i.x.select(0, 0)?.select(1, 0)?;
            let copy = |x: &ShardTensor| ShardTensor::from_parts(&x.local().copy(), x.layout());
            let channels = channels.redistribute(None, &[Placement::Replicate])?;
            let (mean, var) = (copy(&channels)?, copy(&channels)?);
            let running = RunningStats { mean: &mean, var: &var, momentum: 0.3 };
            let y = i.x.batch_norm(None, None, Some(running), true, 1e-2)?;
            Ok(vec![y, mean, var])
        }),
        ("rfft", |i| one(Ok(i.x.rfft(Some(8), 2, FftNorm::Ortho)?.view_as_real()?))),
        ("irfft2", |i| {
            one(Ok(i.x.rfft2([1, 2], FftNorm::Forward)?.irfft2([4, 6], [1, 2], FftNorm::Forward)?))
        }),
        ("rfft2", |i| one(Ok(i.x.rfft2([1, 2], FftNorm::Forward)?.view_as_real()?))),
        ("rfftn_modes", |i| {
            let kept = [vec![0..1, 3..4], vec![1..2, 2..4]];
            one(Ok(i.x.rfftn_modes(&[1, 2], &kept, FftNorm::Ortho)?.view_as_real()?))
        }),
        ("irfftn_modes", |i| {
            let kept = [vec![0..1, 3..4], vec![1..2, 2..4]];
            let modes = i.x.rfftn_modes(&[1, 2], &kept, FftNorm::Ortho)?;
            one(Ok(modes.irfftn_modes(&[4, 6], &[1, 2], &kept, FftNorm::Ortho)?))
        }),
        ("rearrange", |i| one(Ok(i.image.rearrange("b (g c) h w -> b g h (w c)", &[("c", 2)])?))),
        ("affine_grid", |i| {
            let theta = i.positive.narrow(2, 0, 3)?.narrow(1, 0, 2)?;
            one(Ok(theta.affine_grid(&i.image, true)?))
        }),
        ("contiguous", |i| one(Ok(Convert::contiguous(&i.x.transpose(0, 1)?)?))),
        ("to_device", |i| one(Ok(Convert::to_device(&i.x, Device::Cpu)?))),
        ("ifft", |i| one(Ok(i.x.ifft(None, 1, FftNorm::Backward)?.view_as_real()?))),
        ("pixel_shuffle", |i| one(Ok(i.image.pixel_shuffle(2)?))),
        ("pixel_unshuffle", |i| one(Ok(i.image.pixel_unshuffle(3)?))),
        ("grid_sample", |i| {
            let grid = i.image.reshape(&[1, 12, 6, 2])?;
            let (interpolation, padding) = (Interpolation::Nearest, SamplePadding::Border);
            let options = GridSample { interpolation, padding, align_corners: true };
            one(Ok(i.image.grid_sample(&grid, &options)?))
        }),
        ("roll", |i| one(i.x.roll(&[1, -2], &[0, 2]))),
        ("flip", |i| one(i.x.flip(&[1, 2]))),
        ("unfold", |i| one(i.x.unfold(2, 3, 2))),
        ("layer_norm", |i| one(i.x.layer_norm(&[4, 6], Some(&i.x.select(0, 1)?), None, 1e-2))),
        ("group_norm", |i| one(i.x.group_norm(2, None, None, 1e-2))),
        ("instance_norm", |i| one(i.x.instance_norm(None, None, 1e-2))),
        ("batch_norm", |i| {
            let ones = i.x.select(0, 0)?.select(1, 0)?.mul_scalar(0.0)?.add_scalar(1.0)?;
            let whole = |x: &ShardTensor| x.redistribute(None, &[Placement::Replicate]);
            let copy = |x: &ShardTensor| ShardTensor::from_parts(&x.local().copy(), x.layout());
            let (mean, var) = (copy(&whole(&ones)?)?, copy(&whole(&ones)?)?);
            let running = RunningStats { mean: &mean, var: &var, momentum: 0.3 };
            let y = i.x.batch_norm(Some(&ones), Some(&ones), Some(running), true, 1e-2)?;
            Ok(vec![y, mean, var])
        }),
        ("softmax", |i| one(i.x.softmax(2))),
        ("log_softmax", |i| one(i.x.log_softmax(2))),
        ("var", |i| one(i.x.statistic(Statistic::Var { correction: 0 }, &[0, 2], true))),
        ("sum", |i| one(i.x.sum())),
        ("logsumexp", |i| one(i.x.statistic(Statistic::LogSumExp, &[2], false))),
        ("argmax", |i| one(i.x.argmax(Some(2), true))),
        ("argmin", |i| one(i.x.argmin(None, false))),
        ("cumsum", |i| one(i.x.cumsum(2))),
        ("sort", |i| two(i.x.sort(2, true))),
        ("topk", |i| two(i.x.topk(2, 2, false))),
        ("permute", |i| one(i.x.permute(&[2, 0, 1]))),
        ("transpose", |i| one(i.x.transpose(0, 2))),
        ("unsqueeze", |i| one(i.x.unsqueeze(1))),
        ("squeeze", |i| one(i.image.squeeze(&[0]))),
        ("expand", |i| one(i.positive.expand(&[3, 4, 6]))),
        ("repeat", |i| one(i.x.repeat(&[2, 1, 3]))),
        ("view_kind", |i| one(i.x.view_kind(Kind::Int64))),
        ("flatten", |i| one(i.x.flatten(1, 2))),
        ("reshape", |i| one(i.x.reshape(&[8, -1]))),
        ("slice", |i| one(i.x.slice(2, Some(1), None, 2))),
        ("narrow", |i| one(i.x.narrow(2, 1, 3))),
        ("select", |i| one(i.x.select(2, -1))),
        ("unbind", |i| i.x.unbind(1)),
        ("split", |i| i.x.split(&[1, 3], 1)),
        ("chunk", |i| i.x.chunk(2, 2)),
        ("cat", |i| one(ShardTensor::cat(&[&i.x, &i.positive], 0))),
        ("stack", |i| one(ShardTensor::stack(&[&i.x, &i.x], 1))),
        ("index_select", |i| one(i.x.index_select(2, &i.index.flatten(0, -1)?))),
        ("gather", |i| one(i.x.gather(1, &i.index))),
        ("index_add", |i| {
            let index = i.index.select(0, 0)?.select(0, 0)?;
            one(i.x.index_add(2, &index, &i.x))
        }),
        ("scatter_add", |i| one(i.x.scatter_add(2, &i.index, &i.x))),
        ("embedding", |i| one(i.points.embedding(&i.index))),
        ("cdist", |i| one(ShardTensor::cdist(&i.points, &i.points, 1.0))),
        ("knn", |i| two(i.points.knn(&i.points, 3))),
        ("ball_query", |i| {
            let found = i.points.ball_query(&i.points, 1.5)?;
            Ok(vec![found.offsets, found.indices, found.distances])
        }),
        ("ball_query_limited", |i| {
            let found = i.points.ball_query_limited(&i.points, 1.5, 2)?;
            Ok(vec![found.indices, found.counts, found.distances])
        }),
        ("dropout", |i| one(i.x.dropout(0.4, &Generator::new(3)))),
        ("scaled_dot_product_attention", |i| {
            let generator = Generator::new(5);
            let options = AttentionOptions {
                scale: Some(0.3),
                is_causal: true,
                dropout_p: 0.2,
                generator: Some(&generator),
                ..Default::default()
            };
            let y = ShardTensor::scaled_dot_product_attention(&i.x, &i.x, &i.x, &options)?;
            assert_eq!(generator.draws(), 1, "a handler's draw is seen");
            Ok(vec![y])
        }),
    ]
}

#[test]
fn every_method_asks_for_a_handler() {
    on_mesh(&[2], |mesh| {
        let along = |shape: &[i64], seed: i64, dim: usize| {
            ShardTensor::distribute(&numbers(shape, seed), mesh, &[Placement::Shard(dim)]).unwrap()
        };
        let index = (numbers(&[2, 4, 6], 4).abs() * 2.0).clamp_max(3.0).to_kind(Kind::Int64);
        let inputs = Inputs {
            x: along(&[2, 4, 6], 1, 2),
            image: along(&[1, 4, 6, 6], 2, 2),
            positive: ShardTensor::distribute(
                &(numbers(&[1, 4, 6], 3).abs() + 0.5),
                mesh,
                &[Placement::Replicate],
            )
            .unwrap(),
            index: ShardTensor::distribute(&index, mesh, &[Placement::Shard(2)]).unwrap(),
            points: along(&[9, 3], 5, 0),
        };
        let run = |(name, call): &Call| -> Vec<Tensor> {
            let outputs = call(&inputs).unwrap_or_else(|error| panic!("{name}: {error}"));
            outputs.iter().map(|output| output.full_tensor(None).unwrap()).collect()
        };
        let before: Vec<Vec<Tensor>> = calls().iter().map(run).collect();
        let group = mesh.group_along(&[0]).unwrap();
        group.barrier().unwrap();
        let rank = group.rank();
        if rank == 0 {
            for (name, _) in calls() {
                register_sharded_op(name, move |inputs, attrs| {
                    *CALLS.lock().unwrap().entry(name.to_owned()).or_default() += 1;
                    Ok(ShardTensor::op(name, inputs, attrs)?)
                });
            }
        }
        group.barrier().unwrap();
        for (call, before) in calls().iter().zip(&before) {
            let name = call.0;
            let count = || CALLS.lock().unwrap().get(name).copied().unwrap_or(0);
            let asked = count();
            let after = run(call);
            assert!(count() > asked, "{name} did not ask");
            assert_eq!(after.len(), before.len(), "{name}");
            for (a, b) in after.iter().zip(before) {
                assert!(difference(a, b) == 0.0, "{name} lost an argument");
            }
        }

        // A handler that gives another number of tensors is an error.
        group.barrier().unwrap();
        register_sharded_op("softmax", |_, _| Ok(Vec::new()));
        group.barrier().unwrap();
        let error = inputs.x.softmax(2).unwrap_err().to_string();
        assert!(error.contains("gave 0 tensors, expected 1"), "{error}");
    });
}

/// A built-in operator with a declared sharding and no dense handler runs on the shards.
#[test]
fn a_built_in_operator_whose_sharding_is_declared() {
    register_sharding("tanhshrink", |layouts, _| {
        let along = |dim: usize| Sharding::new(&[Placement::Shard(dim)], &[Placement::Shard(dim)]);
        Ok(Shardings::new((0..layouts[0].ndim()).map(along).collect()))
    });
    on_mesh(&[2], |mesh| {
        let whole = numbers(&[4, 3], 1);
        let want = &whole - whole.tanh();
        let rows = vec![Placement::Shard(0); mesh.ndim()];
        let x = ShardTensor::distribute(&whole, mesh, &rows).unwrap();
        let y = ShardTensor::op("tanhshrink", &[&x], &Attrs::new()).unwrap().remove(0);
        assert!(difference(&y.full_tensor(None).unwrap(), &want) < 1e-12);
        assert!(difference(&x.unary(Unary::Tanhshrink).unwrap().full_tensor(None).unwrap(), &want) < 1e-12);
        let dense = Tensor::op("tanhshrink", &[&whole], &Attrs::new()).unwrap().remove(0);
        assert!(difference(&dense, &want) < 1e-12);
    });
}
