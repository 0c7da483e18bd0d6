//! Cases that others get wrong, by name: layouts and arguments for which PhysicsNeMo's ShardTensor or PyTorch's DTensor give
//! another answer than a single device, an error on some ranks only, or none at all.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Conv, Generator, Interpolation, PadMode, Padding, Pool, Resize, Statistic};
use isobar_collectives::ReduceOp;
use isobar_mesh::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::{Dice, Split, difference, leaf, numbers, on_mesh, same};

const NEAR: f64 = 1e-9;

fn shard(mesh: &DeviceMesh, shape: &[i64], placements: &[Placement]) -> Layout {
    Layout::new(mesh, placements, shape, &Sizes::Chunk).unwrap()
}

fn whole(mesh: &DeviceMesh, shape: &[i64]) -> Layout {
    shard(mesh, shape, &vec![Placement::Replicate; mesh.ndim()])
}

fn conv_matches(mesh: &DeviceMesh, shape: &[i64], placements: &[Placement], kernel: i64, conv: &Conv) {
    let layout = shard(mesh, shape, placements);
    let weight_shape = [3, shape[1], kernel, kernel];
    let (x, w, b) = (numbers(shape, 1), numbers(&weight_shape, 2), numbers(&[3], 3));
    let Padding::Each(padding) = conv.padding.clone() else { panic!("numbers") };
    let inputs = [(&x, &layout), (&w, &whole(mesh, &weight_shape)), (&b, &whole(mesh, &[3]))];
    let two = |list: &[i64]| [list[0], *list.last().unwrap()];
    same(
        &format!("{conv:?}"),
        &inputs,
        NEAR,
        |t| t[0].conv(&t[1], Some(&t[2]), conv),
        |t| {
            t[0].f_conv2d(
                &t[1],
                Some(&t[2]),
                two(&conv.stride),
                two(&padding),
                two(&conv.dilation),
                conv.groups,
            )
        },
    );
}

// PhysicsNeMo's ShardTensor

#[rstest]
fn scatter_of_extents_that_two_chunk_rules_split_differently(#[values(3, 5, 6, 9)] extent: i64) {
    on_mesh(&[4], move |mesh| {
        let full = numbers(&[extent, 2], 1);
        let source = (mesh.coordinates().unwrap() == [1]).then_some(&full);
        let x = ShardTensor::scatter(source, 1, mesh, &[Placement::Shard(0)], &Sizes::Chunk, true).unwrap();
        assert!(x.is_leaf() && x.requires_grad());
        assert_eq!(x.full_tensor(None).unwrap(), full);
        x.sum().unwrap().backward().unwrap();
        assert_eq!(x.grad().unwrap().full_tensor(None).unwrap(), full.ones_like());
    });
}

#[test]
fn partial_to_shard_of_extent_6_over_4() {
    on_mesh(&[4], |mesh| {
        let part = numbers(&[6, 3], mesh.coordinates().unwrap()[0] as i64);
        let partial = [Placement::Partial(ReduceOp::Sum)];
        let x = ShardTensor::from_local(&part, Some(mesh), &partial, &Sizes::Chunk, None).unwrap();
        let y = x.redistribute(None, &[Placement::Shard(0)]).unwrap();
        assert_eq!(y.layout().sizes(0).unwrap(), [2, 2, 2, 0]);
        let sum = (0..4).map(|rank| numbers(&[6, 3], rank)).reduce(|a, b| a + b).unwrap();
        assert!(difference(&y.full_tensor(None).unwrap(), &sum) < NEAR);
    });
}

#[rstest]
fn sums_that_keep_the_dim_below_a_sharded_one(
    #[values(Statistic::Sum, Statistic::Mean)] statistic: Statistic,
) {
    on_mesh(&[2], move |mesh| {
        let shape = [4, 6, 5];
        let layout = shard(mesh, &shape, &[Placement::Shard(2)]);
        let x = leaf(&numbers(&shape, 1), &layout);
        let y = x.statistic(statistic, &[1], true).unwrap();
        assert_eq!((y.shape(), y.placements()), (&[4, 1, 5][..], &[Placement::Shard(2)][..]));
        same(
            "keepdim",
            &[(&numbers(&shape, 1), &layout)],
            NEAR,
            |t| t[0].statistic(statistic, &[1], true),
            |t| match statistic {
                Statistic::Sum => t[0].f_sum_dim_intlist(1, true, None),
                _ => t[0].f_mean_dim(1, true, None),
            },
        );
    });
}

