//! Operators of windows against the dense ones, over random shapes, layouts and arguments.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Conv, Interpolation, PadMode, Padding, Pool, Resize};
use isobar_shard::{Layout, Placement, Sizes};
use rstest::rstest;
use tch::Tensor;

use crate::common::{Dice, MESHES, numbers, on_mesh, same};

const ROUNDS: usize = 60;

fn shape(dice: &mut Dice, spatial: usize, low: i64, high: i64) -> Vec<i64> {
    let mut shape = vec![dice.roll(1, 3), 0];
    shape[1] = *dice.pick(&[2, 4]);
    shape.extend((0..spatial).map(|_| dice.roll(low, high)));
    shape
}

fn list(dice: &mut Dice, spatial: usize, low: i64, high: i64) -> Vec<i64> {
    (0..spatial).map(|_| dice.roll(low, high)).collect()
}

fn splittable(spatial: usize) -> Vec<usize> {
    std::iter::once(0).chain(2..spatial + 2).collect()
}

fn replicated(mesh: &isobar_mesh::DeviceMesh, shape: &[i64]) -> Layout {
    let placements = vec![Placement::Replicate; mesh.ndim()];
    Layout::new(mesh, &placements, shape, &Sizes::Chunk).unwrap()
}

#[rstest]
fn convolution(#[values(1, 2, 3, 4)] mesh: usize, #[values(1, 2, 3)] spatial: usize) {
    on_mesh(MESHES[mesh], move |mesh| {
        let mut dice = Dice(7 * spatial as u64 + 1);
        for round in 0..ROUNDS {
            let high = if spatial == 3 { 7 } else { 13 };
            let shape = shape(&mut dice, spatial, 3, high);
            let groups = *dice.pick(&[1, 1, 2]);
            let out = *dice.pick(&[2, 4, 6]);
            let kernel = list(&mut dice, spatial, 1, 4);
            let mode = *dice.pick(&[
                PadMode::Constant,
                PadMode::Constant,
                PadMode::Circular,
                PadMode::Reflect,
                PadMode::Replicate,
            ]);
            let stride = list(&mut dice, spatial, 1, 3);
            let dilation = list(&mut dice, spatial, 1, 2);
            let padding = list(&mut dice, spatial, 0, 3);
            let mut channels = splittable(spatial);
            if groups > 1 || dice.chance(4) {
                channels.push(1);
            }
            let layout = dice.layout(mesh, &shape, &channels);
            let x = numbers(&shape, round as i64);
            let weight_shape = [&[out, shape[1] / groups][..], &kernel].concat();
            let weight = numbers(&weight_shape, 3);
            let weight_layout = if dice.chance(4) {
                dice.layout(mesh, &weight_shape, &[0, 1])
            } else {
                replicated(mesh, &weight_shape)
            };
            let bias = numbers(&[out], 5);
            let bias_layout =
                if dice.chance(4) { dice.layout(mesh, &[out], &[0]) } else { replicated(mesh, &[out]) };
            let conv = Conv {
                stride: stride.clone(),
                padding: Padding::Each(padding.clone()),
                dilation: dilation.clone(),
                groups,
                padding_mode: mode,
            };
            let what = format!("{conv:?} of {shape:?} with {weight_shape:?}");
            same(
                &what,
                &[(&x, &layout), (&weight, &weight_layout), (&bias, &bias_layout)],
                1e-9,
                |t| t[0].conv(&t[1], Some(&t[2]), &conv),
                |t| {
                    let (x, left) = match mode {
                        PadMode::Constant => (t[0].shallow_clone(), padding.clone()),
                        mode => {
                            let pairs: Vec<i64> = padding.iter().rev().flat_map(|&p| [p, p]).collect();
                            let name = format!("{mode:?}").to_lowercase();
                            (t[0].f_pad(&pairs, &name, None)?, vec![0; spatial])
                        }
                    };
                    x.f_convolution(
                        &t[1],
                        Some(&t[2]),
                        &stride,
                        left,
                        &dilation,
                        false,
                        vec![0; spatial],
                        groups,
                    )
                },
            );
        }
    });
}

