//! Corners: rows of −∞, parts of several pieces, transposed meshes, mixed partial sums, 16 bits, empty parts, disagreement.

use std::time::Duration;

use isobar_array::{Conv, Elementwise, Padding, Statistic};
use isobar_collectives::{ReduceOp, threads};
use isobar_mesh::DeviceMesh;
use isobar_shard::rules::{LocalMap, LocalOutput, local_map};
use isobar_shard::{CommTrace, Layout, Placement, ShardTensor, Sizes};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::{Split, difference, leaf, numbers, on_mesh, same};

const SHARD: [Placement; 1] = [Placement::Shard(0)];

#[test]
fn a_part_that_is_minus_infinity_throughout() {
    on_mesh(&[2], |mesh| {
        let low = f64::NEG_INFINITY;
        let x = Tensor::from_slice(&[0.0, 1.0, low, low]);
        let layout = Layout::new(mesh, &SHARD, &[4], &Sizes::Chunk).unwrap();
        let with = [(&x, &layout)];
        same("softmax", &with, 1e-12, |t| t[0].softmax(0), |t| t[0].f_softmax(0, None));
        let sum = |t: &[ShardTensor]| t[0].statistic(Statistic::LogSumExp, &[], false);
        same("logsumexp", &with, 1e-12, sum, |t| t[0].f_logsumexp(0, false));
        let y = ShardTensor::distribute_as(&x, &layout).unwrap().log_softmax(0).unwrap();
        let want = x.log_softmax(0, None);
        assert_eq!(y.full_tensor(None).unwrap().narrow(0, 0, 2), want.narrow(0, 0, 2));
    });
}

#[test]
fn functions_of_parts_in_several_pieces() {
    on_mesh(&[2], |mesh| {
        let a = ShardTensor::distribute(&numbers(&[4], 1), mesh, &SHARD).unwrap();
        let joined = ShardTensor::cat(&[&a, &a], 0).unwrap();
        assert!(joined.to_string().contains("in several pieces"), "{joined}");
        let want = Tensor::cat(&[numbers(&[4], 1), numbers(&[4], 1)], 0);
        let out = [LocalOutput::placed(&SHARD)];
        let options = LocalMap::default();
        let doubled = local_map(|t| Ok(vec![&t[0] * 2.0]), &[&joined], &out, &options);
        let y = doubled.unwrap().remove(0);
        assert_eq!(y.full_tensor(None).unwrap(), &want * 2.0);
        // A partial sum that is scattered to such parts.
        let part = numbers(&[8], 3);
        let partial = [Placement::Partial(ReduceOp::Sum)];
        let p = ShardTensor::from_local(&part, Some(mesh), &partial, &Sizes::Chunk, None).unwrap();
        let scattered = p.to_layout(joined.layout()).unwrap();
        assert!(difference(&scattered.full_tensor(None).unwrap(), &(&part * 2.0)) < 1e-12);
    });
}

#[test]
fn meshes_whose_axes_are_exchanged() {
    on_mesh(&[2, 2], |mesh| {
        let turned = mesh.slice(&["b", "a"]).unwrap();
        let x = numbers(&[9], 1);
        let both = [Placement::Shard(0), Placement::Shard(0)];
        let layout = Layout::new(&turned, &both, &[9], &Sizes::Balanced).unwrap();
        same("cumsum", &[(&x, &layout)], 1e-12, |t| t[0].cumsum(0), |t| t[0].f_cumsum(0, None));
        same(
            "sort",
            &[(&x, &layout)],
            1e-12,
            |t| Ok(t[0].sort(0, false)?.0),
            |t| Ok(t[0].f_sort(0, false)?.0),
        );
        let line = turned.flatten("line").unwrap();
        let rank = mesh.coordinates().unwrap();
        let part = numbers(&[9], (2 * rank[0] + rank[1]) as i64);
        let sum: Tensor = (0..4).map(|rank| numbers(&[9], rank)).reduce(|a, b| a + b).unwrap();
        let partial = [Placement::Partial(ReduceOp::Sum)];
        let p = ShardTensor::from_local(&part, Some(&line), &partial, &Sizes::Chunk, None).unwrap();
        let scattered = p.redistribute(Some(&line), &SHARD).unwrap();
        assert!(difference(&scattered.full_tensor(None).unwrap(), &sum) < 1e-12);
    });
}

