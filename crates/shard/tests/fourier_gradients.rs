//! Fourier transforms of sharded tensors against the dense ones: gradients of gradients in every norm, complex transforms of real
//! numbers, and single precision.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Convert, FftNorm, Spectral};
use isobar_mesh::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor, Sizes, forbid_hidden_communication, grad};
use isobar_torch::autograd::{self, BackwardOptions};
use rstest::rstest;
use tch::{Kind, Tensor};

use crate::common::{Dice, MESHES, difference, leaf, numbers, on_mesh, same};

const NORMS: [FftNorm; 3] = [FftNorm::Backward, FftNorm::Ortho, FftNorm::Forward];

/// A transform over the last two dims.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Transform {
    Fftn,
    /// Of real numbers.
    RealFftn,
    Ifftn,
    Rfft2,
    /// To so many points along the last dim.
    Irfft2(i64),
}

impl Transform {
    fn all(width: i64) -> [Self; 6] {
        let inverse = [2 * (width - 1), 2 * width - 1].map(|points| Self::Irfft2(points.max(1)));
        [Self::Fftn, Self::RealFftn, Self::Ifftn, Self::Rfft2, inverse[0], inverse[1]]
    }

    /// Returns whether it transforms two dims.
    fn is_of_pairs(self) -> bool {
        !matches!(self, Self::RealFftn | Self::Rfft2)
    }

    fn sharded(self, x: &ShardTensor, norm: FftNorm) -> isobar_array::Result<ShardTensor> {
        let complex = || if self.is_of_pairs() { x.view_as_complex() } else { Ok(x.shallow_clone()) };
        match self {
            Self::Fftn | Self::RealFftn => complex()?.fftn(&[], &[1, 2], norm)?.view_as_real(),
            Self::Ifftn => complex()?.ifftn(&[], &[1, 2], norm)?.view_as_real(),
            Self::Rfft2 => x.rfft2([1, 2], norm)?.view_as_real(),
            Self::Irfft2(points) => complex()?.irfft2([x.shape()[1], points], [1, 2], norm),
        }
    }

    fn dense(self, x: &Tensor, norm: FftNorm) -> Tensor {
        let (dims, of) = (&[1, 2][..], norm.name());
        let complex = || if self.is_of_pairs() { x.view_as_complex() } else { x.shallow_clone() };
        match self {
            Self::Fftn | Self::RealFftn => complex().fft_fftn(None::<&[i64]>, dims, of).view_as_real(),
            Self::Ifftn => complex().fft_ifftn(None::<&[i64]>, dims, of).view_as_real(),
            Self::Rfft2 => x.fft_rfft2(None::<&[i64]>, dims, of).view_as_real(),
            Self::Irfft2(points) => complex().fft_irfft2(&[x.size()[1], points][..], dims, of),
        }
    }

    /// Returns its input for this grid.
    fn input(self, [height, width]: [i64; 2]) -> Tensor {
        let shape = [2, height, width, 2];
        numbers(&shape[..if self.is_of_pairs() { 4 } else { 3 }], 1)
    }
}

/// Each axis of the mesh splits a dim of the grid.
fn split(mesh: &DeviceMesh, shape: &[i64], first: usize) -> Layout {
    let placements: Vec<Placement> =
        (0..mesh.ndim()).map(|axis| Placement::Shard(1 + (first + axis) % 2)).collect();
    Layout::new(mesh, &placements, shape, &Sizes::Chunk).unwrap()
}

