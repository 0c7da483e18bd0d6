//! Operators × dtypes × layouts: a sharded operator gives the dense one's result, or both refuse, and then all ranks give one and
//! the same error, from metadata, so that no rank waits for another.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{
    Array, AttentionOptions, Binary, Comparison, Conv, Elementwise, FftNorm, GridSample, Interpolation,
    Linear, Padding, Pool, Reduce, Resample, Resize, Result, Statistic, Unary,
};
use isobar_collectives::threads;
use isobar_mesh::DeviceMesh;
use isobar_shard::{Layout, Operand, Placement, ShardTensor, Sizes};
use isobar_torch::guard::Autocast;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::{numbers, on_mesh, placements};

const KINDS: [Kind; 7] =
    [Kind::Int64, Kind::Uint8, Kind::Bool, Kind::Half, Kind::BFloat16, Kind::Double, Kind::ComplexFloat];

/// Deadline of ranks that wait for another one in error.
const DEADLINE: Duration = Duration::from_secs(10);

/// Call of an operator, on dense and on sharded tensors.
struct Case {
    name: &'static str,
    shapes: &'static [&'static [i64]],
    dense: fn(&[Tensor]) -> Result<Tensor>,
    sharded: fn(&[ShardTensor]) -> Result<ShardTensor>,
}

macro_rules! cases {
    ($($name:literal $shapes:expr, |$x:ident| $body:expr;)*) => {
        [$({
            fn run<A: Array + Resample>($x: &[A]) -> Result<A> {
                $body
            }
            Case { name: $name, shapes: &$shapes, dense: run::<Tensor>, sharded: run::<ShardTensor> }
        }),*]
    };
}

fn same(padding: i64) -> Conv {
    Conv { padding: Padding::Each(vec![padding]), ..Conv::default() }
}

fn overlapping() -> Pool {
    Pool { stride: vec![2], padding: vec![1], ..Pool::new(&[3]) }
}