#[test]
fn partial_along_two_axes() {
    on_mesh(&[2, 2], |mesh| {
        let at = mesh.coordinates().unwrap();
        let value = [[3.0, 0.0], [0.0, 2.0]][at[0]][at[1]];
        let enter = |op, value: f64| {
            let local = Tensor::from_slice(&[value]).set_requires_grad(true);
            let both = [Placement::Partial(op), Placement::Partial(op)];
            let x = ShardTensor::from_local(&local, Some(mesh), &both, &Sizes::Chunk, None).unwrap();
            x.sum().unwrap().backward().unwrap();
            local.grad().double_value(&[0])
        };
        assert_eq!(enter(ReduceOp::Max, value), f64::from(at == [0, 0]));
        assert_eq!(enter(ReduceOp::Avg, value), 0.25);
        // The others' product, of 2, 3, 5 and 7.
        let primes = [[2.0, 3.0], [5.0, 7.0]];
        let own: f64 = primes[at[0]][at[1]];
        assert_eq!(enter(ReduceOp::Product, own), 210.0 / own);
        let mixed = [Placement::Partial(ReduceOp::Sum), Placement::Partial(ReduceOp::Max)];
        let local = Tensor::from_slice(&[value]).set_requires_grad(true);
        assert!(ShardTensor::from_local(&local, Some(mesh), &mixed, &Sizes::Chunk, None).is_err());
        // Made whole, as many times as there are ways.
        for second in [ReduceOp::Product, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Sum] {
            let both = [Placement::Partial(ReduceOp::Sum), Placement::Partial(second)];
            let layout = Layout::new(mesh, &both, &[2], &Sizes::Chunk).unwrap();
            let full = ShardTensor::full(&layout, 5.0, Kind::Double, Device::Cpu).unwrap();
            assert_eq!(full.full_tensor(None).unwrap(), Tensor::from_slice(&[5.0, 5.0]), "{second:?}");
        }
    });
}

#[test]
fn averages_through_functions_of_parts() {
    on_mesh(&[2], |mesh| {
        let local = numbers(&[3], 1).set_requires_grad(true);
        let average = [Placement::Partial(ReduceOp::Avg)];
        for checked in [false, true] {
            let mut local = local.detach().set_requires_grad(true);
            local.zero_grad();
            let made = match checked {
                true => ShardTensor::from_local_checked(&local, Some(mesh), &average, &Sizes::Chunk, None),
                false => ShardTensor::from_local(&local, Some(mesh), &average, &Sizes::Chunk, None),
            };
            let x = made.unwrap();
            let out = [LocalOutput::placed(&average)];
            let y = local_map(|t| Ok(vec![&t[0] * 2.0]), &[&x], &out, &LocalMap::default()).unwrap();
            y[0].sum().unwrap().backward().unwrap();
            assert_eq!(local.grad(), local.ones_like());
        }
    });
}

#[test]
fn means_of_16_bits_do_not_overflow() {
    on_mesh(&[2], |mesh| {
        let ones = Tensor::ones([100_000], (Kind::Half, Device::Cpu));
        for placement in [Placement::Replicate, Placement::Shard(0)] {
            let x = ShardTensor::distribute(&ones, mesh, &[placement]).unwrap();
            let mean = x.mean().unwrap().full_tensor(None).unwrap();
            assert_eq!((mean.kind(), mean.double_value(&[])), (Kind::Half, 1.0));
            let y = x.softmax(0).unwrap().full_tensor(None).unwrap();
            assert!((y.to_kind(Kind::Double).sum(None).double_value(&[]) - 1.0).abs() < 0.1);
        }
    });
}

/// A part fits each rank's own layout; together they make no tensor. Every operator that communicates tells.
#[rstest]
#[case::gathered(|x: &ShardTensor| x.full_tensor(None).is_err())]
#[case::mean(|x: &ShardTensor| x.mean().and_then(|m| m.full_tensor(None)).is_err())]
#[case::softmax(|x: &ShardTensor| x.softmax(0).is_err())]
#[case::norm(|x: &ShardTensor| x.layer_norm(x.shape(), None, None, 1e-5).is_err())]
fn ranks_that_disagree(#[case] fails: fn(&ShardTensor) -> bool) {
    on_mesh(&[2], move |mesh| {
        let sizes = [[3, 4], [2, 3]][mesh.coordinates().unwrap()[0]].to_vec();
        let sizes = Sizes::Explicit(vec![(0, sizes)]);
        let x = ShardTensor::from_local(&numbers(&[3], 1), Some(mesh), &SHARD, &sizes, None).unwrap();
        assert!(fails(&x));
    });
}

