//! Common parts of the Fourier transforms: normalization, and matrix products in place of short transforms.

use tch::{Kind, TchError, Tensor};

/// Normalization of a transform and its inverse, as in PyTorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FftNorm {
    /// The inverse transform divides by the number of points.
    #[default]
    Backward,
    /// Both transforms divide by the square root of the number of points, which makes them unitary.
    Ortho,
    /// The forward transform divides by the number of points.
    Forward,
}

impl FftNorm {
    /// PyTorch's name for it.
    pub fn name(self) -> &'static str {
        match self {
            FftNorm::Backward => "backward",
            FftNorm::Ortho => "ortho",
            FftNorm::Forward => "forward",
        }
    }

    pub(super) fn scale(self, n: i64, inverse: bool) -> f64 {
        match (self, inverse) {
            (FftNorm::Ortho, _) => (n as f64).sqrt().recip(),
            (FftNorm::Backward, true) | (FftNorm::Forward, false) => (n as f64).recip(),
            _ => 1.0,
        }
    }
}

/// Algorithm of a transform.
pub(super) enum FftAlgorithm {
    /// There is nothing to transform: libtorch's transforms refuse that.
    Empty,
    Matrices,
    Fft,
}

/// A transform of the dims `dims` of a tensor that has no elements, to the extents `size`: attached to the graph, so that
/// ranks without samples make the same nodes as the others.
pub(super) fn empty_transform(x: &Tensor, dims: &[i64], size: &[i64]) -> Result<Tensor, TchError> {
    let points = x.f_sum_dim_intlist(dims, true, x.kind())?;
    let mut shape = points.size();
    for (dim, &extent) in dims.iter().zip(size) {
        let at = dim.rem_euclid(shape.len() as i64) as usize;
        shape[at] = extent;
    }
    points.f_expand(shape, false)
}

pub(super) fn complex(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::ComplexDouble } else { Kind::ComplexFloat }
}

/// One matrix `[i, j]` times each of a batch `[n, j, k]`.
pub(super) fn left_product(matrix: &Tensor, batch: &Tensor) -> Result<Tensor, TchError> {
    let ((count, inner, columns), (height, width)) = (batch.size3()?, matrix.size2()?);
    if columns == 1 {
        // Consecutive rows, which one product takes.
        return batch.f_reshape([count, inner])?.f_matmul(&matrix.f_transpose(0, 1)?)?.f_unsqueeze(-1);
    }
    if count == 1 {
        return matrix.f_matmul(&batch.f_select(0, 0)?)?.f_unsqueeze(0);
    }
    if columns < FEW {
        // Many products of few columns run at half the speed of one of many, which is worth the copy.
        let joined = batch.f_transpose(0, 1)?.f_reshape([inner, count * columns])?;
        return matrix.f_matmul(&joined)?.f_view([height, count, columns])?.f_transpose(0, 1);
    }
    matrix.f_unsqueeze(0)?.f_expand([count, height, width], false)?.f_bmm(batch)
}

/// Columns below which a product is slow.
const FEW: i64 = 64;
