use isobar_torch::autograd::{BackwardOptions, grad};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use super::*;
use crate::register_op;
use crate::{Conv, Generator, Interpolation, PadMode, Padding, Pool, Resize, RunningStats, Window};

const CPU64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn random(seed: u64, shape: &[i64]) -> Tensor {
    Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, CPU64).unwrap()
}

fn assert_close(got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_eq!(got.size(), want.size());
    if want.numel() == 0 {
        return;
    }
    let error = (got - want).abs().max().double_value(&[]);
    assert!(error <= tolerance, "differs by {error}");
}

#[rstest]
#[case::one(Unary::Softshrink(0.5), |x: f64| if x.abs() <= 0.5 { 0.0 } else { x - 0.5 * x.signum() })]
#[case::two(Unary::LeakyRelu(0.1), |x: f64| if x > 0.0 { x } else { 0.1 * x })]
#[case::three(Unary::Softsign, |x: f64| x / (1.0 + x.abs()))]
#[case::four(Unary::Threshold { threshold: 1.0, value: 1.0 }, |x: f64| x.max(1.0))]
#[case::five(Unary::Clamp { min: 0.0, max: 0.5 }, |x: f64| x.clamp(0.0, 0.5))]
#[case::six(Unary::Tanhshrink, |x: f64| x - x.tanh())]
#[case::seven(Unary::Silu, |x: f64| x / (1.0 + (-x).exp()))]
#[case::eight(Unary::Softplus, |x: f64| x.exp().ln_1p())]
#[case::nine(Unary::LogSigmoid, |x: f64| -(-x).exp().ln_1p())]
#[case::ten(Unary::PowScalar(2.0), |x: f64| x * x)]
#[case::eleven(Unary::AddScalar(2.5), |x: f64| x + 2.5)]
#[case::twelve(Unary::Elu, |x: f64| if x > 0.0 { x } else { x.exp_m1() })]
#[case::thirteen(Unary::Celu, |x: f64| if x > 0.0 { x } else { x.exp_m1() })]
#[case::fourteen(Unary::Gelu, |x: f64| x * 0.5 * libm::erfc(-x / 2f64.sqrt()))]
fn unary_functions(#[case] function: Unary, #[case] want: fn(f64) -> f64) {
    let x = random(1, &[64]);
    let want: Vec<f64> = Vec::<f64>::try_from(&x).unwrap().into_iter().map(want).collect();
    assert_close(&x.unary(function).unwrap(), &Tensor::from_slice(&want), 1e-12);
}

#[test]
fn softshrink_has_libtorchs_gradient() {
    let x = Tensor::from_slice(&[-2.0, -0.5, -0.2, 0.0, 0.2, 0.5, 2.0]).set_requires_grad(true);
    let options = BackwardOptions::default();
    let got = grad(&[&x.unary(Unary::Softshrink(0.5)).unwrap().sum(Kind::Double)], &[&x], &[None], options)
        .unwrap();
    let want = grad(&[&x.softshrink().sum(Kind::Double)], &[&x], &[None], options).unwrap();
    assert_eq!(got[0], want[0]);
}

#[rstest]
// Short transforms, by matrices.
#[case([2], [8, 6], [3], 0..8, 0..4)]
#[case([2], [7, 9], [1], 2..6, 1..3)]
#[case([1], [6, 5], [4], 0..6, 0..3)]
#[case([3], [1, 1], [2], 0..1, 0..1)]
#[case([2], [4, 4], [2], 1..1, 0..2)]
#[case([2], [4, 6], [1], 1..3, 0..0)]
#[case([1], [4, 6], [2], 3..3, 0..0)]
// Long ones, by the FFT.
#[case([1], [4, 600], [2], 1..4, 0..301)]
#[case([2], [301, 3], [1], 5..200, 1..2)]
#[case([2], [4, 600], [1], 2..2, 0..0)]
fn modes_are_a_part_of_the_half_spectrum(
    #[case] outer: [i64; 1],
    #[case] size: [i64; 2],
    #[case] inner: [i64; 1],
    #[case] rows: std::ops::Range<i64>,
    #[case] columns: std::ops::Range<i64>,
    #[values(FftNorm::Backward, FftNorm::Ortho, FftNorm::Forward)] norm: FftNorm,
) {
    let x = random(2, &[&outer[..], &size, &inner].concat());
    let modes = Modes { rows: rows.clone(), columns: columns.clone() };
    let (row_count, column_count) = (rows.end - rows.start, columns.end - columns.start);
    let got = x.rfft2_modes(1, &modes, norm).unwrap();
    let spectrum = Spectral::rfft2(&x, [1, 2], norm).unwrap();
    let part = spectrum.narrow(1, rows.start, row_count).narrow(2, columns.start, column_count);
    assert_close(&got, &part.view_as_real().permute([0, 4, 1, 2, 3]), 1e-11);

    let coefficients = random(3, &got.size());
    let back = coefficients.irfft2_modes(1, size, &modes, norm).unwrap();
    let complex = Convert::view_as_complex(&coefficients.permute([0, 2, 3, 4, 1])).unwrap();
    let whole = spectrum.zeros_like();
    whole.narrow(1, rows.start, row_count).narrow(2, columns.start, column_count).copy_(&complex);
    assert_close(&back, &Spectral::irfft2(&whole, size, [1, 2], norm).unwrap(), 1e-11);
}