#[test]
fn shapes_that_do_not_fit_are_refused_on_all_ranks() {
    on_mesh(&[2], |mesh| {
        let shard = |whole: &Tensor| ShardTensor::distribute(whole, mesh, &SHARD).unwrap();
        let (a, b) = (shard(&numbers(&[3, 1], 1)), shard(&numbers(&[3, 4], 2)));
        assert!(a.matmul(&b).is_err());
        assert!(a.unsqueeze(0).unwrap().bmm(&b.unsqueeze(0).unwrap(), None).is_err());
        let integers = shard(&Tensor::from_slice(&[1_i64, 2, 3]));
        assert!(integers.statistic(Statistic::Var { correction: 1 }, &[], false).is_err());
        assert!(shard(&Tensor::from_slice(&[true])).argmax(None, false).is_err());
        let two = [Placement::Shard(0), Placement::Shard(0)];
        assert!(ShardTensor::from_local(&numbers(&[2], 1), Some(mesh), &two, &Sizes::Infer, None).is_err());
    });
}

#[test]
fn views_of_few_elements_over_many_ranks() {
    on_mesh(&[4], |mesh| {
        let x = numbers(&[3], 1);
        let layout = Layout::new(mesh, &SHARD, &[3], &Sizes::Chunk).unwrap();
        same("to a row", &[(&x, &layout)], 1e-12, |t| t[0].reshape(&[1, 3]), |t| t[0].f_reshape([1, 3]));
        let row = leaf(&x, &layout).reshape(&[1, 3]).unwrap();
        assert_eq!(row.placements(), [Placement::Shard(1)]);
        let one = numbers(&[1], 2);
        let layout = Layout::new(mesh, &SHARD, &[1], &Sizes::Chunk).unwrap();
        same(
            "to a number",
            &[(&one, &layout)],
            1e-12,
            |t| t[0].reshape(&[]),
            |t| t[0].f_reshape(Vec::<i64>::new()),
        );
        let none = Tensor::zeros([0], (Kind::Double, Device::Cpu));
        let layout = Layout::new(mesh, &SHARD, &[0], &Sizes::Chunk).unwrap();
        let x = ShardTensor::distribute_as(&none, &layout).unwrap();
        assert_eq!(x.sort(0, false).unwrap().0.shape(), [0]);
    });
}

#[test]
fn infinite_values_stay_where_they_are() {
    on_mesh(&[2], |mesh| {
        let x = Tensor::from_slice(&[1.0, 2.0, 3.0, f64::INFINITY]).view([1, 1, 4]);
        for placement in [Placement::Replicate, Placement::Shard(2)] {
            let y = ShardTensor::distribute(&x, mesh, &[placement]).unwrap().adaptive_avg_pool(&[2]).unwrap();
            let y = y.full_tensor(None).unwrap();
            assert_eq!((y.double_value(&[0, 0, 0]), y.double_value(&[0, 0, 1])), (1.5, f64::INFINITY));
        }
        // A partial sum to which one rank adds the bias.
        let layout = Layout::new(mesh, &[Placement::Shard(1)], &[2, 4], &Sizes::Chunk).unwrap();
        let x = ShardTensor::distribute_as(&numbers(&[2, 4], 1), &layout).unwrap();
        let whole = |t: &Tensor| ShardTensor::distribute(t, mesh, &[Placement::Replicate]).unwrap();
        let bias = Tensor::from_slice(&[f64::INFINITY, 1.0, 2.0]);
        let y =
            x.linear(&whole(&numbers(&[3, 4], 2)), Some(&whole(&bias))).unwrap().full_tensor(None).unwrap();
        assert!(y.isnan().any().int64_value(&[]) == 0, "{y}");
    });
}

