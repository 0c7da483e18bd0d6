//! Rearranged and resampled fields against PyTorch's.

use std::time::Duration;

use isobar_array::{GridSample, Interpolation, Resample, SamplePadding};
use isobar_collectives::threads;
use isobar_mesh::DeviceMesh;
use isobar_shard::{CommTrace, Layout, Placement, ShardTensor, Sizes, forbid_hidden_communication};
use rstest::rstest;
use tch::Tensor;

use crate::common::{Dice, MESHES, difference, numbers, on_mesh, same};

const NEAR: f64 = 1e-11;
const ROUNDS: usize = 12;

#[rstest]
fn shuffles(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(3);
        for round in 0..ROUNDS {
            let _forbidden = forbid_hidden_communication();
            let factor = dice.roll(1, 3);
            let fine = [2, 3, factor * dice.roll(1, 4), factor * dice.roll(1, 4)];
            let coarse = [2, 3 * factor * factor, dice.roll(1, 5), dice.roll(1, 5)];
            let (lf, lc) = (dice.layout(mesh, &fine, &[0, 2, 3]), dice.layout(mesh, &coarse, &[0, 1, 2, 3]));
            let (fine, coarse) = (numbers(&fine, round as i64), numbers(&coarse, round as i64));
            let shuffle = |t: &[ShardTensor]| Ok(t[0].pixel_shuffle(factor)?);
            same("pixel_shuffle", &[(&coarse, &lc)], NEAR, shuffle, |t| t[0].f_pixel_shuffle(factor));
            let unshuffle = |t: &[ShardTensor]| Ok(t[0].pixel_unshuffle(factor)?);
            same("pixel_unshuffle", &[(&fine, &lf)], NEAR, unshuffle, |t| t[0].f_pixel_unshuffle(factor));
        }
    });
}

#[rstest]
fn patches(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(5);
        for round in 0..ROUNDS {
            let _forbidden = forbid_hidden_communication();
            let (p, q) = (dice.roll(1, 3), dice.roll(1, 3));
            let (h, w) = (dice.roll(1, 4), dice.roll(1, 4));
            let shape = [2, 3, h * p, w * q];
            let layout = dice.layout(mesh, &shape, &[0, 1, 2, 3]);
            let x = numbers(&shape, round as i64);
            same(
                "patches",
                &[(&x, &layout)],
                NEAR,
                |t| Ok(t[0].rearrange("b c (h p) (w q) -> b (h w) (p q c)", &[("p", p), ("q", q)])?),
                |t| {
                    let cells = t[0].f_reshape([2, 3, h, p, w, q])?.f_permute([0, 2, 4, 3, 5, 1])?;
                    cells.f_reshape([2, h * w, p * q * 3])
                },
            );
        }
    });
}