/// A rank whose part of the batch is empty makes the same nodes as the others.
#[rstest]
#[case::short([8, 6])]
#[case::long([4, 600])]
fn transforms_of_nothing(#[case] size: [i64; 2], #[values([0, 2], [3, 0])] others: [i64; 2]) {
    let ([height, width], [outer, inner]) = (size, others);
    let x = Tensor::zeros([outer, height, width, inner], CPU64).set_requires_grad(true);
    let modes = Modes { rows: 1..3, columns: 0..2 };
    let spectrum = x.rfft2_modes(1, &modes, FftNorm::Ortho).unwrap();
    assert_eq!(spectrum.size(), [outer, 2, 2, 2, inner]);
    let back = spectrum.irfft2_modes(1, size, &modes, FftNorm::Ortho).unwrap();
    let half = Spectral::rfft2(&x, [1, -2], FftNorm::Ortho).unwrap();
    assert_eq!((half.size(), half.kind()), (vec![outer, height, width / 2 + 1, inner], Kind::ComplexDouble));
    let whole = Spectral::irfft2(&half, size, [1, -2], FftNorm::Ortho).unwrap();
    for y in [back, whole] {
        assert_eq!((y.size(), y.kind()), (x.size(), Kind::Double));
        let dx = grad(&[&y], &[&x], &[Some(y.zeros_like())], BackwardOptions::default()).unwrap();
        assert_eq!(dx[0].as_ref().unwrap().size(), x.size());
    }
}

#[test]
fn transforms_refuse_what_they_cannot_do() {
    let modes = Modes { rows: 0..4, columns: 0..3 };
    let half = Tensor::zeros([4, 4], (Kind::Half, Device::Cpu));
    assert!(
        half.rfft2_modes(0, &modes, FftNorm::Ortho).unwrap_err().to_string().contains("convert to Float")
    );
    let x = random(0, &[4, 4]);
    assert!(x.rfft2_modes(1, &modes, FftNorm::Ortho).is_err());
    for modes in [Modes { rows: 0..5, columns: 0..3 }, Modes { rows: 0..4, columns: 0..4 }] {
        assert!(x.rfft2_modes(0, &modes, FftNorm::Ortho).is_err());
        assert!(random(0, &[2, 4, 3]).irfft2_modes(0, [4, 4], &modes, FftNorm::Ortho).is_err());
    }
}

#[test]
fn errors_name_operator_and_shapes() {
    let (a, b) = (random(0, &[2, 3]), random(0, &[4, 5]));
    let text = Linear::matmul(&a, &b).unwrap_err().to_string();
    assert!(text.starts_with("matmul of Double [2, 3], Double [4, 5] failed: "), "{text}");
    assert!(!text.contains("Exception raised"), "{text}");
    let text = Tensor::op("no_such", &[&a], &Attrs::new()).unwrap_err().to_string();
    assert!(text.starts_with("unknown operator \"no_such\"; registered are "), "{text}");
    assert!(Array::extent(&a, 2).unwrap_err().to_string().contains("dim 2 of a tensor with 2 dims"));
    assert!(Reduce::mse_loss(&a, &random(0, &[1, 3])).is_err());
    assert!(<Tensor as Shape>::cat(&[], 0).is_err());
    assert!(Linear::conv2d(&a, &b, None, &Conv2d::default()).is_err());
}

