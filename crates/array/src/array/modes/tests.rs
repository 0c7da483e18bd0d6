#![expect(clippy::single_range_in_vec_init, reason = "one range of modes is a list of ranges")]

use isobar_torch::autograd::{BackwardOptions, grad};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

use super::*;
use crate::array::Spectral;
use crate::{Generator, Window};

const CPU64: (Kind, Device) = (Kind::Double, Device::Cpu);
const NORMS: [FftNorm; 3] = [FftNorm::Backward, FftNorm::Ortho, FftNorm::Forward];

fn random(seed: u64, shape: &[i64]) -> Tensor {
    Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, CPU64).unwrap()
}

fn random_complex(seed: u64, shape: &[i64]) -> Tensor {
    Tensor::complex(&random(seed, shape), &random(seed + 100, shape))
}

fn max_error(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.size(), want.size());
    if got.numel() == 0 { 0.0 } else { (got - want).abs().max().double_value(&[]) }
}

/// y · ȳ, the real inner product.
fn inner(a: &Tensor, b: &Tensor) -> Tensor {
    match a.is_complex() {
        true => (a.view_as_real() * b.resolve_conj().view_as_real()).sum(Kind::Double),
        false => (a * b).sum(Kind::Double),
    }
}

fn gradient(y: &Tensor, cotangent: &Tensor, x: &Tensor) -> Tensor {
    let loss = inner(y, cotangent);
    let mut found = grad(&[&loss], &[x], &[None], BackwardOptions::default()).unwrap();
    found.remove(0).unwrap()
}

/// One transform and the whole one that it is a part of.
#[derive(Debug, Clone)]
struct Case {
    shape: Vec<i64>,
    dims: Vec<i64>,
    kept: Vec<Vec<Range<i64>>>,
    norm: FftNorm,
}

impl Case {
    fn extents(&self) -> Vec<i64> {
        self.dims.iter().map(|&dim| self.shape[dim as usize]).collect()
    }

    /// The kept modes of a whole half spectrum.
    fn select(&self, spectrum: &Tensor) -> Tensor {
        let mut y = spectrum.shallow_clone();
        for (&dim, ranges) in self.dims.iter().zip(&self.kept) {
            let modes: Vec<i64> = tables::indices(ranges).collect();
            y = y.index_select(dim, &Tensor::from_slice(&modes));
        }
        y
    }

    /// Modes in their places of a whole half spectrum, added.
    fn scatter(&self, modes: &Tensor) -> Tensor {
        let mut y = modes.shallow_clone();
        for (index, (&dim, ranges)) in self.dims.iter().zip(&self.kept).enumerate() {
            let mut shape = y.size();
            let extent = self.shape[dim as usize];
            shape[dim as usize] = if index + 1 == self.dims.len() { extent / 2 + 1 } else { extent };
            let places: Vec<i64> = tables::indices(ranges).collect();
            let zeros = Tensor::zeros(shape, (y.kind(), Device::Cpu));
            y = zeros.index_add(dim, &Tensor::from_slice(&places), &y);
        }
        y
    }

    fn check(&self) {
        let name = self.norm.name();
        let (extents, dims) = (self.extents(), &self.dims);
        let x = random(1, &self.shape).set_requires_grad(true);
        let got = x.rfftn_modes(dims, &self.kept, self.norm).unwrap();
        let want = self.select(&x.fft_rfftn(None::<&[i64]>, &dims[..], name));
        assert_eq!(got.kind(), Kind::ComplexDouble);
        assert!(max_error(&got, &want) < 1e-10, "{self:?}");
        let cotangent = random_complex(2, &got.size());
        let error = max_error(&gradient(&got, &cotangent, &x), &gradient(&want, &cotangent, &x));
        assert!(error < 1e-10, "gradient of {self:?}");

        let modes = random_complex(3, &got.size()).set_requires_grad(true);
        let got = modes.irfftn_modes(&extents, dims, &self.kept, self.norm).unwrap();
        let want = self.scatter(&modes).fft_irfftn(&extents[..], &dims[..], name);
        assert!(max_error(&got, &want) < 1e-10, "inverse of {self:?}");
        let cotangent = random(4, &got.size());
        let error = max_error(&gradient(&got, &cotangent, &modes), &gradient(&want, &cotangent, &modes));
        assert!(error < 1e-10, "gradient of the inverse of {self:?}");

        // The gradient of a linear map is its adjoint.
        let y = x.rfftn_modes(dims, &self.kept, self.norm).unwrap();
        let cotangent = random_complex(5, &y.size());
        let there = inner(&y, &cotangent).double_value(&[]);
        let back = inner(&x, &gradient(&y, &cotangent, &x)).double_value(&[]);
        assert!((there - back).abs() < 1e-9 * (1.0 + there.abs()), "adjoint of {self:?}");
    }
}