/// Convolutions, products, norms and attention, with operands of one dtype and of two.
fn products() -> Vec<Case> {
    cases! {
        "conv1d" [&[1, 2, 3], &[2, 2, 3]], |x| x[0].conv(&x[1], None, &same(1));
        "conv2d" [&[1, 2, 2, 4], &[2, 2, 3, 3], &[2]], |x| x[0].conv(&x[1], Some(&x[2]), &same(1));
        "conv2d without padding" [&[1, 2, 4, 3], &[2, 2, 1, 1]], |x| x[0].conv(&x[1], None, &same(0));
        "conv3d" [&[1, 1, 3, 2, 2], &[1, 1, 3, 1, 1]], |x| x[0].conv(&x[1], None, &same(1));
        "conv2d with a weight of Float" [&[1, 2, 4, 3], &[2, 2, 3, 3]],
            |x| x[0].conv(&x[1].to_kind(Kind::Float)?, None, &same(1));
        "conv2d with a bias of Float" [&[1, 2, 4, 3], &[2, 2, 3, 3], &[2]],
            |x| x[0].conv(&x[1], Some(&x[2].to_kind(Kind::Float)?), &same(1));
        "conv_transpose2d" [&[1, 2, 3, 2], &[2, 1, 3, 3]],
            |x| x[0].conv_transpose(&x[1], None, &Conv { stride: vec![2], ..same(1) }, &[1]);
        "linear" [&[1, 3], &[2, 3], &[2]], |x| x[0].linear(&x[1], Some(&x[2]));
        "linear with a weight of Float" [&[1, 3], &[3, 3]], |x| x[0].linear(&x[1].to_kind(Kind::Float)?, None);
        "linear with a bias of Float" [&[1, 3], &[2, 3], &[2]],
            |x| x[0].linear(&x[1], Some(&x[2].to_kind(Kind::Float)?));
        "matmul" [&[1, 3], &[3, 2]], |x| x[0].matmul(&x[1]);
        "matmul with Float" [&[1, 3], &[3, 2]], |x| x[0].matmul(&x[1].to_kind(Kind::Float)?);
        "bmm" [&[1, 2, 3], &[1, 3, 2]], |x| x[0].bmm(&x[1], None);
        "bmm with Float" [&[1, 2, 3], &[1, 3, 2]], |x| x[0].bmm(&x[1].to_kind(Kind::Float)?, None);
        "einsum" [&[1, 3], &[3, 2]], |x| A::einsum("ij,jk->ik", &[&x[0], &x[1]]);
        "einsum with Float" [&[1, 3], &[3, 2]],
            |x| A::einsum("ij,jk->ik", &[&x[0], &x[1].to_kind(Kind::Float)?]);
        "layer_norm" [&[1, 3], &[3]], |x| x[0].layer_norm(&[3], Some(&x[1]), None, 1e-5);
        "layer_norm without a weight" [&[2, 3]], |x| x[0].layer_norm(&[3], None, None, 1e-5);
        "layer_norm with a weight of Float" [&[1, 3], &[3]],
            |x| x[0].layer_norm(&[3], Some(&x[1].to_kind(Kind::Float)?), None, 1e-5);
        "group_norm" [&[1, 4, 3], &[4]], |x| x[0].group_norm(2, Some(&x[1]), None, 1e-5);
        "group_norm with a weight of Float" [&[1, 4, 3], &[4]],
            |x| x[0].group_norm(2, Some(&x[1].to_kind(Kind::Float)?), None, 1e-5);
        "instance_norm" [&[1, 2, 3], &[2]], |x| x[0].instance_norm(Some(&x[1]), None, 1e-5);
        "instance_norm with a weight of Float" [&[1, 2, 3], &[2]],
            |x| x[0].instance_norm(Some(&x[1].to_kind(Kind::Float)?), None, 1e-5);
        "batch_norm" [&[2, 2, 3], &[2]], |x| x[0].batch_norm(Some(&x[1]), None, None, true, 1e-5);
        "batch_norm with a weight of Float" [&[2, 2, 3], &[2]],
            |x| x[0].batch_norm(Some(&x[1].to_kind(Kind::Float)?), None, None, true, 1e-5);
        "attention" [&[1, 2, 3, 4], &[1, 2, 3, 4]],
            |x| A::scaled_dot_product_attention(&x[0], &x[1], &x[1], &AttentionOptions::default());
        "attention with a key of Float" [&[1, 2, 3, 4], &[1, 2, 3, 4]], |x| {
            let other = x[1].to_kind(Kind::Float)?;
            A::scaled_dot_product_attention(&x[0], &other, &other, &AttentionOptions::default())
        };
        "cdist" [&[3, 2], &[2, 2]], |x| A::cdist(&x[0], &x[1], 2.0);
        "cdist with Float" [&[3, 2], &[2, 2]], |x| A::cdist(&x[0], &x[1].to_kind(Kind::Float)?, 2.0);
        "knn" [&[3, 2], &[2, 2]], |x| Ok(x[0].knn(&x[1], 1)?.0);
        "ball_query_limited" [&[3, 2], &[2, 2]], |x| Ok(x[0].ball_query_limited(&x[1], 9.0, 3)?.into_iter().last().unwrap());
    }
    .into()
}