#[rstest]
#[case(PadMode::Circular, "circular", [3, 2])]
#[case(PadMode::Reflect, "reflect", [2, 3])]
#[case(PadMode::Replicate, "replicate", [7, 1])]
#[case(PadMode::Constant, "constant", [2, -1])]
fn padding_of_any_dim(#[case] mode: PadMode, #[case] name: &str, #[case] pair: [i64; 2]) {
    let x = random(1, &[2, 4, 3]);
    let value = (mode == PadMode::Constant).then_some(1.5);
    let want = x.transpose(1, 2).f_pad(pair, name, value).unwrap().transpose(1, 2);
    let pairs = [0, 0, pair[0], pair[1]];
    assert_eq!(x.pad_mode(&pairs, mode, 1.5).unwrap(), want);
    if mode != PadMode::Constant {
        let too_wide = |extent: i64| x.narrow(1, 0, extent).pad_mode(&pairs, mode, 0.0).is_err();
        assert_eq!([too_wide(0), too_wide(2)], [true, mode != PadMode::Replicate]);
        assert!(x.pad_mode(&[1], mode, 0.0).is_err());
    }
}

#[test]
fn linspace_has_both_ends() {
    let x = random(1, &[4, 1, 0]).to_kind(Kind::Float);
    let third = 1.0 / 3.0f32;
    let values = Vec::<f32>::try_from(x.linspace_along(0, 0.0, 1.0).unwrap()).unwrap();
    assert_eq!(values, [0.0, third, 2.0 * third, 1.0]);
    assert_eq!(x.linspace_along(1, 2.0, 5.0).unwrap(), Tensor::from_slice(&[2.0f32]));
    assert_eq!(x.linspace_along(-1, 2.0, 5.0).unwrap().size(), [0]);
    assert!(x.linspace_along(3, 0.0, 1.0).is_err());
}

#[test]
fn registered_operators_are_found_and_replaced() {
    let double = |factor: f64| move |x: &[&Tensor], _: &Attrs| Ok(vec![x[0].f_mul_scalar(factor)?]);
    assert!(!register_op("array-tests/scale", double(2.0)));
    assert!(register_op("array-tests/scale", double(3.0)));
    let x = random(0, &[3]);
    let outputs = Tensor::op("array-tests/scale", &[&x], &Attrs::new()).unwrap();
    assert_close(&outputs[0], &(&x * 3.0), 0.0);
    register_op("array-tests/fails", |_, _| Err("wrong phase of the moon".into()));
    let text = Tensor::op("array-tests/fails", &[&x], &Attrs::new()).unwrap_err().to_string();
    assert_eq!(text, "operator \"array-tests/fails\" failed: wrong phase of the moon");
}

#[test]
fn dropout_is_cut_from_the_whole() {
    let x = Tensor::ones([6, 5], CPU64);
    let whole = Window::whole(&[6, 5]);
    let y = RandomOps::dropout(&x, 0.4, &Generator::new(1), &whole).unwrap();
    let part = RandomOps::dropout(
        &x.narrow(0, 2, 3),
        0.4,
        &Generator::new(1),
        &whole.clone().narrow(0, 2, 3).unwrap(),
    );
    assert_eq!(part.unwrap(), y.narrow(0, 2, 3));
    let generator = Generator::new(1);
    assert_eq!(RandomOps::dropout(&x, 0.0, &generator, &whole).unwrap(), x);
    assert_eq!(generator.draws(), 0);
    assert_eq!(RandomOps::dropout(&x, 1.0, &Generator::new(1), &whole).unwrap(), x.zeros_like());
    // One mask a row.
    let rows = RandomOps::dropout(&x, 0.5, &generator, &Window::whole(&[6, 1])).unwrap();
    assert_eq!(rows, rows.select(1, 0).unsqueeze(1).expand([6, 5], false));
    assert!(RandomOps::dropout(&x, 0.5, &generator, &Window::whole(&[5, 5])).is_err());
}

#[test]
fn view_as_complex_aligns() {
    let x = random(0, &[7]).narrow(0, 1, 6).reshape([3, 2]);
    let complex = Convert::view_as_complex(&x).unwrap();
    assert_eq!(Tensor::view_as_real(&complex), x);
}