#[test]
fn reshape_that_merges_a_batch_with_a_sharded_dim() {
    on_mesh(&[4], |mesh| {
        let shape = [3, 10, 4];
        let layout = shard(mesh, &shape, &[Placement::Shard(1)]);
        let x = numbers(&shape, 1);
        same("merge", &[(&x, &layout)], NEAR, |t| t[0].reshape(&[30, 4]), |t| t[0].f_reshape([30, 4]));
        // Nothing is sent: the part of each rank is three pieces of the merged dim.
        let merged = leaf(&x, &layout).reshape(&[30, 4]).unwrap();
        assert_eq!(merged.layout().intervals()[0].len(), 3);
        // And a weight may follow, which they refuse.
        let w = numbers(&[4, 4], 2);
        same(
            "merge and multiply",
            &[(&x, &layout), (&w, &whole(mesh, &[4, 4]))],
            NEAR,
            |t| t[0].matmul(&t[1]),
            |t| t[0].f_matmul(&t[1]),
        );
    });
}

#[test]
fn two_axes_that_shard_one_dim() {
    on_mesh(&[2, 2], |mesh| {
        let layout = shard(mesh, &[9, 2], &[Placement::Shard(0), Placement::Shard(0)]);
        let x = leaf(&numbers(&[9, 2], 1), &layout);
        assert_eq!(x.full_tensor(None).unwrap(), numbers(&[9, 2], 1));
        assert_eq!(layout.offsets(0).unwrap().len(), 2);
        conv_matches(
            mesh,
            &[1, 2, 11, 5],
            &[Placement::Shard(2), Placement::Shard(2)],
            3,
            &Conv { padding: Padding::Each(vec![1]), ..Conv::default() },
        );
    });
}

#[test]
fn group_norm_sharded_on_the_batch() {
    on_mesh(&[2], |mesh| {
        let (shape, layout) = ([4, 6, 5, 3], shard(mesh, &[4, 6, 5, 3], &[Placement::Shard(0)]));
        let (x, w) = (numbers(&shape, 1), numbers(&[6], 2));
        same(
            "group_norm",
            &[(&x, &layout), (&w, &whole(mesh, &[6]))],
            NEAR,
            |t| t[0].group_norm(3, Some(&t[1]), None, 1e-5),
            |t| t[0].f_group_norm(3, Some(&t[1]), None::<&Tensor>, 1e-5, false),
        );
    });
}

#[rstest]
#[case::local_extent_no_multiple_of_the_stride(20, 3, 2, 1)]
#[case::padding_not_half_the_kernel(17, 5, 1, 1)]
#[case::patches_of_an_odd_kernel(21, 3, 3, 0)]
#[case::patches_that_do_not_fill_the_parts(18, 2, 2, 0)]
#[case::an_even_kernel(16, 4, 1, 2)]
#[case::a_halo_wider_than_a_part(7, 7, 1, 3)]
fn convolution_of(#[case] extent: i64, #[case] kernel: i64, #[case] stride: i64, #[case] padding: i64) {
    on_mesh(&[4], move |mesh| {
        let conv = Conv { stride: vec![stride], padding: Padding::Each(vec![padding]), ..Conv::default() };
        for dim in [2, 3] {
            conv_matches(mesh, &[2, 2, extent, extent], &[Placement::Shard(dim)], kernel, &conv);
        }
    });
}

#[test]
fn pooling_with_padding_ceil_mode_and_on_the_second_axis() {
    on_mesh(&[2, 2], |mesh| {
        let shape = [2, 3, 9, 11];
        let x = numbers(&shape, 1);
        let layout = shard(mesh, &shape, &[Placement::Shard(2), Placement::Shard(3)]);
        let pool = Pool { stride: vec![2], padding: vec![1], ceil_mode: true, ..Pool::new(&[3]) };
        let dense = |t: &Tensor| t.f_max_pool2d_with_indices([3, 3], [2, 2], [1, 1], [1, 1], true);
        same("max_pool", &[(&x, &layout)], NEAR, |t| Ok(t[0].max_pool(2, &pool)?.0), |t| Ok(dense(&t[0])?.0));
        same(
            "its indices",
            &[(&x, &layout)],
            NEAR,
            |t| Ok(t[0].max_pool(2, &pool)?.1),
            |t| Ok(dense(&t[0])?.1),
        );
        same(
            "avg_pool",
            &[(&x, &layout)],
            NEAR,
            |t| t[0].avg_pool(2, &pool),
            |t| t[0].f_avg_pool2d([3, 3], [2, 2], [1, 1], true, true, None),
        );
        same(
            "adaptive",
            &[(&x, &layout)],
            NEAR,
            |t| t[0].adaptive_avg_pool(&[4, 5]),
            |t| t[0].f_adaptive_avg_pool2d([4, 5]),
        );
    });
}