/// Statistics and scans, along a split dim and along whole ones.
fn reductions() -> Vec<Case> {
    cases! {
        "sum" [&[1, 3]], |x| x[0].reduce(Statistic::Sum, &[0], false);
        "mean" [&[1, 3]], |x| x[0].reduce(Statistic::Mean, &[0], false);
        "mean of all" [&[4]], |x| x[0].mean();
        "prod" [&[2, 3]], |x| x[0].reduce(Statistic::Prod, &[0], false);
        "amax" [&[2, 3]], |x| x[0].reduce(Statistic::Max, &[0], false);
        "amin" [&[2, 3]], |x| x[0].reduce(Statistic::Min, &[1], true);
        "var" [&[2, 3]], |x| x[0].reduce(Statistic::Var { correction: 1 }, &[0], false);
        "std" [&[2, 3]], |x| x[0].reduce(Statistic::Std { correction: 0 }, &[0], false);
        "norm" [&[2, 3]], |x| x[0].reduce(Statistic::Norm, &[0], false);
        "logsumexp" [&[2, 3]], |x| x[0].reduce(Statistic::LogSumExp, &[0], false);
        "any" [&[2, 3]], |x| x[0].reduce(Statistic::Any, &[0], false);
        "all" [&[2, 3]], |x| x[0].reduce(Statistic::All, &[0], false);
        "argmax" [&[2, 3]], |x| x[0].argmax(Some(0), false);
        "argmin" [&[2, 3]], |x| x[0].argmin(Some(0), false);
        "softmax" [&[1, 3]], |x| x[0].softmax(1);
        "softmax along the first" [&[3, 2]], |x| x[0].softmax(0);
        "log_softmax" [&[3, 2]], |x| x[0].log_softmax(0);
        "cumsum" [&[3, 2]], |x| x[0].cumsum(0);
        "mse_loss" [&[3, 2], &[3, 2]], |x| x[0].mse_loss(&x[1]);
        "sort" [&[3, 2]], |x| Ok(x[0].sort(0, true)?.0);
        "topk" [&[3, 2]], |x| Ok(x[0].topk(1, 0, true)?.0);
    }
    .into()
}

/// Operators with windows.
fn windows() -> Vec<Case> {
    cases! {
        "max_pool1d" [&[1, 1, 6]], |x| Ok(x[0].max_pool(1, &overlapping())?.0);
        "max_pool2d" [&[1, 1, 3, 4]], |x| Ok(x[0].max_pool(2, &overlapping())?.0);
        "max_pool3d" [&[1, 1, 3, 2, 2]], |x| Ok(x[0].max_pool(3, &overlapping())?.0);
        "indices of max_pool1d" [&[1, 1, 6]], |x| Ok(x[0].max_pool(1, &overlapping())?.1);
        "avg_pool1d" [&[1, 1, 6]], |x| x[0].avg_pool(1, &Pool::new(&[2]));
        "avg_pool2d" [&[1, 1, 3, 4]], |x| x[0].avg_pool(2, &overlapping());
        "adaptive_avg_pool1d" [&[1, 1, 5]], |x| x[0].adaptive_avg_pool(&[2]);
        "adaptive_avg_pool2d" [&[1, 1, 3, 4]], |x| x[0].adaptive_avg_pool(&[2, 2]);
        "adaptive_max_pool1d" [&[1, 1, 5]], |x| x[0].adaptive_max_pool(&[2]);
        "adaptive_max_pool2d" [&[1, 1, 3, 4]], |x| x[0].adaptive_max_pool(&[2, 2]);
        "interpolate linear" [&[1, 1, 2, 3]],
            |x| x[0].interpolate(&Resize::Size(vec![4, 4]), Interpolation::Linear, false);
        "interpolate nearest" [&[1, 1, 2, 3]],
            |x| x[0].interpolate(&Resize::Size(vec![4, 4]), Interpolation::Nearest, false);
        "interpolate cubic" [&[1, 1, 2, 3]],
            |x| x[0].interpolate(&Resize::Size(vec![4, 4]), Interpolation::Cubic, false);
        "interpolate area" [&[1, 1, 4, 4]],
            |x| x[0].interpolate(&Resize::Size(vec![2, 2]), Interpolation::Area, false);
        "pad" [&[3, 2]], |x| x[0].pad(&[1, 1, 2, 0], 2.0);
        "pad with infinity" [&[3, 2]], |x| x[0].pad(&[1, 1, 2, 0], f64::INFINITY);
        "grid_sample" [&[1, 1, 3, 2], &[1, 2, 2, 2]], |x| x[0].grid_sample(&x[1], &GridSample::default());
        "grid_sample with a grid of Float" [&[1, 1, 3, 2], &[1, 2, 2, 2]],
            |x| x[0].grid_sample(&x[1].to_kind(Kind::Float)?, &GridSample::default());
        "affine_grid" [&[1, 2, 3], &[1, 1, 3, 2]], |x| x[0].affine_grid(&x[1], false);
        "roll" [&[3, 2]], |x| x[0].roll(&[1], &[0]);
        "rfftn" [&[2, 3]], |x| x[0].rfftn(&[], &[1], FftNorm::Backward);
        "fftn" [&[2, 3]], |x| x[0].fftn(&[], &[0, 1], FftNorm::Backward);
        "irfftn" [&[2, 3]], |x| x[0].irfftn(&[], &[1], FftNorm::Backward);
    }
    .into()
}