#[test]
fn view_as_real_of_nothing_has_a_gradient_of_any_strides() {
    let pairs = Tensor::zeros([0, 3, 2], CPU64).set_requires_grad(true);
    let complex = Convert::view_as_complex(&pairs).unwrap();
    let real = Convert::view_as_real(&complex).unwrap();
    assert_eq!(real.size(), [0, 3, 2]);
    let permuted = real.permute([2, 1, 0]).reshape([2, 3, 0]) * 2.0;
    let ones = Some(permuted.ones_like());
    let found = grad(&[&permuted], &[&pairs], &[ones], BackwardOptions::default()).unwrap();
    assert_eq!(found[0].as_ref().unwrap().size(), [0, 3, 2]);
}

#[test]
fn convolutions_of_fields() {
    let (x, weight, bias) = (random(1, &[2, 4, 7, 6]), random(2, &[6, 2, 3, 2]), random(3, &[6]));
    let conv = Conv {
        stride: vec![2, 1],
        padding: Padding::Each(vec![2, 1]),
        dilation: vec![1, 2],
        groups: 2,
        ..Conv::default()
    };
    let want = x.conv2d(&weight, Some(&bias), [2, 1], [2, 1], [1, 2], 2);
    assert_close(&Windowed::conv(&x, &weight, Some(&bias), &conv).unwrap(), &want, 1e-12);
    let one = Windowed::conv(&x.get(1), &weight, Some(&bias), &conv).unwrap();
    assert_close(&one, &want.get(1), 1e-12);
    for mode in [PadMode::Circular, PadMode::Reflect, PadMode::Replicate] {
        let padded = x.pad([1, 1, 2, 2], mode.name(), None);
        let want = padded.conv2d(&weight, Some(&bias), [2, 1], [0, 0], [1, 2], 2);
        let conv = Conv { padding_mode: mode, ..conv.clone() };
        assert_close(&Windowed::conv(&x, &weight, Some(&bias), &conv).unwrap(), &want, 1e-12);
    }
    // The odd element comes after.
    let same = Conv { padding: Padding::Same, groups: 2, ..Conv::default() };
    let want = x.conv2d_padding(&weight, None::<&Tensor>, [1, 1], "same", [1, 1], 2);
    assert_close(&Windowed::conv(&x, &weight, None, &same).unwrap(), &want, 1e-12);

    let (weight, bias) = (random(4, &[4, 3, 3, 3]), random(5, &[6]));
    let conv = Conv { stride: vec![2], padding: Padding::Each(vec![1]), groups: 2, ..Conv::default() };
    let want = x.conv_transpose2d(&weight, Some(&bias), [2, 2], [1, 1], [1, 0], 2, [1, 1]);
    let got = Windowed::conv_transpose(&x, &weight, Some(&bias), &conv, &[1, 0]).unwrap();
    assert_close(&got, &want, 1e-12);
    let got = Windowed::conv_transpose(&x.get(0), &weight, Some(&bias), &conv, &[1, 0]).unwrap();
    assert_close(&got, &want.get(0), 1e-12);
}