#[test]
fn interpolation_with_aligned_corners_sizes_and_scales_that_are_not_whole() {
    on_mesh(&[4], |mesh| {
        let shape = [1, 2, 9, 7];
        let x = numbers(&shape, 1);
        let layout = shard(mesh, &shape, &[Placement::Shard(2)]);
        let with = [(&x, &layout)];
        let size = Resize::Size(vec![17, 12]);
        same(
            "corners",
            &with,
            NEAR,
            |t| t[0].interpolate(&size, Interpolation::Linear, true),
            |t| t[0].f_upsample_bilinear2d([17, 12], true, None, None),
        );
        let scale = Resize::Scale(vec![1.5]);
        same(
            "1.5 ×",
            &with,
            NEAR,
            |t| t[0].interpolate(&scale, Interpolation::Linear, false),
            |t| t[0].f_upsample_bilinear2d([13, 10], false, 1.5, 1.5),
        );
    });
}

#[rstest]
fn statistics_of_a_large_mean_in_fp32(#[values(1e3, 1e4)] mean: f64) {
    on_mesh(&[4], move |mesh| {
        let shape = [2, 4, 32, 16];
        let deviations = numbers(&shape, 1);
        let x = (&deviations + mean).to_kind(Kind::Float);
        let exact = x.to_kind(Kind::Double).group_norm(2, None::<&Tensor>, None::<&Tensor>, 1e-5, false);
        let layout = shard(mesh, &shape, &[Placement::Shard(2)]);
        let y = ShardTensor::distribute_as(&x, &layout).unwrap().group_norm(2, None, None, 1e-5).unwrap();
        // Rounding of fp32 at a value of this size.
        let rounding = mean * f64::from(f32::EPSILON);
        assert!(difference(&y.full_tensor(None).unwrap(), &exact) < 4.0 * rounding);
    });
}

#[test]
fn padding_wider_than_a_part_and_circular() {
    on_mesh(&[4], |mesh| {
        let shape = [1, 1, 6, 3];
        let x = numbers(&shape, 1);
        let layout = shard(mesh, &shape, &[Placement::Shard(2)]);
        for mode in [PadMode::Circular, PadMode::Reflect, PadMode::Replicate] {
            let name = format!("{mode:?}").to_lowercase();
            same(
                &name,
                &[(&x, &layout)],
                NEAR,
                |t| t[0].pad_mode(&[0, 0, 5, 4], mode, 0.0),
                |t| t[0].f_pad([0, 0, 5, 4], &name, None),
            );
        }
    });
}

#[test]
fn view_as_another_kind_keeps_the_dims() {
    on_mesh(&[2], |mesh| {
        let x = numbers(&[4, 6], 1);
        let y =
            ShardTensor::distribute(&x, mesh, &[Placement::Shard(0)]).unwrap().view_kind(Kind::Int).unwrap();
        assert_eq!(y.shape(), [4, 12]);
        assert_eq!(y.full_tensor(None).unwrap(), x.view_dtype(Kind::Int));
    });
}

// PyTorch's DTensor

#[test]
fn uneven_parts_come_back_in_order() {
    on_mesh(&[4], |mesh| {
        let sizes = [1, 4, 2, 3];
        let rank = mesh.coordinates().unwrap()[0];
        let start: i64 = sizes[..rank].iter().sum();
        let local = Tensor::arange_start(start, start + sizes[rank], (Kind::Int64, Device::Cpu));
        for told in [Sizes::Explicit(vec![(0, sizes.to_vec())]), Sizes::Infer] {
            let x = ShardTensor::from_local(&local, Some(mesh), &[Placement::Shard(0)], &told, None).unwrap();
            assert_eq!(x.offsets(0).unwrap(), [0, 1, 5, 7]);
            assert_eq!(x.full_tensor(None).unwrap(), Tensor::arange(10, (Kind::Int64, Device::Cpu)));
            assert_eq!(
                x.to_kind(Kind::Double).unwrap().mean().unwrap().full_tensor(None).unwrap().double_value(&[]),
                4.5
            );
        }
    });
}

#[test]
fn a_wrong_uneven_layout_is_one_error_on_all_ranks() {
    on_mesh(&[3], |mesh| {
        let rank = mesh.coordinates().unwrap()[0];
        let local = numbers(&[[2, 3, 4][rank], 2], 1);
        let wrong = Sizes::Explicit(vec![(0, vec![2, 4, 3])]);
        let checked =
            ShardTensor::from_local_checked(&local, Some(mesh), &[Placement::Shard(0)], &wrong, None);
        let text = checked.unwrap_err().to_string();
        assert!(text.contains("rank 1 of the mesh") && text.contains("[3, 2], expected [4, 2]"), "{text}");
        // Without the check, ranks whose part fits learn it at their next call.
        let made = ShardTensor::from_local(&local, Some(mesh), &[Placement::Shard(0)], &wrong, None);
        let error = made.and_then(|x| x.full_tensor(None)).unwrap_err().to_string();
        assert!(error.contains("expected [4, 2]") || error.contains("expected [3, 2]"), "{error}");
    });
}