#[rstest]
fn transposed_convolution(#[values(1, 2, 3, 4)] mesh: usize, #[values(1, 2, 3)] spatial: usize) {
    on_mesh(MESHES[mesh], move |mesh| {
        let mut dice = Dice(11 * spatial as u64);
        for round in 0..ROUNDS {
            let shape = shape(&mut dice, spatial, 1, if spatial == 3 { 5 } else { 9 });
            let groups = *dice.pick(&[1, 1, 2]);
            let kernel = list(&mut dice, spatial, 1, 4);
            let stride = list(&mut dice, spatial, 1, 3);
            let dilation = list(&mut dice, spatial, 1, 2);
            let padding = list(&mut dice, spatial, 0, 2);
            let steps = stride.iter().zip(&dilation);
            let extra: Vec<i64> = steps.map(|(&s, &d)| dice.roll(0, s.max(d) - 1)).collect();
            let mut dims = splittable(spatial);
            if groups > 1 {
                dims.push(1);
            }
            let layout = dice.layout(mesh, &shape, &dims);
            let weight_shape = [&[shape[1], 3][..], &kernel].concat();
            let (x, weight, bias) =
                (numbers(&shape, round as i64), numbers(&weight_shape, 3), numbers(&[3 * groups], 5));
            let conv = Conv {
                stride: stride.clone(),
                padding: Padding::Each(padding.clone()),
                dilation: dilation.clone(),
                groups,
                padding_mode: PadMode::Constant,
            };
            let what = format!("transposed {conv:?}, {extra:?} of {shape:?} with {weight_shape:?}");
            same(
                &what,
                &[
                    (&x, &layout),
                    (&weight, &replicated(mesh, &weight_shape)),
                    (&bias, &replicated(mesh, &[3 * groups])),
                ],
                1e-9,
                |t| t[0].conv_transpose(&t[1], Some(&t[2]), &conv, &extra),
                |t| {
                    t[0].f_convolution(&t[1], Some(&t[2]), &stride, &padding, &dilation, true, &extra, groups)
                },
            );
        }
    });
}