#[rstest]
#[case::at_a_boundary(4, 4, 0)]
#[case::across_a_boundary(6, 3, 5 * 8)]
#[case::one_group(4, 1, 0)]
fn channels_in_groups_move_to_the_next_boundary(
    #[case] channels: i64,
    #[case] groups: i64,
    #[case] received: u64,
) {
    threads::run(2, Duration::from_secs(60), move |group| {
        let mesh = DeviceMesh::new(&group, &[2], &["model"]).unwrap();
        let (whole, w) = (numbers(&[1, channels, 5], 1), numbers(&[channels, channels / groups, 3], 2));
        let x = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(1)]).unwrap();
        let weight = ShardTensor::distribute(&w, &mesh, &[Placement::Replicate]).unwrap();
        let conv = Conv { groups, padding: Padding::Each(vec![1]), ..Conv::default() };
        let trace = CommTrace::start(&group);
        let _forbidden = isobar_shard::forbid_hidden_communication();
        let y = x.conv(&weight, None, &conv).unwrap();
        // The second rank has a part of the first one's last group.
        assert_eq!(trace.received(), if group.rank() == 0 { received } else { 0 });
        let want = whole.f_conv1d_padding::<Tensor>(&w, None, [1], "same", [1], groups).unwrap();
        let error = (y.full_tensor(None).unwrap() - want).abs().max().double_value(&[]);
        assert!(error < 1e-12, "{error}");
    });
}

/// The elements of a split dim come without a gather: each rank receives what its share of the rows lacks.
#[test]
fn unbound_elements_are_shared_out() {
    threads::run(2, Duration::from_secs(60), |group| {
        let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
        let whole = numbers(&[4, 6, 2], 1);
        let x = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(0)]).unwrap();
        let trace = CommTrace::start(&group);
        let parts = x.unbind(0).unwrap();
        assert_eq!(trace.received(), 2 * 3 * 2 * 8);
        assert_eq!(parts[1].local_shape(), [3, 2]);
        assert_eq!(parts[1].full_tensor(None).unwrap(), whole.get(1));
    });
}

#[test]
fn wide_borders_are_few_pieces() {
    on_mesh(&[2], |mesh| {
        let x = numbers(&[1, 1, 6, 5], 1);
        let layout = Split::Uneven.layout(mesh, &[Placement::Shard(2)], &[1, 1, 6, 5]);
        let widths = [400, 300, 500, 200];
        let pad = |t: &[ShardTensor]| t[0].pad_mode(&widths, isobar_array::PadMode::Replicate, 0.0);
        same("pad", &[(&x, &layout)], 1e-9, pad, |t| t[0].f_pad(widths, "replicate", None));
    });
}

#[test]
fn sizes_that_stay() {
    on_mesh(&[2, 2], |mesh| {
        let uneven = Split::Uneven.layout(mesh, &[Placement::Shard(0), Placement::Replicate], &[7, 6]);
        let x = ShardTensor::distribute_as(&numbers(&[7, 6], 1), &uneven).unwrap();
        let options = isobar_shard::Redistribute { sizes: Sizes::Balanced, ..Default::default() };
        let y = x.redistribute_with(None, &[Placement::Shard(0), Placement::Shard(1)], &options).unwrap();
        assert_eq!(y.layout().sizes(0).unwrap(), uneven.sizes(0).unwrap());
        assert_eq!(y.mul_scalar(1.0).unwrap().full_tensor(None).unwrap(), numbers(&[7, 6], 1));
    });
}

/// A replicated tensor beside a split one is cut, even where it is the larger one.
#[test]
fn a_larger_replicated_tensor_follows_a_split_one() {
    threads::run(4, Duration::from_secs(60), |group| {
        let mesh = DeviceMesh::new(&group, &[2, 2], &["rows", "columns"]).unwrap();
        let put = |channels: i64, placements: &[Placement]| {
            ShardTensor::distribute(&numbers(&[1, channels, 4, 4], channels), &mesh, placements).unwrap()
        };
        let field = put(1, &[Placement::Shard(2), Placement::Shard(3)]);
        let rows = put(2, &[Placement::Shard(2), Placement::Replicate]);
        let table = put(5, &[Placement::Replicate, Placement::Replicate]);
        let trace = CommTrace::start(&group);
        let joined = ShardTensor::cat(&[&field, &rows, &table], 1).unwrap();
        assert_eq!((joined.local_shape(), trace.received()), (&[1, 8, 2, 2][..], 0));
    });
}
