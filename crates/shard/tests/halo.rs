//! Convolutions that compute their interior while the halo is in flight.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Conv, PadMode, Padding, Windowed};
use isobar_collectives::trace::CommTrace;
use isobar_mesh::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor, Sizes, grad};
use isobar_torch::autograd::{self, BackwardOptions};
use isobar_torch::guard::Autocast;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::{Split, difference, leaf, numbers, on_mesh, same};

fn replicated(mesh: &DeviceMesh, shape: &[i64]) -> Layout {
    Layout::new(mesh, &vec![Placement::Replicate; mesh.ndim()], shape, &Sizes::Chunk).unwrap()
}

fn conv(padding: i64, stride: i64, dilation: i64, padding_mode: PadMode) -> Conv {
    Conv {
        padding: Padding::Each(vec![padding]),
        stride: vec![stride],
        dilation: vec![dilation],
        padding_mode,
        ..Conv::default()
    }
}

const MODES: [PadMode; 4] = [PadMode::Constant, PadMode::Circular, PadMode::Reflect, PadMode::Replicate];

/// Every border with strides, dilations and kernels, even ones and wider than their padding too; shards that are even, uneven,
/// empty, and narrower than the halo.
#[rstest]
fn convolutions_of_split_grids(
    #[values(
        (&[2][..], &[3][..]), (&[3][..], &[2][..]), (&[4][..], &[3][..]), (&[2, 2][..], &[2, 3][..]), (&[2, 2][..], &[3, 3][..]), (&[2, 2][..], &[0, 2][..])
    )]
    (shape, dims): (&'static [i64], &'static [usize]),
    #[values(Split::Balanced, Split::Uneven, Split::Empty)] split: Split,
) {
    on_mesh(shape, move |mesh| {
        let placements: Vec<Placement> = dims.iter().map(|&dim| Placement::Shard(dim)).collect();
        let shape = [2, 4, 26, 29];
        let layout = split.layout(mesh, &placements, &shape);
        let x = numbers(&shape, 1);
        for (points, stride, dilation, padding) in
            [(3, 1, 1, 1), (4, 1, 1, 2), (3, 2, 1, 1), (2, 3, 2, 0), (5, 1, 1, 0), (3, 2, 2, 3)]
        {
            let kernel = [6, 2, points, 3];
            let (weight, bias) = (numbers(&kernel, 2), numbers(&[6], 3));
            for mode in MODES {
                let conv = Conv { groups: 2, ..conv(padding, stride, dilation, mode) };
                let what = format!("{conv:?} with {kernel:?}");
                same(
                    &what,
                    &[(&x, &layout), (&weight, &replicated(mesh, &kernel)), (&bias, &replicated(mesh, &[6]))],
                    1e-10,
                    |t| t[0].conv(&t[1], Some(&t[2]), &conv),
                    |t| Ok(Windowed::conv(&t[0], &t[1], Some(&t[2]), &conv).unwrap()),
                );
            }
        }
    });
}

#[rstest]
fn convolutions_of_lines_and_volumes(#[values(&[2][..], &[3], &[2, 2], &[2, 2, 2])] shape: &'static [i64]) {
    on_mesh(shape, move |mesh| {
        for (extents, kernel) in
            [(vec![1, 2, 40], vec![3, 2, 5]), (vec![1, 2, 12, 13, 14], vec![2, 2, 3, 3, 3])]
        {
            let spatial = extents.len() - 2;
            if spatial < mesh.ndim() {
                continue;
            }
            let placements: Vec<Placement> =
                (0..mesh.ndim()).map(|axis| Placement::Shard(axis + 2)).collect();
            let layout = Split::Balanced.layout(mesh, &placements, &extents);
            let (x, weight) = (numbers(&extents, 1), numbers(&kernel, 2));
            for (mode, padding) in
                MODES.into_iter().flat_map(|mode| [(mode, Padding::Same), (mode, Padding::Each(vec![1]))])
            {
                let conv = Conv { padding, padding_mode: mode, ..Conv::default() };
                same(
                    &format!("{conv:?} of {extents:?}"),
                    &[(&x, &layout), (&weight, &replicated(mesh, &kernel))],
                    1e-10,
                    |t| t[0].conv(&t[1], None, &conv),
                    |t| Ok(Windowed::conv(&t[0], &t[1], None, &conv).unwrap()),
                );
            }
        }
    });
}