#[rstest]
fn pooling(#[values(1, 2, 3, 4)] mesh: usize, #[values(1, 2, 3)] spatial: usize) {
    on_mesh(MESHES[mesh], move |mesh| {
        let mut dice = Dice(13 * spatial as u64);
        for round in 0..ROUNDS {
            let shape = shape(&mut dice, spatial, 3, if spatial == 3 { 7 } else { 13 });
            let layout = dice.layout(mesh, &shape, &[&splittable(spatial)[..], &[1]].concat());
            let kernel = list(&mut dice, spatial, 1, 4);
            let padding: Vec<i64> = kernel.iter().map(|&k| dice.roll(0, k / 2)).collect();
            let pool = Pool {
                stride: list(&mut dice, spatial, 1, 3),
                padding: padding.clone(),
                dilation: list(&mut dice, spatial, 1, 2),
                ceil_mode: dice.chance(2),
                count_include_pad: dice.chance(2),
                divisor_override: if dice.chance(4) { Some(3) } else { None },
                ..Pool::new(&kernel)
            };
            let x = numbers(&shape, round as i64);
            let max = |t: &Tensor| {
                let Pool { kernel, stride, padding, dilation, ceil_mode, .. } = pool.clone();
                match spatial {
                    1 => t.f_max_pool1d_with_indices(kernel, stride, padding, dilation, ceil_mode),
                    2 => t.f_max_pool2d_with_indices(kernel, stride, padding, dilation, ceil_mode),
                    _ => t.f_max_pool3d_with_indices(kernel, stride, padding, dilation, ceil_mode),
                }
            };
            let what = format!("{pool:?} of {shape:?}");
            same(
                &what,
                &[(&x, &layout)],
                1e-9,
                |t| Ok(t[0].max_pool(spatial, &pool)?.0),
                |t| Ok(max(&t[0])?.0),
            );
            same(
                &what,
                &[(&x, &layout)],
                1e-9,
                |t| Ok(t[0].max_pool(spatial, &pool)?.1),
                |t| Ok(max(&t[0])?.1),
            );
            let mean = |t: &Tensor| {
                let Pool {
                    kernel,
                    stride,
                    padding,
                    ceil_mode,
                    count_include_pad: count,
                    divisor_override,
                    ..
                } = pool.clone();
                match spatial {
                    1 => {
                        let wide = |list: &[i64], one: i64| vec![one, list[0]];
                        let (kernel, stride, padding) =
                            (wide(&kernel, 1), wide(&stride, 1), wide(&padding, 0));
                        t.f_unsqueeze(-2)?
                            .f_avg_pool2d(kernel, stride, padding, ceil_mode, count, divisor_override)?
                            .f_squeeze_dim(-2)
                    }
                    2 => t.f_avg_pool2d(kernel, stride, padding, ceil_mode, count, divisor_override),
                    _ => t.f_avg_pool3d(kernel, stride, padding, ceil_mode, count, divisor_override),
                }
            };
            same(&what, &[(&x, &layout)], 1e-9, |t| t[0].avg_pool(spatial, &pool), |t| mean(&t[0]));
            let output = list(&mut dice, spatial, 1, 6);
            let what = format!("adaptive {output:?} of {shape:?}");
            same(
                &what,
                &[(&x, &layout)],
                1e-9,
                |t| t[0].adaptive_avg_pool(&output),
                |t| match spatial {
                    1 => t[0].f_adaptive_avg_pool1d(&output),
                    2 => t[0].f_adaptive_avg_pool2d(&output),
                    _ => t[0].f_adaptive_avg_pool3d(&output),
                },
            );
            same(
                &what,
                &[(&x, &layout)],
                1e-9,
                |t| t[0].adaptive_max_pool(&output),
                |t| {
                    Ok(match spatial {
                        1 => t[0].f_adaptive_max_pool1d(&output)?.0,
                        2 => t[0].f_adaptive_max_pool2d(&output)?.0,
                        _ => t[0].f_adaptive_max_pool3d(&output)?.0,
                    })
                },
            );
        }
    });
}

#[rstest]
fn interpolation(#[values(1, 2, 3, 4)] mesh: usize, #[values(1, 2, 3)] spatial: usize) {
    on_mesh(MESHES[mesh], move |mesh| {
        let mut dice = Dice(17 * spatial as u64);
        for round in 0..ROUNDS {
            let shape = shape(&mut dice, spatial, 2, if spatial == 3 { 6 } else { 11 });
            let layout = dice.layout(mesh, &shape, &splittable(spatial));
            let x = numbers(&shape, round as i64);
            let scale = dice.chance(2);
            let scales: Vec<f64> =
                (0..spatial).map(|_| *dice.pick(&[2.0, 1.5, 0.5, 0.7, 1.0, 3.0])).collect();
            let size = list(&mut dice, spatial, 1, 14);
            let output: Vec<i64> = match scale {
                true => shape[2..].iter().zip(&scales).map(|(&n, s)| (n as f64 * s) as i64).collect(),
                false => size.clone(),
            };
            let resize = if scale { Resize::Scale(scales.clone()) } else { Resize::Size(size) };
            let given = |index: usize| scale.then(|| scales[index]);
            let corners = dice.chance(2);
            let nearest = |t: &Tensor| match spatial {
                1 => t.f_upsample_nearest1d(&output, given(0)),
                2 => t.f_upsample_nearest2d(&output, given(0), given(1)),
                _ => t.f_upsample_nearest3d(&output, given(0), given(1), given(2)),
            };
            let exact = |t: &Tensor| match spatial {
                1 => t.f_internal_upsample_nearest_exact1d(&output, given(0)),
                2 => t.f_internal_upsample_nearest_exact2d(&output, given(0), given(1)),
                _ => t.f_internal_upsample_nearest_exact3d(&output, given(0), given(1), given(2)),
            };
            let linear = |t: &Tensor| match spatial {
                1 => t.f_upsample_linear1d(&output, corners, given(0)),
                2 => t.f_upsample_bilinear2d(&output, corners, given(0), given(1)),
                _ => t.f_upsample_trilinear3d(&output, corners, given(0), given(1), given(2)),
            };
            let what = format!("{resize:?} of {shape:?}, corners {corners}");
            let run = |mode, corners| {
                move |t: &[isobar_shard::ShardTensor]| t[0].interpolate(&resize.clone(), mode, corners)
            };
            let with = [(&x, &layout)];
            same(&what, &with, 1e-9, run.clone()(Interpolation::Nearest, false), |t| nearest(&t[0]));
            same(&what, &with, 1e-9, run.clone()(Interpolation::NearestExact, false), |t| exact(&t[0]));
            same(&what, &with, 1e-9, run.clone()(Interpolation::Linear, corners), |t| linear(&t[0]));
            if spatial == 2 {
                same(&what, &with, 1e-9, run.clone()(Interpolation::Cubic, corners), |t| {
                    t[0].f_upsample_bicubic2d(&output, corners, given(0), given(1))
                });
            }
            // In fp32 positions are those of fp32.
            let single = x.to_kind(tch::Kind::Float);
            same(&what, &[(&single, &layout)], 2e-4, run.clone()(Interpolation::Linear, corners), |t| {
                linear(&t[0])
            });
            same(&what, &[(&single, &layout)], 1e-4, run(Interpolation::Nearest, false), |t| nearest(&t[0]));
        }
    });
}