/// One to three dims of up to five, in any order, with one or two ranges each, which may overlap or be empty.
fn cases() -> impl Strategy<Value = Case> {
    let dims = (1..=5usize).prop_flat_map(|count| {
        let order = Just((0..count as i64).collect::<Vec<_>>()).prop_shuffle();
        (prop::collection::vec(1..=7i64, count), order, 1..=count.min(3))
    });
    let ends = prop::collection::vec(prop::collection::vec((0.0..1.0f64, 0.0..1.0f64), 1..=2), 3);
    (dims, ends, 0..3usize).prop_map(|((shape, mut dims, over), ends, norm)| {
        dims.truncate(over);
        let range = |modes: i64, (a, b): (f64, f64)| {
            let at = |u: f64| (u * (modes + 1) as f64) as i64;
            at(a).min(at(b))..at(a).max(at(b))
        };
        let kept = dims
            .iter()
            .zip(ends)
            .enumerate()
            .map(|(index, (&dim, ends))| {
                let extent = shape[dim as usize];
                let modes = if index + 1 == over { extent / 2 + 1 } else { extent };
                ends.into_iter().map(|ends| range(modes, ends)).collect()
            })
            .collect();
        Case { shape, dims, kept, norm: NORMS[norm] }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn are_a_part_of_the_whole_transform(case in cases()) {
        case.check();
    }
}

/// Too long for matrices, where all modes are wanted.
#[test]
fn long_transforms_are_a_part_too() {
    let halves = |n: i64, m: i64| vec![0..m, n - m..n];
    for (shape, dims, kept) in [
        (vec![2, 600, 1500], vec![1, 2], vec![halves(600, 290), vec![0..751]]),
        (vec![2000, 3], vec![0], vec![vec![1..1000]]),
        (vec![2000, 3], vec![0], vec![vec![1..800, 100..1001]]),
        (vec![7, 1100, 3], vec![0, 1], vec![vec![2..6], vec![0..551]]),
        (vec![1100, 2, 7], vec![2, 0], vec![halves(7, 4), vec![0..551]]),
    ] {
        for norm in NORMS {
            Case { shape: shape.clone(), dims: dims.clone(), kept: kept.clone(), norm }.check();
        }
    }
}

/// A rank whose part of the batch is empty makes the same nodes as the others.
#[test]
fn of_nothing_too() {
    let kept = [vec![0..2, 3..5], vec![0..2]];
    for shape in [[0, 5, 6], [2, 5, 6]] {
        let x = Tensor::zeros(shape, CPU64).set_requires_grad(true);
        for kept in [&kept, &[vec![], vec![0..2]], &[vec![0..1], vec![2..2]]] {
            let y = x.rfftn_modes(&[1, 2], kept, FftNorm::Ortho).unwrap();
            let counts: Vec<i64> = kept.iter().map(|ranges| tables::count(ranges)).collect();
            assert_eq!((y.size(), y.kind()), (vec![shape[0], counts[0], counts[1]], Kind::ComplexDouble));
            let back = y.irfftn_modes(&[5, 6], &[1, 2], kept, FftNorm::Ortho).unwrap();
            assert_eq!((back.size(), back.kind()), (x.size(), Kind::Double));
            assert_eq!(gradient(&back, &back.ones_like(), &x).size(), x.size());
        }
    }
}

#[test]
fn single_precision_stays_single() {
    let x = random(1, &[3, 8, 9]).to_kind(Kind::Float);
    let kept = [vec![0..3, 6..8], vec![0..3]];
    let y = x.rfftn_modes(&[1, 2], &kept, FftNorm::Backward).unwrap();
    assert_eq!(y.kind(), Kind::ComplexFloat);
    assert_eq!(y.irfftn_modes(&[8, 9], &[1, 2], &kept, FftNorm::Backward).unwrap().kind(), Kind::Float);
}

#[test]
fn refuses_what_is_not_there() {
    let x = random(0, &[4, 6]);
    let refused = |dims: &[i64], kept: &[Vec<Range<i64>>]| {
        x.rfftn_modes(dims, kept, FftNorm::Ortho).unwrap_err().to_string()
    };
    assert!(refused(&[1], &[vec![0..5]]).contains("[0..5] is not inside the 4 modes of 6"));
    assert!(refused(&[0, 1], &[vec![-1..2], vec![0..2]]).contains("not inside the 4 modes of 4"));
    assert!(refused(&[0, 0], &[vec![0..2], vec![0..2]]).contains("each once"));
    assert!(refused(&[], &[]).contains("one or more dims"));
    assert!(refused(&[2], &[vec![0..1]]).contains("dim 2 of a tensor with 2 dims"));
    assert!(refused(&[0, 1], &[vec![0..2]]).contains("modes of 1 dims for 2 dims"));
    let half = x.to_kind(Kind::Half).rfftn_modes(&[0], &[vec![0..1]], FftNorm::Ortho);
    assert!(half.unwrap_err().to_string().contains("convert to Float"));
    let inverse = |y: &Tensor, s: &[i64]| y.irfftn_modes(s, &[0], &[vec![0..2]], FftNorm::Ortho);
    assert!(inverse(&x, &[4]).unwrap_err().to_string().contains("is not complex"));
    let y = random_complex(0, &[3, 2]);
    assert!(inverse(&y, &[4]).unwrap_err().to_string().contains("has not the 2 modes kept along dim 0"));
    assert!(inverse(&y, &[4, 4]).unwrap_err().to_string().contains("2 extents for 1 dims"));
}