/// Functions of each element, and indexing.
fn elements() -> Vec<Case> {
    cases! {
        "add" [&[1, 3], &[3]], |x| x[0].add(&x[1]);
        "sub" [&[1, 3], &[3]], |x| x[0].sub(&x[1]);
        "div" [&[1, 3], &[3]], |x| x[0].div(&x[1]);
        "pow" [&[1, 3], &[3]], |x| x[0].binary(Binary::Pow, &x[1]);
        "maximum" [&[1, 3], &[3]], |x| x[0].binary(Binary::Maximum, &x[1]);
        "lt" [&[1, 3], &[3]], |x| x[0].compare(Comparison::Lt, &x[1]);
        "add with Float" [&[1, 3], &[3]], |x| x[0].add(&x[1].to_kind(Kind::Float)?);
        "where" [&[1, 3], &[3]], |x| x[0].select_where(&x[1], &x[1]);
        "masked_fill" [&[1, 3], &[3]], |x| x[0].masked_fill(&x[1], 2.0);
        "masked_fill by a mask" [&[1, 3], &[3]], |x| x[0].masked_fill(&x[1].to_kind(Kind::Bool)?, 2.0);
        "masked_fill with infinity" [&[1, 3], &[3]],
            |x| x[0].masked_fill(&x[1].to_kind(Kind::Bool)?, f64::NEG_INFINITY);
        "prelu" [&[1, 3], &[3]], |x| x[0].prelu(&x[1]);
        "index_select" [&[3, 2], &[2]], |x| x[0].to_kind(Kind::Double)?.index_select(0, &x[1]);
        "index_select of x" [&[3, 2], &[2]], |x| x[0].index_select(0, &x[1].to_kind(Kind::Int64)?);
        "gather" [&[3, 2], &[2, 2]], |x| x[0].to_kind(Kind::Double)?.gather(0, &x[1]);
        "embedding" [&[3, 2], &[2]], |x| x[0].to_kind(Kind::Double)?.embedding(&x[1]);
        "scatter_add" [&[3, 2], &[2, 2]],
            |x| x[0].to_kind(Kind::Double)?.scatter_add(0, &x[1], &x[1].to_kind(Kind::Double)?);
        "scatter_add of Float" [&[3, 2], &[2, 2]],
            |x| x[0].scatter_add(0, &x[1].to_kind(Kind::Int64)?, &x[1].to_kind(Kind::Float)?);
        "index_add" [&[3, 2], &[2], &[2, 2]],
            |x| x[0].to_kind(Kind::Double)?.index_add(0, &x[1], &x[2].to_kind(Kind::Double)?);
        "index_add of Float" [&[3, 2], &[2], &[2, 2]],
            |x| x[0].index_add(0, &x[1].to_kind(Kind::Int64)?, &x[2].to_kind(Kind::Float)?);
        "index_select by Int" [&[3, 2], &[2]], |x| x[0].index_select(0, &x[1].to_kind(Kind::Int)?);
        "gather by Int" [&[3, 2], &[2, 2]], |x| x[0].gather(0, &x[1].to_kind(Kind::Int)?);
        "embedding by Int" [&[3, 2], &[2]], |x| x[0].embedding(&x[1].to_kind(Kind::Int)?);
        "scatter_add by Int" [&[3, 2], &[2, 2]], |x| x[0].scatter_add(0, &x[1].to_kind(Kind::Int)?, &x[1]);
        "index_add by Int" [&[3, 2], &[2], &[2, 2]], |x| x[0].index_add(0, &x[1].to_kind(Kind::Int)?, &x[2]);
        "cat" [&[1, 3], &[1, 3]], |x| A::cat(&[&x[0], &x[1].to_kind(Kind::Float)?], 0);
    }
    .into()
}