#[rstest]
fn padding_rolling_flipping(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(23);
        for round in 0..2 * ROUNDS {
            let shape = [dice.roll(1, 3), 2, dice.roll(1, 9), dice.roll(1, 9)];
            let layout = dice.layout(mesh, &shape, &[0, 1, 2, 3]);
            let x = numbers(&shape, round as i64);
            let mode =
                *dice.pick(&[PadMode::Constant, PadMode::Circular, PadMode::Reflect, PadMode::Replicate]);
            let widest = if mode == PadMode::Constant { 12 } else { 8 };
            // No more is cut off than there is: libtorch refuses that, even where the other side adds it back.
            let lowest = |extent: i64| if mode == PadMode::Constant { -extent.min(3) } else { 0 };
            let pairs: Vec<i64> =
                [3, 3, 2, 2].map(|dim: usize| dice.roll(lowest(shape[dim]), widest)).to_vec();
            let name = format!("{mode:?}").to_lowercase();
            let value = if mode == PadMode::Constant { Some(0.5) } else { None };
            let what = format!("pad {pairs:?} {mode:?} of {shape:?}");
            same(
                &what,
                &[(&x, &layout)],
                1e-12,
                |t| t[0].pad_mode(&pairs, mode, 0.5),
                |t| t[0].f_pad(&pairs, &name, value),
            );
            let (shifts, dims) =
                ([dice.roll(-12, 12), dice.roll(-12, 12)], [dice.roll(0, 3), dice.roll(-4, -1)]);
            let what = format!("roll {shifts:?} {dims:?} of {shape:?}");
            same(
                &what,
                &[(&x, &layout)],
                1e-12,
                |t| t[0].roll(&shifts, &dims),
                |t| t[0].f_roll(shifts, dims),
            );
            same(
                "flat roll",
                &[(&x, &layout)],
                1e-12,
                |t| t[0].roll(&shifts[..1], &[]),
                |t| t[0].f_roll(shifts[0], Vec::<i64>::new()),
            );
            let dims = [dice.roll(0, 3)];
            same("flip", &[(&x, &layout)], 1e-12, |t| t[0].flip(&dims), |t| t[0].f_flip(dims));
            let (dim, size, step) = (dice.roll(0, 3), dice.roll(1, 4), dice.roll(1, 3));
            let what = format!("unfold {dim} {size} {step} of {shape:?}");
            same(
                &what,
                &[(&x, &layout)],
                1e-12,
                |t| t[0].unfold(dim, size, step),
                |t| t[0].f_unfold(dim, size, step),
            );
        }
    });
}
