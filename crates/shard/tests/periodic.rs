//! Calculus on periodic fields: analytic ones, whole and split.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::f64::consts::TAU;

use isobar_array::periodic::{
    Domain, derivative, energy_spectrum, inverse_laplacian, laplacian, low_pass, resample,
};
use isobar_shard::{ShardTensor, forbid_hidden_communication};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::{MESHES, difference, layouts, numbers, on_mesh};

/// The points of a period `length` along a dim of two.
fn points(n: i64, length: f64, dim: usize) -> Tensor {
    let x = Tensor::arange(n, (Kind::Double, Device::Cpu)) * (length / n as f64);
    if dim == 0 { x.unsqueeze(1) } else { x.unsqueeze(0) }
}

/// sin(2x + 3y) on periods of 2π and π·2/3, with a mean.
fn wave(h: i64, w: i64) -> Tensor {
    (points(h, TAU, 0) * 2.0 + points(w, TAU / 3.0, 1) * 3.0).sin() + 0.5
}

type Of<T> = fn(&T) -> isobar_shard::Result<T>;

/// A function of a field, dense, and split in every way, beside what it must be.
fn check(whole: &Tensor, want: &Tensor, dense: Of<Tensor>, sharded: Of<ShardTensor>) {
    assert!(difference(&dense(whole).unwrap(), want) < 1e-10);
    for mesh in [1, 2, 4] {
        let numbers = |x: &Tensor| (Vec::<f64>::try_from(x.flatten(0, -1).contiguous()).unwrap(), x.size());
        let (whole, want) = (numbers(whole), numbers(want));
        on_mesh(MESHES[mesh], move |mesh| {
            let _guard = forbid_hidden_communication();
            let tensor = |(list, shape): &(Vec<f64>, Vec<i64>)| Tensor::from_slice(list).view(&shape[..]);
            let (whole, want) = (tensor(&whole), tensor(&want));
            for layout in layouts(mesh, &whole.size()) {
                let x = ShardTensor::distribute_as(&whole, &layout).unwrap();
                let got = sharded(&x).unwrap().full_tensor(None).unwrap();
                assert!(difference(&got, &want) < 1e-10, "{layout}");
            }
        });
    }
}

/// Writes the same call for both kinds of array.
macro_rules! both {
    ($whole:expr, $want:expr, $call:expr) => {
        check($whole, $want, |x| Ok($call(x)?), |x| Ok($call(x)?))
    };
}

#[rstest]
#[case(9, 8)]
#[case(8, 7)]
fn derivatives_of_a_wave(#[case] h: i64, #[case] w: i64) {
    let field = wave(h, w);
    let phase = points(h, TAU, 0) * 2.0 + points(w, TAU / 3.0, 1) * 3.0;
    both!(&field, &(phase.cos() * 2.0), |x| derivative(x, 0, TAU, 1));
    both!(&field, &(phase.cos() * 3.0), |x| derivative(x, 1, TAU / 3.0, 1));
    both!(&field, &(phase.sin() * -9.0), |x| derivative(x, -1, TAU / 3.0, 2));
    both!(&field, &(phase.cos() * -27.0), |x| derivative(x, 1, TAU / 3.0, 3));
    fn domain() -> Domain {
        Domain { dims: vec![0, 1], lengths: vec![TAU, TAU / 3.0] }
    }
    both!(&field, &(phase.sin() * -13.0), |x| laplacian(x, &domain()));
    both!(&field, &(phase.sin() / -13.0), |x| inverse_laplacian(x, &domain()));
}

#[test]
fn the_highest_frequency_has_no_slope() {
    let x = points(6, TAU, 1);
    let field = (&x * 3.0).cos().repeat([4, 1]);
    both!(&field, &field.zeros_like(), |x| derivative(x, 1, TAU, 1));
    both!(&field, &(&field * -9.0), |x| derivative(x, 1, TAU, 2));
}

#[test]
fn long_waves_pass() {
    let (x, y) = (points(10, TAU, 0), points(12, TAU, 1));
    let long = (&x * 1.0 + &y * 2.0).sin();
    let field = &long + (&x * 3.0 - &y * 1.0).cos();
    both!(&field, &long, |x| low_pass(x, &Domain::unit(&[0, 1]), 5f64.sqrt()));
}

#[rstest]
#[case([5, 7], [10, 12])]
#[case([10, 12], [5, 7])]
#[case([8, 9], [7, 14])]
fn other_points_of_the_same_wave(#[case] from: [i64; 2], #[case] to: [i64; 2]) {
    let on = |[h, w]: [i64; 2]| (points(h, TAU, 0) + points(w, TAU, 1) * 2.0).sin() + 0.25;
    let got = resample(&on(from), &[0, 1], &to).unwrap();
    assert!(difference(&got, &on(to)) < 1e-12);
    on_mesh(&[3], move |mesh| {
        for layout in layouts(mesh, &from) {
            let x = ShardTensor::distribute_as(&on(from), &layout).unwrap();
            let got = resample(&x, &[0, 1], &to).unwrap().full_tensor(None).unwrap();
            assert!(difference(&got, &on(to)) < 1e-12, "{layout}");
        }
    });
    // Up and down again nothing is lost, with even numbers of points neither.
    let noise = numbers(&[4, 6], 3);
    let back = resample(&resample(&noise, &[0, 1], &[9, 10]).unwrap(), &[0, 1], &[4, 6]).unwrap();
    assert!(difference(&back, &noise) < 1e-12);
}

#[test]
fn energy_lies_in_the_shell_of_its_wave() {
    let (x, y) = (points(12, TAU, 0), points(10, TAU, 1));
    let field = (x * 3.0).sin() * (y * 4.0).cos() * 2.0 + 1.0;
    // Half of the mean of (2 sin cos)², and of 1.
    let want = Tensor::zeros([9], (Kind::Double, Device::Cpu));
    let _ = want.narrow(0, 5, 1).fill_(0.5);
    let _ = want.narrow(0, 0, 1).fill_(0.5);
    both!(&field, &want, |x| energy_spectrum(x, &[0, 1]));
    let noise = numbers(&[2, 3, 5, 6], 1);
    let total = energy_spectrum(&noise, &[2, 3]).unwrap().sum_dim_intlist(2, false, None);
    let mean = (&noise * &noise / 2.0).mean_dim(&[2i64, 3][..], false, None);
    assert!(difference(&total, &mean) < 1e-12);
}

#[test]
fn wrong_arguments_are_errors() {
    let field = wave(4, 4);
    let error = |result: isobar_array::Result<Tensor>| result.unwrap_err().to_string();
    assert!(error(derivative(&field, 0, TAU, -1)).contains("order -1"));
    assert!(
        error(laplacian(&field, &Domain { dims: vec![0], lengths: vec![] })).contains("one for each dim")
    );
    assert!(error(resample(&field, &[0], &[0])).contains("expected at least 1"));
    assert!(error(energy_spectrum(&field, &[0])).contains("are not the last"));
    assert!(error(derivative(&field.to_kind(Kind::Half), 0, TAU, 1)).contains("convert to Float"));
}