#[test]
fn pools_interpolations_and_norms_of_fields() {
    let x = random(1, &[2, 4, 7, 6]);
    let pool = Pool { stride: vec![2], padding: vec![1], ceil_mode: true, ..Pool::new(&[3, 2]) };
    let (y, indices) = Windowed::max_pool(&x, 2, &pool).unwrap();
    let (want, places) = x.max_pool2d_with_indices([3, 2], [2, 2], [1, 1], [1, 1], true);
    assert_eq!((y, indices), (want, places));
    let want = x.avg_pool2d([3, 2], [2, 2], [1, 1], true, true, None::<i64>);
    assert_eq!(Windowed::avg_pool(&x, 2, &pool).unwrap(), want);
    assert_eq!(Windowed::max_pool(&x.narrow(0, 0, 0), 2, &pool).unwrap().0.size(), [0, 4, 4, 4]);

    let size = Resize::Size(vec![9, 3]);
    let bilinear = Windowed::interpolate(&x, &size, Interpolation::Linear, true).unwrap();
    assert_eq!(bilinear, x.upsample_bilinear2d([9, 3], true, None, None));
    let area = Windowed::interpolate(&x, &size, Interpolation::Area, false).unwrap();
    assert_eq!(area, x.adaptive_avg_pool2d([9, 3]));

    let (weight, bias) = (random(2, &[4]), random(3, &[4]));
    let (w, b) = (Some(&weight), Some(&bias));
    let by_group = Windowed::group_norm(&x, 2, w, b, 1e-3).unwrap();
    let flat = x.reshape([2, 2, -1]);
    let centred = &flat - flat.mean_dim([-1].as_slice(), true, Kind::Double);
    let var = flat.var_dim([-1].as_slice(), false, true);
    let along = |vector: &Tensor| vector.view([1, 4, 1, 1]);
    let want = (centred / (var + 1e-3).sqrt()).view([2, 4, 7, 6]) * along(&weight) + along(&bias);
    assert_close(&by_group, &want, 1e-12);
    let each = Windowed::instance_norm(&x, w, b, 1e-3).unwrap();
    assert_close(&each, &Windowed::group_norm(&x, 4, w, b, 1e-3).unwrap(), 1e-12);

    let (mean, var) = (Tensor::zeros([4], CPU64), Tensor::ones([4], CPU64));
    let running = || Some(RunningStats { mean: &mean, var: &var, momentum: 0.25 });
    let got = Windowed::batch_norm(&x, w, b, running(), true, 1e-3).unwrap();
    let rows = x.permute([1, 0, 2, 3]).reshape([4, -1]);
    let (of_mean, of_var) =
        (rows.mean_dim([1].as_slice(), false, Kind::Double), rows.var_dim([1].as_slice(), true, false));
    let biased = rows.var_dim([1].as_slice(), false, false);
    let want = (&x - along(&of_mean)) / (along(&biased) + 1e-3).sqrt() * along(&weight) + along(&bias);
    assert_close(&got, &want, 1e-12);
    assert_close(&mean, &(of_mean * 0.25), 1e-12);
    assert_close(&var, &(of_var * 0.25 + 0.75), 1e-12);
    let got = Windowed::batch_norm(&x, None, None, running(), false, 1e-3).unwrap();
    assert_close(&got, &((&x - along(&mean)) / (along(&var) + 1e-3).sqrt()), 1e-12);
}

#[test]
fn fields_refuse_what_does_not_fit() {
    let (x, weight) = (random(1, &[2, 4, 7, 6]), random(2, &[6, 3, 3, 3]));
    let text = |result: crate::Result<Tensor>| result.unwrap_err().to_string();
    let conv = Conv::default();
    assert_eq!(
        text(Windowed::conv(&x, &weight, None, &conv)),
        "conv: weight [6, 3, 3, 3] in 1 groups does not fit 4 channels"
    );
    let wide = Conv { padding: Padding::Each(vec![7]), padding_mode: PadMode::Reflect, ..conv.clone() };
    let error = text(Windowed::conv(&x, &random(2, &[6, 4, 3, 3]), None, &wide));
    assert_eq!(error, "conv: padding of 7 elements is too wide for Reflect of 7");
    let error = text(Windowed::conv_transpose(&x, &random(2, &[4, 4, 3, 3]), None, &conv, &[1]));
    assert_eq!(error, "conv_transpose: output_padding 1 must be below stride 1 or dilation");
    assert!(text(Windowed::avg_pool(&x, 2, &Pool::new(&[9]))).contains("a window of 9 does not fit"));
    assert!(text(Windowed::pad_mode(&x, &[1], PadMode::Constant, 0.0)).contains("are not pairs"));
    let error = text(Windowed::interpolate(&x, &Resize::Size(vec![0]), Interpolation::Nearest, false));
    assert!(error.contains("expected extents of at least 1"), "{error}");
    let error = text(Windowed::batch_norm(&x, None, None, None, false, 1e-5));
    assert_eq!(error, "batch_norm: running statistics are needed outside of training");
    assert!(text(Windowed::group_norm(&x, 3, None, None, 1e-5)).starts_with("group_norm of Double"));
}

/// Indices as a vector.
fn places(x: &Tensor) -> Vec<i64> {
    Vec::try_from(&x.reshape([-1])).unwrap()
}