#[test]
fn dense_calls_with_numbers_return_errors() {
    let (x, wide) = (values(&[2, 3], 1, Kind::Double), values(&[4], 1, Kind::Bool));
    assert!(Elementwise::masked_fill(&x, &wide, 1.0).is_err());
    assert!(Reduce::statistic(&x, Statistic::Norm, &[0, 0], false).is_err());
    assert!(Reduce::statistic(&x, Statistic::Var { correction: 1 }, &[1, -1], false).is_err());
    let batch = values(&[1, 2, 3], 1, Kind::Double);
    assert!(Linear::bmm(&batch, &batch, Some(&x)).is_err());
    let other = values(&[1, 3, 2], 1, Kind::Double);
    assert!(Linear::bmm(&batch, &other, Some(&x)).is_err());
    assert!(Linear::bmm(&batch, &other, Some(&values(&[2], 1, Kind::Double))).is_ok());
}

/// Functions of one tensor.
const UNARY: [Unary; 29] = [
    Unary::Neg,
    Unary::Abs,
    Unary::Square,
    Unary::Sqrt,
    Unary::Rsqrt,
    Unary::Reciprocal,
    Unary::Exp,
    Unary::Log,
    Unary::Sin,
    Unary::Tanh,
    Unary::Sigmoid,
    Unary::LogSigmoid,
    Unary::Relu,
    Unary::LeakyRelu(0.1),
    Unary::Elu,
    Unary::Celu,
    Unary::Selu,
    Unary::Silu,
    Unary::Gelu,
    Unary::GeluTanh,
    Unary::Softplus,
    Unary::Softsign,
    Unary::Softshrink(0.5),
    Unary::Tanhshrink,
    Unary::Threshold { threshold: 0.5, value: 2.0 },
    Unary::Clamp { min: 0.0, max: 1.0 },
    Unary::AddScalar(0.5),
    Unary::MulScalar(0.5),
    Unary::PowScalar(2.0),
];

/// Small integers, which every dtype holds.
fn values(shape: &[i64], seed: i64, kind: Kind) -> Tensor {
    (numbers(shape, seed) * 10.0).round().abs().remainder(3.0).to_kind(kind)
}

fn inputs(shapes: &[&[i64]], kind: Kind) -> Vec<Tensor> {
    shapes.iter().zip(1..).map(|(shape, seed)| values(shape, seed, kind)).collect()
}

/// Runs a call on all placements of the first tensor, and describes differences from the dense result.
fn differences(
    ranks: usize,
    name: &str,
    shapes: &'static [&'static [i64]],
    kind: Kind,
    mixed: bool,
    dense: &Result<Tensor>,
    sharded: impl Fn(&[ShardTensor]) -> Result<ShardTensor> + Clone + Send + Sync + 'static,
) -> Vec<String> {
    let mut wrong = Vec::new();
    for placement in placements(shapes[0].len(), 1) {
        let (at, sharded) = (placement.clone(), sharded.clone());
        let outcomes = threads::run(ranks, DEADLINE, move |group| {
            let mesh = DeviceMesh::new(&group, &[-1], &["domain"]).unwrap();
            let place = |(index, whole): (usize, &Tensor)| {
                let placements = if index == 0 { at.clone() } else { vec![Placement::Replicate] };
                ShardTensor::distribute(whole, &mesh, &placements).unwrap()
            };
            let x: Vec<ShardTensor> = inputs(shapes, kind).iter().enumerate().map(place).collect();
            let _bf16 = mixed.then(|| Autocast::new(Device::Cpu, Kind::BFloat16).unwrap());
            sharded(&x).and_then(|y| Ok(y.full_tensor(None)?)).map_err(|error| error.to_string())
        });
        let what = format!("{name} of {kind:?} on {placement:?}");
        match (dense, &outcomes[0]) {
            (Ok(want), Ok(got)) if got.kind() != want.kind() => {
                wrong.push(format!("{what}: {:?}, expected {:?}", got.kind(), want.kind()));
            }
            (Ok(want), Ok(got)) => {
                let tolerance = if matches!(kind, Kind::Half | Kind::BFloat16) { 3e-2 } else { 1e-5 };
                let wide = if want.is_complex() { Kind::ComplexDouble } else { Kind::Double };
                let (got, want) = (got.to_kind(wide), want.to_kind(wide));
                if got.size() != want.size() || !got.allclose(&want, tolerance, tolerance, true) {
                    wrong.push(format!("{what}: {got:?}, expected {want:?}"));
                }
            }
            (Err(want), Ok(got)) => {
                wrong.push(format!("{what}: {:?}, expected the error {want}", got.kind()))
            }
            (Ok(_), Err(error)) if !refuses_more(name, kind) => wrong.push(format!("{what}: {error}")),
            (Ok(_), Err(_)) => {}
            (Err(_), Err(_)) => {}
        }
        let errors: Vec<Option<&String>> = outcomes.iter().map(|outcome| outcome.as_ref().err()).collect();
        if errors.iter().any(|error| *error != errors[0]) {
            wrong.push(format!("{what}: ranks differ: {errors:?}"));
        }
    }
    wrong
}