/// In mixed precision each result is rounded once, as the dense one is, and 16 bits are sent.
#[test]
fn mixed_precision_rounds_as_the_dense_convolution_does() {
    on_mesh(&[2, 2], |mesh| {
        let shape = [1, 3, 24, 26];
        let layout = Split::Balanced.layout(mesh, &[Placement::Shard(2), Placement::Shard(3)], &shape);
        let (x, weight) =
            (numbers(&shape, 1).to_kind(Kind::Float), numbers(&[4, 3, 3, 3], 2).to_kind(Kind::Float));
        let whole = replicated(mesh, &[4, 3, 3, 3]);
        for mode in MODES {
            let conv = conv(1, 1, 1, mode);
            let (sharded, w) = (leaf(&x, &layout), leaf(&weight, &whole));
            let (dense, dense_w) = (x.copy().set_requires_grad(true), weight.copy().set_requires_grad(true));
            let _bf16 = Autocast::new(Device::Cpu, Kind::BFloat16).unwrap();
            let seen = CommTrace::start(&mesh.group_along(&[0, 1]).unwrap());
            let y = sharded.conv(&w, None, &conv).unwrap();
            seen.stop();
            let want = Windowed::conv(&dense, &dense_w, None, &conv).unwrap();
            assert_eq!((y.kind(), want.kind()), (Kind::BFloat16, Kind::BFloat16));
            assert!(difference(&y.full_tensor(None).unwrap(), &want) < 0.07, "{mode:?}");
            if mode == PadMode::Constant {
                assert_eq!(seen.received(), 3 * (12 + 13 + 1) * 2);
            }
            let cotangent = numbers(&want.size(), 7).to_kind(Kind::BFloat16);
            let g = ShardTensor::distribute_as(&cotangent, &y.layout().without_partial()).unwrap();
            y.backward_from(Some(&g), BackwardOptions::default()).unwrap();
            (&want * &cotangent).sum(Kind::Float).backward();
            let off = difference(&sharded.grad().unwrap().full_tensor(None).unwrap(), &dense.grad());
            assert!(off < 0.2, "{mode:?}: {off}");
            let of_w = w.grad().unwrap().full_tensor(None).unwrap();
            let off = difference(&of_w, &dense_w.grad()) / dense_w.grad().abs().max().double_value(&[]);
            assert!(off < 0.02, "{mode:?}: {off}");
        }
    });
}

/// Rows, columns and corners, once, in one exchange for each pass.
#[rstest]
#[case::zeros(PadMode::Constant, 12 + 13 + 1)]
#[case::periodic(PadMode::Circular, 2 * (12 + 13) + 4)]
fn a_grid_split_twice_exchanges_its_halo_once(#[case] mode: PadMode, #[case] elements: u64) {
    on_mesh(&[2, 2], move |mesh| {
        let shape = [1, 3, 24, 26];
        let layout = Split::Balanced.layout(mesh, &[Placement::Shard(2), Placement::Shard(3)], &shape);
        let x = leaf(&numbers(&shape, 1), &layout);
        let w =
            ShardTensor::distribute_as(&numbers(&[4, 3, 3, 3], 2), &replicated(mesh, &[4, 3, 3, 3])).unwrap();
        let seen = CommTrace::start(&mesh.group_along(&[0, 1]).unwrap());
        let y = x.conv(&w, None, &conv(1, 1, 1, mode)).unwrap();
        seen.stop();
        let bytes = 3 * elements * 8;
        assert_eq!(
            (seen.received(), seen.sent(), seen.count("fetch")),
            (bytes, bytes, 1),
            "{}",
            seen.record()
        );
        assert_eq!(seen.record().len(), 1);
        let seen = CommTrace::start(&mesh.group_along(&[0, 1]).unwrap());
        y.backward_from(None, BackwardOptions::default()).unwrap();
        seen.stop();
        assert_eq!((seen.received(), seen.sent(), seen.count("accumulate")), (bytes, bytes, 1));
        assert_eq!(seen.record().len(), 1);
    });
}