#[rstest]
#[case("a b", "has no ->")]
#[case("a b -> a c", "on one side only")]
#[case("a a -> a", "twice")]
#[case("a b c -> c b a", "3 dims on the left")]
#[case("a (b c) -> a b c", "leaves the extents of [\"b\", \"c\"] open")]
#[case("a (b p) -> a b p", "splits (b p) of 6 elements by 4")]
#[case("a (b -> a b", "has ( without )")]
#[case("a ... -> ... a", "which is no name")]
fn patterns_that_do_not_fit(#[case] pattern: &str, #[case] expected: &str) {
    let extents: &[(&str, i64)] = if pattern.contains('p') { &[("p", 4)] } else { &[] };
    let error = numbers(&[4, 6], 1).rearrange(pattern, extents).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

fn code(options: &GridSample) -> (i64, i64) {
    let padding = match options.padding {
        SamplePadding::Zeros => 0,
        SamplePadding::Border => 1,
        SamplePadding::Reflection => 2,
    };
    (i64::from(options.interpolation == Interpolation::Nearest), padding)
}

#[rstest]
fn sampled_fields(
    #[values(0, 1, 2, 3, 4)] mesh: usize,
    #[values(2, 3)] spatial: usize,
    #[values(Interpolation::Linear, Interpolation::Nearest)] interpolation: Interpolation,
    #[values(SamplePadding::Zeros, SamplePadding::Border, SamplePadding::Reflection)] padding: SamplePadding,
) {
    on_mesh(MESHES[mesh], move |mesh| {
        let mut dice = Dice(11);
        for round in 0..ROUNDS / 3 {
            let _forbidden = forbid_hidden_communication();
            let mut extents = |most| (0..spatial).map(|_| dice.roll(1, most)).collect::<Vec<i64>>();
            let shape = [&[2, 3][..], &extents(6)].concat();
            let of_grid = [&[2][..], &extents(5), &[spatial as i64]].concat();
            let dims: Vec<usize> = (0..spatial + 2).collect();
            let lx = dice.layout(mesh, &shape, &dims);
            let lg = dice.layout(mesh, &of_grid, &dims[..=spatial]);
            let x = numbers(&shape, round as i64);
            let grid = numbers(&of_grid, round as i64 + 50);
            for align_corners in [false, true] {
                let options = GridSample { interpolation, padding, align_corners };
                let (mode, beyond) = code(&options);
                same(
                    &format!("grid_sample {options:?} of {shape:?} at {of_grid:?}"),
                    &[(&x, &lx), (&grid, &lg)],
                    NEAR,
                    |t| Ok(t[0].grid_sample(&t[1], &options)?),
                    |t| t[0].f_grid_sampler(&t[1], mode, beyond, align_corners),
                );
            }
        }
    });
}

/// The points of the grid themselves, and points half-way between them.
#[rstest]
fn ends_and_halves(#[values(false, true)] align_corners: bool) {
    let x = numbers(&[1, 2, 4, 4], 1);
    let along = Tensor::linspace(-1.5, 1.5, 25, (tch::Kind::Double, tch::Device::Cpu));
    let grid = Tensor::stack(&[&along, &along.flip([0])], 1).reshape([1, 5, 5, 2]);
    for interpolation in [Interpolation::Linear, Interpolation::Nearest] {
        for padding in [SamplePadding::Zeros, SamplePadding::Border, SamplePadding::Reflection] {
            let options = GridSample { interpolation, padding, align_corners };
            let (mode, beyond) = code(&options);
            let want = x.f_grid_sampler(&grid, mode, beyond, align_corners).unwrap();
            let got = x.grid_sample(&grid, &options).unwrap();
            assert!((got - want).abs().max().double_value(&[]) < NEAR, "{options:?}");
        }
    }
}

/// Points at the centres of the cells, whose first and last ones have no gradient along the clamped dim.
#[rstest]
fn gradients_at_the_ends(
    #[values(0, 1, 4)] mesh: usize,
    #[values(2, 3)] spatial: usize,
    #[values(SamplePadding::Border, SamplePadding::Reflection)] padding: SamplePadding,
    #[values(false, true)] align_corners: bool,
) {
    on_mesh(MESHES[mesh], move |mesh| {
        let mut dice = Dice(23);
        // Centres whose coordinates are exact.
        let extents = if align_corners { [5, 3, 2] } else { [4, 2, 1] };
        let shape = [&[1, 2][..], &extents[..spatial]].concat();
        let affine = Tensor::eye(spatial as i64 + 1, (tch::Kind::Double, tch::Device::Cpu));
        let theta = affine.narrow(0, 0, spatial as i64).unsqueeze(0);
        let grid = Tensor::f_affine_grid_generator(&theta, &shape, align_corners).unwrap();
        let dims: Vec<usize> = (0..spatial + 2).collect();
        let options = GridSample { interpolation: Interpolation::Linear, padding, align_corners };
        let (mode, beyond) = code(&options);
        for round in 0..4 {
            let _forbidden = forbid_hidden_communication();
            let lx = dice.layout(mesh, &shape, &dims);
            let lg = dice.layout(mesh, &grid.size(), &dims[..=spatial]);
            same(
                &format!("grid_sample {options:?} of {shape:?} at its own points"),
                &[(&numbers(&shape, round), &lx), (&grid, &lg)],
                NEAR,
                |t| Ok(t[0].grid_sample(&t[1], &options)?),
                |t| t[0].f_grid_sampler(&t[1], mode, beyond, align_corners),
            );
        }
    });
}

/// PyTorch's gradients at the centres of the cells of [1, 2, 4, 8]: none at the ends.
#[rstest]
#[case(false, [0.0, 4.0, 8.0, 0.0])]
#[case(true, [0.0, 3.0, 6.0, 0.0])]
fn gradients_of_four_cells(#[case] align_corners: bool, #[case] want: [f64; 4]) {
    let x = Tensor::from_slice(&[1.0, 2.0, 4.0, 8.0]).reshape([1, 1, 1, 4]);
    let theta = Tensor::from_slice2(&[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).unsqueeze(0);
    for padding in [SamplePadding::Border, SamplePadding::Reflection] {
        let grid = Tensor::f_affine_grid_generator(&theta, [1, 1, 1, 4], align_corners).unwrap();
        let grid = grid.set_requires_grad(true);
        let options = GridSample { padding, align_corners, ..GridSample::default() };
        x.grid_sample(&grid, &options).unwrap().sum(None).backward();
        let got = grid.grad().select(3, 0).reshape([-1]);
        assert!(difference(&got, &Tensor::from_slice(&want)) < NEAR, "{options:?}: {got:?}");
    }
}

#[rstest]
fn affine_grids(#[values(1, 2, 4)] mesh: usize, #[values(2, 3)] spatial: usize) {
    on_mesh(MESHES[mesh], move |mesh| {
        let mut dice = Dice(17);
        for round in 0..ROUNDS {
            let extents: Vec<i64> = (0..spatial).map(|_| dice.roll(1, 6)).collect();
            let shape = [&[2, 1][..], &extents].concat();
            let of_theta = [2, spatial as i64, spatial as i64 + 1];
            let field = dice.layout(mesh, &shape, &(2..spatial + 2).collect::<Vec<_>>());
            let field = ShardTensor::distribute_as(&numbers(&shape, 0), &field).unwrap();
            let theta = numbers(&of_theta, round as i64);
            let whole = Layout::new(mesh, &vec![Placement::Replicate; mesh.ndim()], &of_theta, &Sizes::Chunk);
            for align in [false, true] {
                same(
                    &format!("affine_grid of {shape:?}"),
                    &[(&theta, whole.as_ref().unwrap())],
                    NEAR,
                    |t| Ok(t[0].affine_grid(&field, align)?),
                    |t| Tensor::f_affine_grid_generator(&t[0], &shape, align),
                );
            }
        }
    });
}

/// A rank receives the points that it samples, not the field.
#[test]
fn sampling_does_not_gather() {
    threads::run(2, Duration::from_secs(60), |group| {
        let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
        let split = |shape: &[i64], dim: usize| {
            let layout = Layout::new(&mesh, &[Placement::Shard(dim)], shape, &Sizes::Chunk).unwrap();
            ShardTensor::distribute_as(&(numbers(shape, 1) * 0.1), &layout).unwrap()
        };
        let (x, grid) = (split(&[1, 1, 64, 64], 2), split(&[1, 2, 2, 2], 1));
        let trace = CommTrace::start(&group);
        let _y = x.grid_sample(&grid, &GridSample::default()).unwrap();
        let field = 64 * 64 * 8 / 2;
        assert!(trace.received() < field / 10, "{} bytes", trace.received());
    });
}