/// Sharded statistics that no exchange of ranks supports.
fn refuses_more(name: &str, kind: Kind) -> bool {
    kind == Kind::ComplexFloat && ["var", "std", "logsumexp"].contains(&name)
}

#[rstest]
fn dtypes_are_those_of_dense_tensors(
    #[values(2, 3)] ranks: usize,
    #[values(false, true)] mixed: bool,
    #[values(products, reductions, windows, elements)] cases: fn() -> Vec<Case>,
) {
    let compare = |case: &Case| -> Vec<String> {
        let of_kind = |kind| {
            let bf16 = mixed.then(|| Autocast::new(Device::Cpu, Kind::BFloat16).unwrap());
            let dense = (case.dense)(&inputs(case.shapes, kind));
            drop(bf16);
            differences(ranks, case.name, case.shapes, kind, mixed, &dense, case.sharded)
        };
        // libtorch joins no tensors of Half while autocast to BFloat16 is on.
        let kinds = KINDS.map(|kind| if mixed && kind == Kind::Half { Kind::Float } else { kind });
        kinds.into_iter().flat_map(of_kind).collect()
    };
    let wrong: Vec<String> = cases().iter().flat_map(compare).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[rstest]
fn dtypes_of_functions_are_those_of_dense_tensors(
    #[values(2, 3)] ranks: usize,
    #[values(false, true)] mixed: bool,
) {
    let shapes: &[&[i64]] = &[&[1, 3]];
    let compare = |(function, kind): (Unary, Kind)| {
        let bf16 = mixed.then(|| Autocast::new(Device::Cpu, Kind::BFloat16).unwrap());
        let dense = Elementwise::unary(&values(&[1, 3], 1, kind), function);
        drop(bf16);
        let sharded = move |x: &[ShardTensor]| Elementwise::unary(&x[0], function);
        differences(ranks, function.name(), shapes, kind, mixed, &dense, sharded)
    };
    let calls = UNARY.into_iter().flat_map(|function| KINDS.map(|kind| (function, kind)));
    let wrong: Vec<String> = calls.flat_map(compare).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn errors_name_the_operator_and_the_dtypes() {
    on_mesh(&[2], |mesh| {
        let place = |shape: &[i64], kind, placement| {
            ShardTensor::distribute(&values(shape, 1, kind), mesh, &[placement]).unwrap()
        };
        let x = place(&[1, 2, 4, 3], Kind::Double, Placement::Shard(0));
        let weight = place(&[2, 2, 3, 3], Kind::Float, Placement::Replicate);
        let error = x.conv(&weight, None, &same(1)).unwrap_err().to_string();
        assert!(error.starts_with("conv2d of Double [1, 2, 4, 3] on mesh (a=2)"), "{error}");
        assert!(error.contains("weight is of dtype Float; expected Double, as input is"), "{error}");
        let table = place(&[4, 2], Kind::Double, Placement::Shard(0));
        let far = ShardTensor::distribute(&Tensor::from_slice(&[0_i64, 7]), mesh, &[Placement::Replicate]);
        let error = table.embedding(&far.unwrap()).unwrap_err().to_string();
        assert!(error.starts_with("embedding of "), "{error}");
        assert!(error.contains("index 7 is out of range for dim 0 of extent 4"), "{error}");
        let error = place(&[2], Kind::Int64, Placement::Shard(0)).set_requires_grad(true).unwrap_err();
        assert!(error.to_string().contains("Int64; expected a floating or complex dtype"), "{error}");
        let own = values(&[2, 3 + mesh.coordinates().unwrap()[0] as i64], 1, Kind::Double);
        let placements = [Placement::Shard(0)];
        let error = ShardTensor::from_local(&own, Some(mesh), &placements, &Sizes::Infer, None).unwrap_err();
        assert!(error.to_string().starts_with("from_local: rank 1 of the mesh holds [2, 4]"), "{error}");
    });
}

/// Parts of a sum or mean may be beyond the range of 16 bits where the result is not.
#[test]
fn sums_of_parts_do_not_overflow() {
    const VALUES: [f64; 4] = [60000.0, 60000.0, -60000.0, -59968.0];
    let cases = cases! {
        "sum" [&[4]], |x| x[0].reduce(Statistic::Sum, &[0], false);
        "mean" [&[4]], |x| x[0].unary(Unary::Abs)?.mean();
        "adaptive_avg_pool" [&[4]], |x| x[0].unary(Unary::Abs)?.reshape(&[1, 1, 4])?.adaptive_avg_pool(&[1]);
    };
    fn half() -> Tensor {
        Tensor::from_slice(&VALUES).to_kind(Kind::Half)
    }
    for (case, about) in cases.into_iter().zip([32.0, 60000.0, 60000.0]) {
        let want = (case.dense)(&[half()]).unwrap().double_value(&[]);
        assert!((want - about).abs() <= 40.0, "{}: {want}", case.name);
        on_mesh(&[2], move |mesh| {
            let x = ShardTensor::distribute(&half(), mesh, &[Placement::Shard(0)]).unwrap();
            let y = (case.sharded)(&[x]).unwrap().full_tensor(None).unwrap();
            assert_eq!((y.kind(), y.double_value(&[])), (Kind::Half, want), "{}", case.name);
        });
    }
}

#[test]
fn norms_refuse_one_weight_for_several_channels() {
    on_mesh(&[2], |mesh| {
        let place = |shape: &[i64]| {
            ShardTensor::distribute(&values(shape, 1, Kind::Double), mesh, &[Placement::Replicate]).unwrap()
        };
        let (x, weight) = (place(&[2, 4, 3]), place(&[1]));
        let one = Some(&weight as &dyn Operand);
        for error in [
            x.group_norm(2, one, None, 1e-5).unwrap_err(),
            x.instance_norm(one, None, 1e-5).unwrap_err(),
            x.batch_norm(one, None, None, true, 1e-5).unwrap_err(),
        ] {
            assert!(error.to_string().contains("[1] is not one number for each of 4 channels"), "{error}");
        }
    });
}

#[test]
fn layouts_refuse_two_tables_of_a_dim_and_take_any_extent() {
    on_mesh(&[2], |mesh| {
        let layout = |extent, sizes| Layout::new(mesh, &[Placement::Shard(0)], &[extent], &sizes);
        let error = layout(4, Sizes::Explicit(vec![(0, vec![1, 3]), (0, vec![3, 1])])).unwrap_err();
        assert!(error.to_string().contains("sizes are given twice for dim 0"), "{error}");
        assert_eq!(layout(i64::MAX, Sizes::Chunk).unwrap().sizes(0).unwrap()[1], i64::MAX / 2);
    });
}