/// A second pass through a kept graph, gradients of gradients, and inputs or
/// weights without gradients, as the dense one has them.
#[rstest]
#[case(&[2], Placement::Replicate)]
#[case(&[3], Placement::Replicate)]
#[case(&[2, 2], Placement::Shard(0))]
#[case(&[2, 2], Placement::Shard(2))]
#[case(&[2, 2], Placement::Replicate)]
fn overlapped_convolutions_pass_twice_and_have_second_gradients(
    #[case] shape: &'static [i64],
    #[case] other: Placement,
    #[values((5, 1), (3, 1), (3, 2), (2, 2), (4, 2))] (points, dilation): (i64, i64),
) {
    const SHAPE: [i64; 4] = [2, 4, 13, 27];
    on_mesh(shape, move |mesh| {
        let (image, kernel) = (numbers(&SHAPE, 1), numbers(&[6, 2, 3, points], 2));
        let bias = numbers(&[6], 3);
        let (steps, pads, dilations) = ([2, 1], [2, dilation * (points - 1) / 2], [1, dilation]);
        let conv = Conv {
            stride: steps.to_vec(),
            padding: Padding::Each(pads.to_vec()),
            dilation: dilations.to_vec(),
            groups: 2,
            ..Conv::default()
        };
        let placements: Vec<Placement> =
            if shape.len() == 1 { vec![Placement::Shard(3)] } else { vec![other, Placement::Shard(3)] };
        let split = Layout::new(mesh, &placements, &SHAPE, &Sizes::Balanced).unwrap();
        let whole = |shape: &[i64]| {
            Layout::new(mesh, &vec![Placement::Replicate; mesh.ndim()], shape, &Sizes::Chunk).unwrap()
        };
        for (of_image, of_kernel) in [(true, true), (true, false), (false, true)] {
            let x = leaf(&image, &split).set_requires_grad(of_image).unwrap();
            let w = leaf(&kernel, &whole(&[6, 2, 3, points])).set_requires_grad(of_kernel).unwrap();
            let b = leaf(&bias, &whole(&[6]));
            let dense: Vec<Tensor> = [(&image, of_image), (&kernel, of_kernel), (&bias, true)]
                .map(|(whole, needs)| whole.copy().set_requires_grad(needs))
                .into();
            let y = x.conv(&w, Some(&b), &conv).unwrap();
            let want = dense[0].conv2d(&dense[1], Some(&dense[2]), steps, pads, dilations, 2);
            let (y, want) = (y.mul(&y).unwrap(), &want * &want);
            let leaves: Vec<&ShardTensor> = [&x, &w, &b].into_iter().filter(|t| t.requires_grad()).collect();
            let wholes: Vec<&Tensor> = dense.iter().filter(|t| t.requires_grad()).collect();
            let keep =
                |create_graph| BackwardOptions { retain_graph: true, create_graph, ..Default::default() };
            let ones = Tensor::ones(want.size(), (Kind::Double, tch::Device::Cpu));
            let g = ShardTensor::distribute_as(&ones, &y.layout().without_partial()).unwrap();
            for create_graph in [false, false, true] {
                let got = grad(&[&y], &leaves, &[Some(&g)], keep(create_graph)).unwrap();
                let expected =
                    autograd::grad(&[&want], &wholes, &[Some(ones.copy())], keep(create_graph)).unwrap();
                let pairs: Vec<(ShardTensor, Tensor)> =
                    got.into_iter().zip(expected).map(|(a, b)| (a.unwrap(), b.unwrap())).collect();
                for (got, expected) in &pairs {
                    assert!(difference(&got.full_tensor(None).unwrap(), expected) < 1e-9);
                }
                if create_graph {
                    let squares: Vec<ShardTensor> =
                        pairs.iter().map(|(g, _)| g.mul(g).unwrap().sum().unwrap()).collect();
                    let total =
                        squares[1..].iter().fold(squares[0].shallow_clone(), |a, b| a.add(b).unwrap());
                    let want = pairs.iter().map(|(_, g)| g.square().sum(Kind::Double)).reduce(|a, b| a + b);
                    let got = grad(&[&total], &leaves, &[None], Default::default()).unwrap();
                    let expected =
                        autograd::grad(&[&want.unwrap()], &wholes, &[None], Default::default()).unwrap();
                    for (got, expected) in got.iter().zip(&expected) {
                        let got = got.as_ref().unwrap().full_tensor(None).unwrap();
                        assert!(difference(&got, expected.as_ref().unwrap()) < 1e-6, "second gradients");
                    }
                }
            }
        }
    });
}

/// A bias that was computed from the input: that way is gone through once.
#[test]
fn second_gradients_of_what_was_computed_from_the_input() {
    on_mesh(&[2], |mesh| {
        let (image, kernel) = (numbers(&[1, 3, 18], 1), numbers(&[3, 3, 3], 2));
        let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
        let split = Layout::new(mesh, &[Placement::Shard(2)], &[1, 3, 18], &Sizes::Balanced).unwrap();
        let (x, dense) = (leaf(&image, &split), image.copy().set_requires_grad(true));
        let (w, whole) = (leaf(&kernel, &replicated(mesh, &[3, 3, 3])), kernel.copy());
        let of_x = x.mul(&x).unwrap().statistic(isobar_array::Statistic::Sum, &[0, 2], false).unwrap();
        let y = x.conv(&w, Some(&of_x), &conv).unwrap();
        let want = dense.conv1d(
            &whole,
            Some((&dense * &dense).sum_dim_intlist(&[0i64, 2][..], false, None)),
            1,
            1,
            1,
            1,
        );
        let create = BackwardOptions { create_graph: true, ..Default::default() };
        let (y, want) = (y.mul(&y).unwrap().sum().unwrap(), (&want * &want).sum(Kind::Double));
        let got = grad(&[&y], &[&x], &[None], create).unwrap().remove(0).unwrap();
        let expected = autograd::grad(&[&want], &[&dense], &[None], create).unwrap().remove(0).unwrap();
        assert!(difference(&got.full_tensor(None).unwrap(), &expected) < 1e-9);
    });
}