#[test]
fn neighbours_are_those_of_all_distances() {
    let (points, queries) = (random(31, &[23, 3]), random(32, &[7, 3]));
    let coordinates = |x: &Tensor, row: i64| Vec::<f64>::try_from(x.get(row)).unwrap();
    let distance = |query: i64, point: i64| {
        let pairs = coordinates(&queries, query).into_iter().zip(coordinates(&points, point));
        pairs.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
    };
    let radius = 1.5;
    let (nearest, indices) = points.knn(&queries, 4).unwrap();
    let [offsets, found, distances] = points.ball_query(&queries, radius).unwrap();
    let [first, counts, sparse] = points.ball_query_limited(&queries, radius, 2).unwrap();
    let offsets = places(&offsets);
    for query in 0..7 {
        let mut order: Vec<i64> = (0..23).collect();
        order.sort_by(|&a, &b| distance(query, a).total_cmp(&distance(query, b)));
        assert_eq!(places(&indices.get(query)), order[..4]);
        assert!((nearest.double_value(&[query, 3]) - distance(query, order[3])).abs() < 1e-12);
        let within: Vec<i64> = (0..23).filter(|&point| distance(query, point) <= radius).collect();
        let row = offsets[query as usize]..offsets[query as usize + 1];
        assert_eq!(places(&found.slice(0, row.start, row.end, 1)), within);
        for (entry, &point) in row.clone().zip(&within) {
            assert!((distances.double_value(&[entry]) - distance(query, point)).abs() < 1e-12);
        }
        let kept = within.len().min(2);
        assert_eq!(counts.int64_value(&[query]), kept as i64);
        for slot in 0..2 {
            let want = within.get(slot).copied();
            assert_eq!(first.int64_value(&[query, slot as i64]), want.unwrap_or(-1));
            let want = want.map_or(0.0, |point| distance(query, point));
            assert!((sparse.double_value(&[query, slot as i64]) - want).abs() < 1e-12);
        }
    }
    assert!(points.knn(&queries, 24).is_err());
    assert!(points.ball_query(&queries, -1.0).is_err());
    assert!(points.ball_query(&random(33, &[7, 2]), 1.0).is_err());
}

#[test]
fn orders_and_places_are_libtorchs() {
    let x = random(34, &[4, 6]);
    let (values, index) = Index::topk(&x, 3, 1, true).unwrap();
    let (sorted, _) = Index::sort(&x, -1, true).unwrap();
    assert_close(&values, &sorted.narrow(1, 0, 3), 0.0);
    assert_close(&Index::gather(&x, 1, &index).unwrap(), &values, 0.0);
    let added = Index::scatter_add(&x, 1, &index, &values).unwrap();
    assert_close(&Index::gather(&added, 1, &index).unwrap(), &(values * 2.0), 1e-15);
    assert!(Index::topk(&x, 7, 1, true).is_err());
}

/// Searches in several tiles, with many points equally far, against one full sort.
#[test]
fn neighbours_in_tiles() {
    let grid = |count: i64, modulus: i64| Tensor::arange(count, CPU64).remainder(modulus).unsqueeze(1);
    let (points, queries) = (grid(3000, 11), grid(1500, 13).set_requires_grad(true));
    let all = Tensor::cdist(&queries, &points, 2.0, 2);
    let (values, columns) = all.sort_stable(true, 1, false);
    let (distances, indices) = points.knn(&queries, 280).unwrap();
    assert_eq!(indices, columns.narrow(1, 0, 280));
    assert_eq!(distances, values.narrow(1, 0, 280));
    let [offsets, indices, distances] = points.ball_query(&queries, 1.0).unwrap();
    let pairs = all.le(1.0).nonzero();
    assert_eq!(indices, pairs.select(1, 1));
    assert_eq!(distances, all.masked_select(&all.le(1.0)));
    assert_eq!(offsets.int64_value(&[1500]), pairs.size()[0]);
    // ±1 for each neighbour at a distance, 0 for one at none.
    let gradient =
        |of: &Tensor| Tensor::run_backward(&[of.sum(Kind::Double)], &[&queries], true, false).remove(0);
    assert_eq!(gradient(&distances), gradient(&all.masked_select(&all.le(1.0))));
    let (distances, indices) = points.knn(&queries.narrow(0, 0, 0), 3).unwrap();
    assert_eq!((distances.size(), indices.size()), (vec![0, 3], vec![0, 3]));
}