#[test]
fn ranks_that_mean_different_layouts_are_told() {
    on_mesh(&[2], |mesh| {
        let rank = mesh.coordinates().unwrap()[0];
        // Both fit their own part; together they make no tensor.
        let sizes = [[3, 4], [2, 3]][rank].to_vec();
        let local = numbers(&[3, 2], 1);
        let sizes = Sizes::Explicit(vec![(0, sizes)]);
        let x = ShardTensor::from_local(&local, Some(mesh), &[Placement::Shard(0)], &sizes, None).unwrap();
        assert!(x.full_tensor(None).is_err());
    });
}

#[test]
fn convolution_sharded_on_height_and_on_two_axes() {
    let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
    let of = conv.clone();
    on_mesh(&[4], move |mesh| {
        conv_matches(mesh, &[2, 3, 17, 9], &[Placement::Shard(2)], 3, &of);
        let dilated = Conv { dilation: vec![2], padding: Padding::Each(vec![2]), ..Conv::default() };
        conv_matches(mesh, &[2, 3, 17, 9], &[Placement::Shard(3)], 3, &dilated);
    });
    on_mesh(&[2, 2], move |mesh| {
        conv_matches(mesh, &[2, 3, 17, 9], &[Placement::Shard(0), Placement::Shard(3)], 3, &conv);
        conv_matches(mesh, &[2, 3, 17, 9], &[Placement::Shard(2), Placement::Shard(3)], 3, &conv);
    });
}

#[test]
fn random_numbers_on_cpu_are_those_of_one_rank() {
    let alone = Generator::new(5);
    let options = (Kind::Float, Device::Cpu);
    let window = isobar_array::Window::whole(&[7, 5]);
    let uniform = alone.uniform(&window, 0.0, 1.0, options).unwrap();
    let normal = alone.normal(&window, 0.0, 1.0, options).unwrap();
    let whole_numbers = alone.randint(&window, -3, 9, Device::Cpu).unwrap();
    let mask = alone.dropout_mask(&window, 0.4, options).unwrap();
    let order = alone.randperm(35, Device::Cpu).unwrap();
    let wholes = [uniform, normal, whole_numbers, mask, order];
    for mesh in crate::common::MESHES {
        let wholes: Vec<Tensor> = wholes.iter().map(Tensor::copy).collect();
        let wholes = std::sync::Mutex::new(wholes);
        on_mesh(mesh, move |mesh| {
            let wholes: Vec<Tensor> = wholes.lock().unwrap().iter().map(Tensor::copy).collect();
            let mut dice = Dice(2);
            for _ in 0..8 {
                let layout = dice.layout(mesh, &[7, 5], &[0, 1]);
                let generator = Generator::new(5);
                let full = |x: ShardTensor| x.full_tensor(None).unwrap();
                assert_eq!(
                    full(ShardTensor::rand(&layout, Kind::Float, Device::Cpu, &generator).unwrap()),
                    wholes[0]
                );
                assert_eq!(
                    full(ShardTensor::randn(&layout, Kind::Float, Device::Cpu, &generator).unwrap()),
                    wholes[1]
                );
                assert_eq!(
                    full(ShardTensor::randint(&layout, -3, 9, Device::Cpu, &generator).unwrap()),
                    wholes[2]
                );
                let ones = ShardTensor::ones(&layout, Kind::Float, Device::Cpu).unwrap();
                assert_eq!(full(ones.dropout(0.4, &generator).unwrap()), wholes[3]);
                let row = Split::Uneven.layout(mesh, &vec![Placement::Shard(0); mesh.ndim()], &[35]);
                assert_eq!(full(ShardTensor::randperm(&row, Device::Cpu, &generator).unwrap()), wholes[4]);
                assert_eq!(generator.draws(), 5);
                let mut filled = ShardTensor::zeros(&layout, Kind::Float, Device::Cpu).unwrap();
                filled.uniform_(0.0, 1.0, &Generator::new(5)).unwrap();
                assert_eq!(full(filled), wholes[0]);
            }
        });
    }
}

#[test]
fn slices_and_selections_of_a_sharded_dim_on_two_axes() {
    on_mesh(&[2, 2], |mesh| {
        let mut dice = Dice(9);
        for split in crate::common::SPLITS {
            let layout = split.layout(mesh, &[Placement::Shard(1), Placement::Shard(0)], &[5, 8]);
            let x = numbers(&[5, 8], dice.roll(0, 9));
            same(
                "slice",
                &[(&x, &layout)],
                NEAR,
                |t| t[0].slice(1, Some(1), Some(7), 3),
                |t| t[0].f_slice(1, 1, 7, 3),
            );
            same("select", &[(&x, &layout)], NEAR, |t| t[0].select(1, -3), |t| t[0].f_select(1, -3));
        }
    });
}