/// Of sums of cubes: the gradient, and the gradient of its sum of cubes.
#[rstest]
fn gradients_of_gradients(#[values(1, 2, 4)] mesh: usize, #[values(0, 1, 2)] norm: usize) {
    let norm = NORMS[norm];
    on_mesh(MESHES[mesh], move |mesh| {
        let power = |y: &ShardTensor| y.mul(y).unwrap().mul(y).unwrap().sum().unwrap();
        let of_whole = |y: &Tensor| y.pow_tensor_scalar(3).sum(Kind::Double);
        let create = BackwardOptions { create_graph: true, ..Default::default() };
        for (index, grid) in [[4, 6], [5, 3], [3, 7], [1, 5]].into_iter().enumerate() {
            for transform in Transform::all(grid[1]) {
                let whole = transform.input(grid);
                let layout = split(mesh, &whole.size(), index % 2);
                let what = format!("{transform:?} of {layout} in {norm:?}");
                let close = |step: &str, got: &ShardTensor, want: &Tensor| {
                    let scale = want.abs().max().double_value(&[]).max(1.0);
                    let off = difference(&got.full_tensor(None).unwrap(), want);
                    assert!(off < 1e-11 * scale, "{step} of {what} is off by {off}");
                };
                let (x, dense) = (leaf(&whole, &layout), whole.copy().set_requires_grad(true));
                let y = power(&transform.sharded(&x, norm).unwrap());
                let want = of_whole(&transform.dense(&dense, norm));
                let first = grad(&[&y], &[&x], &[None], create).unwrap().remove(0).unwrap();
                let expected = autograd::grad(&[&want], &[&dense], &[None], create);
                let expected = expected.unwrap().remove(0).unwrap();
                close("gradient", &first, &expected);
                let second = grad(&[&power(&first)], &[&x], &[None], Default::default());
                let want = of_whole(&expected);
                let expected = autograd::grad(&[&want], &[&dense], &[None], Default::default());
                let second = second.unwrap().remove(0).unwrap();
                close("second gradient", &second, &expected.unwrap().remove(0).unwrap());
            }
        }
    });
}

/// Their gradients are real.
#[rstest]
fn complex_transforms_of_real_numbers(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let _guard = forbid_hidden_communication();
        let mut dice = Dice(83);
        for _ in 0..40 {
            let shape: Vec<i64> = (0..dice.roll(2, 3)).map(|_| dice.roll(1, 7)).collect();
            let all: Vec<usize> = (0..shape.len()).collect();
            let layout = dice.layout(mesh, &shape, &all);
            let dims = [dice.roll(0, 1), -1];
            let points = [dice.roll(1, 7), dice.roll(1, 7)];
            let dims = if shape.len() == 2 { [0, 1] } else { dims };
            let norm = *dice.pick(&NORMS);
            for inverse in [false, true] {
                same(
                    &format!("inverse {inverse}, {points:?} {dims:?} {norm:?}"),
                    &[(&numbers(&shape, 1), &layout)],
                    1e-10,
                    |t| match inverse {
                        false => Ok(t[0].fftn(&points, &dims, norm)?.view_as_real()?),
                        true => Ok(t[0].ifftn(&points, &dims, norm)?.view_as_real()?),
                    },
                    |t| match inverse {
                        false => t[0].f_fft_fftn(&points[..], &dims[..], norm.name())?.f_view_as_real(),
                        true => t[0].f_fft_ifftn(&points[..], &dims[..], norm.name())?.f_view_as_real(),
                    },
                );
            }
        }
    });
}

/// Against the dense ones in double.
#[rstest]
fn single_precision(#[values(1, 2, 3, 4)] mesh: usize, #[values(0, 1, 2)] norm: usize) {
    let norm = NORMS[norm];
    on_mesh(MESHES[mesh], move |mesh| {
        for (index, grid) in [[16, 12], [13, 9], [7, 20], [2, 11]].into_iter().enumerate() {
            for transform in Transform::all(grid[1]) {
                let whole = transform.input(grid);
                let layout = split(mesh, &whole.size(), index % 2);
                let single = ShardTensor::distribute_as(&whole.to_kind(Kind::Float), &layout).unwrap();
                let got = transform.sharded(&single, norm).unwrap();
                assert_eq!(got.kind(), Kind::Float);
                let want = transform.dense(&whole, norm);
                let scale = want.abs().max().double_value(&[]);
                let off = difference(&got.full_tensor(None).unwrap(), &want);
                assert!(off < 1e-5 * scale, "{transform:?} of {layout} is off by {off}, of {scale}");
            }
        }
    });
}
